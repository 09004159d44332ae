// Random expert programs: the kernels, by 1 to 16 threads, against a graph of ggml, bit for bit.
#include "engine/kernel_runner.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine_testing.hpp"
#include "engine/kernel_plan.hpp"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

namespace kvasir::engine {
namespace {

using moe::GluKind;
using moe::OpKind;
using moe::SlabPart;
using moe::SlabRole;
using moe::UnaryKind;
using testing::product;
using testing::step;

constexpr uint32_t kExperts = 5;
constexpr SlabRole kRoles[] = {SlabRole::kGate, SlabRole::kUp, SlabRole::kDown, SlabRole::kGateUp};

ExpertEngine& engine_of(uint32_t threads, ComputeWith with) {
    static std::map<std::pair<uint32_t, ComputeWith>, std::unique_ptr<ExpertEngine>> engines;
    auto& engine = engines[{threads, with}];
    if (!engine) engine = testing::make_engine(threads, with);
    return *engine;
}

// A bank of any types and widths, and a program over it.
class RandomBank {
public:
    explicit RandomBank(uint64_t seed) : random_(seed) {
        testing::cpu();  // loads ggml
        meta_.key = {0, 0};
        meta_.experts = kExperts;
        context_.reset(ggml_init({16 * ggml_tensor_overhead(), nullptr, true}));
        const bool fused = below(3) == 0, gated = fused || below(4) != 0;
        const ggml_type gate = any_type(), up = any_type(), down = any_type();
        const uint32_t in = width_for(gate, gated && !fused ? up : gate);
        const uint32_t inner = width_for(down, down);
        const uint32_t out = 1 + below(70);
        uint8_t last = 0;
        if (fused) {
            last = fused_part(gate, in, inner);
        } else if (gated) {
            const uint8_t g = with_extras(SlabRole::kGate, gate, in, inner, 0);
            last = activate(g, with_extras(SlabRole::kUp, up, in, inner, 0));
        } else {
            last = unary(with_extras(SlabRole::kUp, gate, in, inner, 0));
        }
        with_extras(SlabRole::kDown, down, inner, out, last);
        allocate();
    }

    const moe::Program& program() const { return program_; }
    std::string text() const { return text_; }
    uint32_t below(uint32_t n) { return static_cast<uint32_t>(random_() % n); }
    std::shared_ptr<const Bank> prepare(ExpertEngine& engine) const {
        auto bank = engine.prepare(meta_, WeightsForTests::over(tensors_), program_);
        EXPECT_TRUE(bank) << (bank ? "" : bank.error().detail);
        return bank ? *bank : nullptr;
    }

private:
    ggml_type any_type() {
        return static_cast<ggml_type>(kernels::kWeightTypes[below(kernels::kWeightTypeCount)]);
    }
    // Whole blocks of both; SiLU takes 16 at a time.
    uint32_t width_for(ggml_type a, ggml_type b) {
        const auto block = std::max(ggml_blck_size(a), ggml_blck_size(b));
        return static_cast<uint32_t>(block) * (1 + below(block == 32 ? 20 : 3));
    }

    uint8_t add(const moe::ProgramOp& op) {
        program_.ops.push_back(op);
        return static_cast<uint8_t>(program_.ops.size());
    }

    void note(SlabRole role, SlabPart part, ggml_tensor* tensor, uint64_t n_in, uint64_t n_out) {
        tensors_[BankWeights::index(role, part)] = tensor;
        moe::SlabTensor slab;
        slab.name = std::string(to_string(role));
        slab.role = role;
        slab.part = part;
        slab.type = static_cast<uint32_t>(tensor->type);
        slab.n_in = n_in;
        slab.n_out = n_out;
        slab.slab_bytes = ggml_nbytes(tensor) / kExperts;
        meta_.tensors.push_back(slab);
    }

