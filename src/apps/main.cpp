// The `kvasir` program: global flags, the list of subcommands, exit codes.
#include <csignal>
#include <exception>
#include <string>

#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include "apps/commands.hpp"
#include "apps/console.hpp"
#include "base/log.hpp"

namespace {

constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;

int run_program(int argc, char** argv) {
    using namespace kvasir::apps;
    CLI::App app{"Kvasir: a Mixture-of-Experts model computed by a swarm of expert workers",
                 "kvasir"};
    app.set_version_flag("--version", std::string("kvasir ") + KVASIR_VERSION);
    app.require_subcommand(1);
    std::string log_level;
    app.add_option("--log-level", log_level,
                   "debug, info, warn, error or off (default: KVASIR_LOG, else warn)");
    app.fallthrough();

    int exit_code = 0;
    kvasir::Status log_status;
    // Runs before the subcommand's own callback.
    app.parse_complete_callback([&] {
        log_status = install_log(log_level);
        if (!log_status) throw CLI::ValidationError(log_status.error().detail);
    });
    add_run(app, exit_code);
    add_bench(app, exit_code);
    add_inspect(app, exit_code);
    add_slice(app, exit_code);
    add_verify(app, exit_code);
    add_worker(app, exit_code);
    add_plugin_path(app, exit_code);
    add_relay(app, exit_code);

    try {
        app.parse(argc, argv);
    } catch (const CLI::Success& success) {  // --help, --version
        return app.exit(success);
    } catch (const CLI::ParseError& error) {
        const auto chosen = app.get_subcommands();
        if (chosen.empty() && argc > 1 && argv[1][0] != '-') {
            fmt::print(stderr, "kvasir: '{}' is not a subcommand\n", kvasir::printable(argv[1]));
        } else {
            fmt::print(stderr, "kvasir: {}\n", error.what());
        }
        fmt::print(stderr, "Run 'kvasir{}{} --help' for the flags.\n", chosen.empty() ? "" : " ",
                   chosen.empty() ? "" : chosen.front()->get_name());
        return kExitUsage;
    }
    return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
    std::signal(SIGPIPE, SIG_IGN);  // a closed pipe or socket is an error value, not a death
    try {
        return run_program(argc, argv);
    } catch (const std::exception& error) {
        fmt::print(stderr, "kvasir: {}\n", error.what());
    }
    return kExitFailed;
}
