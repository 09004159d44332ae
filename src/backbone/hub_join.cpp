// Hub, the part that lets workers in: HELLO on a connection of their own, or through a relay.
#include <algorithm>
#include <utility>

#include "backbone/hub.hpp"
#include "base/log.hpp"
#include "engine/runtime.hpp"
#include "wire/messages.hpp"

#include <sys/epoll.h>

namespace kvasir::backbone {
namespace {

wire::BuildFingerprint own_build() {
    const engine::Fingerprint print = engine::fingerprint();
    return {"kvasir " KVASIR_VERSION, print.engine, print.isa, print.compiler, print.kernels};
}

std::string version_text(uint16_t major, uint16_t minor) {
    return std::to_string(major) + "." + std::to_string(minor);
}

// Of a worker whose key is known: a name that it cannot choose.
wire::NodeId node_id(const wire::NodeKey& key) {
    wire::NodeId id;
    std::copy_n(key.begin(), id.size(), id.begin());
    return id;
}

}  // namespace

// An honest worker speaks at once, so the oldest of many that do not is the one to lose.
void Hub::make_room() {
    if (joining_.size() < options_.limits.joining_max) return;
    refuse(joining_.begin()->second, {Errc::kBusy, "too many connections wait for a HELLO"});
    joining_.erase(joining_.begin());
}

void Hub::on_joining(uint64_t tag) {
    const auto found = joining_.find(tag);
    if (found == joining_.end()) return;
    bool joined = false;
    if (Status ok = join_step(tag, found->second, joined); !ok) refuse(found->second, ok.error());
    const bool gone = joined || found->second.stream.closed();
    if (gone) joining_.erase(found);
    const auto link = links_.find(tag);
    if (link == links_.end()) return;
    read_link(tag);  // what came right behind makes no event
    link->second.link->watch();
}

Status Hub::join_step(uint64_t tag, Joining& joining, bool& joined) {
    for (;;) {
        auto message = joining.stream.try_receive();
        if (!message) return tl::unexpected(message.error());
        if (!*message) return {};
        if (!joining.role_seen) {
            if ((*message)->size() != 1 ||
                (**message)[0] != static_cast<uint8_t>(wire::Role::kWorker)) {
                return fail(Errc::kProtocol, "the first message must be the role byte 'W'");
            }
            joining.role_seen = true;
            continue;
        }
        // The message lies in the stream's memory, which moves with the stream.
        const std::vector<uint8_t> first((*message)->begin(), (*message)->end());
        auto frame = wire::decode_frame(first);
        if (!frame) return tl::unexpected(frame.error());
        if (frame->header.type != wire::FrameType::kHello)
            return fail(Errc::kProtocol, "expected HELLO");
        auto hello = wire::decode_hello(frame->payload);
        if (!hello) return tl::unexpected(hello.error());
        if (Status ok = check_hello(*hello); !ok) return ok;
        LinkState& state =
            make_link(tag, Link::Kind::kDirect, std::move(joining.stream), joining.address);
        if (Status ok = on_hello(state, 0, first); !ok) state.link->close(ok.error());
        joined = true;
        return {};
    }
}

void Hub::refuse(Joining& joining, const Error& error) {
    if (refusals_.take(net::Clock::now())) {
        log(LogLevel::kWarn, "hub",
            "refused " + joining.address + ": " + error.detail + refusals_.left_out());
    }
    if (joining.stream.closed()) return;
    (void)joining.stream.enqueue(wire::encode_error({error.code, error.detail}, 0));
    joining.stream.close(error.code == Errc::kProtocol ? 1002 : 1008);
}

Status Hub::check_hello(const wire::Hello& hello) const {
    if (hello.major != wire::kProtocolMajor) {
        return fail(Errc::kVersion, "worker speaks protocol " +
                                        version_text(hello.major, hello.minor) +
                                        ", this backbone " +
                                        version_text(wire::kProtocolMajor, wire::kProtocolMinor) +
                                        ": update the older one");
    }
    const moe::Manifest* manifest = replica_.manifest();
    const bool has_id = hello.model_id != Sha256{};
    if (manifest != nullptr && has_id && hello.model_id != manifest->model_id) {
        return fail(Errc::kMismatch, "worker holds model " + to_hex(hello.model_id).substr(0, 16) +
                                         "..., this backbone runs " +
                                         to_hex(manifest->model_id).substr(0, 16) +
                                         "... (another model or another quantisation of it)");
    }
    if (hello.segments.empty()) return fail(Errc::kMismatch, "worker holds no experts");
    const wire::HeldSegment* before = nullptr;
    for (const wire::HeldSegment& held : hello.segments) {
        const Segment& segment = held.segment;
        const std::string where = "segment " + to_string(segment.layer) + ":" +
                                  std::to_string(segment.begin) + "-" + std::to_string(segment.end);
        const moe::ExpertBank* bank = replica_.model().find_bank(segment.layer);
        if (bank == nullptr || segment.begin >= segment.end || segment.end > bank->experts) {
            return fail(Errc::kMismatch, where + " does not exist in this model");
        }
        if (before != nullptr &&
            (before->segment.layer > segment.layer ||
             (before->segment.layer == segment.layer && before->segment.end > segment.begin))) {
            return fail(Errc::kProtocol, where + " is out of order or overlaps");
        }
        if (manifest != nullptr && manifest->segment_digest(segment) != held.digest) {
            return fail(Errc::kMismatch,
                        where + " has other bytes than this model (digest differs)");
        }
        before = &held;
    }
    return {};
}

// `message` is a HELLO of that peer.
Status Hub::on_hello(LinkState& state, uint16_t peer, std::span<const uint8_t> message) {
    auto frame = wire::decode_frame(message);
    if (!frame) return tl::unexpected(frame.error());
    auto hello = wire::decode_hello(frame->payload);
    if (!hello) return tl::unexpected(hello.error());
    if (Status ok = check_hello(*hello); !ok) return ok;
    if (const auto known = state.peers.find(peer); known != state.peers.end())
        hello->node = node_id(known->second.node);
    std::vector<std::shared_ptr<WorkerSession>> older;
    size_t others = 0;
    for (const auto& session : sessions()) {
        if (!session->open()) continue;
        if (session->hello().node == hello->node) {
            older.push_back(session);
        } else {
            ++others;
        }
    }
    if (others >= options_.limits.sessions_max)
        return fail(Errc::kBusy, "this backbone has enough workers");
    const uint64_t tag = next_session_++;
    wire::Welcome welcome;
    welcome.generation = tag;
    welcome.ping_interval_ms = static_cast<uint32_t>(options_.limits.ping_interval.count());
    welcome.build = own_build();
    for (const auto& session : older)
        session->close({Errc::kClosed, "replaced by a newer connection of the same node"});
    auto session = std::make_shared<WorkerSession>(tag, state.link, peer, std::move(*hello),
                                                   event_.get(), options_.health);
    if (Status ok = session->send(wire::encode_welcome(welcome)); !ok) return ok;
    log(LogLevel::kInfo, "hub",
        "worker " + session->label() + " joined from " + state.link->address());
    {
        const std::lock_guard lock(mu_);
        sessions_.emplace(tag, session);
    }
    state.link->add(session);
    verifier_.add(session);
    return {};
}

// ---- frames that belong to no session ----

void Hub::take_control(LinkState& state) {
    bool is_logged = false;
    for (const auto& message : state.link->take_control()) {
        const Status ok = on_control(state, message);
        if (ok) continue;
        const bool is_over = !state.link->open();
        if (!std::exchange(is_logged, true))
            log(LogLevel::kWarn, "hub", state.link->address() + ": " + ok.error().detail);
        if (is_over) continue;  // a MOVE may follow
        state.link->close(ok.error());
        return;
    }
}

// Of a relay: a worker's own connection has no such frames. An error is about a RENEW that it
// names, or about the whole link.
Status Hub::on_control(LinkState& state, std::span<const uint8_t> message) {
    auto frame = wire::decode_frame(message);
    if (!frame) return tl::unexpected(frame.error());
    const uint16_t peer = frame->header.peer;
    if (peer == 0) {
        switch (frame->header.type) {
            case wire::FrameType::kPing: {
                auto token = wire::decode_token(frame->payload);
                if (!token) return tl::unexpected(token.error());
                if (!state.link->open()) return {};
                return state.link->send(wire::encode_pong(*token));
            }
            case wire::FrameType::kPong:
                return {};
            case wire::FrameType::kGoodbye:
                return fail(Errc::kClosed, "said goodbye");
            case wire::FrameType::kError: {
                auto error = wire::decode_error(frame->payload);
                if (!error) return tl::unexpected(error.error());
                if (const uint32_t request = frame->header.request_id; request != 0) {
                    on_renewed(state, request, fail(error->code, printable(error->detail)));
                    return {};
                }
                return fail(error->code == Errc::kDenied || error->code == Errc::kRevoked
                                ? error->code
                                : Errc::kClosed,
                            printable(error->detail));
            }
            default:
                return on_relay_control(state, *frame);
        }
    }
    if (!state.peers.contains(peer)) return {};  // its PEER_DOWN crossed what it sent
    if (frame->header.type != wire::FrameType::kHello) return {};  // of a session that has ended
    if (!state.link->open()) return {};  // what the node has elsewhere may be alive
    Status ok = on_hello(state, peer, message);
    if (ok) return ok;
    if (refusals_.take(net::Clock::now())) {
        log(LogLevel::kWarn, "hub",
            "refused a worker behind " + state.link->address() + ": " + ok.error().detail +
                refusals_.left_out());
    }
    auto refusal = wire::encode_error({ok.error().code, ok.error().detail}, 0);
    wire::set_peer(refusal, peer);
    (void)state.link->send(refusal);
    return {};
}

Status Hub::on_relay_control(LinkState& state, const wire::FrameView& frame) {
    switch (frame.header.type) {
        case wire::FrameType::kPeerUp: {
            auto peer = wire::decode_peer_up(frame.payload);
            if (!peer) return tl::unexpected(peer.error());
            if (peer->role == wire::Role::kWorker) state.peers[peer->handle] = *peer;
            tell_company(state);
            return {};
        }
        case wire::FrameType::kPeerDown: {
            auto peer = wire::decode_peer_down(frame.payload);
            if (!peer) return tl::unexpected(peer.error());
            state.peers.erase(peer->handle);
            tell_company(state);
            if (const auto session = session_of(state.link->tag(), peer->handle)) {
                session->close({Errc::kClosed, "left the relay: " + printable(peer->detail)});
            }
            return {};
        }
        case wire::FrameType::kMove: {
            auto move = wire::decode_move(frame.payload);
            if (!move) return tl::unexpected(move.error());
            if (std::exchange(state.has_move, true)) return {};  // only the first counts
            if (state.events.on_move) state.leave_at = state.events.on_move(*move);
            log(LogLevel::kInfo, "hub",
                "relay " + state.link->address() + " stops, its nodes go to " +
                    (move->url.empty() ? "the same address" : printable(move->url)));
            return {};
        }
        case wire::FrameType::kAttached: {
            auto attached = wire::decode_attached(frame.payload);
            if (!attached) return tl::unexpected(attached.error());
            on_renewed(state, frame.header.request_id, token_left(*attached));
            return {};
        }
        default:
            return fail(Errc::kProtocol, "the relay sent a frame of type " +
                                             std::to_string(static_cast<int>(frame.header.type)));
    }
}

// Whether a worker is there, when that changes.
void Hub::tell_company(LinkState& state) {
    const bool has_company = !state.peers.empty();
    if (state.has_company == has_company) return;
    state.has_company = has_company;
    if (state.events.on_company) state.leave_at = state.events.on_company(has_company);
}

// Finishes what is under way with the workers behind a relay that is to be left, then goes.
void Hub::leave_in_time(LinkState& state, net::Clock::time_point now) {
    if (now < state.leave_at) return;
    for (const auto& session : sessions()) {
        if (session->link() == state.link) session->stop_new_work();
    }
    if (state.link->has_pending() && now < state.leave_at + options_.limits.leave_max) return;
    (void)state.link->send(wire::encode_simple(wire::FrameType::kGoodbye));
    state.link->close({Errc::kClosed, "leaving this relay"});
}

// Nobody waits for the answer to a RENEW that a newer one has overtaken.
void Hub::on_renewed(const LinkState& state, uint32_t request,
                     Result<std::chrono::milliseconds> left) {
    if (request != state.renewals || request == 0) return;
    if (state.events.on_renewed) state.events.on_renewed(std::move(left));
}

}  // namespace kvasir::backbone
