// WebSocket frames for tests, written by the plain rules of RFC 6455 rather than by our encoder.
//
// Used by the tests of net only. Thread: any.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "wire/ws.hpp"

namespace kvasir::net::testing {

using Bytes = std::vector<uint8_t>;

inline Bytes bytes_of(std::string_view text) {
    return {text.begin(), text.end()};
}

// Bytes that differ from place to place, so that lost or doubled ones are seen.
inline Bytes pattern(size_t size, uint32_t seed = 1) {
    Bytes bytes(size);
    for (size_t i = 0; i < size; ++i) {
        bytes[i] = static_cast<uint8_t>(((i + seed) * 2654435761u) >> 13);
    }
    return bytes;
}

// `masked`: as a client sends it, with `key`.
inline Bytes frame(const Bytes& payload, bool masked,
                   wire::WsOpcode opcode = wire::WsOpcode::kBinary, bool fin = true,
                   std::array<uint8_t, 4> key = {0x11, 0x22, 0x33, 0x44}) {
    Bytes out;
    out.reserve(payload.size() + wire::kWsHeaderBytesMax);
    out.push_back(static_cast<uint8_t>((fin ? 0x80 : 0) | static_cast<uint8_t>(opcode)));
    const uint8_t mask_bit = masked ? 0x80 : 0;
    const uint64_t size = payload.size();
    if (size < 126) {
        out.push_back(static_cast<uint8_t>(mask_bit | size));
    } else {
        const int length_bytes = size < 65536 ? 2 : 8;
        out.push_back(mask_bit | (length_bytes == 2 ? 126 : 127));
        for (int i = length_bytes - 1; i >= 0; --i) {
            out.push_back(static_cast<uint8_t>(size >> (8 * i)));
        }
    }
    if (masked) out.insert(out.end(), key.begin(), key.end());
    for (size_t i = 0; i < payload.size(); ++i) {
        out.push_back(masked ? payload[i] ^ key[i % 4] : payload[i]);
    }
    return out;
}

inline Bytes control(wire::WsOpcode opcode, std::string_view payload, bool masked) {
    return frame(bytes_of(payload), masked, opcode);
}

}  // namespace kvasir::net::testing
