#include "wire/messages.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

namespace kvasir::wire {
namespace {

using Bytes = std::vector<uint8_t>;

// ---- the examples of docs/protocol.md ----

BuildFingerprint example_build() {
    return {"kvasir 0.1.0", "llama.cpp v0.5.0", "x86_64 avx2", "gcc 12.2.0", "ggml-cpu"};
}

Hello example_hello() {
    Hello hello;
    for (size_t i = 0; i < hello.node.size(); ++i) hello.node[i] = static_cast<uint8_t>(i);
    hello.name = "phone";
    hello.build = example_build();
    hello.model_id.fill(0xaa);
    hello.threads = 2;
    hello.rows_max = 512;
    hello.pairs_max = 4096;
    HeldSegment held;
    held.segment = {{3, 0}, 8, 16};
    held.digest.fill(0xbb);
    hello.segments = {held};
    return hello;
}

Welcome example_welcome() {
    Welcome welcome;
    welcome.generation = 7;
    welcome.build = example_build();
    return welcome;
}

Bytes floats(std::initializer_list<float> values) {
    ByteWriter out;
    for (const float value : values) out.f32(value);
    return out.take();
}

Bytes example_compute() {
    const std::vector<Pair> pairs = {{0, 0}, {1, 7}};
    const Bytes rows = floats({1, 2, 3, 4});
    ByteWriter out;
    begin_compute(out, 2, 9, 0, 2, pairs, rows.size());
    out.bytes(rows);
    return out.take();
}

Bytes example_result() {
    ByteWriter out;
    begin_result(out, 2, 1500, 2, 2);
    out.bytes(floats({0.5f, -0.5f, 1.5f, -1.5f}));
    return out.take();
}

struct Golden {
    const char* name;
    Bytes encoded;
    const char* hex;  // sixteen bytes a line, exactly as docs/protocol.md shows them
};

std::vector<Golden> golden() {
    return {
        {"HELLO", encode_hello(example_hello()),
         "01 00 00 00 00 00 00 00 be 00 00 00 00 00 00 00\n"
         "01 00 00 00 00 01 02 03 04 05 06 07 08 09 0a 0b\n"
         "0c 0d 0e 0f 05 00 70 68 6f 6e 65 0c 00 6b 76 61\n"
         "73 69 72 20 30 2e 31 2e 30 10 00 6c 6c 61 6d 61\n"
         "2e 63 70 70 20 76 30 2e 35 2e 30 0b 00 78 38 36\n"
         "5f 36 34 20 61 76 78 32 0a 00 67 63 63 20 31 32\n"
         "2e 32 2e 30 08 00 67 67 6d 6c 2d 63 70 75 aa aa\n"
         "aa aa aa aa aa aa aa aa aa aa aa aa aa aa aa aa\n"
         "aa aa aa aa aa aa aa aa aa aa aa aa aa aa 02 00\n"
         "00 00 00 02 00 00 00 10 00 00 01 00 00 00 03 00\n"
         "00 00 00 00 00 00 08 00 00 00 10 00 00 00 bb bb\n"
         "bb bb bb bb bb bb bb bb bb bb bb bb bb bb bb bb\n"
         "bb bb bb bb bb bb bb bb bb bb bb bb bb bb\n"},
        {"WELCOME", encode_welcome(example_welcome()),
         "02 00 00 00 00 00 00 00 53 00 00 00 00 00 00 00\n"
         "01 00 00 00 07 00 00 00 00 00 00 00 20 4e 00 00\n"
         "0c 00 6b 76 61 73 69 72 20 30 2e 31 2e 30 10 00\n"
         "6c 6c 61 6d 61 2e 63 70 70 20 76 30 2e 35 2e 30\n"
         "0b 00 78 38 36 5f 36 34 20 61 76 78 32 0a 00 67\n"
         "63 63 20 31 32 2e 32 2e 30 08 00 67 67 6d 6c 2d\n"
         "63 70 75\n"},
        {"PROGRAM", encode_program({9, {3, 0}, {1, 2, 3}, 2}, 1),
         "03 00 00 00 01 00 00 00 17 00 00 00 00 00 00 00\n"
         "09 00 00 00 03 00 00 00 00 00 00 00 02 00 00 00\n"
         "03 00 00 00 01 02 03\n"},
        {"PROGRAM_ACK", encode_program_ack({9, 0, "avx2"}, 1),
         "04 00 00 00 01 00 00 00 0c 00 00 00 00 00 00 00\n"
         "09 00 00 00 00 00 04 00 61 76 78 32\n"},
        {"PROGRAM_ACK (refused)",
         encode_program_ack({9, errc_info(Errc::kUnsupported).wire_code, "op 12"}, 1),
         "04 00 00 00 01 00 00 00 0d 00 00 00 00 00 00 00\n"
         "09 00 00 00 09 00 05 00 6f 70 20 31 32\n"},
        {"COMPUTE", example_compute(),
         "05 00 00 00 02 00 00 00 28 00 00 00 00 00 00 00\n"
         "09 00 00 00 00 00 00 00 02 00 00 00 02 00 00 00\n"
         "00 00 00 00 01 00 07 00 00 00 80 3f 00 00 00 40\n"
         "00 00 40 40 00 00 80 40\n"},
        {"RESULT", example_result(),
         "06 00 00 00 02 00 00 00 20 00 00 00 00 00 00 00\n"
         "dc 05 00 00 00 00 00 00 02 00 00 00 02 00 00 00\n"
         "00 00 00 3f 00 00 00 bf 00 00 c0 3f 00 00 c0 bf\n"},
        {"ERROR", encode_error({Errc::kBusy, "queue full"}, 2),
         "07 00 00 00 02 00 00 00 0e 00 00 00 00 00 00 00\n"
         "0b 00 0a 00 71 75 65 75 65 20 66 75 6c 6c\n"},
        {"PING", encode_ping(0x0102030405060708),
         "08 00 00 00 00 00 00 00 08 00 00 00 00 00 00 00\n"
         "08 07 06 05 04 03 02 01\n"},
        {"PONG", encode_pong(0x0102030405060708),
         "09 00 00 00 00 00 00 00 08 00 00 00 00 00 00 00\n"
         "08 07 06 05 04 03 02 01\n"},
        {"DRAIN", encode_simple(FrameType::kDrain),
         "0a 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00\n"},
        {"GOODBYE", encode_simple(FrameType::kGoodbye),
         "0b 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00\n"},
    };
}

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

TEST(Messages, GoldenBytes) {
    for (const Golden& example : golden()) {
        EXPECT_EQ(hex_lines(example.encoded), example.hex) << example.name;
    }
}

TEST(Messages, ProtocolDocumentShowsTheGoldenBytesAndEveryErrorCode) {
    std::ifstream file(std::string(KVASIR_SOURCE_DIR) + "/docs/protocol.md");
    ASSERT_TRUE(file) << "docs/protocol.md is missing";
    std::stringstream text;
    text << file.rdbuf();
    for (const Golden& example : golden()) {
        EXPECT_NE(text.str().find(example.hex), std::string::npos) << example.name;
    }
    for (int i = 0; i < static_cast<int>(Errc::kCount_); ++i) {
        const ErrcInfo& info = errc_info(static_cast<Errc>(i));
        const std::string row = "| " + std::to_string(info.wire_code) + " | `" +
                                std::string(info.name) + "` | " + (info.retryable ? "yes" : "no") +
                                " |";
        EXPECT_NE(text.str().find(row), std::string::npos) << "no row " << row;
    }
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
        case FrameType::kHello:
            return status(decode_hello(frame->payload));
        case FrameType::kWelcome:
            return status(decode_welcome(frame->payload));
        case FrameType::kProgram:
            return status(decode_program_message(frame->payload));
        case FrameType::kProgramAck:
            return status(decode_program_ack(frame->payload));
        case FrameType::kCompute:
            return status(decode_compute(frame->payload));
        case FrameType::kResult:
            return status(decode_result(frame->payload));
        case FrameType::kError:
            return status(decode_error(frame->payload));
        case FrameType::kPing:
        case FrameType::kPong:
            return status(decode_token(frame->payload));
        case FrameType::kDrain:
        case FrameType::kGoodbye:
            return {};
        default:
            return fail(Errc::kProtocol, "a type of attach_test.cpp");
    }
}

// Puts the real payload size into the header, so that only the payload's own checks can refuse.
Bytes with_header_size(Bytes message) {
    const uint64_t payload = message.size() - kFrameHeaderBytes;
    for (size_t i = 0; i < 8; ++i) message[8 + i] = static_cast<uint8_t>(payload >> (8 * i));
    return message;
}

bool has_payload(const Golden& example) {
    return example.encoded.size() > kFrameHeaderBytes;
}

TEST(Messages, EveryCutAndEveryExtraByteIsRefused) {
    for (const Golden& example : golden()) {
        EXPECT_TRUE(decode_any(example.encoded)) << example.name;
        for (size_t size = 0; size < example.encoded.size(); ++size) {
            Bytes cut(example.encoded.begin(), example.encoded.begin() + static_cast<long>(size));
            EXPECT_FALSE(decode_any(cut)) << example.name << " cut to " << size;
            // A COMPUTE does not know the width of a row: fewer bytes are narrower rows, which the
            // worker compares with its own width.
            const bool narrower =
                example.name == std::string("COMPUTE") && size > 40 && size % 2 == 0;
            if (size >= kFrameHeaderBytes && has_payload(example) && !narrower) {
                const auto status = decode_any(with_header_size(cut));
                ASSERT_FALSE(status) << example.name << " cut to " << size;
                EXPECT_EQ(status.error().code, Errc::kProtocol) << status.error().detail;
            }
        }
        Bytes longer = example.encoded;
        longer.push_back(0);
        EXPECT_FALSE(decode_any(longer)) << example.name;
        if (has_payload(example)) {
            EXPECT_FALSE(decode_any(with_header_size(longer))) << example.name;
        }
    }
}

struct Field {
    const char* message;
    const char* name;  // must be in the error
    size_t offset;     // in the message
    size_t bytes;
    std::vector<uint64_t> allowed = {};  // values that are fine here although they differ
};

// Every count and every length of every message.
const Field kFields[] = {
    {"HELLO", "name", 36, 2},
    {"HELLO", "build.software", 43, 2},
    {"HELLO", "build.engine", 57, 2},
    {"HELLO", "build.isa", 75, 2},
    {"HELLO", "build.compiler", 88, 2},
    {"HELLO", "build.kernels", 100, 2},
    {"HELLO", "threads", 142, 4, {1, 3, 0xffffffff}},
    {"HELLO", "rows_max", 146, 4, {1, 511, 513, 0xffffffff}},
    {"HELLO", "pairs_max", 150, 4, {1, 4095, 4097, 0xffffffff}},
    {"HELLO", "segment_count", 154, 4},
    {"HELLO", "segments", 166, 4, {0, 1, 7, 9}},          // begin, up to end 16
    {"HELLO", "segments", 170, 4, {15, 17, 0xffffffff}},  // end, above begin 8
    {"WELCOME", "ping_interval_ms", 28, 4, {1, 19999, 20001, 0xffffffff}},
    {"WELCOME", "build.software", 32, 2},
    {"WELCOME", "build.kernels", 89, 2},
    {"PROGRAM", "code_bytes", 32, 4},
    {"PROGRAM_ACK", "detail", 22, 2},
    {"PROGRAM_ACK (refused)", "detail", 22, 2},
    {"COMPUTE", "row_count", 24, 4},
    {"COMPUTE", "pair_count", 28, 4, {1, 3}},  // a pair becomes row bytes, or the reverse
    {"COMPUTE", "pairs", 32, 2, {1}},
    {"COMPUTE", "pairs", 36, 2, {0}},
    {"RESULT", "pair_count", 24, 4},
    {"RESULT", "width", 28, 4},
    {"ERROR", "detail", 18, 2},
    {"PING", "frame", 8, 8},
    {"COMPUTE", "frame", 8, 8},
};

uint64_t get(const Bytes& message, size_t offset, size_t bytes) {
    uint64_t value = 0;
    for (size_t i = bytes; i > 0; --i) value = value << 8 | message[offset + i - 1];
    return value;
}

void put(Bytes& message, size_t offset, size_t bytes, uint64_t value) {
    for (size_t i = 0; i < bytes; ++i) message[offset + i] = static_cast<uint8_t>(value >> (8 * i));
}

const Bytes& encoded(const char* name) {
    static const std::vector<Golden> examples = golden();
    for (const Golden& example : examples) {
        if (std::strcmp(example.name, name) == 0) return example.encoded;
    }
    static const Bytes none;
    ADD_FAILURE() << "no example " << name;
    return none;
}

TEST(Messages, EveryCountAndLengthAtItsEdges) {
    for (const Field& field : kFields) {
        const Bytes& good = encoded(field.message);
        const uint64_t value = get(good, field.offset, field.bytes);
        const uint64_t max = ~uint64_t{0} >> (64 - 8 * field.bytes);
        for (const uint64_t other :
             {uint64_t{0}, uint64_t{1}, value - 1, value + 1, max / 2, max / 2 + 1, max - 1, max}) {
            if (other == value || other > max) continue;
            Bytes bad = good;
            put(bad, field.offset, field.bytes, other);
            const auto status = decode_any(bad);
            if (std::count(field.allowed.begin(), field.allowed.end(), other) != 0) {
                EXPECT_TRUE(status) << field.message << "." << field.name << " = " << other;
                continue;
            }
            // Large values of fields that only describe the worker may pass; none listed may.
            if (std::count(field.allowed.begin(), field.allowed.end(), max) != 0 && other > value) {
                continue;
            }
            ASSERT_FALSE(status) << field.message << "." << field.name << " = " << other;
            EXPECT_TRUE(status.error().code == Errc::kProtocol ||
                        status.error().code == Errc::kLimit);
        }
    }
}

TEST(Messages, ErrorsNameTheField) {
    for (const Field& field : kFields) {
        Bytes bad = encoded(field.message);
        const bool begin = field.offset == 166;  // the largest begin makes the range empty
        const uint64_t max = ~uint64_t{0} >> (64 - 8 * field.bytes);
        const bool zero = !begin &&
                          std::count(field.allowed.begin(), field.allowed.end(), 0) == 0 &&
                          std::count(field.allowed.begin(), field.allowed.end(), max) != 0;
        put(bad, field.offset, field.bytes, zero ? 0 : max);
        const auto status = decode_any(bad);
        ASSERT_FALSE(status) << field.message << "." << field.name;
        EXPECT_NE(status.error().detail.find(field.name), std::string::npos)
            << field.name << ": " << status.error().detail;
    }
}

TEST(Messages, LimitsAreExact) {
    ProgramMessage program;
    program.code.assign(kProgramBytesMax, 7);
    Bytes message = encode_program(program, 1);
    EXPECT_TRUE(decode_any(message));
    message.push_back(7);
    put(message, 32, 4, kProgramBytesMax + 1);
    EXPECT_EQ(decode_any(with_header_size(message)).error().code, Errc::kLimit);

    for (const uint32_t rows : {1u, kRowsMax, kRowsMax + 1}) {
        ByteWriter out;
        begin_compute(out, 1, 1, 0, rows, std::vector<Pair>{{0, 0}}, rows);
        out.reserve(rows);
        EXPECT_EQ(decode_any(out.data()).has_value(), rows <= kRowsMax) << rows;
    }
    std::vector<Pair> pairs(kPairsMax);
    ByteWriter out;
    begin_compute(out, 1, 1, 0, 1, pairs, 4);
    out.u32(0);
    EXPECT_TRUE(decode_any(out.data()));
    Bytes over = out.take();
    put(over, 28, 4, kPairsMax + 1);
    over.resize(over.size() + 4);
    EXPECT_EQ(decode_any(with_header_size(over)).error().code, Errc::kLimit);

    Hello hello = example_hello();
    hello.segments.clear();
    for (uint32_t i = 0; i < kSegmentsMax; ++i) hello.segments.push_back({{{i, 0}, 0, 1}, {}});
    Bytes hello_message = encode_hello(hello);
    EXPECT_TRUE(decode_any(hello_message));
    put(hello_message, 154, 4, kSegmentsMax + 1);
    hello_message.resize(hello_message.size() + 48);
    EXPECT_EQ(decode_any(with_header_size(hello_message)).error().code, Errc::kLimit);
}

TEST(Messages, OwnTextIsCutAtTheLimit) {
    const auto message = encode_error({Errc::kIo, std::string(kTextBytesMax + 500, 'x')}, 3);
    const auto frame = decode_frame(message);
    ASSERT_TRUE(frame);
    const auto error = decode_error(frame->payload);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->detail, std::string(kTextBytesMax, 'x'));
    EXPECT_EQ(error->code, Errc::kIo);
}