    // A product, then perhaps a bias, a scale for each expert, a scale for all, a clamp.
    uint8_t with_extras(SlabRole role, ggml_type type, uint32_t in, uint32_t out, uint8_t a) {
        text_ += std::string(to_string(role)) + " " + ggml_type_name(type) + " " +
                 std::to_string(in) + "x" + std::to_string(out) + "; ";
        note(role, SlabPart::kWeight, ggml_new_tensor_3d(context_.get(), type, in, out, kExperts),
             in, out);
        uint8_t reg = add(product(role, a));
        if (below(3) == 0) {
            note(role, SlabPart::kBias,
                 ggml_new_tensor_2d(context_.get(), GGML_TYPE_F32, out, kExperts), 0, out);
            reg = add(of_role(OpKind::kAddBias, role, reg));
        }
        if (below(4) == 0) {
            note(role, SlabPart::kScale,
                 ggml_new_tensor_1d(context_.get(), GGML_TYPE_F32, kExperts), 0, 1);
            reg = add(of_role(OpKind::kMulScale, role, reg));
        }
        if (below(6) == 0) reg = add(with_floats(OpKind::kScale, reg, 0.75f, 0.0f));
        if (below(6) == 0) reg = add(with_floats(OpKind::kClamp, reg, -1.5f, 2.5f));
        return reg;
    }
    moe::ProgramOp of_role(OpKind kind, SlabRole role, uint8_t a) {
        moe::ProgramOp op = step(kind, a);
        op.role = role;
        text_ += kind == OpKind::kAddBias ? "bias; " : "scale; ";
        return op;
    }
    moe::ProgramOp with_floats(OpKind kind, uint8_t a, float f0, float f1) {
        moe::ProgramOp op = step(kind, a);
        op.f0 = f0;
        op.f1 = f1;
        text_ += kind == OpKind::kScale ? "factor; " : "clamp; ";
        return op;
    }

    uint8_t fused_part(ggml_type type, uint32_t in, uint32_t inner) {
        const uint8_t both = with_extras(SlabRole::kGateUp, type, in, 2 * inner, 0);
        const bool swapped = below(2) == 0;
        const auto half = [&](bool upper) {
            moe::ProgramOp op = step(OpKind::kView, both);
            op.view_begin = upper ? inner : 0;
            op.view_count = inner;
            return add(op);
        };
        const uint8_t g = half(swapped);
        return activate(g, half(!swapped));
    }

    uint8_t activate(uint8_t gate, uint8_t up) {
        if (below(3) == 0) {
            const uint8_t left = unary(gate);
            return add(step(below(4) == 0 ? OpKind::kAdd : OpKind::kMul, left, up));
        }
        constexpr GluKind kGlus[] = {GluKind::kReglu, GluKind::kGeglu, GluKind::kSwiglu,
                                     GluKind::kSwigluOai};
        const GluKind kind = kGlus[below(4)];
        moe::ProgramOp op = step(OpKind::kGlu, gate, up, static_cast<uint8_t>(kind));
        if (kind == GluKind::kSwigluOai) {
            op.f0 = 1.702f;
            op.f1 = 7.0f;
        }
        text_ += "glu " + std::to_string(op.sub) + "; ";
        return add(op);
    }

    uint8_t unary(uint8_t a) {
        constexpr UnaryKind kUnary[] = {UnaryKind::kSilu, UnaryKind::kGelu, UnaryKind::kRelu};
        const auto kind = static_cast<uint8_t>(kUnary[below(3)]);
        text_ += "unary " + std::to_string(kind) + "; ";
        const uint8_t reg = add(step(OpKind::kUnary, a, 0, kind));
        return below(2) == 0 ? add(step(OpKind::kSqr, reg)) : reg;
    }

    void allocate() {
        buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(context_.get(),
                                                               ggml_backend_cpu_buffer_type()));
        for (SlabRole role : kRoles) {
            for (SlabPart part : {SlabPart::kWeight, SlabPart::kBias, SlabPart::kScale}) {
                if (auto* tensor = tensors_[BankWeights::index(role, part)]) fill(tensor);
            }
        }
    }
    // Some rows are quantised, which takes long, and laid out in another order for every expert.
    void fill(ggml_tensor* t) {
        const int64_t different = std::min<int64_t>(13, ggml_nrows(t)), width = t->ne[0];
        const auto values = testing::random_floats(static_cast<size_t>(different * width),
                                                   random_(), t->ne[2] > 1 ? 0.1f : 1.0f);
        const size_t row_size = ggml_row_size(t->type, width);
        std::vector<uint8_t> rows(row_size * static_cast<size_t>(different));
        if (t->type == GGML_TYPE_F32) {
            std::memcpy(rows.data(), values.data(), rows.size());
        } else {
            const std::vector<float> even(static_cast<size_t>(width), 1.0f);
            ggml_quantize_chunk(t->type, values.data(), rows.data(), 0, different, width,
                                even.data());
        }
        auto* to = static_cast<uint8_t*>(t->data);
        for (int64_t r = 0; r < ggml_nrows(t); ++r, to += row_size) {
            const auto from = static_cast<size_t>((r * 5 + r / different) % different);
            std::memcpy(to, rows.data() + from * row_size, row_size);
        }
    }

