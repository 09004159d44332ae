// WebSocket framing (RFC 6455 section 5) as a pure codec: bytes in, frames out. No I/O.
//
// Used by net/message_stream. It is ours because the dispatch path reads and writes the socket from
// the computing thread; the HTTP upgrade before it is Beast's. No extensions, no compression (RSV
// bits are refused). Minimal-length encoding is required both ways, the top bit of a 64-bit length
// is refused, a length above the cap is refused before the body is read, servers require masked
// frames and clients unmasked ones, control frames are <= 125 bytes and unfragmented.
//
// Thread: values. Limits: message_bytes_max of the decoder, summed over fragments.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/result.hpp"

namespace kvasir::wire {

enum class WsOpcode : uint8_t {
    kContinuation = 0,
    kText = 1,
    kBinary = 2,
    kClose = 8,
    kPing = 9,
    kPong = 10,
};

constexpr size_t kWsHeaderBytesMax = 14;

struct WsHeader {
    bool fin = true;
    WsOpcode opcode = WsOpcode::kBinary;
    bool masked = false;
    std::array<uint8_t, 4> mask = {};
    uint64_t payload_bytes = 0;
    uint8_t header_bytes = 0;  // 2..14
};

// Writes the header in minimal form into `out` (at least kWsHeaderBytesMax); returns its size.
size_t encode_ws_header(const WsHeader& header, std::span<uint8_t> out);

// nullopt: more bytes are needed. Errors: kProtocol (RSV, unknown opcode, non-minimal length, top
// bit, long or fragmented control frame, mask bit other than `expect_masked`).
Result<std::optional<WsHeader>> decode_ws_header(std::span<const uint8_t> bytes,
                                                 bool expect_masked);

// XORs `data` in place with the mask, starting at `offset` within the payload. A zero mask costs
// nothing.
void apply_ws_mask(std::span<uint8_t> data, const std::array<uint8_t, 4>& mask, uint64_t offset);

}  // namespace kvasir::wire
