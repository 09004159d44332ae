// MessageStream: WebSocket messages over a connected socket, after the upgrade.
//
// Used by worker and backbone (and later the relay). The socket belongs to whoever calls: there is
// no thread and no reactor inside, so the computing thread can send and receive without a
// hand-over. Pings are answered, pongs noted, fragments joined inside. Outgoing bytes that the
// kernel does not take at once are kept in a bounded buffer. With poll or epoll: level-triggered,
// and call try_receive() until it gives nullopt, since whole messages may be in the buffer already.
//
// Thread: not thread-safe; the owner serialises (the backbone holds the session's mutex).
//
// Owns: the socket and two buffers. Limits: MessageLimits.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/result.hpp"
#include "wire/ws.hpp"

namespace kvasir::net {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

// A file descriptor that closes itself.
class UniqueFd {
public:
    UniqueFd() = default;
    explicit UniqueFd(int fd) : fd_(fd) {}
    UniqueFd(UniqueFd&& other) noexcept : fd_(other.release()) {}
    UniqueFd& operator=(UniqueFd&& other) noexcept;
    ~UniqueFd() { reset(); }
    int get() const { return fd_; }
    int release() {
        int fd = fd_;
        fd_ = -1;
        return fd;
    }
    void reset(int fd = -1);
    explicit operator bool() const { return fd_ >= 0; }

private:
    int fd_ = -1;
};

enum class Side : uint8_t { kClient, kServer };  // clients mask (with a zero key), servers do not

struct MessageLimits {
    uint64_t message_bytes_max = uint64_t{64} << 20;  // summed over fragments, while streaming
    uint64_t unsent_bytes_max = uint64_t{128} << 20;  // enqueue() beyond this is kBusy
    uint32_t control_per_second_max = 100;            // pings a peer may send; more is kProtocol
    // Of effort (StreamCounters); then the caller of try_receive() gets a turn.
    uint64_t receive_bytes_per_call = 8 << 20;
    // Given to the kernel by one enqueue() or flush(), the rest by later calls of flush(). A longer
    // message, and one behind pending bytes, is only appended. For one thread with many streams.
    uint64_t send_bytes_per_call = UINT64_MAX;
};

struct StreamCounters {
    uint64_t bytes_in = 0;  // WebSocket headers included, TLS not
    uint64_t bytes_out = 0;
    uint64_t effort_in = 0;  // bytes_in, and more for short records of TLS: what they cost
    uint64_t messages_in = 0;
    uint64_t messages_out = 0;
};

class Transport;  // net/transport.hpp: the socket, with or without TLS on it

class MessageStream {
public:
    // `leftover`: bytes that arrived together with the end of the HTTP upgrade. Sets TCP_NODELAY
    // and clears O_NONBLOCK: every call inside says whether it may wait, so that receive() can wait
    // in recv() itself.
    MessageStream(UniqueFd fd, Side side, std::vector<uint8_t> leftover, MessageLimits limits = {});
    // Over TLS: `transport` has its handshake behind it. Net only.
    MessageStream(Transport transport, Side side, std::vector<uint8_t> leftover,
                  MessageLimits limits = {});
    MessageStream(MessageStream&&) noexcept;
    MessageStream& operator=(MessageStream&&) noexcept;
    ~MessageStream();

    int fd() const;
    bool closed() const;
    const StreamCounters& counters() const;
    // When the last byte arrived from the peer.
    Clock::time_point last_heard() const;

    // Queues one binary message made of the concatenation of `pieces` and writes what the kernel
    // takes now (one sendmsg when nothing is pending: no copy). Errors: kBusy (unsent bytes over
    // the limit; nothing queued), kLimit (can never be sent), kClosed, kIo, kEnvironment (no
    // memory). After a failed write the stream is closed(), but what the peer had sent before can
    // still be received.
    Status enqueue(std::span<const std::span<const uint8_t>> pieces);
    Status enqueue(std::span<const uint8_t> message);
    // The same; the last piece lies in the message that `from` received last. When it cannot be
    // sent at once it may take over the buffer of `from`, which saves a copy: use the view of that
    // message no more.
    Status pass_on(std::span<const std::span<const uint8_t>> pieces, MessageStream& from);
    Status enqueue_ping();  // WebSocket-level ping
    bool wants_write() const;
    // Writes pending bytes (at most send_bytes_per_call) without blocking. Errors: kClosed, kIo.
    Status flush();
    // Blocks until nothing is pending, or the deadline (kTimeout).
    Status flush_until(Deadline deadline);

    // The next complete message, or nullopt if it has not fully arrived; never blocks. Reads what
    // is there (a flood: at most receive_bytes_per_call). The view starts at a multiple of 16 and
    // is valid until the next receive or try_receive. Errors: kClosed (peer closed or close frame),
    // kProtocol, kLimit, kUnsupported (text), kIo; after an error the stream is closed() (a close
    // frame with the matching code was attempted).
    Result<std::optional<std::span<const uint8_t>>> try_receive();
    // False when the last read took all that had arrived and nothing of it is left: a caller that
    // polls may do so now, without one more try_receive().
    bool may_have_more() const;
    // The same, waiting until the deadline (kTimeout leaves the stream usable).
    Result<std::span<const uint8_t>> receive(Deadline deadline);

    // For who holds many streams: what is queued and not yet taken by the kernel; what receiving
    // holds; other limits from now on; memory given back while nothing is half received (views of
    // messages end).
    uint64_t unsent_bytes() const;
    uint64_t receive_buffer_bytes() const;
    void set_limits(const MessageLimits& limits);
    void set_bytes_per_call(uint64_t bytes);  // both ways; cheap
    void release_idle_buffers();

    // Sends a close frame (best effort, never blocks) and shuts the socket down.
    void close(uint16_t ws_code = 1000);

private:
    struct Impl;
    Status enqueue(std::span<const std::span<const uint8_t>> pieces, Impl* from);
    std::unique_ptr<Impl> impl_;
};

}  // namespace kvasir::net
