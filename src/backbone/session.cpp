#include "backbone/session.hpp"

#include <sys/epoll.h>

#include <algorithm>
#include <utility>

#include "base/log.hpp"

namespace kvasir::backbone {
namespace {

constexpr size_t kSamples = 4096;
constexpr auto kClaimIdle = std::chrono::milliseconds(50);
constexpr uint32_t kControlPerSecondMax = 100;  // frames of a worker that answer no request

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

WorkerSession::WorkerSession(uint64_t tag, net::MessageStream stream, wire::Hello hello,
                             int epoll_fd, int hub_event, dispatch::HealthOptions health)
    : tag_(tag),
      hello_(std::move(hello)),
      label_(printable(hello_.name, 40) + "#" + std::to_string(tag)),
      banks_(held_banks(hello_)),
      epoll_fd_(epoll_fd),
      hub_event_(hub_event),
      fd_(stream.fd()),
      stream_(std::move(stream)),
      health_(health) {}

const HeldBank* WorkerSession::bank(LayerKey layer) const {
    for (const HeldBank& held : banks_) {
        if (held.layer == layer) return &held;
    }
    return nullptr;
}

Status WorkerSession::request(uint32_t request_id, std::span<const std::span<const uint8_t>> pieces,
                              Mailbox* box, uint64_t cookie) {
    const std::lock_guard lock(mu_);
    if (!open()) return fail(Errc::kClosed, label_ + " has left");
    if (pending_.size() >= kPendingMax)
        return fail(Errc::kBusy, label_ + " has too many requests under way");
    if (Status ok = stream_.enqueue(pieces); !ok) {
        if (ok.error().code != Errc::kBusy) close_locked(ok.error(), nullptr, {});
        return ok;
    }
    pending_.emplace(request_id, Pending{box, cookie});
    ++requests_;
    if (!reading_ && reader_ != nullptr) give_back_locked();
    if (stream_.wants_write() && reader_ == nullptr) watch_locked();
    return {};
}

void WorkerSession::cancel(uint32_t request_id) {
    const std::lock_guard lock(mu_);
    if (pending_.erase(request_id) == 0) return;
    cancelled_.insert(request_id);
    if (cancelled_.size() > kPendingMax) cancelled_.erase(cancelled_.begin());
}

bool WorkerSession::claim(const void* reader) {
    const std::lock_guard lock(mu_);
    if (reading_ && reader_ != reader) return false;
    if (reader_ == nullptr) {
        epoll_event event{};
        event.events = EPOLLONESHOT;  // a hang-up is always reported, but then only once
        event.data.u64 = tag_;
        ::epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, fd_, &event);
    }
    reader_ = reader;
    reading_ = true;
    return true;
}

void WorkerSession::release(const void* reader) {
    const std::lock_guard lock(mu_);
    if (reader_ != reader || !reading_) return;
    reading_ = false;
    idle_since_ = net::Clock::now();
    // Somebody else waits for what may come: the hub has to read.
    if (!pending_.empty() || stream_.wants_write()) give_back_locked();
}

void WorkerSession::give_back(const void* reader) {
    const std::lock_guard lock(mu_);
    if (reader_ == reader) give_back_locked();
}

void WorkerSession::give_back_idle() {
    const std::lock_guard lock(mu_);
    if (reading_ || reader_ == nullptr) return;
    if (net::Clock::now() - idle_since_ >= kClaimIdle) give_back_locked();
}

void WorkerSession::give_back_locked() {
    reader_ = nullptr;
    reading_ = false;
    watch_locked();
}

void WorkerSession::watch() {
    const std::lock_guard lock(mu_);
    if (reader_ == nullptr) watch_locked();
}

void WorkerSession::watch_locked() {
    if (!open()) return;
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP | EPOLLONESHOT;
    if (stream_.wants_write()) event.events |= EPOLLOUT;
    event.data.u64 = tag_;
    ::epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, fd_, &event);
}