TEST(Messages, SegmentsMustAscendWithoutOverlap) {
    const std::pair<std::vector<Segment>, bool> cases[] = {
        {{{{0, 0}, 0, 4}, {{0, 0}, 4, 8}}, true},
        {{{{0, 0}, 0, 4}, {{0, 1}, 0, 4}, {{1, 0}, 0, 4}}, true},
        {{{{0, 0}, 0, 4}, {{0, 0}, 3, 8}}, false},
        {{{{0, 0}, 4, 8}, {{0, 0}, 0, 4}}, false},
        {{{{0, 0}, 0, 4}, {{0, 0}, 0, 4}}, false},
        {{{{1, 0}, 0, 4}, {{0, 0}, 0, 4}}, false},
        {{{{0, 1}, 0, 4}, {{0, 0}, 0, 4}}, false},
        {{{{0, 0}, 4, 4}}, false},
        {{{{0, 0}, 5, 4}}, false},
        {{}, true},
    };
    for (const auto& [segments, good] : cases) {
        Hello hello = example_hello();
        hello.segments.clear();
        for (const Segment& segment : segments) hello.segments.push_back({segment, {}});
        EXPECT_EQ(decode_any(encode_hello(hello)).has_value(), good);
    }
}

// Old and new builds: another major version is refused with both values before anything behind it
// is read; a newer minor version may append fields to HELLO and WELCOME.
TEST(Messages, VersionMatrix) {
    for (const uint16_t major : {0, 1, 2, 65535}) {
        for (const uint16_t minor : {0, 1, 65535}) {
            for (const bool appended : {false, true}) {
                for (const char* name : {"HELLO", "WELCOME"}) {
                    Bytes message = encoded(name);
                    put(message, 16, 2, major);
                    put(message, 18, 2, minor);
                    if (appended) message.push_back(1);
                    const auto status = decode_any(with_header_size(message));
                    if (major == kProtocolMajor) {
                        EXPECT_EQ(status.has_value(), !appended || minor > kProtocolMinor)
                            << name << " " << major << "." << minor;
                        continue;
                    }
                    ASSERT_FALSE(status);
                    EXPECT_EQ(status.error().code, Errc::kVersion);
                    for (const std::string& value :
                         {std::to_string(major) + "." + std::to_string(minor),
                          std::string("1.0")}) {
                        EXPECT_NE(status.error().detail.find(value), std::string::npos)
                            << status.error().detail;
                    }
                }
            }
        }
    }
    Bytes foreign = {1, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0};
    EXPECT_EQ(decode_any(foreign).error().code, Errc::kVersion);
}

