// Fuzz target: a whole Kvasir message through decode_frame and the decoder of its type.
//
// What decodes must encode again to the same bytes (unless a newer minor version appended fields),
// and every view must lie inside the message.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <vector>

#include "wire/messages.hpp"

namespace {

using namespace kvasir;
using namespace kvasir::wire;

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "frame_fuzz: %s\n", what);
    std::abort();
}

// The encoders write peer 0; everything else must come back as it was.
void same(std::vector<uint8_t> encoded, std::span<const uint8_t> message) {
    require(encoded.size() == message.size(), "encoded size differs");
    encoded[2] = message[2];
    encoded[3] = message[3];
    require(std::equal(encoded.begin(), encoded.end(), message.begin()), "encoded bytes differ");
}

bool inside(std::span<const uint8_t> part, std::span<const uint8_t> whole) {
    return part.empty() || (part.data() >= whole.data() &&
                            part.data() + part.size() <= whole.data() + whole.size());
}

void check_compute(const ComputeView& view, std::span<const uint8_t> message, uint32_t request_id) {
    require(inside(view.pairs, message) && inside(view.rows, message), "view outside the message");
    require(view.row_count >= 1 && view.row_count <= kRowsMax, "row_count");
    require(view.pair_count >= 1 && view.pair_count <= kPairsMax, "pair_count");
    std::vector<Pair> pairs;
    for (uint32_t i = 0; i < view.pair_count; ++i) {
        pairs.push_back(view.pair(i));
        require(pairs.back().row < view.row_count, "row of a pair");
    }
    ByteWriter out;
    begin_compute(out, request_id, view.program, view.row_type, view.row_count, pairs,
                  view.rows.size());
    out.bytes(view.rows);
    same(out.take(), message);
}

void check_result(const ResultView& view, std::span<const uint8_t> message, uint32_t request_id) {
    require(inside(view.rows, message), "view outside the message");
    ByteWriter out;
    begin_result(out, request_id, view.compute_ns, view.pair_count, view.width);
    out.bytes(view.rows);
    same(out.take(), message);
}

void check_payload(const FrameView& frame, std::span<const uint8_t> message) {
    const uint32_t id = frame.header.request_id;
    switch (frame.header.type) {
        case FrameType::kHello:
            if (auto value = decode_hello(frame.payload);
                value && value->minor <= kProtocolMinor && id == 0) {
                same(encode_hello(*value), message);
            }
            break;
        case FrameType::kWelcome:
            if (auto value = decode_welcome(frame.payload);
                value && value->minor <= kProtocolMinor && id == 0) {
                same(encode_welcome(*value), message);
            }
            break;
        case FrameType::kProgram:
            if (auto value = decode_program_message(frame.payload)) {
                same(encode_program(*value, id), message);
            }
            break;
        case FrameType::kProgramAck:
            if (auto value = decode_program_ack(frame.payload)) {
                same(encode_program_ack(*value, id), message);
            }
            break;
        case FrameType::kCompute:
            if (auto value = decode_compute(frame.payload)) check_compute(*value, message, id);
            break;
        case FrameType::kResult:
            if (auto value = decode_result(frame.payload)) check_result(*value, message, id);
            break;
        case FrameType::kError:
            // An unknown code becomes kProtocol, so only the size is compared.
            if (auto value = decode_error(frame.payload)) {
                require(encode_error(*value, id).size() == message.size(), "error size differs");
            }
            break;
        case FrameType::kPing:
        case FrameType::kPong:
            if (auto token = decode_token(frame.payload)) {
                require(encode_ping(*token).size() == message.size(), "token size differs");
            }
            break;
        case FrameType::kDrain:
        case FrameType::kGoodbye:
            break;
        default:  // the frames of attaching: token_fuzz.cpp
            break;
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const std::span<const uint8_t> message(data, size);
    if (auto frame = decode_frame(message)) {
        require(frame->header.payload_bytes == frame->payload.size(), "payload_bytes");
        check_payload(*frame, message);
    }
    // Every decoder on the raw bytes too: no header needed, so mutations reach the fields sooner.
    (void)decode_hello(message);
    (void)decode_welcome(message);
    (void)decode_program_message(message);
    (void)decode_program_ack(message);
    (void)decode_compute(message);
    (void)decode_result(message);
    (void)decode_error(message);
    return 0;
}
