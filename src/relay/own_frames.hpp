// The frames that a relay itself says besides those of wire/attach.hpp.
//
// Used by Switchboard. ERROR is u16 wire code, text (u16 bytes + bytes), as everywhere.
// Thread: any. Limits: a detail is cut at wire::kAttachTextMax.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "wire/frame.hpp"

namespace kvasir::relay {

std::vector<uint8_t> make_frame(wire::FrameType type, uint16_t peer, uint32_t request_id,
                                std::span<const uint8_t> payload = {});
std::vector<uint8_t> make_error(Errc code, std::string_view detail, uint16_t peer = 0,
                                uint32_t request_id = 0);

}  // namespace kvasir::relay
