// `kvasir worker`: hold some experts and compute them for a backbone.
#include <csignal>

#include <memory>

#include <CLI/CLI.hpp>

#include "apps/commands.hpp"
#include "apps/console.hpp"
#include "base/log.hpp"
#include "engine/runtime.hpp"
#include "worker/worker.hpp"

namespace kvasir::apps {
namespace {

struct WorkerFlags {
    worker::HoldingOptions holding;
    worker::WorkerOptions worker;
};

worker::Worker* g_worker = nullptr;  // for the signal handler only

void on_signal(int) {
    if (g_worker != nullptr) g_worker->stop();
}

Status serve(const WorkerFlags& flags) {
    if (flags.holding.slice_path.empty() == flags.holding.model_path.empty()) {
        return fail(Errc::kUsage, "give --slice S.gguf, or --model M.gguf with --experts SPEC");
    }
    if (Status ok = engine::load_ggml(); !ok) return ok;
    auto holding = worker::Holding::open(flags.holding);
    if (!holding) return tl::unexpected(holding.error());
    auto made = worker::Worker::make(**holding, flags.worker);
    if (!made) return tl::unexpected(made.error());
    g_worker = made->get();
    std::signal(SIGTERM, on_signal);
    std::signal(SIGINT, on_signal);
    log(LogLevel::kInfo, "worker",
        "holding " + std::to_string((*holding)->experts()) + " experts, " +
            std::to_string((*holding)->bytes() / 1000000) + " MB");
    Status ok = (*made)->run();
    std::signal(SIGTERM, SIG_IGN);
    std::signal(SIGINT, SIG_IGN);
    g_worker = nullptr;
    log(LogLevel::kInfo, "worker",
        "computed " + std::to_string((*made)->pairs_done()) + " pairs in " +
            std::to_string((*made)->requests_done()) + " requests");
    return ok;
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
    command->add_option("--connect", flags->worker.connect, "the backbone's hub, ws://HOST:PORT")
        ->required();
    command->add_option("--threads", flags->worker.threads, "compute threads")
        ->check(CLI::Range(1, 512))
        ->capture_default_str();
    command->add_option("--device", flags->worker.device, "ggml device (default: CPU)");
    command->add_option("--name", flags->worker.name,
                        "shown to people (default: this host's name)");
    command->callback([flags, &exit_code] {
        const Status ok = serve(*flags);
        exit_code = ok ? 0 : report_error(ok.error());
    });
}

}  // namespace kvasir::apps
