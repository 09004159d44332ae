// HandleTable: the short names (u16) that one connection has for the nodes it may talk to.
//
// Used by Switchboard. Handles count up and wrap, so that one comes back late; a released one also
// rests: it is free again only some time after everything that was queued for the connection when
// it was released (PEER_DOWN among it) has left, because until then the node's last frames to it
// may be under way. Thread: values. Owns: the table. Limits: 65,535 handles, resting ones included.
#pragma once

#include <chrono>
#include <compare>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <unordered_map>
#include <unordered_set>

namespace kvasir::relay {

using Time = std::chrono::steady_clock::time_point;

// One connection, never reused within a process.
struct ConnectionId {
    uint64_t value = 0;
    auto operator<=>(const ConnectionId&) const = default;
};
struct ConnectionIdHash {
    size_t operator()(ConnectionId id) const { return std::hash<uint64_t>{}(id.value); }
};

class HandleTable {
public:
    struct Peer {
        ConnectionId connection;
        uint16_t handle = 0;  // what the peer calls us; 0: it does not know us (an observer)
    };
    enum class State : uint8_t { kNever, kResting, kLive };

    HandleTable(uint16_t handle_max, std::chrono::milliseconds rest)
        : handle_max_(handle_max), rest_(rest) {}

    // A handle for `connection`, or nullopt: all are in use or resting.
    std::optional<uint16_t> take(ConnectionId connection, Time now);
    void set_peer_handle(uint16_t handle, uint16_t peers_handle);
    void release(uint16_t handle);
    // Everything queued for the connection has left: what was released before may start to rest.
    void on_drained(Time now);
    // The node is not listened to in between: what it sent before may come after, so nothing rests.
    void on_held() { held_ = true; }
    void on_resumed(Time now) {
        held_ = false;
        rest_floor_ = now;
    }

    const Peer* find(uint16_t handle) const;  // live ones only
    State state(uint16_t handle) const;
    const std::unordered_map<uint16_t, Peer>& live() const { return live_; }

private:
    struct Resting {
        uint16_t handle = 0;
        std::optional<Time> since;
    };

    uint16_t handle_max_;
    std::chrono::milliseconds rest_;
    uint16_t last_ = 0;
    bool wrapped_ = false;  // every handle was in use once
    std::unordered_map<uint16_t, Peer> live_;
    std::deque<Resting> resting_;  // oldest first
    size_t started_ = 0;           // so many of resting_ have `since`
    std::unordered_set<uint16_t> is_resting_;
    Time rest_floor_ = Time::min();  // nothing has rested before
    bool held_ = false;
};

}  // namespace kvasir::relay
