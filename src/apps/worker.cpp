// `kvasir worker`: hold some experts and compute them for a backbone: a slice or part of a model
// that is here (--connect), or what a market leases (--join).
#include <csignal>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include "apps/commands.hpp"
#include "apps/console.hpp"
#include "apps/flag_values.hpp"
#include "apps/kernels_flag.hpp"
#include "apps/threads_flag.hpp"
#include "apps/transfer_line.hpp"
#include "base/log.hpp"
#include "base/units.hpp"
#include "engine/runtime.hpp"
#include "worker/agent.hpp"
#include "worker/code_pages.hpp"
#include "worker/origin_auth.hpp"
#include "worker/worker.hpp"

namespace kvasir::apps {
namespace {

struct WorkerFlags {
    worker::HoldingOptions holding;
    worker::WorkerOptions worker;
    worker::AgentOptions join;
    std::vector<std::string> origin_auth;  // "ORIGIN=FILE"
};

worker::Worker* g_worker = nullptr;  // for the signal handler only

void on_signal(int) {
    if (g_worker != nullptr) g_worker->stop();
}

int g_stop_event = -1;  // for the signal handler only

void on_stop_signal(int) {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(g_stop_event, &one, sizeof(one));
}

// The agent runs on this thread; a second one waits for the signal, which only tells it.
Status join(const WorkerFlags& flags) {
    if (flags.join.invite.empty() || flags.join.budget_bytes == 0) {
        return fail(Errc::kUsage,
                    "--join needs --invite CODE and --budget SIZE (e.g. 340M): take "
                    "the line that `kvasir up` or the market prints");
    }
    if (Status ok = engine::load_ggml(); !ok) return ok;
    TransferLine line("fetching");
    worker::AgentOptions options = flags.join;
    auto secrets = worker::load_origin_auth(flags.origin_auth, options.market);
    if (!secrets) return tl::unexpected(secrets.error());
    options.secrets = std::move(*secrets);
    options.threads = flags.worker.threads;
    options.device = flags.worker.device;
    options.compute_with = flags.worker.compute_with;
    options.name = flags.worker.name;
    options.on_line = [&line](const std::string& text) { line.print("worker: " + text); };
    options.on_bytes = [&line](uint64_t done, uint64_t total) { line.show(done, total); };
    auto agent = worker::Agent::make(std::move(options));
    if (!agent) return tl::unexpected(agent.error());
    const net::UniqueFd stop_event(::eventfd(0, EFD_CLOEXEC));
    if (!stop_event) return fail(Errc::kEnvironment, "no eventfd");
    g_stop_event = stop_event.get();
    std::atomic<bool> ended{false};
    std::thread watcher([&] {
        uint64_t count = 0;
        while (::read(stop_event.get(), &count, sizeof(count)) < 0 && errno == EINTR) {
        }
        if (!ended.load()) (*agent)->stop();
    });
    std::signal(SIGTERM, on_stop_signal);
    std::signal(SIGINT, on_stop_signal);
    Status ok = (*agent)->run();
    std::signal(SIGTERM, SIG_IGN);
    std::signal(SIGINT, SIG_IGN);
    ended.store(true);
    on_stop_signal(0);
    watcher.join();
    return ok;
}

Status serve(const WorkerFlags& flags) {
    if (flags.worker.connect.empty()) {
        return fail(Errc::kUsage,
                    "give --connect URL of a backbone's hub, or --join URL of a "
                    "market");
    }
    if (flags.holding.slice_path.empty() == flags.holding.model_path.empty()) {
        return fail(Errc::kUsage, "give --slice S.gguf, or --model M.gguf with --experts SPEC");
    }
    if (Status ok = engine::load_ggml(); !ok) return ok;
    // Loading has touched much code that serving does not: it goes before the slice comes.
    (void)worker::give_back_code_pages();
    auto holding = worker::Holding::open(flags.holding);
    if (!holding) return tl::unexpected(holding.error());
    worker::WorkerOptions options = flags.worker;
    options.on_line = [](const std::string& text) { tell("worker: {}\n", text); };
    auto made = worker::Worker::make(**holding, options);
    if (!made) return tl::unexpected(made.error());
    g_worker = made->get();
    std::signal(SIGTERM, on_signal);
    std::signal(SIGINT, on_signal);
    tell("worker: holding {} experts ({})\n", (*holding)->experts(),
         format_bytes(static_cast<double>((*holding)->bytes())));
    Status ok = (*made)->run();
    std::signal(SIGTERM, SIG_IGN);
    std::signal(SIGINT, SIG_IGN);
    g_worker = nullptr;
    log(LogLevel::kInfo, "worker",
        "computed " + std::to_string((*made)->pairs_done()) + " pairs in " +
            std::to_string((*made)->requests_done()) + " requests");
    return ok;
}

void add_join(CLI::App& command, WorkerFlags& flags, const std::vector<CLI::Option*>& others) {
    worker::AgentOptions& join = flags.join;
    auto* market = command.add_option("--join", join.market,
                                      "the market that leases experts, https://HOST:PORT");
    for (CLI::Option* other : others) market->excludes(other);
    const auto add = [&](CLI::Option* option) { option->needs(market); };
    const CLI::Validator as_size(
        [](std::string& text) {
            const auto size = parse_size(text);
            if (!size) return size.error().detail;
            text = std::to_string(*size);
            return std::string();
        },
        "SIZE");
    add(command.add_option("--invite", join.invite, "the market's invite code"));
    add(command
            .add_option("--budget", join.budget_bytes,
                        "bytes that the slice may take, e.g. 340M (also its memory)")
            ->transform(as_size));
    add(command.add_option("--cache", join.cache_folder,
                           "folder of key and slices (default: $XDG_CACHE_HOME/kvasir/worker)"));
    add(command
            .add_option("--cache-max", join.cache_bytes_max,
                        "bytes of all slices in the cache (default: twice the budget and 16 MB)")
            ->transform(as_size));
    add(command
            .add_option("--max-cpu", join.cpu_percent,
                        "per cent of the --threads cores that may be used")
            ->check(CLI::Range(1, 100))
            ->capture_default_str());
    add(command.add_option(
        "--ca", join.ca_file,
        "PEM file of certificates to trust where no invite pins one: the model's "
        "origin, a relay elsewhere (default: the system's)"));
    add(command.add_option(
        worker::kOriginAuthFlag, flags.origin_auth,
        "ORIGIN=FILE: what FILE's first line has is sent as the Authorization header to "
        "https://HOST[:PORT], the model's origin, and to nobody else; may be repeated"));
}

}  // namespace

void add_worker(CLI::App& app, int& exit_code) {
    CLI::App* command =
        app.add_subcommand("worker", "hold some experts and compute them for a backbone");
    auto flags = std::make_shared<WorkerFlags>();
    auto* slice = command->add_option("--slice", flags->holding.slice_path,
                                      "the slice to serve (made by `kvasir slice`)");
    auto* model = command->add_option("--model", flags->holding.model_path,
                                      "a whole model, mapped; serve some of it");
    auto* experts = command->add_option("--experts", flags->holding.experts,
                                        "which experts of --model, e.g. 0-3:0-15,7:200-255");
    slice->excludes(model);
    model->needs(experts);
    experts->needs(model);
    auto* connect = command->add_option("--connect", flags->worker.connect,
                                        "the backbone's hub, ws://HOST:PORT");
    add_join(*command, *flags, {slice, model, connect});
    check_threads(command->add_option("--threads", flags->worker.threads, "compute threads"));
    add_kernels_flag(*command, flags->worker.compute_with);
    command->add_option("--device", flags->worker.device, "ggml device (default: CPU)");
    command->add_option("--name", flags->worker.name,
                        "shown to people (default: this host's name)");
    command->callback([flags, &exit_code] {
        const Status ok = flags->join.market.empty() ? serve(*flags) : join(*flags);
        exit_code = ok ? 0 : report_error(ok.error());
    });
}

}  // namespace kvasir::apps
