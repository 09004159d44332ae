#include "relay/own_frames.hpp"

#include <algorithm>

#include "base/bytes.hpp"
#include "wire/attach.hpp"

namespace kvasir::relay {

std::vector<uint8_t> make_frame(wire::FrameType type, uint16_t peer, uint32_t request_id,
                                std::span<const uint8_t> payload) {
    ByteWriter out;
    wire::FrameHeader header;
    header.type = type;
    header.peer = peer;
    header.request_id = request_id;
    header.payload_bytes = payload.size();
    wire::append_header(out, header);
    out.bytes(payload);
    return out.take();
}

std::vector<uint8_t> make_error(Errc code, std::string_view detail, uint16_t peer,
                                uint32_t request_id) {
    detail = detail.substr(0, wire::kAttachTextMax);
    std::vector<uint8_t> payload(4 + detail.size());
    const uint16_t fields[] = {errc_info(code).wire_code, static_cast<uint16_t>(detail.size())};
    for (size_t i = 0; i < 4; ++i) payload[i] = static_cast<uint8_t>(fields[i / 2] >> (i % 2 * 8));
    std::copy(detail.begin(), detail.end(), payload.begin() + 4);
    return make_frame(wire::FrameType::kError, peer, request_id, payload);
}

}  // namespace kvasir::relay