// ---- round trips of arbitrary values ----

std::string any_text() {
    auto text = *rc::gen::arbitrary<std::string>();
    return text.substr(0, kTextBytesMax);
}

BuildFingerprint any_build() {
    return {any_text(), any_text(), any_text(), any_text(), any_text()};
}

bool same_build(const BuildFingerprint& a, const BuildFingerprint& b) {
    return a.software == b.software && a.engine == b.engine && a.isa == b.isa &&
           a.compiler == b.compiler && a.kernels == b.kernels;
}

template <class T>
auto payload_of(const T& message) {
    return std::span<const uint8_t>(message).subspan(kFrameHeaderBytes);
}

RC_GTEST_PROP(Messages, HelloRoundTrip, ()) {
    Hello hello;
    hello.minor = *rc::gen::arbitrary<uint16_t>();
    hello.node = *rc::gen::arbitrary<NodeId>();
    hello.name = any_text();
    hello.build = any_build();
    hello.model_id = *rc::gen::arbitrary<Sha256>();
    hello.threads = *rc::gen::inRange<uint32_t>(1, 1000);
    hello.rows_max = *rc::gen::inRange<uint32_t>(1, kRowsMax + 1);
    hello.pairs_max = *rc::gen::inRange<uint32_t>(1, kPairsMax + 1);
    const auto count = *rc::gen::inRange<uint32_t>(0, 20);
    uint32_t begin = 0;
    for (uint32_t i = 0; i < count; ++i) {
        begin += *rc::gen::inRange<uint32_t>(0, 5);
        const uint32_t end = begin + *rc::gen::inRange<uint32_t>(1, 300);
        hello.segments.push_back({{{i / 4, i % 4 / 2}, begin, end}, *rc::gen::arbitrary<Sha256>()});
        begin = end;
    }
    const auto back = decode_hello(payload_of(encode_hello(hello)));
    RC_ASSERT(back.has_value());
    RC_ASSERT(back->major == hello.major && back->minor == hello.minor);
    RC_ASSERT(back->node == hello.node && back->name == hello.name);
    RC_ASSERT(same_build(back->build, hello.build));
    RC_ASSERT(back->model_id == hello.model_id && back->threads == hello.threads);
    RC_ASSERT(back->rows_max == hello.rows_max && back->pairs_max == hello.pairs_max);
    RC_ASSERT(back->segments.size() == hello.segments.size());
    for (size_t i = 0; i < hello.segments.size(); ++i) {
        RC_ASSERT(back->segments[i].segment == hello.segments[i].segment);
        RC_ASSERT(back->segments[i].digest == hello.segments[i].digest);
    }
}

