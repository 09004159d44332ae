#include "wire/ws.hpp"

#include <cstring>
#include <string>

#include "base/check.hpp"

namespace kvasir::wire {
namespace {

constexpr uint8_t kFinBit = 0x80;
constexpr uint8_t kRsvBits = 0x70;
constexpr uint8_t kOpcodeBits = 0x0f;
constexpr uint8_t kMaskBit = 0x80;
constexpr uint8_t kLengthBits = 0x7f;
constexpr uint8_t kLength16 = 126;
constexpr uint8_t kLength64 = 127;
constexpr uint64_t kShortMax = 125;
constexpr uint64_t kLength16Max = 0xffff;

bool known_opcode(uint8_t value) {
    return value <= 2 || (value >= 8 && value <= 10);
}

bool is_control(WsOpcode opcode) {
    return (static_cast<uint8_t>(opcode) & 8) != 0;
}

// Network byte order: the one place of the protocol that is big-endian.
uint64_t read_big_endian(std::span<const uint8_t> bytes) {
    uint64_t value = 0;
    for (const uint8_t byte : bytes) value = (value << 8) | byte;
    return value;
}

void write_big_endian(std::span<uint8_t> out, uint64_t value) {
    for (size_t i = out.size(); i > 0; --i) {
        out[i - 1] = static_cast<uint8_t>(value);
        value >>= 8;
    }
}

// What the first two bytes alone can break.
Status check_start(uint8_t first, uint8_t second, bool expect_masked) {
    const auto opcode = static_cast<WsOpcode>(first & kOpcodeBits);
    if (is_control(opcode)) {
        if ((first & kFinBit) == 0) {
            return fail(Errc::kProtocol, "websocket: fragmented control frame");
        }
        if ((second & kLengthBits) > kShortMax) {
            return fail(Errc::kProtocol, "websocket: control frame longer than 125 bytes");
        }
    }
    if (((second & kMaskBit) != 0) != expect_masked) {
        return fail(Errc::kProtocol, expect_masked ? "websocket: unmasked frame from a client"
                                                   : "websocket: masked frame from a server");
    }
    return {};
}

// Value of the extended length; `bytes` is its 2 or 8 bytes.
Result<uint64_t> extended_length(std::span<const uint8_t> bytes) {
    const uint64_t value = read_big_endian(bytes);
    if (value >> 63 != 0) {
        return fail(Errc::kProtocol, "websocket: top bit of a 64-bit length is set");
    }
    if (value <= (bytes.size() == 2 ? kShortMax : kLength16Max)) {
        return fail(Errc::kProtocol,
                    "websocket: length " + std::to_string(value) + " is not in its shortest form");
    }
    return value;
}

}  // namespace

size_t encode_ws_header(const WsHeader& header, std::span<uint8_t> out) {
    KVASIR_CHECK(out.size() >= kWsHeaderBytesMax);
    KVASIR_CHECK(header.payload_bytes >> 63 == 0);
    const uint8_t mask_bit = header.masked ? kMaskBit : 0;
    out[0] = static_cast<uint8_t>((header.fin ? kFinBit : 0) | static_cast<uint8_t>(header.opcode));
    size_t size = 2;
    if (header.payload_bytes <= kShortMax) {
        out[1] = static_cast<uint8_t>(mask_bit | header.payload_bytes);
    } else if (header.payload_bytes <= kLength16Max) {
        out[1] = mask_bit | kLength16;
        write_big_endian(out.subspan(2, 2), header.payload_bytes);
        size = 4;
    } else {
        out[1] = mask_bit | kLength64;
        write_big_endian(out.subspan(2, 8), header.payload_bytes);
        size = 10;
    }
    if (header.masked) {
        std::memcpy(out.data() + size, header.mask.data(), header.mask.size());
        size += header.mask.size();
    }
    return size;
}

Result<std::optional<WsHeader>> decode_ws_header(std::span<const uint8_t> bytes,
                                                 bool expect_masked) {
    if (bytes.empty()) return std::nullopt;
    const uint8_t first = bytes[0];
    if ((first & kRsvBits) != 0) {
        return fail(Errc::kProtocol, "websocket: reserved bits are set, no extension was agreed");
    }
    if (!known_opcode(first & kOpcodeBits)) {
        return fail(Errc::kProtocol,
                    "websocket: unknown opcode " + std::to_string(first & kOpcodeBits));
    }
    if (bytes.size() < 2) return std::nullopt;
    if (auto status = check_start(first, bytes[1], expect_masked); !status) {
        return tl::unexpected(std::move(status.error()));
    }

    WsHeader header;
    header.fin = (first & kFinBit) != 0;
    header.opcode = static_cast<WsOpcode>(first & kOpcodeBits);
    header.masked = (bytes[1] & kMaskBit) != 0;
    header.payload_bytes = bytes[1] & kLengthBits;
    size_t size = 2;
    if (header.payload_bytes > kShortMax) {
        const size_t length_bytes = header.payload_bytes == kLength16 ? 2 : 8;
        if (bytes.size() < size + length_bytes) return std::nullopt;
        auto length = extended_length(bytes.subspan(size, length_bytes));
        if (!length) return tl::unexpected(std::move(length.error()));
        header.payload_bytes = *length;
        size += length_bytes;
    }
    if (header.masked) {
        if (bytes.size() < size + header.mask.size()) return std::nullopt;
        std::memcpy(header.mask.data(), bytes.data() + size, header.mask.size());
        size += header.mask.size();
    }
    header.header_bytes = static_cast<uint8_t>(size);
    return header;
}

void apply_ws_mask(std::span<uint8_t> data, const std::array<uint8_t, 4>& mask, uint64_t offset) {
    if (mask == std::array<uint8_t, 4>{}) return;
    // The mask as eight bytes in memory order, rotated to the offset.
    std::array<uint8_t, 8> pattern;
    for (size_t i = 0; i < pattern.size(); ++i) pattern[i] = mask[(offset + i) & 3];
    uint64_t wide;
    std::memcpy(&wide, pattern.data(), sizeof(wide));
    size_t i = 0;
    for (; i + sizeof(wide) <= data.size(); i += sizeof(wide)) {
        uint64_t word;
        std::memcpy(&word, data.data() + i, sizeof(word));
        word ^= wide;
        std::memcpy(data.data() + i, &word, sizeof(word));
    }
    for (; i < data.size(); ++i) data[i] ^= pattern[i & 3];
}

}  // namespace kvasir::wire
