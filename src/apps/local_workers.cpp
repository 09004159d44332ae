#include "apps/local_workers.hpp"

#include <signal.h>

#include <filesystem>
#include <system_error>

namespace kvasir::apps {

Result<std::string> own_program() {
    std::error_code error;
    const auto path = std::filesystem::read_symlink("/proc/self/exe", error);
    if (!error) return path.string();
    return fail(Errc::kEnvironment, "/proc/self/exe: " + error.message() + "; is /proc mounted?");
}

Result<LocalWorkers> LocalWorkers::start(const LocalWorkersOptions& options) {
    std::string program = options.program;
    if (program.empty()) {
        auto own = own_program();
        if (!own) return tl::unexpected(own.error());
        program = std::move(*own);
    }
    LocalWorkers out;
    for (size_t i = 0; i < options.experts.size(); ++i) {
        ChildOptions child;
        child.program = program;
        child.label = "worker " + std::to_string(i);
        child.arguments = {"worker",        "--model",          options.model_path,
                           "--experts",     options.experts[i], "--connect",
                           options.connect, "--threads",        std::to_string(options.threads)};
        if (options.compute_with == engine::ComputeWith::kGraph) {
            child.arguments.insert(child.arguments.end(), {"--kernels", "off"});
        }
        if (!options.log_level.empty()) {
            child.arguments.insert(child.arguments.end(), {"--log-level", options.log_level});
        }
        if (!options.cpus.empty()) child.cpu = options.cpus[i % options.cpus.size()];
        auto process = ChildProcess::start(child);
        if (!process) return tl::unexpected(process.error());
        out.workers_.push_back(std::move(*process));
    }
    return out;
}

Status LocalWorkers::check() {
    for (size_t i = 0; i < workers_.size(); ++i) {
        const auto ended = workers_[i].poll();
        if (!ended) continue;
        std::string detail =
            "local worker " + std::to_string(i) + " ended with " + ended->describe();
        // Let the reader see the end of the pipe, so that the reason is in the words.
        workers_[i].stop(std::chrono::milliseconds(0));
        const std::string words = workers_[i].last_words();
        return fail(Errc::kClosed, words.empty() ? detail : detail + ": " + words);
    }
    return {};
}

void LocalWorkers::stop(std::chrono::milliseconds grace) {
    for (ChildProcess& worker : workers_) {
        if (!worker.poll()) kill(worker.pid(), SIGTERM);
    }
    const auto deadline = std::chrono::steady_clock::now() + grace;
    for (ChildProcess& worker : workers_) {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
            deadline - std::chrono::steady_clock::now());
        worker.stop(std::max(left, std::chrono::milliseconds(0)));
    }
}

}  // namespace kvasir::apps