RC_GTEST_PROP(Messages, SmallMessagesRoundTrip,
              (uint32_t request_id, uint32_t program, uint16_t status, uint64_t token)) {
    Welcome welcome;
    welcome.generation = token;
    welcome.ping_interval_ms = *rc::gen::inRange<uint32_t>(1, 1000000);
    welcome.build = any_build();
    const auto welcome_back = decode_welcome(payload_of(encode_welcome(welcome)));
    RC_ASSERT(welcome_back && welcome_back->generation == token);
    RC_ASSERT(welcome_back->ping_interval_ms == welcome.ping_interval_ms);
    RC_ASSERT(same_build(welcome_back->build, welcome.build));

    ProgramMessage message{program, {status, request_id}, *rc::gen::nonEmpty<Bytes>(), status};
    const auto encoded_program = encode_program(message, request_id);
    RC_ASSERT(decode_frame(encoded_program)->header.request_id == request_id);
    const auto message_back = decode_program_message(payload_of(encoded_program));
    RC_ASSERT(message_back && message_back->program == program);
    RC_ASSERT(message_back->layer == message.layer && message_back->code == message.code);
    RC_ASSERT(message_back->numeric == status);

    const ProgramAck ack{program, status, any_text()};
    const auto ack_back = decode_program_ack(payload_of(encode_program_ack(ack, request_id)));
    RC_ASSERT(ack_back && ack_back->program == program && ack_back->status == status);
    RC_ASSERT(ack_back->detail == ack.detail);

    const ErrorMessage error{static_cast<Errc>(status % static_cast<int>(Errc::kCount_)),
                             any_text()};
    const auto error_back = decode_error(payload_of(encode_error(error, request_id)));
    RC_ASSERT(error_back && error_back->code == error.code && error_back->detail == error.detail);

    RC_ASSERT(decode_token(payload_of(encode_ping(token))) == token);
    RC_ASSERT(decode_token(payload_of(encode_pong(token))) == token);
}

