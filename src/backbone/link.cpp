#include "backbone/link.hpp"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <utility>

#include "backbone/session.hpp"
#include "base/check.hpp"
#include "base/log.hpp"
#include "wire/messages.hpp"

namespace kvasir::backbone {
namespace {

constexpr auto kClaimIdle = std::chrono::milliseconds(50);
constexpr auto kToldPause = std::chrono::seconds(1);  // between refusals of one peer's HELLOs
constexpr size_t kPiecesMax = 4;                      // of one frame, its head included

}  // namespace

Link::Link(uint64_t tag, Kind kind, net::MessageStream stream, std::string address, int epoll_fd,
           int hub_event)
    : tag_(tag),
      kind_(kind),
      address_(std::move(address)),
      epoll_fd_(epoll_fd),
      hub_event_(hub_event),
      fd_(stream.fd()),
      stream_(std::move(stream)) {}

// ---- the reading right ----

bool Link::claim(const void* reader) {
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

void Link::release(const void* reader) {
    const std::lock_guard lock(mu_);
    if (reader_ != reader || !reading_) return;
    reading_ = false;
    idle_since_ = net::Clock::now();
    // Somebody else waits for what may come: the hub has to read.
    if (pending_ != 0 || stream_.wants_write()) give_back_locked();
}

void Link::give_back(const void* reader) {
    const std::lock_guard lock(mu_);
    if (reader_ == reader) give_back_locked();
}

void Link::give_back_idle() {
    const std::lock_guard lock(mu_);
    if (reading_ || reader_ == nullptr) return;
    if (net::Clock::now() - idle_since_ >= kClaimIdle) give_back_locked();
}

void Link::give_back_locked() {
    reader_ = nullptr;
    reading_ = false;
    watch_locked();
}

void Link::watch() {
    const std::lock_guard lock(mu_);
    if (reader_ == nullptr) watch_locked();
}

void Link::watch_locked() {
    if (!open()) return;
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP | EPOLLONESHOT;
    if (stream_.wants_write()) event.events |= EPOLLOUT;
    event.data.u64 = tag_;
    ::epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, fd_, &event);
}

// Something was sent, perhaps in part, by a thread that does not read.
void Link::asked_locked() {
    if (!reading_ && reader_ != nullptr) give_back_locked();
    if (stream_.wants_write() && reader_ == nullptr) watch_locked();
}

// ---- reading ----

Status Link::pump(Mailbox* box, const OnReply& on_reply) {
    const std::lock_guard lock(mu_);
    if (!open()) return fail(Errc::kClosed, address_ + " has left");
    // What had arrived counts, also when nothing can be sent any more.
    Status written = stream_.wants_write() ? stream_.flush() : Status();
    for (;;) {
        auto message = stream_.try_receive();
        if (!message) {
            close_locked(message.error(), box, on_reply);
            return tl::unexpected(message.error());
        }
        if (!*message) break;
        if (Status ok = handle(**message, box, on_reply); !ok) {
            const auto bytes = wire::encode_error({ok.error().code, ok.error().detail}, 0);
            (void)stream_.enqueue(bytes);
            close_locked(ok.error(), box, on_reply);
            return ok;
        }
        if (!open()) return fail(Errc::kClosed, address_ + " has left");
        if (!stream_.may_have_more()) break;
    }
    if (!written) close_locked(written.error(), box, on_reply);
    return written;
}

// An error is about the whole link.
Status Link::handle(std::span<const uint8_t> message, Mailbox* box, const OnReply& on_reply) {
    auto frame = wire::decode_frame(message);
    if (!frame) return tl::unexpected(frame.error());
    const auto found = sessions_.find(frame->header.peer);
    if (found == sessions_.end()) {
        if (kind_ != Kind::kDirect) {
            if (frame->header.peer == 0) return keep_for_hub(message);
            // What a node that is no worker of ours sends may not harm those that are.
            if (frame->header.type != wire::FrameType::kHello) return {};
            return keep_hello(frame->header.peer, message);
        }
        return fail(Errc::kProtocol, "a frame for peer " + std::to_string(frame->header.peer) +
                                         " on a direct connection");
    }
    const std::shared_ptr<WorkerSession> session = found->second;  // it may end in here
    session->bytes_in_ += wire_bytes(message.size(), false);
    session->last_heard_ = stream_.last_heard();
    Status ok = session->handle(*frame, box, on_reply);
    if (ok || kind_ != Kind::kRelay) return ok;
    session->end_locked(ok.error(), box, on_reply);  // the others behind the relay go on
    return {};
}

// An honest worker that is not kept must hear of it: it waits for its WELCOME, or says HELLO again
// a while after a refusal.
Status Link::keep_hello(uint16_t peer, std::span<const uint8_t> message) {
    const auto now = net::Clock::now();
    Hellos& hellos = hellos_[peer];
    const std::chrono::duration<double> since = now - hellos.at;
    hellos.left = std::min<double>(kHelloBurst, hellos.left + since.count());
    hellos.at = now;
    if (std::exchange(hellos.round, hello_round_) != hello_round_) hellos.bytes = 0;
    Error refusal;
    if (message.size() > kHelloBytesMax) {
        refusal = {Errc::kLimit, "a HELLO has at most " + std::to_string(kHelloBytesMax) +
                                     " bytes, this one " + std::to_string(message.size())};
    } else if (hellos.left < 1) {
        refusal = {Errc::kBusy, "too many HELLOs from this worker: again in a moment"};
    } else if (hellos.bytes + message.size() > kHelloBytesMax ||
               hello_bytes_ + message.size() > kControlBytesMax / 2) {  // the rest is the relay's
        refusal = {Errc::kBusy, "too many HELLOs wait at this backbone: again in a moment"};
    } else {
        hellos.left -= 1;
        hellos.bytes += message.size();
        hello_bytes_ += message.size();
        return keep_for_hub(message);
    }
    ++hellos_refused_;
    if (hellos.told != net::Clock::time_point() && now - hellos.told < kToldPause) return {};
    hellos.told = now;
    const auto told = wire::encode_error({refusal.code, refusal.detail}, 0);
    const std::span<const uint8_t> piece(told);
    Status ok = enqueue_locked({&piece, 1}, peer);
    if (!ok && ok.error().code != Errc::kBusy) return ok;
    return {};
}

// Errors: the relay's own frames are too many; that is the link's end.
Status Link::keep_for_hub(std::span<const uint8_t> message) {
    if (control_bytes_ + message.size() > kControlBytesMax) {
        return fail(Errc::kLimit, "too many frames of the relay's own");
    }
    control_bytes_ += message.size();
    control_.emplace_back(message.begin(), message.end());
    notify(hub_event_);
    return {};
}

std::vector<std::vector<uint8_t>> Link::take_control() {
    const std::lock_guard lock(mu_);
    ++hello_round_;
    control_bytes_ = hello_bytes_ = 0;
    return std::exchange(control_, {});
}

uint64_t Link::hellos_refused() const {
    const std::lock_guard lock(mu_);
    return hellos_refused_;
}

// ---- writing ----

// `pieces` are one frame; the first begins with the header, which may not be ours to change.
Status Link::enqueue_locked(std::span<const std::span<const uint8_t>> pieces, uint16_t peer) {
    if (peer == 0) return stream_.enqueue(pieces);
    KVASIR_CHECK(!pieces.empty() && pieces[0].size() >= wire::kFrameHeaderBytes &&
                 pieces.size() < kPiecesMax);
    std::array<uint8_t, wire::kFrameHeaderBytes> head;
    std::copy_n(pieces[0].begin(), head.size(), head.begin());
    head[2] = static_cast<uint8_t>(peer);
    head[3] = static_cast<uint8_t>(peer >> 8);
    std::array<std::span<const uint8_t>, kPiecesMax + 1> parts;
    size_t count = 0;
    parts[count++] = head;
    parts[count++] = pieces[0].subspan(head.size());
    for (const auto& piece : pieces.subspan(1)) parts[count++] = piece;
    return stream_.enqueue({parts.data(), count});
}

Status Link::send(std::span<const uint8_t> message) {
    const std::lock_guard lock(mu_);
    if (!open()) return fail(Errc::kClosed, address_ + " has left");
    Status ok = stream_.enqueue(message);
    if (!ok && ok.error().code != Errc::kBusy) close_locked(ok.error(), nullptr, {});
    if (ok) asked_locked();
    return ok;
}

// With the WebSocket header; clients mask (4 bytes more).
uint64_t Link::wire_bytes(uint64_t message_bytes, bool outgoing) const {
    const uint64_t length = message_bytes < 126 ? 2 : message_bytes < 65536 ? 4 : 10;
    const bool masked = outgoing == (kind_ == Kind::kRelay);
    return message_bytes + length + (masked ? 4 : 0);
}

bool Link::wants_write() const {
    const std::lock_guard lock(mu_);
    return stream_.wants_write();
}

net::Clock::time_point Link::last_heard() const {
    const std::lock_guard lock(mu_);
    return stream_.last_heard();
}

bool Link::has_pending() const {
    const std::lock_guard lock(mu_);
    return pending_ != 0;
}

// ---- the end ----

void Link::add(std::shared_ptr<WorkerSession> session) {
    const std::lock_guard lock(mu_);
    if (!open()) {  // another thread has just read its end
        session->end_locked({Errc::kClosed, address_ + " has left"}, nullptr, {});
        return;
    }
    sessions_[session->peer()] = std::move(session);
}

void Link::close(const Error& reason) {
    const std::lock_guard lock(mu_);
    if (open() && reason.code != Errc::kClosed) {
        (void)stream_.enqueue(wire::encode_error({reason.code, reason.detail}, 0));
    }
    close_locked(reason, nullptr, {});
}

void Link::close_locked(const Error& reason, Mailbox* box, const OnReply& on_reply) {
    if (!open()) return;
    open_.store(false, std::memory_order_release);
    for (const auto& [peer, session] : std::exchange(sessions_, {})) {
        session->end_locked(reason, box, on_reply);
    }
    if (kind_ == Kind::kRelay && stream_.closed()) keep_rest();
    stream_.close();
    notify(hub_event_);
}

// Nothing can be sent any more: what the relay itself had said before counts, a MOVE above all.
// Ends at what has not arrived, and with a relay that sends on and on.
void Link::keep_rest() {
    const auto bytes_in = [this] { return stream_.counters().bytes_in; };
    const uint64_t bytes_max = bytes_in() + kControlBytesMax;
    for (uint64_t before = bytes_in(); before < bytes_max; before = bytes_in()) {
        auto message = stream_.try_receive();
        if (!message) return;
        if (!*message) {
            if (bytes_in() == before) return;
            continue;
        }
        auto frame = wire::decode_frame(**message);
        if (!frame || (frame->header.peer == 0 && !keep_for_hub(**message))) return;
    }
}

}  // namespace kvasir::backbone