Status WorkerSession::pump(Mailbox* box, const OnReply& on_reply) {
    const std::lock_guard lock(mu_);
    if (!open()) return fail(Errc::kClosed, label_ + " has left");
    if (stream_.wants_write()) {
        if (Status ok = stream_.flush(); !ok) {
            close_locked(ok.error(), box, on_reply);
            return ok;
        }
    }
    for (;;) {
        auto message = stream_.try_receive();
        if (!message) {
            close_locked(message.error(), box, on_reply);
            return tl::unexpected(message.error());
        }
        if (!*message) return {};
        auto frame = wire::decode_frame(**message);
        Status ok = frame ? handle(*frame, box, on_reply) : Status(tl::unexpected(frame.error()));
        if (!ok) {
            const auto bytes = wire::encode_error({ok.error().code, ok.error().detail}, 0);
            (void)stream_.enqueue(bytes);
            close_locked(ok.error(), box, on_reply);
            return ok;
        }
        if (!stream_.may_have_more()) return {};
    }
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
            if (frame.header.request_id != 0) return deliver(frame, box, on_reply);
            if (auto error = wire::decode_error(frame.payload)) {
                return fail(Errc::kClosed, label_ + " gave up: " + printable(error->detail));
            }
            return fail(Errc::kProtocol, label_ + " sent a malformed ERROR");
        case wire::FrameType::kPing: {
            auto token = wire::decode_token(frame.payload);
            if (!token) return tl::unexpected(token.error());
            return stream_.enqueue(wire::encode_pong(*token));
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
    const std::lock_guard lock(mu_);
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
    const std::lock_guard lock(mu_);
    if (open() && reason.code != Errc::kClosed) {
        (void)stream_.enqueue(wire::encode_error({reason.code, reason.detail}, 0));
    }
    close_locked(reason, nullptr, {});
}

void WorkerSession::close_locked(const Error& reason, Mailbox* box, const OnReply& on_reply) {
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
    pending_.clear();
    stream_.close();
    notify(hub_event_);
}

void WorkerSession::refresh_usable_locked() {
    usable_.store(open() && !draining_.load() && health_.usable(), std::memory_order_release);
}

bool WorkerSession::wants_write() const {
    const std::lock_guard lock(mu_);
    return stream_.wants_write();
}

void WorkerSession::ping() {
    const std::lock_guard lock(mu_);
    if (!open()) return;
    last_ping_ = net::Clock::now();
    const auto token = static_cast<uint64_t>(last_ping_.time_since_epoch().count());
    if (Status ok = stream_.enqueue(wire::encode_ping(token));
        !ok && ok.error().code != Errc::kBusy) {
        close_locked(ok.error(), nullptr, {});
    }
}

net::Clock::time_point WorkerSession::last_heard() const {
    const std::lock_guard lock(mu_);
    return stream_.last_heard();
}

net::Clock::time_point WorkerSession::last_ping() const {
    const std::lock_guard lock(mu_);
    return last_ping_;
}

void WorkerSession::on_answer(uint32_t pairs, std::chrono::nanoseconds took,
                              std::chrono::nanoseconds compute) {
    const std::lock_guard lock(mu_);
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
    const std::lock_guard lock(mu_);
    health_.on_failure(net::Clock::now());
    ++failures_;
    refresh_usable_locked();
    notify(hub_event_);
}

bool WorkerSession::wants_probe() const {
    const std::lock_guard lock(mu_);
    return open() && health_.wants_probe(net::Clock::now());
}

std::chrono::milliseconds WorkerSession::deadline(uint32_t pairs) const {
    const std::lock_guard lock(mu_);
    return health_.deadline(pairs);
}

void WorkerSession::costs(double& request_us, double& pair_us) const {
    const std::lock_guard lock(mu_);
    request_us = health_.request_us();
    pair_us = health_.pair_us();
}

WorkerReport WorkerSession::report() const {
    const std::lock_guard lock(mu_);
    WorkerReport out;
    out.id = label_;
    out.build = one_line(hello_.build);
    for (const HeldBank& held : banks_) out.experts_held += held.globals.size();
    out.pairs = pairs_;
    out.requests = requests_;
    out.failures = failures_;
    out.bytes_in = stream_.counters().bytes_in - bytes_in_base_;
    out.bytes_out = stream_.counters().bytes_out - bytes_out_base_;
    out.compute_us_p50 = median(compute_us_);
    out.exact = exact();
    out.connected = open();
    return out;
}

void WorkerSession::reset_report() {
    const std::lock_guard lock(mu_);
    pairs_ = requests_ = failures_ = late_ = 0;
    bytes_in_base_ = stream_.counters().bytes_in;
    bytes_out_base_ = stream_.counters().bytes_out;
    compute_us_.clear();
    compute_next_ = 0;
}

}  // namespace kvasir::backbone
