// The codes of WebSocket close frames: which may stand there, and which one an error has.
//
// Used by MessageStream. Thread: any.
#pragma once

#include <cstdint>

#include "base/result.hpp"

namespace kvasir::net {

constexpr uint16_t kCloseProtocol = 1002;
constexpr uint16_t kCloseUnsupported = 1003;
constexpr uint16_t kCloseTooBig = 1009;

// Codes that may stand in a close frame (RFC 6455 section 7.4).
inline bool legal_close_code(uint16_t code) {
    if (code >= 3000 && code <= 4999) return true;
    return code >= 1000 && code <= 1014 && code != 1004 && code != 1005 && code != 1006;
}

inline uint16_t close_code_for(Errc code) {
    if (code == Errc::kLimit) return kCloseTooBig;
    return code == Errc::kUnsupported ? kCloseUnsupported : kCloseProtocol;
}

}  // namespace kvasir::net
