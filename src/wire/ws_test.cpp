#include "wire/ws.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <string>
#include <vector>

namespace kvasir::wire {
namespace {

std::vector<uint8_t> encode(const WsHeader& header) {
    std::vector<uint8_t> bytes(kWsHeaderBytesMax);
    bytes.resize(encode_ws_header(header, bytes));
    return bytes;
}

WsHeader header_of(uint64_t payload_bytes, bool masked = false) {
    WsHeader header;
    header.payload_bytes = payload_bytes;
    header.masked = masked;
    if (masked) header.mask = {1, 2, 3, 4};
    return header;
}

// The edges of the three length forms, signed and unsigned 16/32-bit borders, and 64-bit lengths.
const uint64_t kSizes[] = {0,
                           1,
                           125,
                           126,
                           127,
                           128,
                           16383,
                           16384,
                           16385,
                           32767,
                           32768,
                           65535,
                           65536,
                           65537,
                           1 << 20,
                           (1 << 20) + 1,
                           (uint64_t{1} << 31) - 1,
                           uint64_t{1} << 31,
                           uint64_t{1} << 32,
                           (uint64_t{1} << 32) + 126,
                           (uint64_t{1} << 63) - 1};

TEST(WsHeader, EverySizeInItsShortestFormWhateverTheCut) {
    for (const bool masked : {false, true}) {
        for (const uint64_t size : kSizes) {
            const auto bytes = encode(header_of(size, masked));
            const size_t length_bytes = size <= 125 ? 0 : size <= 65535 ? 2 : 8;
            ASSERT_EQ(bytes.size(), 2 + length_bytes + (masked ? 4 : 0)) << size;
            for (size_t cut = 0; cut < bytes.size(); ++cut) {
                const auto partial = decode_ws_header(std::span(bytes).first(cut), masked);
                ASSERT_TRUE(partial) << size << " cut " << cut << ": " << partial.error().detail;
                EXPECT_FALSE(partial->has_value()) << size << " cut " << cut;
            }
            auto more = bytes;  // payload behind it changes nothing
            more.push_back(0xff);
            for (const auto& whole : {bytes, more}) {
                const auto header = decode_ws_header(whole, masked);
                ASSERT_TRUE(header && *header) << size;
                EXPECT_EQ((*header)->payload_bytes, size);
                EXPECT_EQ((*header)->header_bytes, bytes.size());
                EXPECT_EQ((*header)->masked, masked);
                EXPECT_EQ((*header)->mask, header_of(size, masked).mask);
                EXPECT_TRUE((*header)->fin);
                EXPECT_EQ((*header)->opcode, WsOpcode::kBinary);
            }
        }
    }
}

TEST(WsHeader, GoldenBytes) {
    EXPECT_EQ(encode(header_of(1)), (std::vector<uint8_t>{0x82, 0x01}));
    EXPECT_EQ(encode(header_of(126)), (std::vector<uint8_t>{0x82, 0x7e, 0x00, 0x7e}));
    EXPECT_EQ(encode(header_of(65535)), (std::vector<uint8_t>{0x82, 0x7e, 0xff, 0xff}));
    EXPECT_EQ(encode(header_of(65536)), (std::vector<uint8_t>{0x82, 0x7f, 0, 0, 0, 0, 0, 1, 0, 0}));
    EXPECT_EQ(encode(header_of((uint64_t{1} << 32) + 126, true)),
              (std::vector<uint8_t>{0x82, 0xff, 0, 0, 0, 1, 0, 0, 0, 126, 1, 2, 3, 4}));
    WsHeader fragment;
    fragment.fin = false;
    fragment.opcode = WsOpcode::kContinuation;
    EXPECT_EQ(encode(fragment), (std::vector<uint8_t>{0x00, 0x00}));
}

struct Refused {
    const char* name;
    std::vector<uint8_t> bytes;
    bool expect_masked;
};

TEST(WsHeader, EveryBrokenHeaderIsRefused) {
    const Refused cases[] = {
        {"rsv1", {0xc2, 0x00}, false},
        {"rsv2", {0xa2, 0x00}, false},
        {"rsv3", {0x92, 0x00}, false},
        {"rsv in the first byte alone", {0xc2}, false},
        {"opcode 3", {0x83, 0x00}, false},
        {"opcode 7", {0x87, 0x00}, false},
        {"opcode 11", {0x8b, 0x00}, false},
        {"opcode 15 in the first byte alone", {0x8f}, false},
        {"masked from a server", {0x82, 0x80}, false},
        {"unmasked from a client", {0x82, 0x00}, true},
        {"fragmented ping", {0x09, 0x00}, false},
        {"fragmented close", {0x08, 0x00}, false},
        {"ping of 126", {0x89, 0x7e}, false},
        {"close in the 64-bit form", {0x88, 0x7f}, false},
        {"0 in 16 bits", {0x82, 0x7e, 0, 0}, false},
        {"125 in 16 bits", {0x82, 0x7e, 0, 125}, false},
        {"0 in 64 bits", {0x82, 0x7f, 0, 0, 0, 0, 0, 0, 0, 0}, false},
        {"126 in 64 bits", {0x82, 0x7f, 0, 0, 0, 0, 0, 0, 0, 126}, false},
        {"65535 in 64 bits", {0x82, 0x7f, 0, 0, 0, 0, 0, 0, 0xff, 0xff}, false},
        {"2^63", {0x82, 0x7f, 0x80, 0, 0, 0, 0, 0, 0, 0}, false},
        {"2^64-1", {0x82, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, false},
        {"2^64-1, mask still missing", {0x82, 0xff, 255, 255, 255, 255, 255, 255, 255, 255}, true},
    };
    for (const Refused& refused : cases) {
        const auto header = decode_ws_header(refused.bytes, refused.expect_masked);
        ASSERT_FALSE(header) << refused.name;
        EXPECT_EQ(header.error().code, Errc::kProtocol) << refused.name;
    }
}

RC_GTEST_PROP(WsHeader, RoundTrip, (bool fin, bool masked)) {
    WsHeader header;
    header.opcode = *rc::gen::element(WsOpcode::kContinuation, WsOpcode::kText, WsOpcode::kBinary,
                                      WsOpcode::kClose, WsOpcode::kPing, WsOpcode::kPong);
    const bool control = static_cast<uint8_t>(header.opcode) >= 8;
    header.fin = fin || control;
    header.masked = masked;
    if (masked) header.mask = *rc::gen::arbitrary<std::array<uint8_t, 4>>();
    const int bits = *rc::gen::inRange(0, 64);
    const auto any = *rc::gen::arbitrary<uint64_t>();
    header.payload_bytes = control ? any % 126 : bits == 0 ? 0 : any >> (64 - bits);
    const auto bytes = encode(header);
    const auto back = decode_ws_header(bytes, masked);
    RC_ASSERT(back && *back);
    RC_ASSERT((*back)->fin == header.fin);
    RC_ASSERT((*back)->opcode == header.opcode);
    RC_ASSERT((*back)->mask == header.mask);
    RC_ASSERT((*back)->payload_bytes == header.payload_bytes);
    RC_ASSERT((*back)->header_bytes == bytes.size());
}

// The plain definition: byte i is XORed with key byte i mod 4.
RC_GTEST_PROP(WsMask, IsTheDefinitionForAnyCutAndAlignment, (std::vector<uint8_t> data)) {
    const auto mask = *rc::gen::arbitrary<std::array<uint8_t, 4>>();
    auto expected = data;
    for (size_t i = 0; i < expected.size(); ++i) expected[i] ^= mask[i % 4];
    const auto cut = *rc::gen::inRange<size_t>(0, data.size() + 1);
    auto masked = data;
    apply_ws_mask(std::span(masked).first(cut), mask, 0);
    apply_ws_mask(std::span(masked).subspan(cut), mask, cut);
    RC_ASSERT(masked == expected);
    apply_ws_mask(masked, mask, 0);
    RC_ASSERT(masked == data);
}

}  // namespace
}  // namespace kvasir::wire
