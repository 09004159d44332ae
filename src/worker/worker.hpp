// Worker: dials out to a backbone, answers, comes back after a broken connection, drains on
// request.
//
// Used by `kvasir worker`. One thread reads, computes and writes: between two requests there is
// nothing to overlap. Thread: run() on one thread; stop() from any thread or a signal handler.
// Owns: the connection.
//
// Limits: reconnects with exponential backoff and jitter, at most one attempt per pause.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>

#include "base/result.hpp"
#include "net/upgrade.hpp"
#include "worker/service.hpp"

namespace kvasir::worker {

struct WorkerOptions {
    std::string connect;  // ws://HOST:PORT
    std::string name;     // shown to people; empty: the host's name
    uint32_t threads = 1;
    std::string device;  // ggml device; empty: CPU
    std::chrono::milliseconds pause_first{100};
    std::chrono::milliseconds pause_max{15000};
    std::chrono::milliseconds silence_max{60000};  // nothing heard: the backbone is gone
    std::chrono::milliseconds drain_quiet{300};    // no request for this long ends a drain
    std::chrono::milliseconds drain_max{5000};
};

class Worker {
public:
    // Errors: kUsage (url, device), kEnvironment.
    static Result<std::unique_ptr<Worker>> make(const Holding& holding,
                                                const WorkerOptions& options);
    ~Worker();

    // Serves until stop(). Returns ok after a clean drain. Errors that no retry can mend: kVersion,
    // kMismatch (the backbone runs another model).
    Status run();
    void stop() noexcept;  // async-signal-safe
    // Work done so far, challenges included. Thread: that of run(), or after it.
    uint64_t pairs_done() const { return service_.pairs_done(); }
    uint64_t requests_done() const { return service_.requests_done(); }

private:
    Worker(const Holding& holding, WorkerOptions options, net::Endpoint endpoint,
           ExpertService service);
    Result<net::MessageStream> join();
    Status serve(net::MessageStream& stream);
    Status answer(net::MessageStream& stream, std::span<const uint8_t> message);
    bool pause(std::chrono::milliseconds time);  // false when stop() came

    const Holding& holding_;
    const WorkerOptions options_;
    const net::Endpoint endpoint_;
    ExpertService service_;
    wire::NodeId node_ = {};
    std::chrono::milliseconds ping_interval_{20000};
    std::atomic<bool> stopping_{false};
    net::UniqueFd wake_;
};

}  // namespace kvasir::worker
