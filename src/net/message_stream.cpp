// Sockets, receiving and closing; the sending half is message_stream_send.cpp.
#include "net/message_stream.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/log.hpp"
#include "net/close_code.hpp"
#include "net/message_stream_impl.hpp"
#include "net/socket_wait.hpp"

namespace kvasir::net {
namespace {

using wire::WsOpcode;

constexpr size_t kDrainBytesMax = 1 << 20;  // thrown away before a close, see drain()
constexpr auto kBlockingWaitMin = std::chrono::milliseconds(64);  // see Impl::set_read_timeout
constexpr auto kBlockingWaitMax = std::chrono::hours(1);

}  // namespace

UniqueFd& UniqueFd::operator=(UniqueFd&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
}

void UniqueFd::reset(int fd) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = fd;
}

// ---- receiving ----

// How long a blocking recv() may wait. Coarse on purpose: deadlines differ from call to call, and
// an unchanged power of two costs no system call.
void MessageStream::Impl::set_read_timeout(Clock::duration left) {
    const auto capped = std::min<Clock::duration>(left, kBlockingWaitMax);
    const auto count = std::chrono::duration_cast<std::chrono::milliseconds>(capped).count();
    const std::chrono::milliseconds rounded(std::bit_floor(static_cast<uint64_t>(count)));
    if (rounded == read_timeout) return;
    timeval timeout = {};
    timeout.tv_sec = rounded.count() / 1000;
    timeout.tv_usec = rounded.count() % 1000 * 1000;
    if (::setsockopt(transport.fd(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout)) == 0) {
        read_timeout = rounded;
    }
}

// One read into the reader. Errors close the stream.
Result<MessageStream::Impl::Read> MessageStream::Impl::read_some(bool block) {
    auto room = reader.writable();
    if (!room) {
        close(close_code_for(room.error().code));
        return tl::unexpected(std::move(room.error()));
    }
    *room = room->first(std::min<uint64_t>(room->size(), limits.receive_bytes_per_call));
    const auto got = transport.read(*room, block);
    if (!got) {
        write_closed = true;  // nothing can be sent on it either
        close(1000);
        return tl::unexpected(got.error());
    }
    if (got->end) {
        const bool partial = reader.partial();
        close(1000);
        return fail(Errc::kClosed, partial ? "the connection ended in the middle of a message"
                                           : "the connection ended without a close frame");
    }
    kernel_empty = got->drained;
    counters.effort_in += got->effort;
    if (got->bytes == 0) return Read::kNothing;
    reader.commit(got->bytes);
    counters.bytes_in += got->bytes;
    last_heard = Clock::now();
    return kernel_empty ? Read::kAll : Read::kSome;
}

// The next message of those that have arrived; control frames are dealt with. Errors close the
// stream.
Result<std::optional<std::span<const uint8_t>>> MessageStream::Impl::next_message() {
    while (true) {
        auto event = reader.next();
        if (event && !*event) return std::nullopt;
        if (event && (*event)->opcode == WsOpcode::kBinary) {
            ++counters.messages_in;
            return (*event)->payload;
        }
        const auto status = event ? on_control(**event) : tl::unexpected(std::move(event.error()));
        if (!status) {
            close(close_code_for(status.error().code));
            return tl::unexpected(status.error());
        }
    }
}

Status MessageStream::Impl::on_control(const MessageReader::Event& event) {
    if (event.opcode == WsOpcode::kClose) return tl::unexpected(on_close(event.payload));
    if (auto status = count_control(); !status) return status;
    if (event.opcode == WsOpcode::kPing) on_ping(event.payload);
    return {};
}

Status MessageStream::Impl::count_control() {
    const auto now = Clock::now();
    if (now - control_window >= std::chrono::seconds(1)) {
        control_window = now;
        control_count = 0;
    }
    if (++control_count <= limits.control_per_second_max) return {};
    return fail(Errc::kProtocol, "websocket: more than " +
                                     std::to_string(limits.control_per_second_max) +
                                     " pings and pongs in a second");
}

void MessageStream::Impl::on_ping(std::span<const uint8_t> payload) {
    if (write_closed) return;
    ping_owed.emplace(payload.begin(), payload.end());
    send_owed_pong();
}

// The peer says goodbye: what it said, as an error; its code is echoed.
Error MessageStream::Impl::on_close(std::span<const uint8_t> payload) {
    if (payload.empty()) {
        close(1000);
        return {Errc::kClosed, "the peer closed the connection"};
    }
    const uint16_t code =
        payload.size() < 2 ? 0 : static_cast<uint16_t>(payload[0] << 8 | payload[1]);
    if (!legal_close_code(code)) {
        return {Errc::kProtocol, "websocket: malformed close frame"};
    }
    close(code);
    const auto reason = payload.subspan(2);
    std::string detail = "the peer closed the connection with code " + std::to_string(code);
    if (!reason.empty()) {
        detail += ": " + printable({reinterpret_cast<const char*>(reason.data()), reason.size()});
    }
    return {Errc::kClosed, std::move(detail)};
}

// ---- closing ----

// Closing a socket with unread bytes sends a reset, which can overtake the close frame (and an
// ERROR frame in front of it) at the peer. Reading them first makes that unlikely, and is bounded.
void MessageStream::Impl::drain() {
    std::array<uint8_t, 16384> sink;
    for (size_t total = 0; total < kDrainBytesMax;) {
        const ssize_t got = ::recv(transport.fd(), sink.data(), sink.size(), MSG_DONTWAIT);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return;
        total += static_cast<size_t>(got);
    }
}

