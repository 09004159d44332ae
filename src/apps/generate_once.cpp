#include "apps/generate_once.hpp"

#include <cstdio>
#include <string>
#include <utility>

#include "apps/console.hpp"
#include "base/log.hpp"

namespace kvasir::apps {

Result<generate::Session> open_ready(const generate::SessionOptions& options,
                                     const generate::Request& request) {
    auto session = generate::Session::open(options);
    if (!session) return session;
    if (const Status ready = session->prepare(request); !ready) {
        return tl::unexpected(ready.error());
    }
    return session;
}

void stream_text(std::string_view text) {
    const std::string safe = terminal_text(text);
    std::fwrite(safe.data(), 1, safe.size(), stdout);
    std::fflush(stdout);
}

Status flush_output() {
    if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return {};
    return fail(Errc::kIo, "standard output: the reader is gone or the disk is full");
}

Result<RunOutcome> generate_once(generate::Session& session, generate::Request request,
                                 uint32_t threads, Swarm* swarm, Show show) {
    if (swarm != nullptr) swarm->reset_counters();
    if (show == Show::kText) {
        request.on_text = stream_text;
    } else if (log_enabled(LogLevel::kDebug)) {
        request.on_text = [](std::string_view text) {
            log(LogLevel::kDebug, "text", printable(text));
        };
    }
    auto generation = session.generate(request);
    if (show == Show::kText) std::fputc('\n', stdout);
    if (!generation) return tl::unexpected(generation.error());
    RunOutcome outcome;
    outcome.generation = std::move(*generation);
    outcome.threads = threads;
    if (swarm != nullptr) outcome.swarm = swarm->report();
    return outcome;
}

}  // namespace kvasir::apps
