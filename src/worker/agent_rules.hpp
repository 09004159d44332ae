// AgentRules: what a joined worker does next: token, leases, fetching, proof, serving, heartbeats.
//
// A pure state machine: events and `now` go in, actions come out; Agent (agent.hpp) carries them
// out and reports what became of them. `now` is the time since boot, a phone's sleep included; no
// other clock is looked at, so a wall clock that jumps changes nothing. One call to the market is
// under way at a time. Every failure has its pause (doubled, with jitter, per step), and all calls
// together are bounded per minute, whatever the market answers. A market that is gone changes
// nothing about what is served; after it was gone, or the process asleep, the leases are asked for
// before a new connection to the relay is made (AttachAsked).
// Thread: one at a time. Owns: values. Limits: AgentLimits.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <variant>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "worker/market_client.hpp"

namespace kvasir::worker {

using AgentTime = std::chrono::milliseconds;  // since boot

enum class AgentStep : uint8_t {
    // Calls to the market.
    kLookUp,
    kEnroll,
    kRenew,
    kLease,
    kProgress,
    kProve,
    kBeat,
    kRelease,
    // Work of other threads.
    kFetch,
    kServe,
    kCount_,
};
std::string_view to_string(AgentStep step);

struct AgentLimits {
    AgentTime pause_first{1000};
    AgentTime pause_max{60000};
    AgentTime fetch_pause_first{2000};
    AgentTime fetch_pause_max{300000};
    AgentTime full_pause_first{60000};  // a full disk
    AgentTime full_pause_max{600000};
    AgentTime idle_pause{60000};  // no lease for us
    AgentTime progress_every{10000};
    uint32_t calls_per_minute_max = 60;
    AgentTime tick_max{2000};
};

namespace event {
struct Tick {};
struct Seen {  // kLookUp
    Sha256 outline = {};
};
struct Granted {  // kEnroll, kRenew
    std::chrono::seconds expires_in{0};
    std::chrono::seconds renew_in{0};
};
struct Leased {  // kLease: all leases of this node
    std::vector<NodeLease> leases;
    std::chrono::seconds heartbeat_every{20};
};
struct Progressed {
    LeaseNews news;
};
struct Proved {
    LeaseNews news;
};
struct Beaten {
    LeaseNews news;
    std::optional<Granted> granted;
    bool has_more = false;
};
struct Released {};
struct Fetched {};  // the slice of the last kFetch is whole
struct Failed {
    AgentStep step = AgentStep::kLookUp;
    Error error;
};
struct WorkerEnded {
    Status status;
};
struct AttachAsked {};  // the worker wants to connect and waits for kAllowAttach
struct StopAsked {};
}  // namespace event

using AgentEvent =
    std::variant<event::Tick, event::Seen, event::Granted, event::Leased, event::Progressed,
                 event::Proved, event::Beaten, event::Released, event::Fetched, event::Failed,
                 event::WorkerEnded, event::AttachAsked, event::StopAsked>;

struct AgentAction {
    enum class Kind : uint8_t {
        kCall,         // `step`, with `ids`: leases to prove, to beat for, to report about
        kFetch,        // the slice of `segments`
        kCancelFetch,  // kFetch fails then with kClosed
        kServe,        // the slice of `segments`, which is whole
        kStopServing,  // WorkerEnded comes then
        kAllowAttach,
        kShowToken,  // on the live connection
        kEnd,        // with `status`
    };
    Kind kind = Kind::kCall;
    AgentStep step = AgentStep::kLookUp;
    std::vector<uint64_t> ids;
    std::vector<Segment> segments;
    Status status;
};

// For people.
enum class AgentState : uint8_t {
    kJoining,
    kWaiting,  // no lease fits, or nothing is left to do
    kFetching,
    kDiskFull,
    kProving,
    kServing,
    kStopping,
};
std::string_view to_string(AgentState state);

class AgentRules {
public:
    AgentRules(AgentLimits limits, uint64_t seed) : limits_(limits), random_(seed) {
        calls_left_ = limits_.calls_per_minute_max;
    }

