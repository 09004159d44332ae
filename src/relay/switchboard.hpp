// Switchboard: the rules of a relay, without a socket, a clock or a key in sight.
//
// Used by Relay (relay.hpp), which has the sockets; by tests and the fuzzer, which have none.
// Events and `now` go in, actions come out. It knows the connections, which node is at the other
// end of each (a newer connection of a node replaces the older), who may talk to whom (workers and
// backbones of one model; observers only look), under which handles, what is queued for each, and
// when each has been silent for too long.
//
// Backpressure: a frame from a backbone to a full receiver is answered by ERROR kBusy; a frame from
// a worker to one is held, and the worker is not read until there is room. A receiver that makes
// others wait too long, or takes no byte for too long, is closed. Nothing is dropped in silence.
//
// Thread: not thread-safe (the relay's thread). Owns: all state of the relay but the bytes.
// Limits: SwitchboardOptions.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "relay/handles.hpp"
#include "wire/attach.hpp"
#include "wire/frame.hpp"

namespace kvasir::relay {

using std::chrono::milliseconds;
using std::chrono::seconds;

// What somebody who asks to attach is allowed to be.
struct Admission {
    Sha256 model_id = {};  // zero: any
    uint64_t serial = 0;   // of the token: what is revoked; 0 without a token
    milliseconds left{0};  // until the token expires
};
class Gate {
public:
    virtual ~Gate() = default;
    // Is this really that node, and may it have that role? Errors: kDenied, kExpired, kRevoked.
    virtual Result<Admission> admit(const wire::Nonce& nonce, wire::Role role,
                                    const wire::Attach& attach) = 0;
    // A newer token of a node that is attached already.
    virtual Result<Admission> renew(const wire::NodeKey& node, wire::Role role,
                                    const std::string& token) = 0;
};

struct SwitchboardOptions {
    uint64_t message_bytes_max = wire::kFrameBytesMax;
    uint64_t queue_bytes_max = uint64_t{8} << 20;  // for one receiver; one longer frame may pass
    uint64_t queue_total_max = uint64_t{1} << 30;  // over all; at 5/4 of it the largest goes
    uint64_t own_bytes_max = uint64_t{4} << 20;    // the relay's own frames, on top of a queue
    uint32_t connections_max = 20000;
    uint32_t connections_per_address_max = 1024;
    uint32_t attaching_max = 2048;  // of them, not yet attached
    uint32_t attach_burst = 8;      // attachments of one node in a row, then one per attach_every
    milliseconds attach_every{1000};
    // Frames that carry no work (PING, PONG, RENEW): so many in a row, then so many a second; who
    // sends more is closed. A backbone's to its workers are not counted, and no answer to them is.
    uint32_t talk_burst = 200;
    uint32_t talk_per_second = 100;
    milliseconds attach_deadline{5000};  // from the upgrade to a good ATTACH
    milliseconds ping_interval{20000};   // the node's pings and ours; ours come up to 1/4 earlier
    milliseconds silence_max{60000};     // without a byte from the node
    milliseconds stall_max{20000};       // bytes are queued, and it takes none
    milliseconds hold_max{20000};        // others wait for it without one being let through
    milliseconds handle_rest{120000};    // see HandleTable
    uint16_t handle_max = 65535;
    milliseconds drain_grace{5000};  // after the window of MOVE
    uint64_t generation_first = 1;   // grows from here; larger than what an earlier process gave
};

// Durations are the caller's and may be huge.
inline Time later(Time time, milliseconds by) {
    return time > Time::max() - by ? Time::max() : time + by;
}

// ---- events ----

struct Opened {  // upgraded, nothing said yet
    ConnectionId id;
    std::string address;  // of the peer, as limits count it
    wire::Nonce nonce;    // fresh
};
struct Message {  // one whole message; after a Hold only once its Resume came
    ConnectionId id;
    std::span<const uint8_t> bytes;
};
struct Heard {  // any byte arrived, a pong too
    ConnectionId id;
};
struct Unsent {  // reported after every Send and Forward, and whenever bytes have left
    ConnectionId id;
    uint64_t bytes = 0;
    uint64_t sent_total = 0;  // grows with every byte that the kernel takes
};
struct Closed {  // by the peer, or broken
    ConnectionId id;
    Error reason;
};
struct Tick {};
struct Drain {
    milliseconds within{0};  // nodes come back after a random part of it
    std::string url;         // where to; empty: here
};
struct Revoke {
    std::vector<uint64_t> serials;  // ascending
};
using Event = std::variant<Opened, Message, Heard, Unsent, Closed, Tick, Drain, Revoke>;

// ---- actions ----

struct Send {  // a frame of the relay's own; follow with Unsent
    ConnectionId to;
    std::vector<uint8_t> frame;
};
struct Forward {  // the message of this event, with `peer` in its header; follow with Unsent
    ConnectionId from, to;
    uint16_t peer = 0;
};
struct Hold {  // keep this message and read nothing more from it
    ConnectionId from;
};
struct Resume {  // give the held message again
    ConnectionId from;
};
struct AllowFrames {  // attached: messages up to message_bytes_max; before, kAttachMessageBytesMax
    ConnectionId id;
};
struct Ping {  // a WebSocket ping
    ConnectionId id;
};
struct Close {  // forget it; the frames sent before are still worth a try
    ConnectionId id;
    uint16_t ws_code = 1000;
};
using Action = std::variant<Send, Forward, Hold, Resume, AllowFrames, Ping, Close>;

constexpr uint64_t kAttachMessageBytesMax = 4096;

struct SwitchboardCounters {
    uint64_t opened = 0, attached = 0, renewed = 0, replaced = 0;
    uint64_t refused = 0;  // before they were attached
    uint64_t closed = 0;   // all, the refused ones too
    uint64_t frames_forwarded = 0, bytes_forwarded = 0;
    uint64_t told_busy = 0, told_closed = 0;  // frames answered by ERROR
    uint64_t held = 0;
    uint64_t introduced = 0, introductions_failed = 0;
    uint64_t unmatched = 0;  // met nobody: no token of the other role is for their model
    uint64_t cut_silent = 0, cut_stalled = 0, cut_expired = 0, cut_revoked = 0, cut_protocol = 0;
    uint64_t cut_memory = 0;
};

class Switchboard {
public:
    Switchboard(const SwitchboardOptions& options, Gate& gate);
    ~Switchboard();
    // Appends to `actions`, which are to be done in order.
    void on_event(const Event& event, Time now, std::vector<Action>& actions);
    // When Tick is due; Time::max() with nothing to wait for. One Tick does a bounded amount of
    // work and may be due again at once.
    Time next_tick() const;

