// What the switchboard knows of one connection. Private to it.
//
// Thread: the relay's. Owns: the handle table. Limits: see SwitchboardOptions.
#pragma once

#include <deque>
#include <string>

#include "relay/switchboard.hpp"

namespace kvasir::relay {

struct Switchboard::Connection {
    Connection(ConnectionId id_in, const SwitchboardOptions& options)
        : id(id_in),
          handles(options.handle_max, options.handle_rest),
          talk_credit(options.talk_burst) {}

    ConnectionId id;
    std::string address;
    wire::Nonce nonce = {};
    Phase phase = Phase::kRole;
    bool doomed = false;  // closed at the end of this event
    Time opened;
    Time heard;

    // Once attached
    wire::Role role = wire::Role::kWorker;
    wire::NodeKey node = {};
    std::string name;
    Admission admission;
    uint64_t generation = 0;
    Time expires;
    Time ping_due;
    bool leaving = false;  // said DRAIN: nobody new is introduced to it
    HandleTable handles;
    std::vector<std::pair<ConnectionId, uint16_t>> watchers;  // observers, and their handle for it

    // Queued for it
    uint64_t queued = 0;
    uint64_t sent_total = 0;
    Time stalled_since;                // while queued != 0
    std::deque<ConnectionId> waiters;  // workers whose frame it has no room for, first come first
    Time waiting_since;                // while there are waiters
    std::optional<ConnectionId> resumed;  // the one waiter that is about to give its frame again

    // What it waits for itself; its own id: that it reads what was told to it
    std::optional<ConnectionId> waits_for;
    uint64_t held_bytes = 0;
    bool in_turn = false;  // its held message comes again

    // Frames without work that it may send now
    double talk_credit = 0;
    Time talk_credited;
    uint64_t pongs_owed = 0;  // PINGs of peers that were passed on to it, and not answered

    Time wake = Time::max();  // its entry in wakes_
};

}  // namespace kvasir::relay
