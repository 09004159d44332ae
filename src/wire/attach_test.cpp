#include "wire/attach.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <fstream>
#include <sstream>

#include "wire/messages.hpp"

namespace kvasir::wire {
namespace {

using Bytes = std::vector<uint8_t>;

// ---- the examples of docs/protocol.md ----

Nonce example_nonce() {
    Nonce nonce;
    for (size_t i = 0; i < nonce.size(); ++i) nonce[i] = static_cast<uint8_t>(i);
    return nonce;
}

Attach example_attach() {
    Attach attach;
    attach.node.fill(0xaa);
    attach.token = "kvt1.AQ.AA";
    attach.signature.fill(0xbb);
    attach.name = "phone";
    return attach;
}

Attached example_attached() {
    Attached attached;
    attached.generation = 7;
    attached.message_bytes_max = kFrameBytesMax;
    attached.token_left_ms = 86400000;
    return attached;
}

PeerUp example_peer_up() {
    PeerUp up;
    up.handle = 2;
    up.role = Role::kBackbone;
    up.node.fill(0xcc);
    up.generation = 5;
    up.name = "den";
    return up;
}

PeerDown example_peer_down() {
    return {2, errc_info(Errc::kClosed).wire_code, "gone"};
}

Bytes example_ping() {
    Bytes ping = encode_ping(0x0102030405060708);
    set_peer(ping, 2);
    return ping;
}

struct Golden {
    const char* name;
    Bytes encoded;
    const char* hex;  // sixteen bytes a line, exactly as docs/protocol.md shows them
};

std::vector<Golden> golden() {
    return {
        {"NONCE", encode_nonce(example_nonce()),
         "0c 00 00 00 00 00 00 00 20 00 00 00 00 00 00 00\n"
         "00 01 02 03 04 05 06 07 08 09 0a 0b 0c 0d 0e 0f\n"
         "10 11 12 13 14 15 16 17 18 19 1a 1b 1c 1d 1e 1f\n"},
        {"ATTACH", encode_attach(example_attach()),
         "0d 00 00 00 00 00 00 00 77 00 00 00 00 00 00 00\n"
         "01 00 00 00 aa aa aa aa aa aa aa aa aa aa aa aa\n"
         "aa aa aa aa aa aa aa aa aa aa aa aa aa aa aa aa\n"
         "aa aa aa aa 0a 00 6b 76 74 31 2e 41 51 2e 41 41\n"
         "bb bb bb bb bb bb bb bb bb bb bb bb bb bb bb bb\n"
         "bb bb bb bb bb bb bb bb bb bb bb bb bb bb bb bb\n"
         "bb bb bb bb bb bb bb bb bb bb bb bb bb bb bb bb\n"
         "bb bb bb bb bb bb bb bb bb bb bb bb bb bb bb bb\n"
         "05 00 70 68 6f 6e 65\n"},
        {"ATTACHED", encode_attached(example_attached()),
         "0e 00 00 00 00 00 00 00 20 00 00 00 00 00 00 00\n"
         "01 00 00 00 07 00 00 00 00 00 00 00 20 4e 00 00\n"
         "00 00 00 04 00 00 00 00 00 5c 26 05 00 00 00 00\n"},
        {"PEER_UP", encode_peer_up(example_peer_up()),
         "0f 00 00 00 00 00 00 00 30 00 00 00 00 00 00 00\n"
         "02 00 42 cc cc cc cc cc cc cc cc cc cc cc cc cc\n"
         "cc cc cc cc cc cc cc cc cc cc cc cc cc cc cc cc\n"
         "cc cc cc 05 00 00 00 00 00 00 00 03 00 64 65 6e\n"},
        {"PEER_DOWN", encode_peer_down(example_peer_down()),
         "10 00 00 00 00 00 00 00 0a 00 00 00 00 00 00 00\n"
         "02 00 0d 00 04 00 67 6f 6e 65\n"},
        {"MOVE", encode_move({5000, ""}),
         "11 00 00 00 00 00 00 00 06 00 00 00 00 00 00 00\n"
         "88 13 00 00 00 00\n"},
        {"RENEW", encode_renew("kvt1.AQ.AA", 3),
         "12 00 00 00 03 00 00 00 0c 00 00 00 00 00 00 00\n"
         "0a 00 6b 76 74 31 2e 41 51 2e 41 41\n"},
        {"PING with a handle", example_ping(),
         "08 00 02 00 00 00 00 00 08 00 00 00 00 00 00 00\n"
         "08 07 06 05 04 03 02 01\n"},
        {"the statement", attach_statement(example_nonce(), Role::kWorker, example_attach()),
         "00 01 02 03 04 05 06 07 08 09 0a 0b 0c 0d 0e 0f\n"
         "10 11 12 13 14 15 16 17 18 19 1a 1b 1c 1d 1e 1f\n"
         "57 01 00 00 00 aa aa aa aa aa aa aa aa aa aa aa\n"
         "aa aa aa aa aa aa aa aa aa aa aa aa aa aa aa aa\n"
         "aa aa aa aa aa 0a 00 6b 76 74 31 2e 41 51 2e 41\n"
         "41\n"},
    };
}

constexpr size_t kMessages = 7;  // of these examples: the ones this module decodes

std::string hex_lines(std::span<const uint8_t> bytes) {
    const char* digits = "0123456789abcdef";
    std::string text;
    for (size_t i = 0; i < bytes.size(); ++i) {
        text += digits[bytes[i] >> 4];
        text += digits[bytes[i] & 15];
        text += i % 16 == 15 || i + 1 == bytes.size() ? '\n' : ' ';
    }
    return text;
}

TEST(AttachFrames, GoldenBytesAreThoseOfTheDocument) {
    std::ifstream file(std::string(KVASIR_SOURCE_DIR) + "/docs/protocol.md");
    ASSERT_TRUE(file) << "docs/protocol.md is missing";
    std::stringstream text;
    text << file.rdbuf();
    for (const Golden& example : golden()) {
        EXPECT_EQ(hex_lines(example.encoded), example.hex) << example.name;
        EXPECT_NE(text.str().find(example.hex), std::string::npos) << example.name;
    }
}

// Every frame type has its row in the document's table.
TEST(AttachFrames, TheDocumentListsEveryType) {
    std::ifstream file(std::string(KVASIR_SOURCE_DIR) + "/docs/protocol.md");
    std::stringstream text;
    text << file.rdbuf();
    const char* const names[] = {"NONCE",     "ATTACH", "ATTACHED", "PEER_UP",
                                 "PEER_DOWN", "MOVE",   "RENEW"};
    int type = static_cast<int>(FrameType::kNonce);
    for (const char* name : names) {
        const std::string row = "| " + std::to_string(type++) + " | " + name + " |";
        EXPECT_NE(text.str().find(row), std::string::npos) << row;
    }
    EXPECT_EQ(type, static_cast<int>(FrameType::kRenew) + 1);
}

// ---- decoding ----

// Runs a whole message through decode_frame and the decoder of its type.
Status decode_any(std::span<const uint8_t> message) {
    auto frame = decode_frame(message);
    if (!frame) return tl::unexpected(frame.error());
    const auto status = [](const auto& result) -> Status {
        if (!result) return tl::unexpected(result.error());
        return {};
    };
    switch (frame->header.type) {
        case FrameType::kNonce:
            return status(decode_nonce(frame->payload));
        case FrameType::kAttach:
            return status(decode_attach(frame->payload));
        case FrameType::kAttached:
            return status(decode_attached(frame->payload));
        case FrameType::kPeerUp:
            return status(decode_peer_up(frame->payload));
        case FrameType::kPeerDown:
            return status(decode_peer_down(frame->payload));
        case FrameType::kMove:
            return status(decode_move(frame->payload));
        case FrameType::kRenew:
            return status(decode_renew(frame->payload));
        default:
            return fail(Errc::kProtocol, "a type of messages_test.cpp");
    }
}

// Puts the real payload size into the header, so that only the payload's own checks can refuse.
Bytes with_header_size(Bytes message) {
    const uint64_t payload = message.size() - kFrameHeaderBytes;
    for (size_t i = 0; i < 8; ++i) message[8 + i] = static_cast<uint8_t>(payload >> (8 * i));
    return message;
}

TEST(AttachFrames, EveryCutAndEveryExtraByteIsRefused) {
    const auto examples = golden();
    for (size_t e = 0; e < kMessages; ++e) {
        const Bytes& good = examples[e].encoded;
        ASSERT_TRUE(decode_any(good)) << examples[e].name;
        for (size_t size = 0; size < good.size(); ++size) {
            const Bytes cut(good.begin(), good.begin() + static_cast<long>(size));
            EXPECT_FALSE(decode_any(cut)) << examples[e].name << " cut to " << size;
            if (size < kFrameHeaderBytes) continue;
            const auto status = decode_any(with_header_size(cut));
            ASSERT_FALSE(status) << examples[e].name << " cut to " << size;
            EXPECT_EQ(status.error().code, Errc::kProtocol) << status.error().detail;
        }
        for (const uint8_t more : {0, 1, 255}) {
            Bytes longer = good;
            longer.push_back(more);
            EXPECT_FALSE(decode_any(longer)) << examples[e].name;
            const auto status = decode_any(with_header_size(longer));
            ASSERT_FALSE(status) << examples[e].name;
            EXPECT_NE(status.error().detail.find("left over"), std::string::npos);
        }
    }
}

void put(Bytes& message, size_t offset, size_t bytes, uint64_t value) {
    for (size_t i = 0; i < bytes; ++i) message[offset + i] = static_cast<uint8_t>(value >> (8 * i));
}

TEST(AttachFrames, AWrongFieldIsNamed) {
    const struct {
        size_t example;
        const char* field;
        size_t offset, bytes;
        std::vector<uint64_t> wrong;
        Errc code;
    } cases[] = {
        {1, "token", 52, 2, {9, 11, 1024}, Errc::kProtocol},
        {1, "token", 52, 2, {1025, 0x7fff, 0x8000, 0xffff}, Errc::kLimit},
        {1, "name", 128, 2, {4, 6, 1024}, Errc::kProtocol},
        {1, "name", 128, 2, {1025, 0xffff}, Errc::kLimit},
        {1, "protocol 2.0", 16, 2, {2}, Errc::kVersion},
        {2, "protocol 65535.0", 16, 2, {65535}, Errc::kVersion},
        {2, "ping_interval_ms", 28, 4, {0}, Errc::kProtocol},
        {2, "message_bytes_max", 32, 8, {0, 15}, Errc::kProtocol},
        {3, "handle", 16, 2, {0}, Errc::kProtocol},
        {3, "role", 18, 1, {0, 'X', 'w', 255}, Errc::kProtocol},
        {3, "name", 59, 2, {2, 4}, Errc::kProtocol},
        {4, "handle", 16, 2, {0}, Errc::kProtocol},
        {4, "detail", 20, 2, {3 + 2, 1024}, Errc::kProtocol},
        {5, "url", 20, 2, {1}, Errc::kProtocol},
        {5, "url", 20, 2, {1025}, Errc::kLimit},
        {6, "token", 16, 2, {11}, Errc::kProtocol},
    };
    const auto examples = golden();
    for (const auto& c : cases) {
        for (const uint64_t value : c.wrong) {
            Bytes bad = examples[c.example].encoded;
            put(bad, c.offset, c.bytes, value);
            const auto status = decode_any(bad);
            ASSERT_FALSE(status) << examples[c.example].name << " " << c.field << " " << value;
            // A shorter text shifts what follows: another field may be the first wrong one.
            if (c.code != Errc::kProtocol || value == 0 || c.bytes != 2) {
                EXPECT_EQ(status.error().code, c.code) << status.error().detail;
                EXPECT_NE(status.error().detail.find(c.field), std::string::npos)
                    << status.error().detail;
            }
        }
    }
}

// A newer minor version may append fields to ATTACH and ATTACHED, our own may not.
TEST(AttachFrames, NewerMinorVersionsMayAppend) {
    for (Bytes message : {encode_attach(example_attach()), encode_attached(example_attached())}) {
        message.push_back(9);
        message = with_header_size(message);
        EXPECT_FALSE(decode_any(message));
        put(message, 18, 2, kProtocolMinor + 1);
        EXPECT_TRUE(decode_any(message));
    }
}

template <size_t N>
std::array<uint8_t, N> any_array() {
    std::array<uint8_t, N> value;
    for (uint8_t& byte : value) byte = *rc::gen::arbitrary<uint8_t>();
    return value;
}
std::string any_text() {
    const auto size = *rc::gen::element<size_t>(0, 1, 5, 255, 256, kAttachTextMax);
    return *rc::gen::container<std::string>(size, rc::gen::arbitrary<char>());
}
std::span<const uint8_t> payload_of(const Bytes& message) {
    return decode_frame(message).value().payload;
}

RC_GTEST_PROP(AttachFramesProperty, RoundTrip, ()) {
    const auto nonce = any_array<32>();
    RC_ASSERT(decode_nonce(payload_of(encode_nonce(nonce))).value() == nonce);

    Attach attach;
    attach.node = any_array<32>();
    attach.signature = any_array<64>();
    attach.token = any_text();
    attach.name = any_text();
    const auto a = decode_attach(payload_of(encode_attach(attach))).value();
    RC_ASSERT(a.node == attach.node && a.signature == attach.signature);
    RC_ASSERT(a.token == attach.token && a.name == attach.name);
    RC_ASSERT(attach_statement(nonce, Role::kObserver, a) ==
              attach_statement(nonce, Role::kObserver, attach));

    Attached attached;
    attached.generation = *rc::gen::arbitrary<uint64_t>();
    attached.ping_interval_ms = *rc::gen::positive<uint32_t>();
    attached.message_bytes_max = *rc::gen::inRange<uint64_t>(kFrameHeaderBytes, ~uint64_t{0});
    attached.token_left_ms = *rc::gen::arbitrary<uint64_t>();
    const auto b = decode_attached(payload_of(encode_attached(attached))).value();
    RC_ASSERT(b.generation == attached.generation);
    RC_ASSERT(b.ping_interval_ms == attached.ping_interval_ms);
    RC_ASSERT(b.message_bytes_max == attached.message_bytes_max);
    RC_ASSERT(b.token_left_ms == attached.token_left_ms);
}

RC_GTEST_PROP(AttachFramesProperty, PeersRoundTrip, ()) {
    PeerUp up;
    up.handle = *rc::gen::inRange<uint16_t>(1, 65535);
    up.role = *rc::gen::element(Role::kWorker, Role::kBackbone, Role::kObserver);
    up.node = any_array<32>();
    up.generation = *rc::gen::arbitrary<uint64_t>();
    up.name = any_text();
    const auto c = decode_peer_up(payload_of(encode_peer_up(up))).value();
    RC_ASSERT(c.handle == up.handle && c.role == up.role && c.node == up.node);
    RC_ASSERT(c.generation == up.generation && c.name == up.name);

    const PeerDown down{up.handle, *rc::gen::arbitrary<uint16_t>(), any_text()};
    const auto d = decode_peer_down(payload_of(encode_peer_down(down))).value();
    RC_ASSERT(d.handle == down.handle && d.code == down.code && d.detail == down.detail);

    const Move move{*rc::gen::arbitrary<uint32_t>(), any_text()};
    const auto e = decode_move(payload_of(encode_move(move))).value();
    RC_ASSERT(e.within_ms == move.within_ms && e.url == move.url);

    const std::string token = any_text();
    const auto request = *rc::gen::arbitrary<uint32_t>();
    const Bytes renew = encode_renew(token, request);
    RC_ASSERT(decode_frame(renew).value().header.request_id == request);
    RC_ASSERT(decode_renew(payload_of(renew)).value() == token);
}

// Whatever differs between two attachments is in the statement.
TEST(AttachStatement, CoversEverythingThatDecides) {
    const Attach attach = example_attach();
    const Bytes good = attach_statement(example_nonce(), Role::kWorker, attach);
    std::vector<Bytes> others;
    Nonce nonce = example_nonce();
    nonce[31] ^= 1;
    others.push_back(attach_statement(nonce, Role::kWorker, attach));
    others.push_back(attach_statement(example_nonce(), Role::kBackbone, attach));
    Attach other = attach;
    other.minor ^= 1;
    others.push_back(attach_statement(example_nonce(), Role::kWorker, other));
    other = attach;
    other.major ^= 1;
    others.push_back(attach_statement(example_nonce(), Role::kWorker, other));
    other = attach;
    other.node[0] ^= 1;
    others.push_back(attach_statement(example_nonce(), Role::kWorker, other));
    other = attach;
    other.token += "A";
    others.push_back(attach_statement(example_nonce(), Role::kWorker, other));
    for (const Bytes& statement : others) EXPECT_NE(statement, good);
    other = attach;
    other.name = "another";
    EXPECT_EQ(attach_statement(example_nonce(), Role::kWorker, other), good);
}

TEST(SetPeer, ChangesTheHandleAndNothingElse) {
    const Bytes before = encode_ping(~uint64_t{0});
    for (const uint16_t peer : {0, 1, 255, 256, 65535}) {
        Bytes message = before;
        set_peer(std::span(message).first(kFrameHeaderBytes), peer);
        const auto frame = decode_frame(message).value();
        EXPECT_EQ(frame.header.peer, peer);
        set_peer(message, 0);
        EXPECT_EQ(message, before);
    }
}

}  // namespace
}  // namespace kvasir::wire
