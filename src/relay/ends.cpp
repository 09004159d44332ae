// Switchboard: timers, draining, revoking, and how a connection ends.
#include <algorithm>
#include <string>

#include "base/log.hpp"
#include "relay/connection.hpp"
#include "relay/own_frames.hpp"
#include "relay/switchboard.hpp"

namespace kvasir::relay {
namespace {

constexpr size_t kWakesPerTick = 64;  // then frames get a turn

uint16_t ws_code_for(Errc code) {
    switch (code) {
        case Errc::kClosed:
            return 1000;
        case Errc::kProtocol:
        case Errc::kVersion:
            return 1002;
        case Errc::kLimit:
            return 1009;
        case Errc::kBusy:
            return 1013;
        default:
            return 1008;
    }
}

}  // namespace

// ---- timers ----

Time Switchboard::due(const Connection& connection) const {
    if (connection.phase != Phase::kAttached) {
        return later(connection.opened, options_.attach_deadline);
    }
    Time time = std::min(connection.ping_due, connection.expires);
    if (!connection.waits_for) time = std::min(time, later(connection.heard, options_.silence_max));
    if (connection.queued != 0) {
        time = std::min(time, later(connection.stalled_since, options_.stall_max));
    }
    if (!connection.waiters.empty()) {
        time = std::min(time, later(connection.waiting_since, options_.hold_max));
    }
    return time;
}

// Only brings the next look forward; what moved away is noticed by looking.
void Switchboard::schedule(Connection& connection, Time now) {
    const Time time = std::max(due(connection), now);
    if (time >= connection.wake) return;
    if (connection.wake != Time::max()) wakes_.erase({connection.wake, connection.id});
    connection.wake = time;
    wakes_.insert({time, connection.id});
}

Time Switchboard::next_tick() const {
    Time time = std::min(drain_deadline_, sweep_due_);
    if (!wakes_.empty()) time = std::min(time, wakes_.begin()->first);
    return time;
}

void Switchboard::on(const Tick&, Time now) {
    if (now >= sweep_due_) sweep_nodes(now);
    if (now >= drain_deadline_) {
        drain_deadline_ = Time::max();
        for (auto& [id, connection] : connections_) {
            refuse(*connection, {Errc::kClosed, "this relay stops"}, now);
        }
        return;
    }
    for (size_t i = 0; i < kWakesPerTick; ++i) {
        if (wakes_.empty() || wakes_.begin()->first > now) return;
        const ConnectionId id = wakes_.begin()->second;
        wakes_.erase(wakes_.begin());
        Connection& connection = *connections_.at(id);
        connection.wake = Time::max();
        if (connection.doomed) continue;
        wake(connection, now);
        if (!connection.doomed) schedule(connection, now);
    }
}

void Switchboard::wake(Connection& connection, Time now) {
    if (connection.phase != Phase::kAttached) {
        if (now < later(connection.opened, options_.attach_deadline)) return;
        return refuse(connection, {Errc::kTimeout, "no ATTACH arrived in time"}, now);
    }
    if (now >= connection.expires) {
        ++counters_.cut_expired;
        return refuse(connection, {Errc::kExpired, "the token has expired: renew it"}, now);
    }
    if (!connection.waits_for && now >= later(connection.heard, options_.silence_max)) {
        ++counters_.cut_silent;
        return refuse(connection, {Errc::kTimeout, "nothing was heard for too long"}, now);
    }
    if (connection.queued != 0 && now >= later(connection.stalled_since, options_.stall_max)) {
        ++counters_.cut_stalled;
        return refuse(connection, {Errc::kTimeout, "it took no byte for too long"}, now);
    }
    if (!connection.waiters.empty() && now >= later(connection.waiting_since, options_.hold_max)) {
        ++counters_.cut_stalled;
        return refuse(connection, {Errc::kTimeout, "it reads too slowly, others wait for it"}, now);
    }
    if (now >= connection.ping_due) {
        // Nodes that came together must not be pinged together for ever.
        const auto early = options_.ping_interval * (connection.id.value * 7919 % 64) / 256;
        connection.ping_due = now + options_.ping_interval - early;
        if (connection.queued == 0) actions_->push_back(Ping{connection.id});
    }
}

// ---- leaving ----

void Switchboard::on(const Drain& event, Time now) {
    if (draining_) return;
    draining_ = true;
    drain_deadline_ = later(now, event.within + options_.drain_grace);
    wire::Move move;
    move.within_ms = static_cast<uint32_t>(event.within.count());
    move.url = event.url;
    const auto frame = wire::encode_move(move);
    for (auto& [id, connection] : connections_) {
        if (connection->phase == Phase::kAttached) {
            send(*connection, frame, now);
        } else {
            refuse(*connection, {Errc::kBusy, "this relay stops: come again in a moment"}, now);
        }
    }
    log(LogLevel::kInfo, "relay",
        "event=drain nodes=" + std::to_string(connections_.size()) +
            " within_ms=" + std::to_string(move.within_ms));
}

void Switchboard::on(const Revoke& event, Time now) {
    for (auto& [id, connection] : connections_) {
        if (connection->phase != Phase::kAttached || connection->doomed) continue;
        const uint64_t serial = connection->admission.serial;
        if (serial == 0 || !std::ranges::binary_search(event.serials, serial)) continue;
        ++counters_.cut_revoked;
        refuse(*connection, {Errc::kRevoked, "the token was taken back"}, now);
    }
}

void Switchboard::on(const Closed& event, Time) {
    if (Connection* connection = find(event.id)) {
        if (event.reason.code == Errc::kProtocol) ++counters_.cut_protocol;
        doom(*connection, event.reason);
    }
}

// Says why, then closes.
void Switchboard::refuse(Connection& connection, const Error& reason, Time now) {
    if (connection.doomed) return;
    if (reason.code == Errc::kProtocol) ++counters_.cut_protocol;
    send(connection, make_error(reason.code, reason.detail), now);
    doom(connection, reason);
}

// Ends it at the end of this event; until then nothing finds it any more.
void Switchboard::doom(Connection& connection, Error reason) {
    if (connection.doomed) return;
    connection.doomed = true;
    doomed_.emplace_back(connection.id, std::move(reason));
}

void Switchboard::close_doomed(Time now) {
    for (size_t i = 0; i < doomed_.size(); ++i) {  // grows while it is worked on
        const auto [id, reason] = doomed_[i];
        const auto entry = connections_.find(id);
        if (entry == connections_.end()) continue;
        const std::unique_ptr<Connection> connection = std::move(entry->second);
        connections_.erase(entry);
        actions_->push_back(Close{id, ws_code_for(reason.code)});
        forget(*connection, reason, now);
    }
    doomed_.clear();
}

void Switchboard::forget(Connection& gone, const Error& reason, Time now) {
    ++counters_.closed;
    if (log_enabled(LogLevel::kInfo)) {
        log(LogLevel::kInfo, "relay",
            "event=closed conn=" + std::to_string(gone.id.value) + " addr=" + gone.address +
                " attached=" + (gone.phase == Phase::kAttached ? "yes" : "no") +
                " code=" + std::string(errc_info(reason.code).name) + " reason=\"" +
                printable(reason.detail) + "\"");
    }
    if (gone.wake != Time::max()) wakes_.erase({gone.wake, gone.id});
    if (const auto same = by_address_.find(gone.address); --same->second == 0) {
        by_address_.erase(same);
    }
    queued_total_ -= gone.queued;
    blocked_by_total_.erase(gone.id);
    if (gone.phase != Phase::kAttached) {
        --attaching_;
        ++counters_.refused;
        return settle_blocked(now);
    }
    workers_.erase(gone.id);
    backbones_.erase(gone.id);
    observers_.erase(gone.id);
    if (const auto node = nodes_.find(gone.node);
        node != nodes_.end() && node->second.current == gone.id) {
        node->second.online = false;
        sweep_due_ = std::min(sweep_due_, later(now, milliseconds(10000)));
    }
    // Nobody waits for it any more, and it for nobody.
    if (gone.waits_for) {
        if (Connection* to = find(*gone.waits_for)) std::erase(to->waiters, gone.id);
    }
    for (const ConnectionId id : gone.waiters) {
        if (Connection* waiter = find(id)) stop_waiting(*waiter, now);
    }
    if (gone.role == wire::Role::kObserver) {
        stop_watching(gone);  // nobody knew it
    } else {
        say_gone(gone, reason, now);
    }
    settle_blocked(now);
}

// PEER_DOWN to everybody who knows it.
void Switchboard::say_gone(Connection& gone, const Error& reason, Time now) {
    wire::PeerDown down;
    down.code = errc_info(reason.code).wire_code;
    down.detail = reason.detail.substr(0, wire::kAttachTextMax);
    const auto say = [&](Connection& to, uint16_t handle) {
        to.handles.release(handle);
        down.handle = handle;
        send(to, wire::encode_peer_down(down), now);
        if (to.resumed == gone.id) {
            to.resumed.reset();
            settle(to, now);
        }
    };
    for (const auto& [handle, peer] : gone.handles.live()) {
        if (Connection* to = find(peer.connection)) say(*to, peer.handle);
    }
    for (const auto& [id, handle] : gone.watchers) {
        if (Connection* observer = find(id)) say(*observer, handle);
    }
}

void Switchboard::stop_watching(Connection& observer) {
    for (const auto& [handle, peer] : observer.handles.live()) {
        Connection* node = find(peer.connection);
        if (node == nullptr) continue;
        std::erase_if(node->watchers,
                      [&](const auto& watcher) { return watcher.first == observer.id; });
    }
}

}  // namespace kvasir::relay
