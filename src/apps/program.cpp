#include "apps/program.hpp"

#include <csignal>
#include <cstdio>
#include <exception>
#include <string>

#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include "apps/bus_error.hpp"
#include "apps/console.hpp"
#include "apps/unknown_flag.hpp"
#include "base/log.hpp"

namespace kvasir::apps {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;
constexpr const char* kLogLevels =
    "debug, info, warn, error or off (default: KVASIR_LOG, else warn)";

int parse_and_run(int argc, char** argv, std::span<const AddCommand> commands) {
    CLI::App app{"Kvasir: a Mixture-of-Experts model computed by a swarm of expert workers",
                 "kvasir"};
    app.set_version_flag("--version", std::string("kvasir ") + KVASIR_VERSION);
    app.require_subcommand(1);
    std::string log_level;
    app.add_option("--log-level", log_level, kLogLevels);
    app.fallthrough();

    int exit_code = 0;
    Status log_status;
    // Runs before the subcommand's own callback.
    app.parse_complete_callback([&] {
        log_status = install_log(log_level);
        if (!log_status) throw CLI::ValidationError(log_status.error().detail);
    });
    for (const AddCommand add : commands) add(app, exit_code);
    for (CLI::App* command : app.get_subcommands(nullptr))
        command->footer("Every subcommand takes --log-level, too: " + std::string(kLogLevels) +
                        ".");

    try {
        app.parse(argc, argv);
    } catch (const CLI::Success& success) {  // --help, --version
        return app.exit(success);
    } catch (const CLI::ParseError& error) {
        const auto chosen = app.get_subcommands();
        const auto unknown = describe_unknown(app);
        // Of several mistakes the misspelt flag goes first: what it was meant to give is missing.
        const bool is_unknown = dynamic_cast<const CLI::RequiredError*>(&error) != nullptr ||
                                dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr;
        if (chosen.empty() && argc > 1 && argv[1][0] != '-') {
            tell("kvasir: '{}' is not a subcommand\n", printable(argv[1]));
        } else if (unknown && is_unknown) {
            tell("kvasir: {}\n", *unknown);
        } else {
            tell("kvasir: {}\n", error.what());
        }
        tell("Run 'kvasir{}{} --help' for the flags.\n", chosen.empty() ? "" : " ",
             chosen.empty() ? "" : chosen.front()->get_name());
        return kExitUsage;
    }
    return exit_code;
}

}  // namespace

int run_program(int argc, char** argv, std::span<const AddCommand> commands) {
    std::signal(SIGPIPE, SIG_IGN);  // a closed pipe or socket is an error value, not a death
    std::signal(SIGXFSZ, SIG_IGN);  // and so is a file over its size limit
    explain_bus_errors();
    try {
        const int exit_code = parse_and_run(argc, argv, commands);
        // What subcommands printed may still be in the buffer.
        if (exit_code != 0 || (std::fflush(stdout) == 0 && std::ferror(stdout) == 0))
            return exit_code;
        return report_error({Errc::kIo, "standard output: the reader is gone or the disk is full"});
    } catch (const std::exception& error) {
        tell("kvasir: {}\n", error.what());
    }
    return kExitFailed;
}

}  // namespace kvasir::apps
