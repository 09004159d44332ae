// The expert program: what the experts of a layer compute, as data.
//
// Captured once per bank from llama.cpp's graph by the backend, sent to workers, validated there,
// and turned into a ggml graph by engine/. It is a straight-line list of row-wise operations over
// numbered registers: register 0 is the input row, operation i writes register i + 1. No pointers,
// strides or shapes travel: widths follow from the bank's own tensors. Thread: values.
//
// Limits: kProgramOpsMax operations.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "moe/model.hpp"

namespace kvasir::moe {

constexpr uint32_t kProgramOpsMax = 48;

// Wire values: never renumber.
enum class OpKind : uint8_t {
    kMatMul = 1,    // out = W[role][expert] · a
    kAddBias = 2,   // out = a + bias[role][expert]
    kMulScale = 3,  // out = a * scale[role][expert]
    kUnary = 4,     // out = unary(a)
    kGlu = 5,       // out = glu(a, b)   a goes through the activation, b is the other half
    kMul = 6,       // out = a * b       elementwise, same width
    kAdd = 7,       // out = a + b
    kScale = 8,     // out = a * f0 + f1
    kClamp = 9,     // out = clamp(a, f0, f1)
    kSqr = 10,      // out = a * a
    kView = 11,     // out = a[view_begin .. view_begin + view_count)
};
enum class UnaryKind : uint8_t {
    kSilu = 1,
    kGelu = 2,
    kGeluQuick = 3,
    kGeluErf = 4,
    kRelu = 5,
    kTanh = 6,
    kSigmoid = 7,
};
enum class GluKind : uint8_t {
    kReglu = 1,
    kGeglu = 2,
    kSwiglu = 3,
    kSwigluOai = 4,
    kGegluErf = 5,
    kGegluQuick = 6,
    kSwigluClamp = 7,
};

struct ProgramOp {
    OpKind kind = OpKind::kMatMul;
    SlabRole role = SlabRole::kGate;  // kMatMul, kAddBias, kMulScale
    uint8_t sub = 0;                  // UnaryKind or GluKind
    uint8_t a = 0;                    // register
    uint8_t b = 0;                    // register (kGlu, kMul, kAdd)
    float f0 = 0, f1 = 0;             // kScale, kClamp, kGlu (alpha, limit)
    uint32_t view_begin = 0;          // kView, in elements
    uint32_t view_count = 0;
    bool operator==(const ProgramOp&) const = default;
};

struct Program {
    std::vector<ProgramOp> ops;  // the last operation's register is the output
    bool operator==(const Program&) const = default;
};

// Widths of all registers (index 0: input) of a valid program over a bank.
struct ProgramShape {
    std::vector<uint32_t> width;
    uint32_t input() const { return width.front(); }
    uint32_t output() const { return width.back(); }
};

// Checks every operation against the bank's tensors: roles present, widths equal, registers defined
// before use, the input read by products only, floats finite (clamp may be infinite), at least one
// product. Errors: kUnsupported, kMismatch, kLimit or kBadInput, naming the operation's number.
Result<ProgramShape> validate(const Program& program, const ExpertBank& bank);

// Wire form: u16 version = 1, u16 count, then 24 bytes an operation. decode() is bounds-checked and
// rejects unknown kinds and non-zero unused fields; it does not know the bank (call validate()).
std::vector<uint8_t> encode(const Program& program);
Result<Program> decode_program(std::span<const uint8_t> bytes);

}  // namespace kvasir::moe
