// The inside of a MessageStream: what message_stream.cpp and message_stream_send.cpp share.
//
// Thread: the stream's. Owns: the socket and two buffers. Limits: MessageLimits.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "net/message_reader.hpp"
#include "net/message_stream.hpp"
#include "net/send_buffer.hpp"
#include "net/transport.hpp"

namespace kvasir::net {

struct MessageStream::Impl {
    Impl(Transport transport_in, Side side_in, MessageLimits limits_in)
        : transport(std::move(transport_in)),
          side(side_in),
          limits(limits_in),
          reader(side_in == Side::kServer, limits_in.message_bytes_max) {}

    // `source`: holds the last piece, see pass_on().
    Status send_frame(wire::WsOpcode opcode, std::span<const std::span<const uint8_t>> pieces,
                      MessageReader* source = nullptr);
    bool sends_in_turns() const { return limits.send_bytes_per_call != UINT64_MAX; }
    Result<uint64_t> send_some(std::span<iovec> vectors, uint64_t bytes_max);
    Status send_direct(std::span<iovec> vectors);
    Status flush();
    void send_owed_pong();
    Error write_failed(Error error);
    Status out_of_memory();

    enum class Read : uint8_t { kNothing, kSome, kAll };  // kAll: the kernel had no more

    Result<Read> read_some(bool block);
    void set_read_timeout(Clock::duration left);
    Result<std::optional<std::span<const uint8_t>>> next_message();
    Status on_control(const MessageReader::Event& event);
    Status count_control();
    void on_ping(std::span<const uint8_t> payload);
    Error on_close(std::span<const uint8_t> payload);

    void close(uint16_t code);
    void drain();

    // Constant after construction
    Transport transport;
    Side side;
    MessageLimits limits;

    MessageReader reader;
    SendBuffer unsent;
    StreamCounters counters;
    Clock::time_point last_heard = Clock::now();
    std::chrono::milliseconds read_timeout{0};  // SO_RCVTIMEO as it is set
    bool kernel_empty = false;                  // the last read took all that was there
    bool closed = false;                        // nothing goes either way any more
    bool write_closed = false;  // a write failed; what had arrived can still be read

    // Control frames from the peer are counted in windows of one second.
    Clock::time_point control_window = {};
    uint32_t control_count = 0;
    // A pong waits until the one before it has left, and only the newest ping is answered: a peer
    // that pings and never reads costs two frames of memory.
    uint64_t pong_sent_at = 0;  // counters.bytes_out once the last pong has left
    std::optional<std::vector<uint8_t>> ping_owed;
};

}  // namespace kvasir::net
