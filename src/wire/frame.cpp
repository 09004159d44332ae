#include "wire/frame.hpp"

#include <string>

namespace kvasir::wire {
namespace {

bool known_type(uint8_t value) {
    return value >= static_cast<uint8_t>(FrameType::kHello) &&
           value <= static_cast<uint8_t>(FrameType::kRenew);
}

}  // namespace

void append_header(ByteWriter& out, const FrameHeader& header) {
    out.u8(static_cast<uint8_t>(header.type));
    out.u8(header.flags);
    out.u16(header.peer);
    out.u32(header.request_id);
    out.u64(header.payload_bytes);
}

Result<FrameView> decode_frame(std::span<const uint8_t> message) {
    if (message.size() > kFrameBytesMax) {
        return fail(Errc::kLimit, "frame: " + std::to_string(message.size()) +
                                      " bytes, the limit is " + std::to_string(kFrameBytesMax));
    }
    if (message.size() < kFrameHeaderBytes) {
        return fail(Errc::kProtocol, "frame: " + std::to_string(message.size()) +
                                         " bytes, shorter than the header of " +
                                         std::to_string(kFrameHeaderBytes));
    }
    ByteReader in(message);
    const uint8_t type = in.u8();
    FrameView frame;
    frame.header.flags = in.u8();
    frame.header.peer = in.u16();
    frame.header.request_id = in.u32();
    frame.header.payload_bytes = in.u64();
    if (!known_type(type)) {
        return fail(Errc::kProtocol, "frame: unknown type " + std::to_string(type));
    }
    if (frame.header.flags != 0) {
        return fail(Errc::kProtocol,
                    "frame: flags " + std::to_string(frame.header.flags) + ", must be 0");
    }
    if (frame.header.payload_bytes != in.remaining()) {
        return fail(Errc::kProtocol, "frame: payload_bytes says " +
                                         std::to_string(frame.header.payload_bytes) +
                                         ", the message has " + std::to_string(in.remaining()));
    }
    frame.header.type = static_cast<FrameType>(type);
    frame.payload = message.subspan(kFrameHeaderBytes);
    return frame;
}

}  // namespace kvasir::wire
