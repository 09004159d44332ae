// The hub: accepts workers, checks their hello, watches idle sockets, probes the suspect, drops the
// silent.
//
// Used by Backbone. Every protocol step before a worker may get work happens here or in the
// verifier. Thread: its own epoll loop; the listener hands over upgraded streams from its thread.
// Owns: sessions (shared with the roster).
//
// Limits: HubLimits; a peer that does not say hello in time, or says it wrongly, is told why and
// closed.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "backbone/replica.hpp"
#include "backbone/roster.hpp"
#include "backbone/verifier.hpp"
#include "net/upgrade.hpp"

namespace kvasir::backbone {

struct HubLimits {
    std::chrono::milliseconds hello_deadline{10000};
    std::chrono::milliseconds ping_interval{20000};
    std::chrono::milliseconds silence_max{60000};   // then the worker is gone
    std::chrono::milliseconds probe_interval{200};  // of a suspect worker
    size_t sessions_max = 4096;
    size_t joining_max = 256;  // connections without a HELLO; the longest waiting one makes room
};

class Hub {
public:
    // Errors: kUsage (address), kEnvironment (in use).
    static Result<std::unique_ptr<Hub>> make(const std::string& listen, Replica& replica,
                                             RosterBoard& board, Verifier& verifier,
                                             dispatch::HealthOptions health, HubLimits limits = {});
    ~Hub();

    uint16_t port() const { return listener_->port(); }
    std::vector<std::shared_ptr<WorkerSession>> sessions() const;
    // Last words of workers that left.
    std::vector<WorkerReport> departed() const;
    void reset_reports();

private:
    struct Joining {
        net::MessageStream stream;
        net::Deadline deadline;
        std::string address;
        bool role_seen = false;
    };

    Hub(Replica& replica, RosterBoard& board, Verifier& verifier, dispatch::HealthOptions health,
        HubLimits limits);
    void on_stream(net::MessageStream stream, std::string address);
    void run();
    void take_incoming();
    void make_room();
    void on_joining(uint64_t tag);
    Status join_step(uint64_t tag, Joining& joining, bool& joined);
    Status on_hello(uint64_t tag, Joining& joining, std::span<const uint8_t> message);
    Status check_hello(const wire::Hello& hello) const;
    void on_session(uint64_t tag);
    void tick();
    void sweep();
    void refuse(Joining& joining, const Error& error);

    // Constant after construction.
    Replica& replica_;
    RosterBoard& board_;
    Verifier& verifier_;
    const dispatch::HealthOptions health_;
    const HubLimits limits_;
    net::UniqueFd epoll_;
    net::UniqueFd event_;
    std::unique_ptr<net::Listener> listener_;
    std::atomic<bool> stopping_{false};

    // Hub thread only.
    std::map<uint64_t, Joining> joining_;
    uint64_t next_tag_ = 1;

    mutable std::mutex mu_;
    // Guarded by mu_.
    std::vector<std::pair<net::MessageStream, std::string>> incoming_;
    std::map<uint64_t, std::shared_ptr<WorkerSession>> sessions_;
    std::vector<WorkerReport> departed_;
    std::thread thread_;
};

}  // namespace kvasir::backbone
