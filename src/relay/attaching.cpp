// Switchboard: from a new connection to an attached node that knows its peers.
#include <algorithm>
#include <string>

#include "base/check.hpp"
#include "base/log.hpp"
#include "relay/connection.hpp"
#include "relay/own_frames.hpp"
#include "relay/switchboard.hpp"

namespace kvasir::relay {
namespace {

using wire::FrameType;
using wire::Role;

constexpr milliseconds kSweepEvery{10000};
constexpr size_t kNameBytesMax = 64;  // as in tokens: every peer is told it

std::string short_key(const wire::NodeKey& key) {
    constexpr char kDigits[] = "0123456789abcdef";
    std::string text;
    for (size_t i = 0; i < 6; ++i) {
        text += kDigits[key[i] >> 4];
        text += kDigits[key[i] & 15];
    }
    return text;
}

bool models_meet(const Sha256& a, const Sha256& b) {
    const Sha256 any = {};
    return a == b || a == any || b == any;
}

const char* role_name(Role role) {
    if (role == Role::kObserver) return "observer";
    return role == Role::kBackbone ? "backbone" : "worker";
}

}  // namespace

void Switchboard::on(const Opened& event, Time now) {
    KVASIR_CHECK(!connections_.contains(event.id));
    ++counters_.opened;
    auto made = std::make_unique<Connection>(event.id, options_);
    Connection& connection = *made;
    connection.address = event.address;
    connection.nonce = event.nonce;
    connection.opened = connection.heard = now;
    const Status limits = accept_limits(connection);
    connections_.emplace(event.id, std::move(made));
    ++by_address_[event.address];
    ++attaching_;
    if (!limits) return refuse(connection, limits.error(), now);
    send(connection, wire::encode_nonce(event.nonce), now);
    schedule(connection, now);
}

Status Switchboard::accept_limits(const Connection& connection) const {
    if (draining_) return fail(Errc::kBusy, "this relay stops: come again in a moment");
    if (connections_.size() >= options_.connections_max) {
        return fail(Errc::kBusy, "this relay has its " + std::to_string(options_.connections_max) +
                                     " connections: come again later");
    }
    if (attaching_ >= options_.attaching_max) {
        return fail(Errc::kBusy, "too many connections are being attached: come again in a moment");
    }
    const auto same = by_address_.find(connection.address);
    if (same != by_address_.end() && same->second >= options_.connections_per_address_max) {
        return fail(Errc::kBusy, std::to_string(same->second) +
                                     " connections from your address, no more are taken");
    }
    return {};
}

void Switchboard::on_role(Connection& from, std::span<const uint8_t> message, Time now) {
    const uint8_t role = message.size() == 1 ? message[0] : 0;
    if (role != static_cast<uint8_t>(Role::kWorker) &&
        role != static_cast<uint8_t>(Role::kBackbone) &&
        role != static_cast<uint8_t>(Role::kObserver)) {
        return refuse(from,
                      {Errc::kProtocol, "the first message must be one byte, the role: W, B or O"},
                      now);
    }
    from.role = static_cast<Role>(role);
    from.phase = Phase::kAttach;
}

void Switchboard::on_attach(Connection& from, std::span<const uint8_t> message, Time now) {
    const auto frame = wire::decode_frame(message);
    if (!frame) return refuse(from, frame.error(), now);
    if (frame->header.type != FrameType::kAttach || frame->header.peer != 0) {
        return refuse(from, {Errc::kProtocol, "the first frame must be ATTACH"}, now);
    }
    const auto attach = wire::decode_attach(frame->payload);
    if (!attach) return refuse(from, attach.error(), now);
    if (attach->major != wire::kProtocolMajor) {
        return refuse(from,
                      {Errc::kVersion, "you speak protocol " + std::to_string(attach->major) +
                                           ", this relay " + std::to_string(wire::kProtocolMajor)},
                      now);
    }
    const auto admission = gate_.admit(from.nonce, from.role, *attach);
    if (!admission) return refuse(from, admission.error(), now);
    if (admission->left <= milliseconds(0)) {
        return refuse(from, {Errc::kExpired, "the token has expired: renew it"}, now);
    }
    if (const Status credit = take_credit(attach->node, now); !credit) {
        return refuse(from, credit.error(), now);
    }
    this->attach(from, *attach, *admission, now);
}

// A node that comes and goes all the time costs every peer a handle each time.
Status Switchboard::take_credit(const wire::NodeKey& key, Time now) {
    const auto [entry, is_new] = nodes_.try_emplace(key);
    Node& node = entry->second;
    const double burst = options_.attach_burst;
    if (is_new) {
        node.credit = burst;
    } else {
        const double earned = std::chrono::duration<double>(now - node.credited) /
                              std::chrono::duration<double>(options_.attach_every);
        node.credit = std::min(burst, node.credit + earned);
    }
    node.credited = now;
    sweep_due_ = std::min(sweep_due_, now + kSweepEvery);
    if (node.credit < 1) return fail(Errc::kBusy, "this node attaches too often: wait a little");
    node.credit -= 1;
    return {};
}

void Switchboard::sweep_nodes(Time now) {
    const double burst = options_.attach_burst;
    std::erase_if(nodes_, [&](const auto& entry) {
        const Node& node = entry.second;
        const double earned = std::chrono::duration<double>(now - node.credited) /
                              std::chrono::duration<double>(options_.attach_every);
        return !node.online && node.credit + earned >= burst;
    });
    sweep_due_ = nodes_.empty() ? Time::max() : now + kSweepEvery;
}

void Switchboard::attach(Connection& from, const wire::Attach& attach, const Admission& admission,
                         Time now) {
    --attaching_;
    ++counters_.attached;
    from.phase = Phase::kAttached;
    from.node = attach.node;
    from.name = attach.name.substr(0, kNameBytesMax);
    from.admission = admission;
    from.generation = generation_++;
    from.expires = later(now, admission.left);
    from.ping_due = now + options_.ping_interval * 3 / 4;
    replace_older(from, now);
    Node& node = nodes_[from.node];
    node.current = from.id;
    node.online = true;
    if (log_enabled(LogLevel::kInfo)) {
        log(LogLevel::kInfo, "relay",
            "event=attached conn=" + std::to_string(from.id.value) +
                " role=" + role_name(from.role) + " node=" + short_key(from.node) + " name=\"" +
                printable(from.name, 64) + "\" addr=" + from.address +
                " gen=" + std::to_string(from.generation));
    }
    send(from, attached_frame(from, now, 0), now);
    actions_->push_back(AllowFrames{from.id});
    introduce_to_all(from, now);
    schedule(from, now);
}

void Switchboard::replace_older(const Connection& newer, Time now) {
    const auto entry = nodes_.find(newer.node);
    if (entry == nodes_.end() || !entry->second.online) return;
    Connection* older = find(entry->second.current);
    if (older == nullptr) return;
    ++counters_.replaced;
    const Error reason{Errc::kClosed, "replaced by a newer connection of this node"};
    send(*older, make_error(reason.code, reason.detail), now);
    doom(*older, reason);
    close_doomed(now);  // its peers hear of the end first, then of the beginning
}

std::vector<uint8_t> Switchboard::attached_frame(const Connection& to, Time now,
                                                 uint32_t request_id) const {
    wire::Attached attached;
    attached.generation = to.generation;
    attached.ping_interval_ms = static_cast<uint32_t>(options_.ping_interval.count());
    attached.message_bytes_max = options_.message_bytes_max;
    const auto left = std::chrono::duration_cast<milliseconds>(to.expires - now);
    attached.token_left_ms = static_cast<uint64_t>(std::max<int64_t>(left.count(), 0));
    std::vector<uint8_t> frame = wire::encode_attached(attached);
    for (size_t i = 0; i < 4; ++i) frame[4 + i] = static_cast<uint8_t>(request_id >> (8 * i));
    return frame;
}

// ---- who sees whom ----

void Switchboard::introduce_to_all(Connection& newcomer, Time now) {
    if (newcomer.role == Role::kObserver) {
        for (const auto* set : {&backbones_, &workers_}) {
            for (const ConnectionId id : *set) {
                if (Connection* node = find(id)) show(newcomer, *node, now);
            }
        }
        observers_.insert(newcomer.id);
        return;
    }
    const bool is_worker = newcomer.role == Role::kWorker;
    size_t others = 0, met = 0;
    for (const ConnectionId id : is_worker ? backbones_ : workers_) {
        Connection* other = find(id);
        if (other == nullptr || other->leaving) continue;
        ++others;
        if (!models_meet(newcomer.admission.model_id, other->admission.model_id)) continue;
        ++met;
        introduce(newcomer, *other, now);
    }
    if (others != 0 && met == 0) note_unmatched(newcomer, others);
    for (const ConnectionId id : observers_) {
        if (Connection* observer = find(id)) show(*observer, newcomer, now);
    }
    (is_worker ? workers_ : backbones_).insert(newcomer.id);
}

// It may well wait for one of its model. More often it has the wrong one, and nothing else says so.
void Switchboard::note_unmatched(const Connection& newcomer, size_t others) {
    ++counters_.unmatched;
    log(LogLevel::kWarn, "relay",
        "event=other_model conn=" + std::to_string(newcomer.id.value) +
            " role=" + role_name(newcomer.role) + " node=" + short_key(newcomer.node) +
            " model=" + to_hex(newcomer.admission.model_id).substr(0, 16) +
            " others=" + std::to_string(others) + " reason=\"nobody's token is for its model\"");
}

void Switchboard::introduce(Connection& a, Connection& b, Time now) {
    const auto for_a = a.handles.take(b.id, now);
    const auto for_b = for_a ? b.handles.take(a.id, now) : std::nullopt;
    if (!for_b) {
        if (for_a) a.handles.release(*for_a);
        ++counters_.introductions_failed;
        log(LogLevel::kWarn, "relay",
            "event=no_handle conn=" + std::to_string((for_a ? b : a).id.value));
        return;
    }
    ++counters_.introduced;
    a.handles.set_peer_handle(*for_a, *for_b);
    b.handles.set_peer_handle(*for_b, *for_a);
    send(a, wire::encode_peer_up({*for_a, b.role, b.node, b.generation, b.name}), now);
    send(b, wire::encode_peer_up({*for_b, a.role, a.node, a.generation, a.name}), now);
}

// An observer sees, and is not seen.
void Switchboard::show(Connection& observer, Connection& node, Time now) {
    if (!models_meet(observer.admission.model_id, node.admission.model_id)) return;
    const auto handle = observer.handles.take(node.id, now);
    if (!handle) {
        ++counters_.introductions_failed;
        return;
    }
    node.watchers.emplace_back(observer.id, *handle);
    send(observer,
         wire::encode_peer_up({*handle, node.role, node.node, node.generation, node.name}), now);
}

void Switchboard::on_renew(Connection& from, const wire::FrameView& frame, Time now) {
    const auto told = [&](const Error& error) {
        send(from, make_error(error.code, error.detail, 0, frame.header.request_id), now);
    };
    const auto token = wire::decode_renew(frame.payload);
    if (!token) return refuse(from, token.error(), now);
    const auto admission = gate_.renew(from.node, from.role, *token);
    if (!admission) return told(admission.error());
    if (admission->left <= milliseconds(0)) {
        return told({Errc::kExpired, "the new token has expired already"});
    }
    if (admission->model_id != from.admission.model_id) {
        return told({Errc::kMismatch, "the new token names another model: attach again"});
    }
    ++counters_.renewed;
    from.admission = *admission;
    from.expires = later(now, admission->left);
    send(from, attached_frame(from, now, frame.header.request_id), now);
    schedule(from, now);
}

}  // namespace kvasir::relay
