#include "wire/messages.hpp"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "base/check.hpp"
#include "wire/fields.hpp"

namespace kvasir::wire {
namespace {

constexpr uint64_t kComputeFixedBytes = 16;
constexpr uint64_t kPairBytes = 4;
constexpr uint64_t kResultFixedBytes = 16;
constexpr uint64_t kSegmentBytes = 16 + 32;

void store_u32(uint8_t* out, uint32_t value) {
    out[0] = static_cast<uint8_t>(value);
    out[1] = static_cast<uint8_t>(value >> 8);
    out[2] = static_cast<uint8_t>(value >> 16);
    out[3] = static_cast<uint8_t>(value >> 24);
}

void store_u16(uint8_t* out, uint16_t value) {
    out[0] = static_cast<uint8_t>(value);
    out[1] = static_cast<uint8_t>(value >> 8);
}

uint16_t load_u16(const uint8_t* in) {
    return static_cast<uint16_t>(in[0] | in[1] << 8);
}

void put_build(ByteWriter& out, const BuildFingerprint& build) {
    put_text(out, build.software);
    put_text(out, build.engine);
    put_text(out, build.isa);
    put_text(out, build.compiler);
    put_text(out, build.kernels);
}

BuildFingerprint read_build(FieldReader& in) {
    BuildFingerprint value;
    value.software = in.text("build.software");
    value.engine = in.text("build.engine");
    value.isa = in.text("build.isa");
    value.compiler = in.text("build.compiler");
    value.kernels = in.text("build.kernels");
    return value;
}

// Ranges are not empty, ascend, and do not overlap within a bank: local ids are positions in them.
void check_segment(FieldReader& in, const std::vector<HeldSegment>& before, const Segment& next) {
    if (next.begin >= next.end) in.wrong("segments", "a range is empty");
    if (before.empty()) return;
    const Segment& last = before.back().segment;
    if (next.layer < last.layer || (next.layer == last.layer && next.begin < last.end)) {
        in.wrong("segments", "not in order, or overlapping");
    }
}

void read_segments(FieldReader& in, std::vector<HeldSegment>& out) {
    const uint32_t count = in.u32("segment_count");
    if (count > kSegmentsMax) return in.over_limit("segment_count", count, kSegmentsMax);
    if (count * kSegmentBytes > in.remaining()) {
        return in.wrong("segment_count", std::to_string(count) + " segments do not fit in " +
                                             std::to_string(in.remaining()) + " bytes");
    }
    out.reserve(count);
    for (uint32_t i = 0; i < count && !in.failed(); ++i) {
        HeldSegment held;
        held.segment.layer.layer = in.u32("segments.layer");
        held.segment.layer.bank = in.u32("segments.bank");
        held.segment.begin = in.u32("segments.begin");
        held.segment.end = in.u32("segments.end");
        held.digest = in.array<32>("segments.digest");
        check_segment(in, out, held.segment);
        out.push_back(held);
    }
}

}  // namespace

Pair ComputeView::pair(uint32_t index) const {
    KVASIR_DCHECK(index < pair_count);
    const uint8_t* at = pairs.data() + size_t{index} * kPairBytes;
    return {load_u16(at), load_u16(at + 2)};
}

std::vector<uint8_t> encode_hello(const Hello& message) {
    KVASIR_CHECK(message.segments.size() <= kSegmentsMax);
    ByteWriter out;
    out.u16(message.major);
    out.u16(message.minor);
    out.bytes(message.node);
    put_text(out, message.name);
    put_build(out, message.build);
    out.bytes(message.model_id);
    out.u32(message.threads);
    out.u32(message.rows_max);
    out.u32(message.pairs_max);
    out.u32(static_cast<uint32_t>(message.segments.size()));
    for (const HeldSegment& held : message.segments) {
        out.u32(held.segment.layer.layer);
        out.u32(held.segment.layer.bank);
        out.u32(held.segment.begin);
        out.u32(held.segment.end);
        out.bytes(held.digest);
    }
    return finish(FrameType::kHello, 0, out);
}

std::vector<uint8_t> encode_welcome(const Welcome& message) {
    ByteWriter out;
    out.u16(message.major);
    out.u16(message.minor);
    out.u64(message.generation);
    out.u32(message.ping_interval_ms);
    put_build(out, message.build);
    return finish(FrameType::kWelcome, 0, out);
}

std::vector<uint8_t> encode_program(const ProgramMessage& message, uint32_t request_id) {
    KVASIR_CHECK(message.code.size() <= kProgramBytesMax);
    ByteWriter out;
    out.u32(message.program);
    out.u32(message.layer.layer);
    out.u32(message.layer.bank);
    out.u32(message.numeric);
    out.u32(static_cast<uint32_t>(message.code.size()));
    out.bytes(message.code);
    return finish(FrameType::kProgram, request_id, out);
}

std::vector<uint8_t> encode_program_ack(const ProgramAck& message, uint32_t request_id) {
    ByteWriter out;
    out.u32(message.program);
    out.u16(message.status);
    put_text(out, message.detail);
    return finish(FrameType::kProgramAck, request_id, out);
}

std::vector<uint8_t> encode_error(const ErrorMessage& message, uint32_t request_id) {
    ByteWriter out;
    out.u16(errc_info(message.code).wire_code);
    put_text(out, message.detail);
    return finish(FrameType::kError, request_id, out);
}

std::vector<uint8_t> encode_ping(uint64_t token, uint32_t request_id) {
    ByteWriter out;
    out.u64(token);
    return finish(FrameType::kPing, request_id, out);
}

std::vector<uint8_t> encode_pong(uint64_t token) {
    ByteWriter out;
    out.u64(token);
    return finish(FrameType::kPong, 0, out);
}

std::vector<uint8_t> encode_simple(FrameType type) {
    KVASIR_CHECK(type == FrameType::kDrain || type == FrameType::kGoodbye);
    return finish(type, 0, ByteWriter());
}

void begin_compute(ByteWriter& out, uint32_t request_id, uint32_t program, uint32_t row_type,
                   uint32_t row_count, std::span<const Pair> pairs, uint64_t rows_bytes) {
    KVASIR_CHECK(pairs.size() <= kPairsMax);
    FrameHeader header;
    header.type = FrameType::kCompute;
    header.request_id = request_id;
    header.payload_bytes = kComputeFixedBytes + pairs.size() * kPairBytes + rows_bytes;
    append_header(out, header);
    uint8_t* at = out.reserve(kComputeFixedBytes + pairs.size() * kPairBytes).data();
    store_u32(at, program);
    store_u32(at + 4, row_type);
    store_u32(at + 8, row_count);
    store_u32(at + 12, static_cast<uint32_t>(pairs.size()));
    at += kComputeFixedBytes;
    for (const Pair& pair : pairs) {
        KVASIR_DCHECK(pair.row < kPairsMax && pair.local < kPairsMax);
        store_u16(at, static_cast<uint16_t>(pair.row));
        store_u16(at + 2, static_cast<uint16_t>(pair.local));
        at += kPairBytes;
    }
}

void begin_result(ByteWriter& out, uint32_t request_id, uint64_t compute_ns, uint32_t pair_count,
                  uint32_t width) {
    FrameHeader header;
    header.type = FrameType::kResult;
    header.request_id = request_id;
    header.payload_bytes = kResultFixedBytes + uint64_t{pair_count} * width * sizeof(float);
    append_header(out, header);
    out.u64(compute_ns);
    out.u32(pair_count);
    out.u32(width);
}

Result<Hello> decode_hello(std::span<const uint8_t> payload) {
    FieldReader in("hello", payload);
    Hello value;
    value.major = in.u16("major");
    value.minor = in.u16("minor");
    if (in.failed()) return tl::unexpected(std::move(in).error());
    // Before anything else: another major version may lay out the rest differently.
    if (auto status = check_version("hello", value.major, value.minor); !status) {
        return tl::unexpected(std::move(status.error()));
    }
    value.node = in.array<16>("node");
    value.name = in.text("name");
    value.build = read_build(in);
    value.model_id = in.array<32>("model_id");
    value.threads = in.u32("threads");
    value.rows_max = in.u32("rows_max");
    value.pairs_max = in.u32("pairs_max");
    if (!in.failed()) {
        if (value.threads == 0) in.wrong("threads", "must not be 0");
        // More than our own limits is fine: the asker keeps to the smaller of the two.
        if (value.rows_max == 0) in.wrong("rows_max", "must not be 0");
        if (value.pairs_max == 0) in.wrong("pairs_max", "must not be 0");
    }
    if (!in.failed()) read_segments(in, value.segments);
    // A newer minor version may append fields; ours must end here.
    if (value.minor <= kProtocolMinor) in.check_finished();
    return done(in, std::move(value));
}

Result<Welcome> decode_welcome(std::span<const uint8_t> payload) {
    FieldReader in("welcome", payload);
    Welcome value;
    value.major = in.u16("major");
    value.minor = in.u16("minor");
    if (in.failed()) return tl::unexpected(std::move(in).error());
    if (auto status = check_version("welcome", value.major, value.minor); !status) {
        return tl::unexpected(std::move(status.error()));
    }
    value.generation = in.u64("generation");
    value.ping_interval_ms = in.u32("ping_interval_ms");
    if (!in.failed() && value.ping_interval_ms == 0) in.wrong("ping_interval_ms", "must not be 0");
    value.build = read_build(in);
    if (value.minor <= kProtocolMinor) in.check_finished();
    return done(in, std::move(value));
}

Result<ProgramMessage> decode_program_message(std::span<const uint8_t> payload) {
    FieldReader in("program", payload);
    ProgramMessage value;
    value.program = in.u32("program");
    value.layer.layer = in.u32("layer");
    value.layer.bank = in.u32("bank");
    value.numeric = in.u32("numeric");
    const uint32_t size = in.u32("code_bytes");
    if (!in.failed()) in.check_count("code_bytes", size, kProgramBytesMax);
    if (!in.failed()) {
        const auto code = in.bytes("code", size);
        value.code.assign(code.begin(), code.end());
        in.check_finished();
    }
    return done(in, std::move(value));
}

Result<ProgramAck> decode_program_ack(std::span<const uint8_t> payload) {
    FieldReader in("program_ack", payload);
    ProgramAck value;
    value.program = in.u32("program");
    value.status = in.u16("status");
    value.detail = in.text("detail");
    in.check_finished();
    return done(in, std::move(value));
}

Result<ComputeView> decode_compute(std::span<const uint8_t> payload) {
    FieldReader in("compute", payload);
    ComputeView view;
    view.program = in.u32("program");
    view.row_type = in.u32("row_type");
    view.row_count = in.u32("row_count");
    view.pair_count = in.u32("pair_count");
    if (in.failed()) return tl::unexpected(std::move(in).error());
    in.check_count("row_count", view.row_count, kRowsMax);
    in.check_count("pair_count", view.pair_count, kPairsMax);
    if (in.failed()) return tl::unexpected(std::move(in).error());
    view.pairs = in.bytes("pairs", view.pair_count * kPairBytes);
    view.rows = in.bytes("rows", in.remaining());
    if (in.failed()) return tl::unexpected(std::move(in).error());
    if (view.rows.empty() || view.rows.size() % view.row_count != 0) {
        in.wrong("rows", std::to_string(view.rows.size()) + " bytes are not " +
                             std::to_string(view.row_count) + " equal rows");
    }
    for (uint32_t i = 0; i < view.pair_count && !in.failed(); ++i) {
        if (view.pair(i).row >= view.row_count) {
            in.wrong("pairs", "row " + std::to_string(view.pair(i).row) + " of " +
                                  std::to_string(view.row_count));
        }
    }
    return done(in, std::move(view));
}

Result<ResultView> decode_result(std::span<const uint8_t> payload) {
    FieldReader in("result", payload);
    ResultView view;
    view.compute_ns = in.u64("compute_ns");
    view.pair_count = in.u32("pair_count");
    view.width = in.u32("width");
    if (in.failed()) return tl::unexpected(std::move(in).error());
    in.check_count("pair_count", view.pair_count, kPairsMax);
    if (view.width == 0) in.wrong("width", "must not be 0");
    const uint64_t wanted = uint64_t{view.pair_count} * view.width * sizeof(float);
    if (!in.failed() && wanted != in.remaining()) {
        in.wrong("rows", std::to_string(in.remaining()) + " bytes, " + std::to_string(wanted) +
                             " expected from pair_count and width");
    }
    if (!in.failed()) view.rows = in.bytes("rows", wanted);
    return done(in, std::move(view));
}

Result<ErrorMessage> decode_error(std::span<const uint8_t> payload) {
    FieldReader in("error", payload);
    ErrorMessage value;
    value.code = errc_from_wire(in.u16("code"));
    value.detail = in.text("detail");
    in.check_finished();
    return done(in, std::move(value));
}

Result<uint64_t> decode_token(std::span<const uint8_t> payload) {
    FieldReader in("token", payload);
    uint64_t value = in.u64("token");
    in.check_finished();
    return done(in, std::move(value));
}

}  // namespace kvasir::wire
