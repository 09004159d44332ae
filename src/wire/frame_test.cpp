#include "wire/frame.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <vector>

namespace kvasir::wire {
namespace {

std::vector<uint8_t> make_message(FrameHeader header, size_t payload_bytes) {
    ByteWriter out;
    append_header(out, header);
    out.reserve(payload_bytes);
    return out.take();
}

FrameHeader header_of(FrameType type, uint64_t payload_bytes) {
    FrameHeader header;
    header.type = type;
    header.payload_bytes = payload_bytes;
    return header;
}

TEST(Frame, HeaderIsSixteenLittleEndianBytes) {
    FrameHeader header = header_of(FrameType::kCompute, 0x0807060504030201);
    header.peer = 0x2221;
    header.request_id = 0x34333231;
    ByteWriter out;
    append_header(out, header);
    const std::vector<uint8_t> expected = {5,    0,    0x21, 0x22, 0x31, 0x32, 0x33, 0x34,
                                           0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08};
    EXPECT_EQ(out.data(), expected);
}

RC_GTEST_PROP(Frame, RoundTrip, (uint16_t peer, uint32_t request_id)) {
    FrameHeader header;
    header.type = static_cast<FrameType>(*rc::gen::inRange(1, 12));
    header.peer = peer;
    header.request_id = request_id;
    const auto payload = *rc::gen::arbitrary<std::vector<uint8_t>>();
    header.payload_bytes = payload.size();
    ByteWriter out;
    append_header(out, header);
    out.bytes(payload);
    const auto frame = decode_frame(out.data());
    RC_ASSERT(frame.has_value());
    RC_ASSERT(frame->header.type == header.type);
    RC_ASSERT(frame->header.flags == 0);
    RC_ASSERT(frame->header.peer == peer);
    RC_ASSERT(frame->header.request_id == request_id);
    RC_ASSERT(std::vector<uint8_t>(frame->payload.begin(), frame->payload.end()) == payload);
}

TEST(Frame, EveryShorterMessageIsRefused) {
    const auto message = make_message(header_of(FrameType::kPing, 8), 8);
    for (size_t size = 0; size < message.size(); ++size) {
        const auto frame = decode_frame(std::span(message).first(size));
        ASSERT_FALSE(frame) << size;
        EXPECT_EQ(frame.error().code, Errc::kProtocol) << size;
    }
    EXPECT_TRUE(decode_frame(message));
}

TEST(Frame, PayloadBytesMustBeWhatIsThere) {
    for (const uint64_t claimed : {uint64_t{0}, uint64_t{1}, uint64_t{7}, uint64_t{9}, uint64_t{24},
                                   uint64_t{1} << 31, uint64_t{1} << 32, (uint64_t{1} << 32) + 8,
                                   uint64_t{1} << 63, ~uint64_t{0}, ~uint64_t{0} - 15}) {
        const auto frame = decode_frame(make_message(header_of(FrameType::kPing, claimed), 8));
        ASSERT_FALSE(frame) << claimed;
        EXPECT_EQ(frame.error().code, Errc::kProtocol);
        EXPECT_NE(frame.error().detail.find(std::to_string(claimed)), std::string::npos)
            << frame.error().detail;
    }
}

TEST(Frame, UnknownTypesAreRefusedNotGuessed) {
    for (int type = 0; type < 256; ++type) {
        const auto message = make_message(header_of(static_cast<FrameType>(type), 0), 0);
        EXPECT_EQ(decode_frame(message).has_value(), type >= 1 && type <= 18) << type;
    }
}

TEST(Frame, FlagsMustBeZero) {
    for (int bit = 0; bit < 8; ++bit) {
        FrameHeader header = header_of(FrameType::kPing, 8);
        header.flags = static_cast<uint8_t>(1 << bit);
        const auto frame = decode_frame(make_message(header, 8));
        ASSERT_FALSE(frame);
        EXPECT_EQ(frame.error().code, Errc::kProtocol);
    }
}

TEST(Frame, LimitIsExact) {
    const uint64_t payload_max = kFrameBytesMax - kFrameHeaderBytes;
    EXPECT_TRUE(
        decode_frame(make_message(header_of(FrameType::kResult, payload_max), payload_max)));
    const auto over =
        decode_frame(make_message(header_of(FrameType::kResult, payload_max + 1), payload_max + 1));
    ASSERT_FALSE(over);
    EXPECT_EQ(over.error().code, Errc::kLimit);
}

}  // namespace
}  // namespace kvasir::wire
