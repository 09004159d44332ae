// MessageReader: bytes of a WebSocket connection in, whole messages and control frames out. No I/O.
//
// Used by MessageStream, which lets the kernel write straight into writable(). A message of one
// frame is returned where it arrived; fragments are joined in place. Every message starts at an
// address that is a multiple of 16, so that floats behind a 16-byte header can be read as floats.
// Thread: not thread-safe. Owns: one buffer that grows with what really arrived, never with what a
// length claims (at most 1 MiB or twice the arrived bytes ahead), and shrinks again.
// Limits: message_bytes_max summed over fragments, kFragmentsMax a message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/result.hpp"
#include "net/block.hpp"
#include "wire/ws.hpp"

namespace kvasir::net {

constexpr size_t kMessageAlign = 16;
constexpr uint32_t kFragmentsMax =
    65536;  // empty fragments are legal, an endless row of them is not

class MessageReader {
public:
    // kBinary is a whole message; the others are control frames. Views are valid until the next
    // call of next() or writable().
    struct Event {
        wire::WsOpcode opcode = wire::WsOpcode::kBinary;
        std::span<const uint8_t> payload;
    };

    MessageReader(bool expect_masked, uint64_t message_bytes_max)
        : expect_masked_(expect_masked), message_bytes_max_(message_bytes_max) {}

    // Room for the next bytes, never empty. Errors: kEnvironment (out of memory).
    Result<std::span<uint8_t>> writable();
    // `count` bytes of writable() were filled.
    void commit(size_t count);
    // The next event, or nullopt when more bytes are needed. Errors: kProtocol, kLimit,
    // kUnsupported (a text message); the reader is of no use after one.
    Result<std::optional<Event>> next();

    // Right after a message: gives away the buffer it lies in, so that its view lives as long as
    // the block. Null, and nothing changes, when there is no memory for another buffer.
    Block take_block();

    // True in the middle of a frame or of a fragmented message.
    bool partial() const { return header_ || in_message_ || begin_ != end_; }
    size_t capacity() const { return capacity_; }
    void set_message_bytes_max(uint64_t bytes) { message_bytes_max_ = bytes; }
    // Gives the buffer back if nothing is in it. Views of messages end.
    void release();

private:
    Status accept_header(const wire::WsHeader& header);
    void align_payload();
    std::optional<Event> finish_frame();
    void compact();
    Status grow(size_t wanted);

    bool expect_masked_;  // constant after construction
    uint64_t message_bytes_max_;

    Block data_;
    size_t capacity_ = 0;
    size_t capacity_next_ = 0;  // after a buffer that was taken: the next message may be as long
    size_t begin_ = 0;          // bytes not yet consumed: [begin_, end_)
    size_t end_ = 0;
    // The frame whose header was consumed and whose payload is at payload_; begin_ == payload_
    // unless the payload was moved down to its alignment.
    std::optional<wire::WsHeader> header_;
    size_t payload_ = 0;
    // The message being joined: [message_, message_ + message_bytes_), below begin_.
    bool in_message_ = false;
    size_t message_ = 0;
    uint64_t message_bytes_ = 0;
    uint32_t fragments_ = 0;
    // The header size of the last message predicts the next one's, so that its payload falls on
    // the right address without a move.
    size_t header_bytes_expected_ = 4;
    uint32_t small_messages_ = 0;  // in a row, while the buffer is large
};

}  // namespace kvasir::net