    std::vector<AgentAction> on_event(const AgentEvent& event, AgentTime now);
    // When a Tick is due at the latest.
    AgentTime wake_at(AgentTime now) const;
    AgentState state() const;
    const std::vector<NodeLease>& leases() const { return leases_; }
    std::vector<Segment> wanted() const;  // normalised

private:
    void apply(const event::Tick&, AgentTime) {}
    void apply(const event::Seen& seen, AgentTime now);
    void apply(const event::Granted& granted, AgentTime now);
    void apply(const event::Leased& leased, AgentTime now);
    void apply(const event::Progressed& progressed, AgentTime now);
    void apply(const event::Proved& proved, AgentTime now);
    void apply(const event::Beaten& beaten, AgentTime now);
    void apply(const event::Released& released, AgentTime now);
    void apply(const event::Fetched& fetched, AgentTime now);
    void apply(const event::Failed& failed, AgentTime now);
    void apply(const event::WorkerEnded& ended, AgentTime now);
    void apply(const event::AttachAsked&, AgentTime now);
    void apply(const event::StopAsked&, AgentTime now);

    void succeeded(AgentStep step);
    void take_token(const event::Granted& granted, AgentTime now);
    void call_failed(AgentStep step, const Error& error, AgentTime now);
    void fetch_failed(const Error& error, AgentTime now);
    void take_news(const LeaseNews& news, AgentTime now);
    void forget_leases();
    void end_with(Error error);
    AgentTime pause(AgentStep step, AgentTime first, AgentTime most);
    bool token_is_good(AgentTime now) const;
    bool all_proved() const;
    bool is_final(AgentStep step, Errc code) const;

    void decide(AgentTime now, std::vector<AgentAction>& actions);
    void decide_end(std::vector<AgentAction>& actions);
    void decide_call(AgentTime now, std::vector<AgentAction>& actions);
    std::optional<AgentStep> due_call(AgentTime now);
    void decide_fetch(AgentTime now, std::vector<AgentAction>& actions);
    void decide_serve(AgentTime now, std::vector<AgentAction>& actions);
    void decide_attach(AgentTime now, std::vector<AgentAction>& actions);
    void stop_serving(std::vector<AgentAction>& actions);
    bool take_call(AgentTime now);

    // Constant after construction.
    const AgentLimits limits_;
    // State.
    std::mt19937_64 random_;
    std::array<uint32_t, static_cast<size_t>(AgentStep::kCount_)> failures_ = {};  // in a row
    bool call_pending_ = false;
    AgentTime call_at_{0};
    double calls_left_ = 0;
    AgentTime calls_counted_{0};

    bool has_seen_ = false;   // the market's description is fresh
    bool ever_seen_ = false;  // and `outline_` is known
    Sha256 outline_ = {};

    bool has_token_ = false;
    bool token_refused_ = false;
    bool is_unknown_ = false;  // the market does not know this node: enroll
    AgentTime token_expires_{0};
    AgentTime token_renew_{0};
    bool token_is_new_ = false;

    std::vector<NodeLease> leases_;
    std::map<uint64_t, AgentTime> lease_expires_;
    std::map<uint64_t, bool> is_proved_;
    bool needs_leases_ = true;
    bool has_nothing_ = false;  // the market had no lease for us
    AgentTime lease_at_{0};
    AgentTime beat_every_{20000};
    AgentTime beat_at_{0};
    AgentTime more_at_{0};  // not before then does "there is more" count again

    bool is_fetching_ = false;
    bool is_cancelling_ = false;
    bool disk_is_full_ = false;
    std::vector<Segment> fetching_;
    std::vector<Segment> ready_;  // whole on disk
    AgentTime fetch_at_{0};
    AgentTime progress_at_{0};

    bool has_worker_ = false;
    bool is_draining_ = false;
    bool is_void_ = false;  // what is served is of another model
    std::vector<Segment> serving_;
    AgentTime serve_at_{0};
    AgentTime served_since_{0};

    bool attach_asked_ = false;
    bool failed_since_asked_ = false;

    bool is_stopping_ = false;
    bool has_released_ = false;
    bool has_ended_ = false;
    Status end_;
};

}  // namespace kvasir::worker
