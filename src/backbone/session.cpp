#include "backbone/session.hpp"

#include <algorithm>
#include <utility>

#include "base/log.hpp"

namespace kvasir::backbone {
namespace {

constexpr size_t kSamples = 4096;
constexpr uint32_t kControlPerSecondMax = 100;  // frames of a worker that answer no request
// Of a PING: a relay that cannot deliver it names it in its ERROR. Without one the ERROR would be
// the worker's own, and the end of the session. Requests count up from 1.
constexpr uint32_t kPingRequest = 0xffffffff;

std::string one_line(const wire::BuildFingerprint& build) {
    return printable(build.software) + ", " + printable(build.engine) + ", " +
           printable(build.kernels) + ", " + printable(build.isa) + ", " +
           printable(build.compiler);
}

double median(std::vector<float> values) {
    if (values.empty()) return 0;
    const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
}

}  // namespace

std::vector<HeldBank> held_banks(const wire::Hello& hello) {
    std::vector<HeldBank> banks;
    for (const wire::HeldSegment& held : hello.segments) {
        if (banks.empty() || banks.back().layer != held.segment.layer) {
            banks.push_back({held.segment.layer, {}, {}});
        }
        HeldBank& bank = banks.back();
        for (uint32_t id = held.segment.begin; id < held.segment.end; ++id)
            bank.globals.push_back(id);
    }
    for (HeldBank& bank : banks) {
        bank.local_of_global.assign(size_t{bank.globals.back()} + 1, -1);
        for (size_t i = 0; i < bank.globals.size(); ++i) {
            bank.local_of_global[bank.globals[i]] = static_cast<int32_t>(i);
        }
    }
    return banks;
}

WorkerSession::WorkerSession(uint64_t tag, std::shared_ptr<Link> link, uint16_t peer,
                             wire::Hello hello, int hub_event, dispatch::HealthOptions health)
    : tag_(tag),
      hello_(std::move(hello)),
      label_(printable(hello_.name, 40) + "#" + std::to_string(tag)),
      banks_(held_banks(hello_)),
      link_(std::move(link)),
      peer_(peer),
      hub_event_(hub_event),
      health_(health) {}

const HeldBank* WorkerSession::bank(LayerKey layer) const {
    for (const HeldBank& held : banks_) {
        if (held.layer == layer) return &held;
    }
    return nullptr;
}

Status WorkerSession::enqueue_locked(std::span<const std::span<const uint8_t>> pieces) {
    Status ok = link_->enqueue_locked(pieces, peer_);
    if (!ok) {
        if (ok.error().code != Errc::kBusy && ok.error().code != Errc::kLimit) {
            link_->close_locked(ok.error(), nullptr, {});
        }
        return ok;
    }
    uint64_t bytes = 0;
    for (const auto& piece : pieces) bytes += piece.size();
    bytes_out_ += link_->wire_bytes(bytes, true);
    link_->asked_locked();
    return {};
}

Status WorkerSession::enqueue_locked(std::span<const uint8_t> message) {
    return enqueue_locked(std::span<const std::span<const uint8_t>>(&message, 1));
}

Status WorkerSession::send(std::span<const uint8_t> message) {
    const std::lock_guard lock(link_->mu_);
    if (!open()) return fail(Errc::kClosed, label_ + " has left");
    return enqueue_locked(message);
}

Status WorkerSession::request(uint32_t request_id, std::span<const std::span<const uint8_t>> pieces,
                              uint32_t pairs, Mailbox* box, uint64_t cookie) {
    const std::lock_guard lock(link_->mu_);
    if (!open()) return fail(Errc::kClosed, label_ + " has left");
    if (pending_.size() >= kPendingMax)
        return fail(Errc::kBusy, label_ + " has too many requests under way");
    if (Status ok = enqueue_locked(pieces); !ok) return ok;
    pending_.emplace(request_id, Pending{box, cookie, pairs});
    ++link_->pending_;
    pairs_pending_ += pairs;
    ++requests_;
    return {};
}

void WorkerSession::cancel(uint32_t request_id) {
    const std::lock_guard lock(link_->mu_);
    const auto found = pending_.find(request_id);
    if (found == pending_.end()) return;
    pairs_pending_ -= found->second.pairs;
    --link_->pending_;
    pending_.erase(found);
    cancelled_.insert(request_id);
    if (cancelled_.size() > kPendingMax) cancelled_.erase(cancelled_.begin());
}

Status WorkerSession::handle(const wire::FrameView& frame, Mailbox* box, const OnReply& on_reply) {
    const auto now = net::Clock::now();
    const bool answer = frame.header.type == wire::FrameType::kResult ||
                        frame.header.type == wire::FrameType::kProgramAck;
    if (!answer) {
        if (Status ok = count_control_locked(now); !ok) return ok;
    }
    switch (frame.header.type) {
        case wire::FrameType::kResult:
        case wire::FrameType::kProgramAck:
            return deliver(frame, box, on_reply);
        case wire::FrameType::kError:
            if (frame.header.request_id == kPingRequest) return {};  // it is asked again
            if (frame.header.request_id != 0) return deliver(frame, box, on_reply);
            if (auto error = wire::decode_error(frame.payload)) {
                return fail(Errc::kClosed, label_ + " gave up: " + printable(error->detail));
            }
            return fail(Errc::kProtocol, label_ + " sent a malformed ERROR");
        case wire::FrameType::kPing: {
            auto token = wire::decode_token(frame.payload);
            if (!token) return tl::unexpected(token.error());
            return enqueue_locked(wire::encode_pong(*token));
        }
        case wire::FrameType::kPong: {
            if (auto token = wire::decode_token(frame.payload); !token)
                return tl::unexpected(token.error());
            health_.on_pong(now);
            refresh_usable_locked();
            return {};
        }
        case wire::FrameType::kDrain:
            draining_.store(true);
            refresh_usable_locked();
            notify(hub_event_);
            return {};
        case wire::FrameType::kGoodbye:
            return fail(Errc::kClosed, label_ + " said goodbye");
        default:
            return fail(Errc::kProtocol, label_ + " sent a frame of type " +
                                             std::to_string(static_cast<int>(frame.header.type)) +
                                             ", which is not a worker's");
    }
}

// A flood of frames that answer nothing would keep the reading thread, a lane's perhaps, from its
// work.
Status WorkerSession::count_control_locked(net::Clock::time_point now) {
    if (now - second_start_ > std::chrono::seconds(1)) {
        second_start_ = now;
        control_this_second_ = 0;
    }
    if (++control_this_second_ <= kControlPerSecondMax) return {};
    return fail(Errc::kLimit, label_ + " sends too many frames that answer nothing");
}

void WorkerSession::mark_exact(bool exact) {
    const std::lock_guard lock(link_->mu_);
    differed_ = differed_ || !exact;
    exact_.store(!differed_);
}

Status WorkerSession::deliver(const wire::FrameView& frame, Mailbox* box, const OnReply& on_reply) {
    const auto found = pending_.find(frame.header.request_id);
    if (found == pending_.end()) {
        if (cancelled_.erase(frame.header.request_id) == 0) {
            return fail(Errc::kProtocol, label_ + " answered request " +
                                             std::to_string(frame.header.request_id) +
                                             ", which nobody asked");
        }
        ++late_;
        return {};
    }
    const Pending pending = found->second;
    pending_.erase(found);
    pairs_pending_ -= pending.pairs;
    --link_->pending_;
    Error error;
    if (frame.header.type == wire::FrameType::kError) {
        auto decoded = wire::decode_error(frame.payload);
        if (!decoded) return tl::unexpected(decoded.error());
        error = {decoded->code, label_ + ": " + printable(decoded->detail)};
    }
    if (pending.box == box && on_reply) {
        on_reply(pending.cookie, frame.header.type, frame.payload, error);
    } else {
        pending.box->post({pending.cookie, frame.header.type,
                           std::vector<uint8_t>(frame.payload.begin(), frame.payload.end()),
                           error});
    }
    return {};
}

void WorkerSession::close(const Error& reason) {
    const std::lock_guard lock(link_->mu_);
    end_locked(reason, nullptr, {});
}

// What the worker is told goes out first; a relay's link goes on for the others.
void WorkerSession::end_locked(const Error& reason, Mailbox* box, const OnReply& on_reply) {
    if (!open()) return;
    open_.store(false, std::memory_order_release);
    refresh_usable_locked();
    log(LogLevel::kInfo, "hub", "worker " + label_ + " left: " + reason.detail);
    for (const auto& [id, pending] : pending_) {
        const Error error{Errc::kClosed, reason.detail};
        if (pending.box == box && on_reply) {
            on_reply(pending.cookie, wire::FrameType::kError, {}, error);
        } else {
            pending.box->post({pending.cookie, wire::FrameType::kError, {}, error});
        }
    }
    failures_ += pending_.size();
    link_->pending_ -= pending_.size();
    pairs_pending_ = 0;
    pending_.clear();
    if (link_->open()) {
        const bool relayed = link_->kind() == Link::Kind::kRelay;
        // Its own socket says the rest by closing.
        if (relayed || reason.code != Errc::kClosed) {
            const auto bytes = wire::encode_error({reason.code, reason.detail}, 0);
            const std::span<const uint8_t> piece(bytes);
            (void)link_->enqueue_locked({&piece, 1}, peer_);
        }
        if (relayed) {
            const auto found = link_->sessions_.find(peer_);
            if (found != link_->sessions_.end() && found->second.get() == this)
                link_->sessions_.erase(found);
        } else {
            link_->close_locked(reason, box, on_reply);
        }
    }
    notify(hub_event_);
}

void WorkerSession::refresh_usable_locked() {
    usable_.store(open() && !draining_.load() && health_.usable(), std::memory_order_release);
}

void WorkerSession::stop_new_work() {
    const std::lock_guard lock(link_->mu_);
    if (draining_.exchange(true)) return;
    refresh_usable_locked();
    notify(hub_event_);
}

void WorkerSession::ping() {
    const std::lock_guard lock(link_->mu_);
    if (!open()) return;
    last_ping_ = net::Clock::now();
    const auto token = static_cast<uint64_t>(last_ping_.time_since_epoch().count());
    (void)enqueue_locked(wire::encode_ping(token, kPingRequest));
}

net::Clock::time_point WorkerSession::last_heard() const {
    const std::lock_guard lock(link_->mu_);
    return last_heard_;
}

net::Clock::time_point WorkerSession::last_ping() const {
    const std::lock_guard lock(link_->mu_);
    return last_ping_;
}

void WorkerSession::on_answer(uint32_t pairs, std::chrono::nanoseconds took,
                              std::chrono::nanoseconds compute) {
    const std::lock_guard lock(link_->mu_);
    health_.on_answer(pairs, took, compute);
    pairs_ += pairs;
    const float us = static_cast<float>(compute.count()) / 1000.0f;
    if (compute_us_.size() < kSamples) {
        compute_us_.push_back(us);
    } else {
        compute_us_[compute_next_++ % kSamples] = us;
    }
}

void WorkerSession::on_failure() {
    const std::lock_guard lock(link_->mu_);
    health_.on_failure(net::Clock::now());
    ++failures_;
    refresh_usable_locked();
    notify(hub_event_);
}

bool WorkerSession::wants_probe() const {
    const std::lock_guard lock(link_->mu_);
    return open() && health_.wants_probe(net::Clock::now());
}

std::chrono::milliseconds WorkerSession::deadline(uint32_t pairs) const {
    const std::lock_guard lock(link_->mu_);
    return health_.deadline(pairs);
}

dispatch::HolderCost WorkerSession::costs() const {
    const std::lock_guard lock(link_->mu_);
    dispatch::HolderCost cost;
    cost.request_us = health_.request_us();
    cost.pair_us = health_.pair_us();
    cost.queued_us = static_cast<double>(pairs_pending_) * cost.pair_us;
    return cost;
}

WorkerReport WorkerSession::report() const {
    const std::lock_guard lock(link_->mu_);
    WorkerReport out;
    out.id = label_;
    out.build = one_line(hello_.build);
    out.computes = computes_;
    for (const HeldBank& held : banks_) out.experts_held += held.globals.size();
    out.pairs = pairs_;
    out.requests = requests_;
    out.failures = failures_;
    out.bytes_in = bytes_in_;
    out.bytes_out = bytes_out_;
    out.compute_us_p50 = median(compute_us_);
    out.exact = exact();
    out.connected = open();
    return out;
}

void WorkerSession::computes_with(std::string text) {
    const std::lock_guard lock(link_->mu_);
    computes_ = std::move(text);
}

void WorkerSession::reset_report() {
    const std::lock_guard lock(link_->mu_);
    pairs_ = requests_ = failures_ = late_ = 0;
    bytes_in_ = bytes_out_ = 0;
    compute_us_.clear();
    compute_next_ = 0;
}

}  // namespace kvasir::backbone