RC_GTEST_PROP(Messages, ComputeAndResultRoundTrip, (uint32_t request_id, uint32_t program)) {
    const auto rows = *rc::gen::inRange<uint32_t>(1, 40);
    const auto row_bytes = *rc::gen::inRange<uint32_t>(1, 50);
    std::vector<Pair> pairs(*rc::gen::inRange<size_t>(1, 60));
    for (Pair& pair : pairs) {
        pair = {*rc::gen::inRange<uint32_t>(0, rows), *rc::gen::inRange<uint32_t>(0, 65536)};
    }
    const auto data = *rc::gen::container<Bytes>(rows * row_bytes, rc::gen::arbitrary<uint8_t>());
    ByteWriter out;
    begin_compute(out, request_id, program, 15, rows, pairs, data.size());
    out.bytes(data);
    const auto view = decode_compute(payload_of(out.data()));
    RC_ASSERT(view && view->program == program && view->row_type == 15u);
    RC_ASSERT(view->row_count == rows && view->pair_count == pairs.size());
    for (uint32_t i = 0; i < pairs.size(); ++i) RC_ASSERT(view->pair(i) == pairs[i]);
    RC_ASSERT(Bytes(view->rows.begin(), view->rows.end()) == data);

    const auto answer = *rc::gen::container<Bytes>(pairs.size() * 8, rc::gen::arbitrary<uint8_t>());
    ByteWriter reply;
    begin_result(reply, request_id, 12345, static_cast<uint32_t>(pairs.size()), 2);
    RC_ASSERT(reply.size() == 32u);
    reply.bytes(answer);
    const auto result = decode_result(payload_of(reply.data()));
    RC_ASSERT(result && result->compute_ns == 12345u && result->pair_count == pairs.size());
    RC_ASSERT(result->width == 2u);
    RC_ASSERT(Bytes(result->rows.begin(), result->rows.end()) == answer);
}

// Bytes changed at random: decoders answer, whatever the answer is (sanitizers judge the rest).
RC_GTEST_PROP(Messages, RandomDamageNeverBreaksADecoder, ()) {
    static const std::vector<Golden> examples = golden();
    Bytes message = examples[*rc::gen::inRange<size_t>(0, examples.size())].encoded;
    const auto hits = *rc::gen::inRange(1, 6);
    for (int i = 0; i < hits; ++i) {
        message[*rc::gen::inRange<size_t>(0, message.size())] = *rc::gen::arbitrary<uint8_t>();
    }
    for (const Bytes& bytes : {message, with_header_size(message)}) {
        const auto status = decode_any(bytes);
        if (!status) RC_ASSERT(!status.error().detail.empty());
    }
}

}  // namespace
}  // namespace kvasir::wire
