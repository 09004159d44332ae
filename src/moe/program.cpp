#include "moe/program.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>

#include "base/bytes.hpp"
#include "base/log.hpp"

namespace kvasir::moe {
namespace {

constexpr uint16_t kProgramVersion = 1;
constexpr size_t kOpBytes = 24;
constexpr uint64_t kWidthMax = uint64_t{1} << 24;  // of a register, in elements

std::string at(size_t index, const std::string& what) {
    return "expert program, operation " + std::to_string(index) + ": " + what;
}

// The bank tensor an operation needs, or null.
const SlabTensor* operand(const ProgramOp& op, const ExpertBank& bank) {
    switch (op.kind) {
        case OpKind::kMatMul:
            return bank.find(op.role, SlabPart::kWeight);
        case OpKind::kAddBias:
            return bank.find(op.role, SlabPart::kBias);
        case OpKind::kMulScale:
            return bank.find(op.role, SlabPart::kScale);
        default:
            return nullptr;
    }
}

bool has_two_inputs(OpKind kind) {
    return kind == OpKind::kGlu || kind == OpKind::kMul || kind == OpKind::kAdd;
}

bool floats_ok(const ProgramOp& op) {
    if (std::isnan(op.f0) || std::isnan(op.f1)) return false;
    if (op.kind == OpKind::kClamp) return op.f0 <= op.f1;
    return std::isfinite(op.f0) && std::isfinite(op.f1);
}

// Width of the register an operation writes, given the widths of those before it.
Result<uint32_t> output_width(const ProgramOp& op, size_t index, const ExpertBank& bank,
                              const std::vector<uint32_t>& width) {
    const bool needs_tensor =
        op.kind == OpKind::kMatMul || op.kind == OpKind::kAddBias || op.kind == OpKind::kMulScale;
    const SlabTensor* tensor = operand(op, bank);
    if (tensor != nullptr && std::max(tensor->n_in, tensor->n_out) > kWidthMax) {
        return fail(Errc::kLimit, at(index, printable(tensor->name) + " is wider than " +
                                                std::to_string(kWidthMax)));
    }
    if (needs_tensor && tensor == nullptr) {
        return fail(Errc::kMismatch,
                    at(index, "needs the " + std::string(to_string(op.role)) + " tensor of layer " +
                                  to_string(bank.key) + ", which the bank does not have"));
    }
    const uint32_t in = width[op.a];
    if (has_two_inputs(op.kind) && width[op.b] != in) {
        return fail(Errc::kBadInput, at(index, "its inputs have different widths"));
    }
    switch (op.kind) {
        case OpKind::kMatMul:
            if (tensor->n_in != in) {
                return fail(Errc::kBadInput, at(index, "input width is not the row length of " +
                                                           printable(tensor->name)));
            }
            return static_cast<uint32_t>(tensor->n_out);
        case OpKind::kAddBias:
            if (tensor->n_out != in) {
                return fail(Errc::kBadInput, at(index, "input width is not the length of " +
                                                           printable(tensor->name)));
            }
            return in;
        case OpKind::kView:
            if (op.view_count == 0 || op.view_begin > in || op.view_count > in - op.view_begin) {
                return fail(Errc::kBadInput, at(index, "view outside its input"));
            }
            return op.view_count;
        default:
            return in;
    }
}

// The input has one row where other registers have one for every pair, so only products may read
// it.
bool reads_input_wrongly(const ProgramOp& op) {
    if (op.kind == OpKind::kMatMul) return false;
    return op.a == 0 || (has_two_inputs(op.kind) && op.b == 0);
}

Status check_op(const ProgramOp& op, size_t index) {
    if (op.a > index) return fail(Errc::kBadInput, at(index, "reads a register not yet written"));
    if (has_two_inputs(op.kind) && op.b > index) {
        return fail(Errc::kBadInput, at(index, "reads a register not yet written"));
    }
    if (reads_input_wrongly(op)) {
        return fail(Errc::kUnsupported, at(index, "only products may read the input row"));
    }
    if (!floats_ok(op)) return fail(Errc::kBadInput, at(index, "parameter is not a usable number"));
    return {};
}

bool kind_ok(uint8_t kind, uint8_t role, uint8_t sub) {
    if (kind < static_cast<uint8_t>(OpKind::kMatMul) ||
        kind > static_cast<uint8_t>(OpKind::kView)) {
        return false;
    }
    if (role > static_cast<uint8_t>(SlabRole::kGateUp)) return false;
    if (kind == static_cast<uint8_t>(OpKind::kUnary)) {
        return sub >= 1 && sub <= static_cast<uint8_t>(UnaryKind::kSigmoid);
    }
    if (kind == static_cast<uint8_t>(OpKind::kGlu)) {
        return sub >= 1 && sub <= static_cast<uint8_t>(GluKind::kSwigluClamp);
    }
    return sub == 0;
}

// Every program has one encoding: fields that an operation does not use are zero (-0 is not).
bool unused_fields_zero(const ProgramOp& op) {
    const bool weights =
        op.kind == OpKind::kMatMul || op.kind == OpKind::kAddBias || op.kind == OpKind::kMulScale;
    const bool floats =
        op.kind == OpKind::kScale || op.kind == OpKind::kClamp || op.kind == OpKind::kGlu;
    if (!weights && op.role != SlabRole::kGate) return false;
    if (!has_two_inputs(op.kind) && op.b != 0) return false;
    if (!floats && (std::bit_cast<uint32_t>(op.f0) != 0 || std::bit_cast<uint32_t>(op.f1) != 0))
        return false;
    return op.kind == OpKind::kView || (op.view_begin == 0 && op.view_count == 0);
}

}  // namespace

Result<ProgramShape> validate(const Program& program, const ExpertBank& bank) {
    if (program.ops.empty() || program.ops.size() > kProgramOpsMax) {
        return fail(Errc::kUnsupported, "expert program has " + std::to_string(program.ops.size()) +
                                            " operations (1 to " + std::to_string(kProgramOpsMax) +
                                            " are possible)");
    }
    // The input width is that of the first product; it must read the input register.
    const auto first =
        std::find_if(program.ops.begin(), program.ops.end(),
                     [](const ProgramOp& op) { return op.kind == OpKind::kMatMul && op.a == 0; });
    if (first == program.ops.end()) {
        return fail(Errc::kUnsupported, "expert program has no product with the input row");
    }
    const SlabTensor* weights = bank.find(first->role, SlabPart::kWeight);
    if (weights == nullptr) {
        return fail(Errc::kMismatch, "expert program needs the " +
                                         std::string(to_string(first->role)) + " tensor of layer " +
                                         to_string(bank.key) + ", which the bank does not have");
    }
    if (weights->n_in > kWidthMax) {
        return fail(Errc::kLimit,
                    printable(weights->name) + " is wider than " + std::to_string(kWidthMax));
    }
    ProgramShape shape;
    shape.width.push_back(static_cast<uint32_t>(weights->n_in));
    for (size_t i = 0; i < program.ops.size(); ++i) {
        if (Status ok = check_op(program.ops[i], i); !ok) return tl::unexpected(ok.error());
        auto width = output_width(program.ops[i], i, bank, shape.width);
        if (!width) return tl::unexpected(width.error());
        shape.width.push_back(*width);
    }
    return shape;
}

std::vector<uint8_t> encode(const Program& program) {
    ByteWriter out;
    out.u16(kProgramVersion);
    out.u16(static_cast<uint16_t>(program.ops.size()));
    for (const ProgramOp& op : program.ops) {
        out.u8(static_cast<uint8_t>(op.kind));
        out.u8(static_cast<uint8_t>(op.role));
        out.u8(op.sub);
        out.u8(op.a);
        out.u8(op.b);
        out.u8(0);
        out.u16(0);
        out.f32(op.f0);
        out.f32(op.f1);
        out.u32(op.view_begin);
        out.u32(op.view_count);
    }
    return out.take();
}

Result<Program> decode_program(std::span<const uint8_t> bytes) {
    ByteReader in(bytes);
    const uint16_t version = in.u16();
    const uint16_t count = in.u16();
    if (in.failed()) return fail(Errc::kProtocol, "expert program shorter than its header");
    if (version != kProgramVersion) {
        return fail(Errc::kVersion, "expert program version " + std::to_string(version) +
                                        ", this build speaks " + std::to_string(kProgramVersion));
    }
    if (count == 0 || count > kProgramOpsMax || in.remaining() != count * kOpBytes) {
        return fail(Errc::kProtocol, "expert program of " + std::to_string(count) +
                                         " operations has " + std::to_string(in.remaining()) +
                                         " bytes");
    }
    Program program;
    for (uint16_t i = 0; i < count; ++i) {
        const uint8_t kind = in.u8();
        const uint8_t role = in.u8();
        ProgramOp op;
        op.sub = in.u8();
        op.a = in.u8();
        op.b = in.u8();
        const uint32_t reserved = uint32_t{in.u8()} | in.u16();
        op.f0 = in.f32();
        op.f1 = in.f32();
        op.view_begin = in.u32();
        op.view_count = in.u32();
        if (!kind_ok(kind, role, op.sub) || reserved != 0) {
            return fail(Errc::kUnsupported, at(i, "kind " + std::to_string(kind) + "/" +
                                                      std::to_string(op.sub) + " is not known"));
        }
        op.kind = static_cast<OpKind>(kind);
        op.role = static_cast<SlabRole>(role);
        if (!unused_fields_zero(op))
            return fail(Errc::kProtocol, at(i, "a field it does not use is not zero"));
        program.ops.push_back(op);
    }
    return program;
}

}  // namespace kvasir::moe
