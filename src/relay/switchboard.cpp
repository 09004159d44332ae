// Switchboard: events, routing, queues. Attaching is in attaching.cpp, timers and ends in ends.cpp.
#include "relay/switchboard.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/check.hpp"
#include "base/log.hpp"
#include "relay/connection.hpp"
#include "relay/own_frames.hpp"

namespace kvasir::relay {
namespace {

using wire::FrameType;
using wire::Role;

// Of the relay and the node it came from alone: never from node to node.
bool belongs_to_the_relay(FrameType type) {
    return type >= FrameType::kNonce;
}

constexpr size_t kPingBytesMax = 64;
constexpr double kRenewCost = 20;  // of talk: a signature is checked
constexpr uint64_t kPongsOwedMax = 10000;

}  // namespace

Switchboard::Switchboard(const SwitchboardOptions& options, Gate& gate)
    : options_(options), gate_(gate), generation_(options.generation_first) {
    KVASIR_CHECK(options.queue_bytes_max > 0 && options.handle_max > 0);
}

Switchboard::~Switchboard() = default;

size_t Switchboard::KeyHash::operator()(const wire::NodeKey& key) const {
    size_t value = 0;
    std::memcpy(&value, key.data(), sizeof(value));
    return value;
}

Switchboard::Connection* Switchboard::find(ConnectionId id) {
    const auto entry = connections_.find(id);
    return entry == connections_.end() || entry->second->doomed ? nullptr : entry->second.get();
}

size_t Switchboard::attached(Role role) const {
    if (role == Role::kObserver) return observers_.size();
    return role == Role::kBackbone ? backbones_.size() : workers_.size();
}

void Switchboard::on_event(const Event& event, Time now, std::vector<Action>& actions) {
    actions_ = &actions;
    std::visit([this, now](const auto& one) { on(one, now); }, event);
    if (!doomed_.empty()) close_doomed(now);
    actions_ = nullptr;
}

void Switchboard::on(const Heard& event, Time now) {
    if (Connection* connection = find(event.id)) connection->heard = now;
}

void Switchboard::on(const Message& event, Time now) {
    Connection* from = find(event.id);
    if (from == nullptr) return;
    KVASIR_CHECK(!from->waits_for);  // after Hold comes Resume
    from->heard = now;
    if (from->phase == Phase::kRole) return on_role(*from, event.bytes, now);
    if (from->phase == Phase::kAttach) return on_attach(*from, event.bytes, now);
    on_frame(*from, event.bytes, now);
}

// ---- frames ----

void Switchboard::on_frame(Connection& from, std::span<const uint8_t> message, Time now) {
    const bool in_turn = std::exchange(from.in_turn, false);
    const auto frame = wire::decode_frame(message);
    if (!frame) return refuse(from, frame.error(), now);
    if (!in_turn && !take_talk(from, frame->header, now)) {  // one that was held is counted once
        return refuse(from,
                      {Errc::kProtocol, "more than " + std::to_string(options_.talk_per_second) +
                                            " frames a second that carry no work"},
                      now);
    }
    if (!in_turn && own_queue_full(from)) {  // it is told more than it reads
        return hold(from, from, message.size(), false, now);
    }
    if (frame->header.peer == 0) return on_own_frame(from, *frame, now);
    if (belongs_to_the_relay(frame->header.type)) {
        return refuse(
            from,
            {Errc::kProtocol, "frame type " + std::to_string(static_cast<int>(frame->header.type)) +
                                  " may not be sent to another node"},
            now);
    }
    route(from, *frame, message.size(), now);
}

bool Switchboard::take_talk(Connection& from, const wire::FrameHeader& header, Time now) const {
    const bool is_renew = header.type == FrameType::kRenew;
    if (!is_renew && header.type != FrameType::kPing && header.type != FrameType::kPong)
        return true;
    if (header.peer != 0 && from.role == Role::kBackbone) return true;
    // An answer is not its sender's doing. Counted over all who asked, not for each: the answer to
    // one that has left meanwhile is an answer, too.
    if (header.peer != 0 && header.type == FrameType::kPong && from.pongs_owed > 0) {
        --from.pongs_owed;
        return true;
    }
    const std::chrono::duration<double> since = now - from.talk_credited;
    from.talk_credit = std::min<double>(
        options_.talk_burst, from.talk_credit + since.count() * options_.talk_per_second);
    from.talk_credited = now;
    from.talk_credit -= is_renew ? kRenewCost : 1;
    return from.talk_credit >= 0;
}

void Switchboard::on_own_frame(Connection& from, const wire::FrameView& frame, Time now) {
    const wire::FrameHeader& header = frame.header;
    switch (header.type) {
        case FrameType::kPing:
            if (frame.payload.size() > kPingBytesMax) break;
            return send(from, make_frame(FrameType::kPong, 0, header.request_id, frame.payload),
                        now);
        case FrameType::kPong:
            return;
        case FrameType::kRenew:
            return on_renew(from, frame, now);
        case FrameType::kDrain:  // to whoever has work with it
            if (from.leaving) return;
            from.leaving = true;
            for (const auto& [handle, peer] : from.handles.live()) {
                Connection* to = find(peer.connection);
                if (to == nullptr || peer.handle == 0) continue;
                send(*to, make_frame(FrameType::kDrain, peer.handle, 0), now);
            }
            return;
        case FrameType::kGoodbye:
            return doom(from, {Errc::kClosed, "the node said goodbye"});
        case FrameType::kError:
            return doom(from, {Errc::kClosed, "the node reported an error"});
        default:
            break;
    }
    refuse(from,
           {Errc::kProtocol, "frame type " + std::to_string(static_cast<int>(header.type)) +
                                 " of " + std::to_string(frame.payload.size()) +
                                 " bytes is not for the relay: set the handle of a peer"},
           now);
}

void Switchboard::route(Connection& from, const wire::FrameView& frame, uint64_t bytes, Time now) {
    const HandleTable::Peer* peer = from.handles.find(frame.header.peer);
    if (from.role == Role::kObserver) {
        return refuse(from, {Errc::kDenied, "an observer may not send to nodes"}, now);
    }
    Connection* to = peer != nullptr ? find(peer->connection) : nullptr;
    Connection* resumed_for = nullptr;  // this frame was held for it
    if (to != nullptr && to->resumed == from.id) {
        resumed_for = to;
        to->resumed.reset();
    }
    if (to == nullptr) {
        if (from.handles.state(frame.header.peer) == HandleTable::State::kNever) {
            return refuse(from,
                          {Errc::kProtocol, "handle " + std::to_string(frame.header.peer) +
                                                " was never given to this connection"},
                          now);
        }
        ++counters_.told_closed;
        return tell(from, frame.header, Errc::kClosed, "that node is gone", now);
    }
    const bool in_turn = resumed_for != nullptr || (to->waiters.empty() && !to->resumed);
    if (in_turn && admits(*to, bytes)) {
        ++counters_.frames_forwarded;
        counters_.bytes_forwarded += bytes;
        actions_->push_back(Forward{from.id, to->id, peer->handle});
        if (frame.header.type == FrameType::kPing && to->pongs_owed < kPongsOwedMax)
            ++to->pongs_owed;
        if (resumed_for != nullptr) to->waiting_since = now;
        add_queued(*to, bytes, now);
        if (resumed_for != nullptr) settle(*to, now);
        return;
    }
    if (from.role == Role::kBackbone) {
        ++counters_.told_busy;
        return tell(from, frame.header, Errc::kBusy, "its queue at the relay is full", now);
    }
    ++counters_.held;
    hold(from, *to, bytes, resumed_for != nullptr, now);
}

// The frame was not delivered: its sender is told, by the handle it used.
void Switchboard::tell(Connection& to, const wire::FrameHeader& about, Errc code,
                       std::string_view detail, Time now) {
    send(to, make_error(code, detail, about.peer, about.request_id), now);
}

// ---- queues ----

// One frame longer than a whole queue may pass when nothing else is queued.
bool Switchboard::has_room(const Connection& to, uint64_t bytes) const {
    const uint64_t own_max = options_.queue_bytes_max;
    return to.queued == 0 || (to.queued < own_max && bytes <= own_max - to.queued);
}

// Over the total, only those who read all that they get are sent more.
bool Switchboard::admits(const Connection& to, uint64_t bytes) const {
    if (to.queued == 0) return true;
    const uint64_t total_max = options_.queue_total_max;
    return has_room(to, bytes) && queued_total_ < total_max && bytes <= total_max - queued_total_;
}

// Half of the room for the relay's own words is left for what it must say without being asked.
bool Switchboard::own_queue_full(const Connection& connection) const {
    return connection.queued > options_.queue_bytes_max + options_.own_bytes_max / 2;
}

void Switchboard::hold(Connection& from, Connection& waits_for, uint64_t bytes, bool first,
                       Time now) {
    from.waits_for = waits_for.id;
    from.held_bytes = bytes;
    from.handles.on_held();
    actions_->push_back(Hold{from.id});
    if (waits_for.id != from.id) {
        if (waits_for.waiters.empty() && !first) waits_for.waiting_since = now;
        if (first) {
            waits_for.waiters.push_front(from.id);
        } else {
            waits_for.waiters.push_back(from.id);
        }
        settle(waits_for, now);
    }
    schedule(waits_for, now);
}

// Lets the next waiter try, if there is room for its frame.
void Switchboard::settle(Connection& to, Time now) {
    if (to.waits_for == to.id && !own_queue_full(to)) stop_waiting(to, now);
    blocked_by_total_.erase(to.id);
    if (to.resumed || to.waiters.empty()) return;
    Connection* next = find(to.waiters.front());
    KVASIR_CHECK(next != nullptr);
    if (!admits(to, next->held_bytes)) {
        if (has_room(to, next->held_bytes)) blocked_by_total_.insert(to.id);
        return;
    }
    to.waiters.pop_front();
    to.resumed = next->id;
    stop_waiting(*next, now);
}

void Switchboard::stop_waiting(Connection& from, Time now) {
    from.waits_for.reset();
    from.in_turn = true;
    from.heard = now;  // it was we who did not listen
    from.handles.on_resumed(now);
    actions_->push_back(Resume{from.id});
}

void Switchboard::settle_blocked(Time now) {
    if (blocked_by_total_.empty() || queued_total_ >= options_.queue_total_max) return;
    const std::vector<ConnectionId> blocked(blocked_by_total_.begin(), blocked_by_total_.end());
    for (const ConnectionId id : blocked) {
        if (Connection* to = find(id)) settle(*to, now);
    }
}

void Switchboard::on(const Unsent& event, Time now) {
    Connection* connection = find(event.id);
    if (connection == nullptr) return;
    const bool less = event.bytes < connection->queued;
    queued_total_ += event.bytes;
    queued_total_ -= connection->queued;
    connection->queued = event.bytes;
    if (event.sent_total != connection->sent_total) {
        connection->sent_total = event.sent_total;
        connection->stalled_since = now;
    }
    if (queued_total_ > options_.queue_total_max + options_.queue_total_max / 4) cut_largest();
    if (event.bytes == 0) {
        connection->handles.on_drained(now);
    } else {
        schedule(*connection, now);
    }
    if (!less) return;
    settle(*connection, now);
    settle_blocked(now);
}

// Far over the total: whoever has most queued makes room.
void Switchboard::cut_largest() {
    Connection* largest = nullptr;
    for (const auto& [id, connection] : connections_) {
        if (connection->doomed) continue;
        if (largest == nullptr || connection->queued > largest->queued) largest = connection.get();
    }
    if (largest == nullptr) return;
    ++counters_.cut_memory;
    doom(*largest, {Errc::kBusy, "it reads too slowly, and the relay is short of memory"});
}

void Switchboard::send(Connection& to, std::vector<uint8_t> frame, Time now) {
    if (to.doomed) return;
    const uint64_t bytes = frame.size();
    const uint64_t hard_max =
        std::max(options_.queue_bytes_max, options_.message_bytes_max) + options_.own_bytes_max;
    if (to.queued + bytes > hard_max) {
        return doom(to, {Errc::kBusy, "it does not read what the relay tells it"});
    }
    actions_->push_back(Send{to.id, std::move(frame)});
    add_queued(to, bytes, now);
}

// A guess until Unsent says how much of it the kernel took.
void Switchboard::add_queued(Connection& to, uint64_t bytes, Time now) {
    if (to.queued == 0) to.stalled_since = now;
    to.queued += bytes;
    queued_total_ += bytes;
}

}  // namespace kvasir::relay
