// Payloads of the frames between backbone and worker.
//
// Each struct has encode_*() -> whole message (header included) and decode_*(payload). Decoders
// check every count against the bytes that are there before anything is built from it, and require
// that nothing is left over. Fixed fields are little-endian in the order written here; text is u16
// length + bytes (UTF-8 not required, never trusted). docs/protocol.md shows the layout; golden
// bytes in messages_test.cpp. Thread: values. Limits: the constants below.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "wire/frame.hpp"

namespace kvasir::wire {

constexpr uint32_t kTextBytesMax = 1024;
constexpr uint32_t kSegmentsMax = 4096;  // in one hello
constexpr uint32_t kProgramBytesMax = 4096;
constexpr uint32_t kRowsMax = 8192;    // in one compute request
constexpr uint32_t kPairsMax = 65536;  // in one compute request

using NodeId = std::array<uint8_t, 16>;  // random, made once per worker process

// What decides bits besides the weights; exchanged and shown, the numeric challenge decides.
struct BuildFingerprint {
    std::string software;  // "kvasir 0.1.0"
    std::string engine;    // "llama.cpp v0.5.0"
    std::string isa;       // "x86_64 avx2 fma f16c avx512 vnni", from ggml's feature list
    std::string compiler;  // "gcc 12.2.0"
    std::string kernels;   // "ggml-cpu"
};

struct HeldSegment {
    Segment segment;     // u32 layer, u32 bank, u32 begin, u32 end: global expert ids
    Sha256 digest = {};  // moe::Manifest::segment_digest
};

struct Hello {
    uint16_t major = kProtocolMajor;
    uint16_t minor = kProtocolMinor;
    NodeId node = {};
    std::string name;  // for people
    BuildFingerprint build;
    Sha256 model_id = {};
    uint32_t threads = 1;
    uint32_t rows_max = kRowsMax;  // most rows it takes in one request
    uint32_t pairs_max = kPairsMax;
    std::vector<HeldSegment>
        segments;  // ordered; local id = position of the expert within its bank
};

struct Welcome {
    uint16_t major = kProtocolMajor;
    uint16_t minor = kProtocolMinor;
    uint64_t generation = 0;  // of this node's connections, grows
    uint32_t ping_interval_ms = 20000;
    BuildFingerprint build;
};

struct ProgramMessage {
    uint32_t program = 0;       // id, unique per backbone
    LayerKey layer;             // u32, u32
    std::vector<uint8_t> code;  // moe::encode(Program)
    // u32, between layer and code: whose bits the answers shall have. 0 the worker's own backend's,
    // 1 x86-v3, 2 x86-v4 (docs/numerics.md); one that the worker does not know counts as 0.
    uint32_t numeric = 0;
};

struct ProgramAck {
    uint32_t program = 0;
    uint16_t status = 0;  // 0, or the wire code of an Errc
    std::string detail;   // what computes the bank, or why it cannot be
};

struct Pair {            // two u16 on the wire
    uint32_t row = 0;    // index into the request's rows
    uint32_t local = 0;  // the worker's local expert id in that bank
    bool operator==(const Pair&) const = default;
};

// Zero-copy view of a COMPUTE payload.
//   u32 program, u32 row_type, u32 row_count, u32 pair_count, pair_count x {u16 row, u16 local},
//   rows
// row_type is a ggml type number: 0 (f32) or the vec_dot type of the first products (15: Q8_K).
struct ComputeView {
    uint32_t program = 0;
    uint32_t row_type = 0;
    uint32_t row_count = 0;
    uint32_t pair_count = 0;
    std::span<const uint8_t> pairs;  // pair_count * 4 bytes; pair(i) decodes one
    std::span<const uint8_t>
        rows;  // the rest; the worker checks it against row_count and its own width
    Pair pair(uint32_t index) const;
};

// Zero-copy view of a RESULT payload.
//   u64 compute_ns, u32 pair_count, u32 width, pair_count * width f32 (order of the request's
//   pairs)
struct ResultView {
    uint64_t compute_ns = 0;  // wall time the worker spent computing
    uint32_t pair_count = 0;
    uint32_t width = 0;
    std::span<const uint8_t> rows;  // exactly pair_count * width * 4 bytes
};

struct ErrorMessage {
    Errc code = Errc::kProtocol;
    std::string detail;
};

std::vector<uint8_t> encode_hello(const Hello& message);
std::vector<uint8_t> encode_welcome(const Welcome& message);
std::vector<uint8_t> encode_program(const ProgramMessage& message, uint32_t request_id);
std::vector<uint8_t> encode_program_ack(const ProgramAck& message, uint32_t request_id);
std::vector<uint8_t> encode_error(const ErrorMessage& message, uint32_t request_id);
std::vector<uint8_t> encode_ping(uint64_t token, uint32_t request_id = 0);
std::vector<uint8_t> encode_pong(uint64_t token);
std::vector<uint8_t> encode_simple(FrameType type);  // kDrain, kGoodbye: no payload

// Header + fixed fields + pairs of a COMPUTE message; `rows_bytes` bytes of rows follow as a second
// piece in the same WebSocket message, so activations are never copied into a frame.
void begin_compute(ByteWriter& out, uint32_t request_id, uint32_t program, uint32_t row_type,
                   uint32_t row_count, std::span<const Pair> pairs, uint64_t rows_bytes);
// Header + fixed fields of a RESULT message (32 bytes); the rows follow as a second piece.
void begin_result(ByteWriter& out, uint32_t request_id, uint64_t compute_ns, uint32_t pair_count,
                  uint32_t width);

// Errors: kProtocol naming the field; kLimit naming the limit.
Result<Hello> decode_hello(std::span<const uint8_t> payload);
Result<Welcome> decode_welcome(std::span<const uint8_t> payload);
Result<ProgramMessage> decode_program_message(std::span<const uint8_t> payload);
Result<ProgramAck> decode_program_ack(std::span<const uint8_t> payload);
Result<ComputeView> decode_compute(std::span<const uint8_t> payload);
Result<ResultView> decode_result(std::span<const uint8_t> payload);
Result<ErrorMessage> decode_error(std::span<const uint8_t> payload);
Result<uint64_t> decode_token(std::span<const uint8_t> payload);

}  // namespace kvasir::wire
