// The hub: accepts workers, checks their hello, watches idle sockets, probes the suspect, drops the
// silent. Workers come in directly or through relays that the backbone dialed.
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
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "backbone/replica.hpp"
#include "backbone/roster.hpp"
#include "backbone/uplink.hpp"
#include "backbone/verifier.hpp"
#include "base/log_budget.hpp"
#include "net/upgrade.hpp"
#include "wire/attach.hpp"

namespace kvasir::backbone {

struct HubLimits {
    std::chrono::milliseconds hello_deadline{10000};
    std::chrono::milliseconds ping_interval{20000};
    std::chrono::milliseconds silence_max{60000};   // then the worker is gone
    std::chrono::milliseconds probe_interval{200};  // of a suspect worker
    std::chrono::milliseconds leave_max{5000};      // what is under way when a relay stops
    size_t sessions_max = 4096;
    uint64_t join_bytes_max = 256 << 10;  // of a message before the HELLO; it has 4,096 segments
    size_t joining_max = 256;  // connections without a HELLO; the longest waiting one makes room
};

struct HubOptions {
    std::string listen;  // empty: workers come through relays only
    net::MessageLimits messages;
    dispatch::HealthOptions health;
    HubLimits limits;
};

class Hub {
public:
    // Errors: kUsage (address), kEnvironment (in use).
    static Result<std::unique_ptr<Hub>> make(HubOptions options, Replica& replica,
                                             RosterBoard& board, Verifier& verifier);
    ~Hub();

    uint16_t port() const { return listener_ ? listener_->port() : 0; }
    std::vector<std::shared_ptr<WorkerSession>> sessions() const;
    // Last words of workers that left.
    std::vector<WorkerReport> departed() const;
    void reset_reports();

    // A connection to a relay, attached (wire/attach.hpp). Returns its number, never used again.
    // Thread: any.
    uint64_t adopt_relay(net::MessageStream stream, std::string address, RelayEvents events);
    // Shows a newer token on that connection; the answer is one of its events. Nothing happens if
    // the connection is over. Thread: any.
    void renew(uint64_t connection, std::string token);

private:
    // A connection that has not said HELLO.
    struct Joining {
        net::MessageStream stream;
        net::Deadline deadline;
        std::string address;
        bool role_seen = false;
    };
    // What only the hub's thread knows of a link.
    struct LinkState {
        std::shared_ptr<Link> link;
        std::map<uint16_t, wire::PeerUp> peers;         // behind a relay
        net::Clock::time_point last_ping{};             // of the relay itself
        net::Deadline leave_at = net::Deadline::max();  // of a relay that is to be left
        std::optional<bool> has_company;                // as told
        bool has_move = false;                          // a MOVE came
        uint32_t renewals = 0;                          // RENEWs sent: the request_id of the newest
        uint64_t hellos_refused = 0;                    // as of link->hellos_refused(), when logged
        RelayEvents events;
    };
    struct Incoming {
        uint64_t tag = 0;
        net::MessageStream stream;
        std::string address;
        bool relay = false;
        RelayEvents events;
    };
    struct Renewal {
        uint64_t tag = 0;  // of the connection
        std::string token;
    };

    Hub(HubOptions options, Replica& replica, RosterBoard& board, Verifier& verifier);
    void on_stream(net::MessageStream stream, std::string address);
    void run();
    void on_event(uint64_t tag);
    void take_incoming();
    void take_relay(Incoming incoming);
    void send_renewals();
    void make_room();
    void on_joining(uint64_t tag);
    Status join_step(uint64_t tag, Joining& joining, bool& joined);
    Status check_hello(const wire::Hello& hello) const;
    Status on_hello(LinkState& state, uint16_t peer, std::span<const uint8_t> message);
    LinkState& make_link(uint64_t tag, Link::Kind kind, net::MessageStream stream,
                         std::string address);
    void read_link(uint64_t tag);
    void take_control(LinkState& state);
    Status on_control(LinkState& state, std::span<const uint8_t> message);
    Status on_relay_control(LinkState& state, const wire::FrameView& frame);
    static void on_renewed(const LinkState& state, uint32_t request,
                           Result<std::chrono::milliseconds> left);
    std::shared_ptr<WorkerSession> session_of(uint64_t link_tag, uint16_t peer) const;
    void tick();
    void tick_links();
    static void tell_company(LinkState& state);
    void leave_in_time(LinkState& state, net::Clock::time_point now);
    void tick_sessions();
    void sweep();
    void refuse(Joining& joining, const Error& error);

    // Constant after construction.
    const HubOptions options_;
    Replica& replica_;
    RosterBoard& board_;
    Verifier& verifier_;
    net::UniqueFd epoll_;
    net::UniqueFd event_;
    std::unique_ptr<net::Listener> listener_;
    std::atomic<bool> stopping_{false};

    // Hub thread only.
    std::map<uint64_t, Joining> joining_;
    LogBudget refusals_{10};
    std::map<uint64_t, LinkState> links_;
    uint64_t next_session_ = 1;  // a worker's generation

    mutable std::mutex mu_;
    // Guarded by mu_.
    uint64_t next_tag_ = 1;  // of connections
    std::vector<Incoming> incoming_;
    std::vector<Renewal> renewals_;
    std::map<uint64_t, std::shared_ptr<WorkerSession>> sessions_;
    std::vector<WorkerReport> departed_;
    std::thread thread_;
};

}  // namespace kvasir::backbone
