// TurnQueue: whose turn is next among connections that share one thread.
//
// Start-time fair queueing (Goyal, Vin, Cheng: "Start-time Fair Queueing", IEEE/ACM Transactions on
// Networking 5(5), 1997): whoever has cost least is next, and nobody saves up by being idle. So a
// connection that asks for little waits for the turn that is under way, however many others ask for
// all they can get; those share what is left equally.
//
// Crowd tells when turns may be long: a sender and its receiver alone make nobody wait.
//
// Used by the relay's thread. Thread: not thread-safe. Owns: nothing but the order; each connection
// is in it once at most. Limits: the caller's.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <queue>
#include <tuple>
#include <vector>

#include "relay/handles.hpp"

namespace kvasir::relay {

class TurnQueue {
public:
    // What one connection has cost, in the queue's time: add the cost of a turn to it when the turn
    // is over. Begins at 0.
    using Account = uint64_t;

    // `id` wants a turn.
    void add(ConnectionId id, Account& account) {
        account = std::max(account, now_);
        waiting_.emplace(account, ++added_, id.value);
    }
    bool empty() const { return waiting_.empty(); }
    // Not when empty.
    ConnectionId take() {
        const auto [start, order, id] = waiting_.top();
        waiting_.pop();
        now_ = start;
        return {id};
    }

private:
    using Entry = std::tuple<Account, uint64_t, uint64_t>;  // start, order of arrival, connection
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> waiting_;
    uint64_t now_ = 0;  // start of the turn taken last
    uint64_t added_ = 0;
};

// Whether more connections than a sender and its receiver had turns of late.
class Crowd {
public:
    void note(ConnectionId id, Time now) {
        Seen& one = seen_[0].id == id ? seen_[0] : seen_[1];
        if (one.id == id) {
            one.when = now;
            return;
        }
        Seen& older = seen_[0].when < seen_[1].when ? seen_[0] : seen_[1];
        if (older.when > now - kMemory) until_ = now + kMemory;
        older = {id, now};
    }
    bool is_here(Time now) const { return now < until_; }

private:
    static constexpr std::chrono::milliseconds kMemory{100};
    struct Seen {
        ConnectionId id;
        Time when;
    };
    std::array<Seen, 2> seen_;
    Time until_;
};

}  // namespace kvasir::relay