    std::mt19937_64 random_;
    moe::ExpertBank meta_;
    moe::Program program_;
    std::string text_;
    ggml_context_ptr context_;
    ggml_backend_buffer_ptr buffer_;
    BankWeights::Tensors tensors_ = {};
};

// Rows, and who gets them: sometimes more rows of an expert than go through the phases at once,
// sometimes rows that nobody gets.
struct Work {
    uint32_t rows = 0;
    std::vector<PairIn> pairs;
};

Work random_work(RandomBank& bank) {
    Work work;
    const uint32_t kind = bank.below(4);
    work.rows = kind == 0 ? 1 : kind == 3 ? 70 + bank.below(80) : 1 + bank.below(12);
    const uint32_t favourite = bank.below(kExperts);
    for (uint32_t r = 0; r < work.rows; ++r) {
        if (kind != 0 && bank.below(10) == 0) continue;
        work.pairs.push_back({r, kind == 3 ? favourite : bank.below(kExperts)});
        if (bank.below(2) == 0) {
            work.pairs.push_back({r, (work.pairs.back().expert + 1) % kExperts});
        }
    }
    if (work.pairs.empty()) work.pairs.push_back({0, favourite});
    for (size_t i = work.pairs.size(); i > 1; --i) {  // callers need not sort
        std::swap(work.pairs[i - 1], work.pairs[bank.below(static_cast<uint32_t>(i))]);
    }
    return work;
}

// The kernels' answer, by each count of threads, is the graph's.
void expect_same(const RandomBank& random, const Work& work, uint32_t row_type,
                 std::span<const uint8_t> rows) {
    ExpertEngine& graph = engine_of(1, ComputeWith::kGraph);
    const auto by_graph = random.prepare(graph);
    ASSERT_TRUE(by_graph);
    const auto out = graph.compute(*by_graph, row_type, work.rows, rows, work.pairs);
    ASSERT_TRUE(out) << out.error().detail;
    const std::vector<float> wanted(out->begin(), out->end());
    // Prepared once: that runs a graph of ggml, whose threads spin when they are more than the
    // cores.
    const auto bank = random.prepare(engine_of(1, ComputeWith::kKernels));
    ASSERT_TRUE(bank);
    ASSERT_TRUE(bank->plan != nullptr) << bank->computed_by();
    for (uint32_t threads : {1u, 2u, 3u, 4u, 16u}) {
        ExpertEngine& engine = engine_of(threads, ComputeWith::kKernels);
        const auto got = engine.compute(*bank, row_type, work.rows, rows, work.pairs);
        ASSERT_TRUE(got) << got.error().detail;
        ASSERT_EQ(got->size(), wanted.size());
        ASSERT_EQ(std::memcmp(got->data(), wanted.data(), got->size_bytes()), 0)
            << threads << " threads";
    }
}

TEST(KernelRunner, RandomProgramsGiveTheBitsOfTheGraph) {
    testing::cpu();  // loads ggml
    if (numeric_class() == kernels::NumericClass::kOther) {
        GTEST_SKIP() << "ggml is of another processor";
    }
    uint32_t with_q8k = 0, large = 0;
    for (uint64_t seed = 1; seed <= 60; ++seed) {
        RandomBank random(seed);
        const Work work = random_work(random);
        SCOPED_TRACE("seed " + std::to_string(seed) + ": " + random.text() +
                     std::to_string(work.rows) + " rows, " + std::to_string(work.pairs.size()) +
                     " pairs");
        const auto bank = random.prepare(engine_of(1, ComputeWith::kGraph));
        ASSERT_TRUE(bank);
        const uint32_t width = bank->shape.input();
        const auto x = testing::random_floats(size_t{work.rows} * width, seed);
        expect_same(random, work, kRowF32, testing::as_bytes(x));
        if (HasFatalFailure()) return;
        large += work.rows >= 70;
        if (!bank->takes_q8k) continue;
        ++with_q8k;
        std::vector<uint8_t> q(row_bytes(kRowQ8K, width) * work.rows);
        ASSERT_TRUE(engine_of(1, ComputeWith::kGraph)
                        .quantise(x.data(), work.rows, width, q.data())
                        .has_value());
        expect_same(random, work, kRowQ8K, q);
        if (HasFatalFailure()) return;
    }
    // What is to be covered was.
    EXPECT_GT(with_q8k, 5u);
    EXPECT_GT(large, 5u);
}

// A call leaves nothing behind that another could see: sizes go up and down.
TEST(KernelRunner, CallsOfAnySizeInAnyOrder) {
    testing::cpu();
    if (numeric_class() == kernels::NumericClass::kOther) {
        GTEST_SKIP() << "ggml is of another processor";
    }
    RandomBank random(7);
    for (uint32_t round = 0; round < 12; ++round) {
        const Work work = random_work(random);
        const auto bank = random.prepare(engine_of(1, ComputeWith::kGraph));
        ASSERT_TRUE(bank);
        const auto x = testing::random_floats(size_t{work.rows} * bank->shape.input(), 100 + round);
        expect_same(random, work, kRowF32, testing::as_bytes(x));
        if (HasFatalFailure()) return;
    }
}

// Products of the toy's weights with one row, by the reference.
std::vector<float> reference_product(const Bank& bank, SlabRole role, uint32_t expert,
                                     const std::vector<float>& x) {
    const kernels::Kernels& reference = testing::reference_kernels();
    const ggml_tensor& weights = *bank.weights.get(role, SlabPart::kWeight);
    const auto type = static_cast<kernels::WeightType>(weights.type);
    const auto width = static_cast<uint32_t>(weights.ne[0]);
    std::vector<int8_t> q(width);
    std::vector<float> d(width);
    std::vector<int16_t> sums(width), pairs(width);
    reference.elementwise.quantise_q8_k(width, x.data(), q.data(), d.data(), sums.data(),
                                        pairs.data());
    reference.arrange(type, width, q.data());
    const kernels::Row row{q.data(), d.data(), sums.data(), pairs.data()};
    std::vector<float> out(static_cast<size_t>(weights.ne[1]));
    reference.dot[kernels::index_of(type)](
        width, static_cast<const uint8_t*>(weights.data) + expert * weights.nb[2], weights.nb[1],
        static_cast<uint32_t>(out.size()), &row, 1, out.data(), out.size());
    return out;
}

// The class that a bank is prepared for decides whose exponential its SiLU has, whatever the class
// of this process's own ggml.
TEST(KernelRunner, TheClassOfTheBankDecidesItsSilu) {
    using kernels::NumericClass;
    const testing::Folder folder;
    const testing::Toy toy(testing::write_toy(folder, "toy.gguf", testing::toy_spec()));
    const kernels::Elementwise& reference = testing::reference_kernels().elementwise;
    const moe::Program silu{{product(SlabRole::kGate, 0),
                             step(OpKind::kUnary, 1, 0, static_cast<uint8_t>(UnaryKind::kSilu))}};
    const moe::Program swiglu{{product(SlabRole::kGate, 0), product(SlabRole::kUp, 0),
                               step(OpKind::kGlu, 1, 2, static_cast<uint8_t>(GluKind::kSwiglu))}};
    const std::vector<float> x = testing::random_floats(256, 3, 4);
    const PairIn pair{0, 5};
    for (const moe::Program* program : {&silu, &swiglu}) {
        SCOPED_TRACE(program == &silu ? "silu" : "swiglu");
        std::vector<float> answers[2];
        for (const NumericClass numeric : {NumericClass::kX86V3, NumericClass::kX86V4}) {
            const bool v4 = numeric == NumericClass::kX86V4;
            SCOPED_TRACE(v4 ? "v4" : "v3");
            ExpertEngine& engine = engine_of(1, ComputeWith::kKernels);
            const auto bank = toy.prepare(engine, {0, 0}, *program, numeric);
            ASSERT_TRUE(bank->plan != nullptr) << bank->computed_by();
            const auto got = engine.compute(*bank, kRowF32, 1, testing::as_bytes(x), {&pair, 1});
            ASSERT_TRUE(got) << got.error().detail;
            std::vector<float> wanted = reference_product(*bank, SlabRole::kGate, pair.expert, x);
            const auto count = static_cast<uint32_t>(wanted.size());
            if (program == &silu) {
                (v4 ? reference.silu_v4 : reference.silu_v3)(count, wanted.data(), nullptr,
                                                             wanted.data());
            } else {
                const auto up = reference_product(*bank, SlabRole::kUp, pair.expert, x);
                (v4 ? reference.swiglu_v4 : reference.swiglu_v3)(count, wanted.data(), up.data(),
                                                                 wanted.data());
            }
            ASSERT_EQ(got->size(), wanted.size());
            EXPECT_EQ(std::memcmp(got->data(), wanted.data(), got->size_bytes()), 0);
            answers[v4].assign(got->begin(), got->end());
        }
        EXPECT_NE(answers[0], answers[1]) << "these values do not tell the classes apart";
    }
}

}  // namespace
}  // namespace kvasir::engine