void MessageStream::Impl::close(uint16_t code) {
    if (closed) return;
    closed = true;
    limits.send_bytes_per_call = UINT64_MAX;  // the last chance of what is pending
    if (!write_closed) {
        const std::array<uint8_t, 2> payload = {static_cast<uint8_t>(code >> 8),
                                                static_cast<uint8_t>(code)};
        const std::span<const uint8_t> piece(payload);
        ping_owed.reset();
        (void)send_frame(WsOpcode::kClose, {&piece, 1});  // best effort
    }
    write_closed = true;
    unsent.clear();
    ping_owed.reset();
    transport.shut_down_write();
    drain();
    ::shutdown(transport.fd(), SHUT_RDWR);
}

// ---- the public face ----

MessageStream::MessageStream(UniqueFd fd, Side side, std::vector<uint8_t> leftover,
                             MessageLimits limits)
    : MessageStream(Transport(std::move(fd)), side, std::move(leftover), limits) {}

MessageStream::MessageStream(Transport transport, Side side, std::vector<uint8_t> leftover,
                             MessageLimits limits)
    : impl_(std::make_unique<Impl>(std::move(transport), side, limits)) {
    const int socket = impl_->transport.fd();
    if (const int flags = ::fcntl(socket, F_GETFL); flags >= 0) {
        (void)::fcntl(socket, F_SETFL, flags & ~O_NONBLOCK);  // each call says whether it may wait
    }
    const int on = 1;  // fails on a socket that is not TCP, which needs none
    (void)::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    impl_->counters.bytes_in += leftover.size();
    impl_->counters.effort_in += leftover.size();
    for (std::span<const uint8_t> rest = leftover; !rest.empty();) {
        auto room = impl_->reader.writable();
        if (!room) {
            impl_->close(close_code_for(room.error().code));
            return;
        }
        const size_t count = std::min(rest.size(), room->size());
        std::memcpy(room->data(), rest.data(), count);
        impl_->reader.commit(count);
        rest = rest.subspan(count);
    }
}

MessageStream::MessageStream(MessageStream&&) noexcept = default;
MessageStream& MessageStream::operator=(MessageStream&&) noexcept = default;
MessageStream::~MessageStream() = default;

int MessageStream::fd() const {
    return impl_->transport.fd();
}
bool MessageStream::closed() const {
    return !impl_ || impl_->closed || impl_->write_closed;
}
const StreamCounters& MessageStream::counters() const {
    return impl_->counters;
}
Clock::time_point MessageStream::last_heard() const {
    return impl_->last_heard;
}
bool MessageStream::wants_write() const {
    return !impl_->unsent.empty() || impl_->transport.wants_write();
}

Result<std::optional<std::span<const uint8_t>>> MessageStream::try_receive() {
    if (!impl_ || impl_->closed) return fail(Errc::kClosed, "the connection is closed");
    const uint64_t effort_max = impl_->counters.effort_in + impl_->limits.receive_bytes_per_call;
    while (true) {
        auto message = impl_->next_message();
        if (!message || *message) return message;
        if (impl_->counters.effort_in >= effort_max) return std::nullopt;
        auto read = impl_->read_some(false);
        if (!read) return tl::unexpected(std::move(read.error()));
        if (*read == Impl::Read::kNothing) return std::nullopt;
        // The kernel had no more; if it has by now, poll() says so.
        if (*read == Impl::Read::kAll) return impl_->next_message();
    }
}

uint64_t MessageStream::unsent_bytes() const {
    return impl_->unsent.size() + impl_->transport.unsent_bytes();
}
uint64_t MessageStream::receive_buffer_bytes() const {
    return impl_->reader.capacity();
}
void MessageStream::set_limits(const MessageLimits& limits) {
    impl_->limits = limits;
    impl_->reader.set_message_bytes_max(limits.message_bytes_max);
}
void MessageStream::set_bytes_per_call(uint64_t bytes) {
    impl_->limits.receive_bytes_per_call = impl_->limits.send_bytes_per_call = bytes;
}
void MessageStream::release_idle_buffers() {
    impl_->reader.release();
}

bool MessageStream::may_have_more() const {
    return impl_ && (!impl_->kernel_empty || impl_->reader.partial());
}

// Waits in recv() itself where it can: a wake-up is then one system call in place of three.
Result<std::span<const uint8_t>> MessageStream::receive(Deadline deadline) {
    while (true) {
        const auto left = deadline - std::min(Clock::now(), deadline);
        if (closed() || wants_write() || left < kBlockingWaitMin) {
            auto message = try_receive();
            if (!message) return tl::unexpected(std::move(message.error()));
            if (*message) return **message;
            const short events = wants_write() ? POLLIN | POLLOUT : POLLIN;
            // Asked before the wait: a peer that drips bytes keeps the socket readable for ever.
            auto ready = left.count() > 0 ? wait_for(fd(), events, deadline) : Result<bool>(false);
            if (!ready) return tl::unexpected(std::move(ready.error()));
            if (!*ready) return fail(Errc::kTimeout, "no message arrived in time");
            if (wants_write()) (void)impl_->flush();  // a failure ends sending only
            continue;
        }
        auto message = impl_->next_message();
        if (!message) return tl::unexpected(std::move(message.error()));
        if (*message) return **message;
        impl_->set_read_timeout(left);
        if (auto read = impl_->read_some(true); !read) {
            return tl::unexpected(std::move(read.error()));
        }
    }
}

void MessageStream::close(uint16_t ws_code) {
    if (impl_) impl_->close(ws_code);
}

}  // namespace kvasir::net