    const SwitchboardCounters& counters() const { return counters_; }
    size_t connections() const { return connections_.size(); }
    size_t attached(wire::Role role) const;
    uint64_t queued_bytes() const { return queued_total_; }
    bool draining() const { return draining_; }

private:
    struct Connection;
    enum class Phase : uint8_t { kRole, kAttach, kAttached };
    // Per node key, also for a while after it has gone.
    struct Node {
        ConnectionId current;
        bool online = false;
        double credit = 0;
        Time credited;
    };
    struct KeyHash {
        size_t operator()(const wire::NodeKey& key) const;
    };

    void on(const Opened& event, Time now);
    void on(const Message& event, Time now);
    void on(const Heard& event, Time now);
    void on(const Unsent& event, Time now);
    void on(const Closed& event, Time now);
    void on(const Tick& event, Time now);
    void on(const Drain& event, Time now);
    void on(const Revoke& event, Time now);

    Connection* find(ConnectionId id);
    Status accept_limits(const Connection& connection) const;
    // Attaching (attaching.cpp)
    void on_role(Connection& from, std::span<const uint8_t> message, Time now);
    void on_attach(Connection& from, std::span<const uint8_t> message, Time now);
    Status take_credit(const wire::NodeKey& key, Time now);
    void attach(Connection& from, const wire::Attach& attach, const Admission& admission, Time now);
    void replace_older(const Connection& newer, Time now);
    void introduce_to_all(Connection& newcomer, Time now);
    void introduce(Connection& a, Connection& b, Time now);
    void note_unmatched(const Connection& newcomer, size_t others);
    void show(Connection& observer, Connection& node, Time now);
    void on_renew(Connection& from, const wire::FrameView& frame, Time now);
    std::vector<uint8_t> attached_frame(const Connection& to, Time now, uint32_t request_id) const;
    void sweep_nodes(Time now);
    // Frames (switchboard.cpp)
    void on_frame(Connection& from, std::span<const uint8_t> message, Time now);
    bool take_talk(Connection& from, const wire::FrameHeader& header, Time now) const;
    void on_own_frame(Connection& from, const wire::FrameView& frame, Time now);
    void route(Connection& from, const wire::FrameView& frame, uint64_t bytes, Time now);
    void tell(Connection& to, const wire::FrameHeader& about, Errc code, std::string_view detail,
              Time now);
    bool has_room(const Connection& to, uint64_t bytes) const;
    bool admits(const Connection& to, uint64_t bytes) const;
    bool own_queue_full(const Connection& connection) const;
    void hold(Connection& from, Connection& waits_for, uint64_t bytes, bool first, Time now);
    void settle(Connection& to, Time now);
    void settle_blocked(Time now);
    void stop_waiting(Connection& from, Time now);
    void send(Connection& to, std::vector<uint8_t> frame, Time now);
    void cut_largest();
    void add_queued(Connection& to, uint64_t bytes, Time now);
    // Timers and ends (ends.cpp)
    void refuse(Connection& connection, const Error& reason, Time now);
    void doom(Connection& connection, Error reason);
    void close_doomed(Time now);
    void forget(Connection& gone, const Error& reason, Time now);
    void say_gone(Connection& gone, const Error& reason, Time now);
    void stop_watching(Connection& observer);
    void schedule(Connection& connection, Time now);
    Time due(const Connection& connection) const;
    void wake(Connection& connection, Time now);

    // Constant after construction
    const SwitchboardOptions options_;
    Gate& gate_;

    std::unordered_map<ConnectionId, std::unique_ptr<Connection>, ConnectionIdHash> connections_;
    std::unordered_map<wire::NodeKey, Node, KeyHash> nodes_;
    std::unordered_map<std::string, uint32_t> by_address_;
    std::set<std::pair<Time, ConnectionId>> wakes_;
    std::set<ConnectionId> backbones_, workers_, observers_;  // attached ones
    std::set<ConnectionId> blocked_by_total_;                 // somebody waits for them
    std::vector<std::pair<ConnectionId, Error>> doomed_;
    uint32_t attaching_ = 0;
    uint64_t queued_total_ = 0;
    uint64_t generation_;
    bool draining_ = false;
    Time drain_deadline_ = Time::max();
    Time sweep_due_ = Time::max();
    SwitchboardCounters counters_;
    std::vector<Action>* actions_ = nullptr;  // during on_event()
};

}  // namespace kvasir::relay
