#include "net/message_reader.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/check.hpp"

namespace kvasir::net {
namespace {

using wire::WsHeader;
using wire::WsOpcode;

constexpr size_t kCapacityFirst = 256 << 10;
constexpr size_t kCapacityAgainMax = 1 << 20;  // without a byte of the next message
constexpr size_t kGrowBytes = 1 << 20;
constexpr size_t kReadBytesMin = 16 << 10;  // do not ask the kernel for less unless it ends a frame
constexpr size_t kFront = 32;               // first payload address; a header fits in front of it
constexpr uint32_t kSmallMessagesMax = 64;  // then a large buffer is given back

static_assert(kFront % kMessageAlign == 0 && kFront >= wire::kWsHeaderBytesMax);

bool is_control(WsOpcode opcode) {
    return (static_cast<uint8_t>(opcode) & 8) != 0;
}

}  // namespace

Result<std::span<uint8_t>> MessageReader::writable() {
    if (!partial()) {
        if (capacity_ > kCapacityFirst && small_messages_ >= kSmallMessagesMax) {
            data_.reset();
            capacity_ = 0;
            small_messages_ = 0;
        }
        begin_ = end_ = kFront - header_bytes_expected_;
    }
    size_t wanted = kReadBytesMin;
    if (header_ && header_->payload_bytes > end_ - begin_) {
        wanted = static_cast<size_t>(header_->payload_bytes) - (end_ - begin_);
    }
    if (capacity_ < end_ + wanted) {
        compact();
        if (auto status = grow(wanted); !status) return tl::unexpected(std::move(status.error()));
    }
    return std::span<uint8_t>(data_.get() + end_, capacity_ - end_);
}

void MessageReader::release() {
    if (partial()) return;
    data_.reset();
    capacity_ = capacity_next_ = begin_ = end_ = 0;
    small_messages_ = 0;
}

void MessageReader::commit(size_t count) {
    KVASIR_CHECK(count <= capacity_ - end_);
    end_ += count;
}

// Moves what is still needed to the front of the buffer.
void MessageReader::compact() {
    if (!data_) return;
    uint8_t* data = data_.get();
    size_t front = header_ ? kFront : kFront - header_bytes_expected_;
    if (in_message_) {
        if (message_ > kFront) {
            std::memmove(data + kFront, data + message_, static_cast<size_t>(message_bytes_));
            message_ = kFront;
        }
        front = message_ + static_cast<size_t>(message_bytes_);
    }
    if (begin_ <= front) return;
    std::memmove(data + front, data + begin_, end_ - begin_);
    end_ -= begin_ - front;
    begin_ = payload_ = front;
}

// Makes room for `wanted` more bytes, or for as many as the bytes that really arrived justify.
Status MessageReader::grow(size_t wanted) {
    if (capacity_ >= end_ + std::min(wanted, kReadBytesMin)) return {};
    const size_t ahead = std::min(wanted, std::max(kGrowBytes, end_));
    const size_t capacity = std::max({kCapacityFirst, capacity_next_, end_ + ahead});
    if (capacity <= capacity_) return {};
    // realloc() moves pages rather than bytes, but also bytes that nobody needs.
    const bool in_place = end_ > capacity_ / 2;
    Block data(in_place ? static_cast<uint8_t*>(std::realloc(data_.get(), capacity))
                        : allocate_block(capacity).release());
    if (!data) {
        return fail(Errc::kEnvironment,
                    "no memory for a message of " + std::to_string(end_ + wanted) + " bytes");
    }
    if (in_place) {
        (void)data_.release();  // realloc() took it
    } else if (data_) {
        std::memcpy(data.get(), data_.get(), end_);
    }
    data_ = std::move(data);
    capacity_ = capacity;
    capacity_next_ = 0;
    return {};
}

Block MessageReader::take_block() {
    KVASIR_CHECK(data_ && !header_ && !in_message_);
    const size_t front = kFront - header_bytes_expected_;
    const size_t rest = end_ - begin_;
    const size_t used = message_ + static_cast<size_t>(message_bytes_);
    const size_t capacity_again = std::min(used, kCapacityAgainMax);
    Block data;
    size_t capacity = 0;
    if (rest != 0) {
        capacity = std::max({kCapacityFirst, capacity_again, front + rest + kReadBytesMin});
        data = allocate_block(capacity);
        if (!data) return {};
        std::memcpy(data.get() + front, data_.get() + begin_, rest);
    }
    data_.swap(data);
    capacity_ = capacity;
    capacity_next_ = capacity_again;
    begin_ = rest != 0 ? front : 0;  // writable() begins anew
    end_ = begin_ + rest;
    return data;
}

Result<std::optional<MessageReader::Event>> MessageReader::next() {
    while (true) {
        if (!header_) {
            auto header =
                wire::decode_ws_header({data_.get() + begin_, end_ - begin_}, expect_masked_);
            if (!header) return tl::unexpected(std::move(header.error()));
            if (!*header) return std::nullopt;
            if (auto status = accept_header(**header); !status) {
                return tl::unexpected(std::move(status.error()));
            }
        }
        if (end_ - begin_ < header_->payload_bytes) return std::nullopt;
        if (!header_->fin && ++fragments_ > kFragmentsMax) {
            return fail(Errc::kLimit, "websocket: more than " + std::to_string(kFragmentsMax) +
                                          " fragments in one message");
        }
        if (auto event = finish_frame()) return event;
    }
}

// The header is legal by itself; is it legal here?
Status MessageReader::accept_header(const WsHeader& header) {
    if (!is_control(header.opcode)) {
        if (header.opcode == WsOpcode::kText) {
            return fail(Errc::kUnsupported, "websocket: text message, only binary ones are taken");
        }
        if (header.opcode == WsOpcode::kContinuation && !in_message_) {
            return fail(Errc::kProtocol, "websocket: continuation of no message");
        }
        if (header.opcode == WsOpcode::kBinary && in_message_) {
            return fail(Errc::kProtocol, "websocket: new message inside a fragmented one");
        }
        const uint64_t joined = in_message_ ? message_bytes_ : 0;
        if (header.payload_bytes > message_bytes_max_ - joined) {
            return fail(Errc::kLimit, "websocket: message of " +
                                          std::to_string(header.payload_bytes) + " bytes after " +
                                          std::to_string(joined) + ", the limit is " +
                                          std::to_string(message_bytes_max_));
        }
    }
    begin_ += header.header_bytes;
    payload_ = begin_;
    header_ = header;
    if (header.opcode == WsOpcode::kBinary) {
        header_bytes_expected_ = header.header_bytes;
        align_payload();
    }
    return {};
}

// Moves the arrived part of a message's first payload down to a multiple of kMessageAlign. What
// lies below is its own header and bytes of messages that were already handed out.
void MessageReader::align_payload() {
    const size_t shift = begin_ % kMessageAlign;
    if (shift == 0) return;
    const size_t available = end_ - begin_;
    const size_t arrived = std::min<uint64_t>(available, header_->payload_bytes);
    uint8_t* data = data_.get();
    payload_ = begin_ - shift;
    std::memmove(data + payload_, data + begin_, arrived);
    if (arrived == available) {  // nothing behind it: the rest can arrive there
        begin_ = payload_;
        end_ -= shift;
    }
}

// The whole frame is there: consumes it. nullopt: it was a fragment and more follow.
std::optional<MessageReader::Event> MessageReader::finish_frame() {
    const WsHeader header = *header_;
    const auto size = static_cast<size_t>(header.payload_bytes);
    uint8_t* payload = data_.get() + payload_;
    wire::apply_ws_mask({payload, size}, header.mask, 0);
    header_.reset();
    begin_ += size;
    if (is_control(header.opcode)) return Event{header.opcode, {payload, size}};

    if (!in_message_) {
        message_ = payload_;
        message_bytes_ = 0;
    } else if (size != 0) {
        std::memmove(data_.get() + message_ + message_bytes_, payload, size);
    }
    message_bytes_ += size;
    in_message_ = !header.fin;
    if (in_message_) return std::nullopt;
    fragments_ = 0;
    small_messages_ = message_bytes_ < capacity_ / 4 ? small_messages_ + 1 : 0;
    return Event{WsOpcode::kBinary, {data_.get() + message_, static_cast<size_t>(message_bytes_)}};
}

}  // namespace kvasir::net
