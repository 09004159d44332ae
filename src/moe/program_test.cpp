#include "moe/program.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>
#include <limits>
#include <string>

namespace kvasir::moe {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

SlabTensor weight(SlabRole role, uint64_t n_in, uint64_t n_out) {
    SlabTensor tensor;
    tensor.name = "blk.3.ffn_" + std::string(to_string(role)) + "_exps.weight";
    tensor.role = role;
    tensor.n_in = n_in;
    tensor.n_out = n_out;
    return tensor;
}

SlabTensor side(SlabRole role, SlabPart part, uint64_t n_out) {
    SlabTensor tensor;
    tensor.name =
        "blk.3.ffn_" + std::string(to_string(role)) + "_exps." + std::string(to_string(part));
    tensor.role = role;
    tensor.part = part;
    tensor.n_out = n_out;
    return tensor;
}

// 64 -> 96 -> 64, with a bias on gate and a scale on down.
ExpertBank bank() {
    ExpertBank out;
    out.key = {3, 0};
    out.experts = 4;
    out.tensors = {weight(SlabRole::kGate, 64, 96),
                   side(SlabRole::kGate, SlabPart::kBias, 96),
                   weight(SlabRole::kUp, 64, 96),
                   weight(SlabRole::kDown, 96, 64),
                   side(SlabRole::kDown, SlabPart::kScale, 1),
                   weight(SlabRole::kGateUp, 64, 192)};
    return out;
}

ProgramOp product(SlabRole role, uint8_t a) {
    ProgramOp op;
    op.role = role;
    op.a = a;
    return op;
}

ProgramOp with(OpKind kind, uint8_t a, uint8_t b = 0, uint8_t sub = 0) {
    ProgramOp op;
    op.kind = kind;
    op.a = a;
    op.b = b;
    op.sub = sub;
    return op;
}

ProgramOp glu(uint8_t a, uint8_t b) {
    return with(OpKind::kGlu, a, b, static_cast<uint8_t>(GluKind::kSwiglu));
}

Program swiglu() {
    return {{product(SlabRole::kGate, 0), product(SlabRole::kUp, 0), glu(1, 2),
             product(SlabRole::kDown, 3)}};
}

// An operation of any known kind whose fields are in the canonical form, not necessarily valid.
rc::Gen<ProgramOp> any_op() {
    return rc::gen::exec([] {
        ProgramOp op;
        op.kind = static_cast<OpKind>(*rc::gen::inRange(1, 12));
        op.a = *rc::gen::arbitrary<uint8_t>();
        const auto real = [] { return static_cast<float>(*rc::gen::inRange(-1000, 1000)) / 8; };
        switch (op.kind) {
            case OpKind::kMatMul:
            case OpKind::kAddBias:
            case OpKind::kMulScale:
                op.role = static_cast<SlabRole>(*rc::gen::inRange(0, 4));
                break;
            case OpKind::kUnary:
                op.sub = static_cast<uint8_t>(*rc::gen::inRange(1, 8));
                break;
            case OpKind::kGlu:
                op.sub = static_cast<uint8_t>(*rc::gen::inRange(1, 8));
                op.b = *rc::gen::arbitrary<uint8_t>();
                op.f0 = real();
                op.f1 = real();
                break;
            case OpKind::kMul:
            case OpKind::kAdd:
                op.b = *rc::gen::arbitrary<uint8_t>();
                break;
            case OpKind::kScale:
            case OpKind::kClamp:
                op.f0 = real();
                op.f1 = real();
                break;
            case OpKind::kSqr:
                break;
            case OpKind::kView:
                op.view_begin = *rc::gen::arbitrary<uint32_t>();
                op.view_count = *rc::gen::arbitrary<uint32_t>();
                break;
        }
        return op;
    });
}

RC_GTEST_PROP(Program, EncodingRoundTrips, ()) {
    const auto count = *rc::gen::inRange<size_t>(1, kProgramOpsMax + 1);
    const Program program{*rc::gen::container<std::vector<ProgramOp>>(count, any_op())};
    const auto bytes = encode(program);
    RC_ASSERT(bytes.size() == 4 + 24 * count);
    const auto decoded = decode_program(bytes);
    RC_ASSERT(decoded.has_value());
    RC_ASSERT(*decoded == program);
}

// Whatever is accepted is the one encoding of what it means, so no byte can be changed unseen.
RC_GTEST_PROP(Program, ChangedBytesAreRefusedOrMeanSomethingElse, ()) {
    const auto count = *rc::gen::inRange<size_t>(1, 6);
    const Program program{*rc::gen::container<std::vector<ProgramOp>>(count, any_op())};
    const auto good = encode(program);
    for (size_t at = 0; at < good.size(); ++at) {
        for (const int change : {1, 2, 0x10, 0x7f, 0x80, 0xff}) {
            auto bytes = good;
            bytes[at] = static_cast<uint8_t>(bytes[at] ^ change);
            const auto decoded = decode_program(bytes);
            if (!decoded) {
                RC_ASSERT(!decoded.error().detail.empty());
                continue;
            }
            RC_ASSERT(encode(*decoded) == bytes);
        }
    }
}

TEST(Program, EveryLengthButTheRightOneIsRefused) {
    const auto good = encode(swiglu());
    for (size_t size = 0; size < good.size(); ++size) {
        EXPECT_FALSE(decode_program({good.data(), size})) << size;
    }
    auto longer = good;
    longer.push_back(0);
    EXPECT_FALSE(decode_program(longer));
    EXPECT_TRUE(decode_program(good));
}

TEST(Program, CorruptFieldsAreNamed) {
    struct Case {
        const char* what;
        size_t at;
        uint8_t value;
        Errc code;
    };
    const size_t op0 = 4;
    const size_t op2 = 4 + 2 * 24;
    const Case cases[] = {
        {"version 0", 0, 0, Errc::kVersion},
        {"version 2", 0, 2, Errc::kVersion},
        {"version 257", 1, 1, Errc::kVersion},
        {"count 0", 2, 0, Errc::kProtocol},
        {"count - 1", 2, 3, Errc::kProtocol},
        {"count + 1", 2, 5, Errc::kProtocol},
        {"count 49", 2, 49, Errc::kProtocol},
        {"count 65284", 3, 255, Errc::kProtocol},
        {"kind 0", op0, 0, Errc::kUnsupported},
        {"kind 12", op0, 12, Errc::kUnsupported},
        {"kind 255", op0, 255, Errc::kUnsupported},
        {"role 4", op0 + 1, 4, Errc::kUnsupported},
        {"role 255", op0 + 1, 255, Errc::kUnsupported},
        {"sub of a product", op0 + 2, 1, Errc::kUnsupported},
        {"second input of a product", op0 + 4, 1, Errc::kProtocol},
        {"reserved byte", op0 + 5, 1, Errc::kUnsupported},
        {"reserved word", op0 + 6, 1, Errc::kUnsupported},
        {"reserved word, high", op0 + 7, 128, Errc::kUnsupported},
        {"f0 of a product", op0 + 8, 1, Errc::kProtocol},
        {"f0 of a product: -0", op0 + 11, 128, Errc::kProtocol},
        {"f1 of a product", op0 + 12, 1, Errc::kProtocol},
        {"view of a product", op0 + 16, 1, Errc::kProtocol},
        {"view count of a product", op0 + 23, 1, Errc::kProtocol},
        {"role of a GLU", op2 + 1, 1, Errc::kProtocol},
        {"GLU 0", op2 + 2, 0, Errc::kUnsupported},
        {"GLU 8", op2 + 2, 8, Errc::kUnsupported},
        {"GLU as UNARY with a second input", op2, 4, Errc::kProtocol},
    };
    for (const Case& c : cases) {
        auto bytes = encode(swiglu());
        ASSERT_NE(bytes[c.at], c.value) << c.what;
        bytes[c.at] = c.value;
        const auto decoded = decode_program(bytes);
        ASSERT_FALSE(decoded) << c.what;
        EXPECT_EQ(decoded.error().code, c.code) << c.what << ": " << decoded.error().detail;
    }
}

TEST(Program, ShapesFollowFromTheBank) {
    const auto shape = validate(swiglu(), bank());
    ASSERT_TRUE(shape) << shape.error().detail;
    EXPECT_EQ(shape->width, (std::vector<uint32_t>{64, 96, 96, 96, 64}));
    EXPECT_EQ(shape->input(), 64u);
    EXPECT_EQ(shape->output(), 64u);

    ProgramOp low = with(OpKind::kView, 1);
    low.view_count = 96;
    ProgramOp high = low;
    high.view_begin = 96;
    ProgramOp bias = with(OpKind::kAddBias, 2);
    ProgramOp scale = with(OpKind::kMulScale, 6);
    scale.role = SlabRole::kDown;
    const Program fused{{product(SlabRole::kGateUp, 0), low, high, bias, glu(4, 3),
                         product(SlabRole::kDown, 5), scale}};
    const auto fused_shape = validate(fused, bank());
    ASSERT_TRUE(fused_shape) << fused_shape.error().detail;
    EXPECT_EQ(fused_shape->width, (std::vector<uint32_t>{64, 192, 96, 96, 96, 96, 64, 64}));
}

struct BadProgram {
    std::string what;
    Program program;
    Errc code;
};

std::vector<BadProgram> bad_programs() {
    std::vector<BadProgram> out;
    const auto bad = [&](std::string what, std::vector<ProgramOp> ops, Errc code) {
        out.push_back({std::move(what), {std::move(ops)}, code});
    };
    const ProgramOp gate = product(SlabRole::kGate, 0);
    const ProgramOp up = product(SlabRole::kUp, 0);
    bad("0 operations", {}, Errc::kUnsupported);
    bad("49 operations", std::vector<ProgramOp>(49, gate), Errc::kUnsupported);
    bad("no product", {with(OpKind::kSqr, 0)}, Errc::kUnsupported);
    bad("no product of the input", {with(OpKind::kSqr, 0), product(SlabRole::kGate, 1)},
        Errc::kUnsupported);
    bad("reads its own register", {gate, product(SlabRole::kDown, 2)}, Errc::kBadInput);
    bad("reads a later register", {gate, with(OpKind::kSqr, 3), gate}, Errc::kBadInput);
    bad("reads register 255", {gate, with(OpKind::kSqr, 255)}, Errc::kBadInput);
    bad("second input not yet written", {gate, glu(1, 2)}, Errc::kBadInput);
    bad("second input 255", {gate, with(OpKind::kAdd, 1, 255)}, Errc::kBadInput);
    bad("wrong input width", {gate, product(SlabRole::kUp, 1)}, Errc::kBadInput);
    bad("first product reads rows of another width", {gate, product(SlabRole::kDown, 0)},
        Errc::kBadInput);
    bad("two widths", {gate, product(SlabRole::kDown, 1), with(OpKind::kMul, 1, 2)},
        Errc::kBadInput);
    bad("GLU of two widths", {gate, product(SlabRole::kGateUp, 0), glu(2, 1)}, Errc::kBadInput);
    bad("bias of another width", {product(SlabRole::kGateUp, 0), with(OpKind::kAddBias, 1)},
        Errc::kBadInput);
    ProgramOp no_bias = with(OpKind::kAddBias, 1);
    no_bias.role = SlabRole::kUp;
    bad("bias that is not there", {up, no_bias}, Errc::kMismatch);
    bad("scale that is not there", {up, with(OpKind::kMulScale, 1)}, Errc::kMismatch);
    const auto floats = [&](const char* what, OpKind kind, float f0, float f1) {
        ProgramOp op = with(kind, 1);
        op.f0 = f0;
        op.f1 = f1;
        bad(what, {gate, op}, Errc::kBadInput);
    };
    floats("scale by NaN", OpKind::kScale, kNan, 0);
    floats("scale plus NaN", OpKind::kScale, 1, kNan);
    floats("scale by infinity", OpKind::kScale, kInf, 0);
    floats("scale plus -infinity", OpKind::kScale, 1, -kInf);
    floats("clamp NaN", OpKind::kClamp, kNan, 1);
    floats("clamp to NaN", OpKind::kClamp, 0, kNan);
    floats("clamp upside down", OpKind::kClamp, 1, 0);
    ProgramOp oai = glu(1, 1);
    oai.f0 = kInf;
    bad("GLU with infinite alpha", {gate, oai}, Errc::kBadInput);
    const auto view = [&](const char* what, uint32_t begin, uint32_t count) {
        ProgramOp op = with(OpKind::kView, 1);
        op.view_begin = begin;
        op.view_count = count;
        bad(what, {gate, op}, Errc::kBadInput);
    };
    view("empty view", 0, 0);
    view("view one too long", 0, 97);
    view("view from the end", 96, 1);
    view("view beyond the end", 97, 1);
    view("view whose sum wraps", 0xffffffff, 2);
    view("view of 2^32 - 1", 1, 0xffffffff);
    // The input has one row for all pairs of a token, so ggml's row-wise operations could not pair
    // it with the others.
    bad("bias on the input", {gate, with(OpKind::kAddBias, 0)}, Errc::kUnsupported);
    bad("activation of the input", {gate, with(OpKind::kUnary, 0, 0, 1)}, Errc::kUnsupported);
    bad("input as the second factor", {gate, product(SlabRole::kDown, 1), with(OpKind::kMul, 2, 0)},
        Errc::kUnsupported);
    bad("input as the first summand", {gate, product(SlabRole::kDown, 1), with(OpKind::kAdd, 0, 2)},
        Errc::kUnsupported);
    ProgramOp input_view = with(OpKind::kView, 0);
    input_view.view_count = 64;
    bad("view of the input", {gate, input_view}, Errc::kUnsupported);
    return out;
}

TEST(Program, EveryKindOfNonsenseIsRefusedWithItsOperation) {
    for (const BadProgram& c : bad_programs()) {
        const auto shape = validate(c.program, bank());
        ASSERT_FALSE(shape) << c.what;
        EXPECT_EQ(shape.error().code, c.code) << c.what << ": " << shape.error().detail;
        EXPECT_NE(shape.error().detail.find("expert program"), std::string::npos) << c.what;
    }
}

TEST(Program, WhatTheBankLacksIsNamed) {
    for (const SlabRole role : {SlabRole::kGate, SlabRole::kUp, SlabRole::kDown}) {
        ExpertBank smaller = bank();
        std::erase_if(smaller.tensors, [&](const SlabTensor& tensor) {
            return tensor.role == role && tensor.part == SlabPart::kWeight;
        });
        const auto shape = validate(swiglu(), smaller);
        ASSERT_FALSE(shape);
        EXPECT_EQ(shape.error().code, Errc::kMismatch);
        EXPECT_NE(shape.error().detail.find(to_string(role)), std::string::npos)
            << shape.error().detail;
    }
}

TEST(Program, WidthsThatNoModelHasAreRefused) {
    ExpertBank wide = bank();
    wide.tensors[0].n_out = (uint64_t{1} << 32) + 96;  // 96 in 32 bits
    const auto shape = validate(swiglu(), wide);
    ASSERT_FALSE(shape);
    EXPECT_EQ(shape.error().code, Errc::kLimit);
    wide = bank();
    for (size_t i : {0, 2, 5}) wide.tensors[i].n_in = (uint64_t{1} << 32) + 64;
    EXPECT_EQ(validate(swiglu(), wide).error().code, Errc::kLimit);
}

TEST(Program, InfiniteClampsAreFine) {
    ProgramOp clamp = with(OpKind::kClamp, 1);
    clamp.f0 = -kInf;
    clamp.f1 = 7;
    const Program program{{product(SlabRole::kGate, 0), clamp, product(SlabRole::kDown, 2)}};
    EXPECT_TRUE(validate(program, bank()));
    const auto decoded = decode_program(encode(program));
    ASSERT_TRUE(decoded);
    EXPECT_EQ(*decoded, program);
}

TEST(Program, FortyEightOperationsAreTaken) {
    std::vector<ProgramOp> ops(47, product(SlabRole::kGate, 0));
    ops.push_back(product(SlabRole::kDown, 47));
    EXPECT_TRUE(validate({ops}, bank()));
    EXPECT_TRUE(decode_program(encode({ops})));
}

}  // namespace
}  // namespace kvasir::moe
