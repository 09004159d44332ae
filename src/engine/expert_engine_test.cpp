// The engine against ggml graphs built the way llama.cpp builds them: the same bits, for every type
// of weights, any grouping and any number of threads; and what it does with nonsense.
#include "engine/expert_engine.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <string>
#include <tuple>

#include "base/log_testing.hpp"
#include "engine/engine_testing.hpp"
#include "engine/kernels/kernels.hpp"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

namespace kvasir::engine {
namespace {

using namespace testing;
using moe::GluKind;
using moe::OpKind;
using moe::Program;
using moe::SlabPart;
using moe::SlabRole;
using ::testing::StartsWith;

constexpr int64_t kIn = 256;
constexpr int64_t kHidden = 512;
constexpr int64_t kExperts = 6;

// Experts with random weights of one type, in tensors of our own.
class Stack {
public:
    explicit Stack(ggml_type type) : type_(type) {
        const ggml_init_params params = {ggml_tensor_overhead() * 8, nullptr, true};
        context_.reset(ggml_init(params));
        for (const auto& [role, n_in, n_out] :
             {std::tuple(SlabRole::kGate, kIn, kHidden), std::tuple(SlabRole::kUp, kIn, kHidden),
              std::tuple(SlabRole::kDown, kHidden, kIn)}) {
            note(role, SlabPart::kWeight,
                 ggml_new_tensor_3d(context_.get(), type_, n_in, n_out, kExperts), n_in, n_out);
        }
        note(SlabRole::kGate, SlabPart::kBias,
             ggml_new_tensor_2d(context_.get(), GGML_TYPE_F32, kHidden, kExperts), 0, kHidden);
        note(SlabRole::kDown, SlabPart::kBias,
             ggml_new_tensor_2d(context_.get(), GGML_TYPE_F32, kIn, kExperts), 0, kIn);
        note(SlabRole::kDown, SlabPart::kScale,
             ggml_new_tensor_1d(context_.get(), GGML_TYPE_F32, kExperts), 0, 1);
        buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(
            context_.get(), ggml_backend_dev_buffer_type(cpu())));
        for (ggml_tensor* tensor : tensors_) {
            if (tensor != nullptr) fill(tensor);
        }
        meta_.key = {0, 0};
        meta_.experts = kExperts;
    }

    const moe::ExpertBank& meta() const { return meta_; }
    ggml_tensor* get(SlabRole role, SlabPart part = SlabPart::kWeight) const {
        return tensors_[BankWeights::index(role, part)];
    }
    BankWeights weights() const { return WeightsForTests::over(tensors_); }
    std::shared_ptr<const Bank> prepare(ExpertEngine& engine,
                                        const Program& program = swiglu()) const {
        auto bank = engine.prepare(meta_, weights(), program);
        EXPECT_TRUE(bank) << (bank ? "" : bank.error().detail);
        return bank ? *bank : nullptr;
    }

private:
    // Every index into a grid means something, so any bytes will do but for the scale; ggml's
    // quantisers for these types spend seconds on tables.
    void random_blocks(ggml_type type, std::vector<uint8_t>& rows) {
        std::mt19937_64 random(++seed_);
        for (uint8_t& byte : rows) byte = static_cast<uint8_t>(random());
        const size_t block = ggml_type_size(type);
        for (size_t at = 0; at < rows.size(); at += block) {
            if (type == GGML_TYPE_IQ1_M) {  // its exponent is the high half of the last byte
                rows[at + block - 1] = static_cast<uint8_t>((rows[at + block - 1] & 0x0f) | 0x20);
            } else {  // f16 in front
                rows[at + 1] = static_cast<uint8_t>((rows[at + 1] & 0x03) | 0x20);
            }
        }
    }

    // Some rows are quantised and laid out in another order for every expert.
    void fill(ggml_tensor* tensor) {
        const int64_t width = tensor->ne[0];
        const int64_t different = std::min<int64_t>(37, ggml_nrows(tensor));
        const float size = ggml_n_dims(tensor) == 3 ? 0.05f : 1.0f;
        const auto values = random_floats(static_cast<size_t>(width * different), ++seed_, size);
        const size_t row_size = ggml_row_size(tensor->type, width);
        std::vector<uint8_t> rows(row_size * static_cast<size_t>(different));
        if (tensor->type == GGML_TYPE_F32) {
            std::memcpy(rows.data(), values.data(), rows.size());
        } else if (depends_on_grouping(static_cast<uint32_t>(tensor->type))) {
            random_blocks(tensor->type, rows);
        } else {
            const std::vector<float> importance(static_cast<size_t>(width), 1.0f);
            ggml_quantize_chunk(tensor->type, values.data(), rows.data(), 0, different, width,
                                importance.data());
        }
        for (int64_t r = 0; r < ggml_nrows(tensor); ++r) {
            const auto from = static_cast<size_t>((r * 7 + r / different) % different);
            ggml_backend_tensor_set(tensor, rows.data() + from * row_size,
                                    static_cast<size_t>(r) * row_size, row_size);
        }
    }

    void note(SlabRole role, SlabPart part, ggml_tensor* tensor, int64_t n_in, int64_t n_out) {
        tensors_[BankWeights::index(role, part)] = tensor;
        moe::SlabTensor slab;
        slab.name = "blk.0." + std::string(to_string(role)) + "." + std::string(to_string(part));
        slab.role = role;
        slab.part = part;
        slab.type = static_cast<uint32_t>(tensor->type);
        slab.n_in = static_cast<uint64_t>(n_in);
        slab.n_out = static_cast<uint64_t>(n_out);
        slab.slab_bytes = ggml_nbytes(tensor) / size_t{kExperts};
        meta_.tensors.push_back(slab);
    }

    ggml_type type_;
    uint64_t seed_ = 0;
    ggml_context_ptr context_;
    ggml_backend_buffer_ptr buffer_;
    BankWeights::Tensors tensors_ = {};
    moe::ExpertBank meta_;
};

// One for each type: quantising is most of the cost of a test.
const Stack& stack_of(ggml_type type) {
    static std::map<ggml_type, std::unique_ptr<Stack>> made;
    auto& stack = made[type];
    if (!stack) stack = std::make_unique<Stack>(type);
    return *stack;
}

// Runs one graph on the CPU backend and returns the result.
class Reference {
public:
    Reference() {
        const ggml_init_params params = {size_t{1} << 20, nullptr, true};
        context_.reset(ggml_init(params));
        backend_.reset(ggml_backend_dev_init(cpu(), nullptr));
        pool_ = set_threads(backend_.get(), 1);  // its default is four that spin
    }
    ~Reference() {
        backend_.reset();
        free_threads(pool_);
    }
    Reference(const Reference&) = delete;
    Reference& operator=(const Reference&) = delete;
    ggml_context* context() const { return context_.get(); }
    // [n, 1, tokens] and [used, tokens], as build_moe_ffn has them.
    ggml_tensor* rows(const std::vector<float>& values, int64_t width) {
        const int64_t tokens = static_cast<int64_t>(values.size()) / width;
        return input(ggml_new_tensor_3d(context(), GGML_TYPE_F32, width, 1, tokens), values.data());
    }
    ggml_tensor* ids(const std::vector<int32_t>& values, int64_t used) {
        const int64_t tokens = static_cast<int64_t>(values.size()) / used;
        return input(ggml_new_tensor_2d(context(), GGML_TYPE_I32, used, tokens), values.data());
    }
    std::vector<float> run(ggml_tensor* output) {
        ggml_cgraph* graph = ggml_new_graph(context());
        ggml_set_output(output);
        ggml_build_forward_expand(graph, output);
        ggml_gallocr_ptr allocator(ggml_gallocr_new(ggml_backend_dev_buffer_type(cpu())));
        EXPECT_TRUE(ggml_gallocr_alloc_graph(allocator.get(), graph));
        for (const auto& [tensor, data] : inputs_) {
            ggml_backend_tensor_set(tensor, data, 0, ggml_nbytes(tensor));
        }
        EXPECT_EQ(ggml_backend_graph_compute(backend_.get(), graph), GGML_STATUS_SUCCESS);
        std::vector<float> out(static_cast<size_t>(ggml_nelements(output)));
        ggml_backend_tensor_get(output, out.data(), 0, ggml_nbytes(output));
        return out;
    }

private:
    ggml_tensor* input(ggml_tensor* tensor, const void* data) {
        ggml_set_input(tensor);
        inputs_[tensor] = data;
        return tensor;
    }
    ggml_context_ptr context_;
    ggml_backend_ptr backend_;
    ggml_threadpool* pool_ = nullptr;
    std::map<ggml_tensor*, const void*> inputs_;
};

// gate and up, SwiGLU, down for `ids` [used, tokens].
std::vector<float> reference_swiglu(const Stack& stack, const std::vector<float>& rows,
                                    const std::vector<int32_t>& ids, int64_t used) {
    Reference graph;
    ggml_context* c = graph.context();
    ggml_tensor* x = graph.rows(rows, kIn);
    ggml_tensor* i = graph.ids(ids, used);
    ggml_tensor* gate = ggml_mul_mat_id(c, stack.get(SlabRole::kGate), x, i);
    ggml_tensor* up = ggml_mul_mat_id(c, stack.get(SlabRole::kUp), x, i);
    return graph.run(
        ggml_mul_mat_id(c, stack.get(SlabRole::kDown), ggml_swiglu_split(c, gate, up), i));
}

std::vector<PairIn> pairs_of(const std::vector<int32_t>& ids, int64_t used) {
    std::vector<PairIn> pairs;
    for (size_t i = 0; i < ids.size(); ++i) {
        pairs.push_back(
            {static_cast<uint32_t>(i / static_cast<size_t>(used)), static_cast<uint32_t>(ids[i])});
    }
    return pairs;
}

// `used` different experts a token.
std::vector<int32_t> random_ids(size_t tokens, int64_t used, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<int32_t> all(kExperts), out;
    std::iota(all.begin(), all.end(), 0);
    for (size_t t = 0; t < tokens; ++t) {
        std::shuffle(all.begin(), all.end(), random);
        out.insert(out.end(), all.begin(), all.begin() + used);
    }
    return out;
}

std::vector<float> compute(ExpertEngine& engine, const Bank& bank, const std::vector<float>& rows,
                           const std::vector<PairIn>& pairs) {
    auto out =
        engine.compute(bank, kRowF32, static_cast<uint32_t>(rows.size() / bank.shape.input()),
                       as_bytes(rows), pairs);
    EXPECT_TRUE(out) << (out ? "" : out.error().detail);
    return out ? std::vector<float>(out->begin(), out->end()) : std::vector<float>();
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && !a.empty() &&
           std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

class EveryType : public ::testing::TestWithParam<std::tuple<int, uint32_t>> {
protected:
    ggml_type type() const { return static_cast<ggml_type>(std::get<0>(GetParam())); }
    uint32_t threads() const { return std::get<1>(GetParam()); }
};

TEST_P(EveryType, OneRowGivesTheBitsOfLlama) {
    const Stack& stack = stack_of(type());
    auto engine = make_engine(threads());
    const auto bank = stack.prepare(*engine);
    ASSERT_TRUE(bank);
    for (int64_t used : {1, 2, 5}) {
        const auto rows = random_floats(kIn, 77 + static_cast<uint64_t>(used));
        const auto ids = random_ids(1, used, 5);
        EXPECT_TRUE(same_bits(compute(*engine, *bank, rows, pairs_of(ids, used)),
                              reference_swiglu(stack, rows, ids, used)))
            << used;
    }
}

TEST_P(EveryType, ManyRowsGiveTheBitsOfLlama) {
    const Stack& stack = stack_of(type());
    auto engine = make_engine(threads());
    const auto bank = stack.prepare(*engine);
    ASSERT_TRUE(bank);
    for (size_t tokens : {2, 35}) {
        const auto rows = random_floats(tokens * kIn, 100 + tokens);
        const auto ids = random_ids(tokens, 3, tokens);
        EXPECT_TRUE(same_bits(compute(*engine, *bank, rows, pairs_of(ids, 3)),
                              reference_swiglu(stack, rows, ids, 3)))
            << tokens;
    }
}

// Pairs in another order, some of the rows only, one pair at a time, an expert's rows split over
// calls: the same bits but for grid types, whose rows of an expert must stay together.
TEST_P(EveryType, GroupingDoesNotChangeBits) {
    const Stack& stack = stack_of(type());
    auto engine = make_engine(threads());
    const auto bank = stack.prepare(*engine);
    ASSERT_TRUE(bank);
    const size_t tokens = 24;
    const auto rows = random_floats(tokens * kIn, 8);
    const auto ids = random_ids(tokens, 3, 9);
    const auto pairs = pairs_of(ids, 3);
    const auto want = reference_swiglu(stack, rows, ids, 3);
    const auto row_of = [&](size_t pair) {
        return std::vector<float>(want.begin() + static_cast<long>(pair) * kIn,
                                  want.begin() + static_cast<long>(pair + 1) * kIn);
    };
    // All rows of one expert in one call, experts in separate calls.
    for (uint32_t expert = 0; expert < kExperts; ++expert) {
        std::vector<PairIn> some;
        std::vector<float> expected;
        for (size_t i = pairs.size(); i-- > 0;) {
            if (pairs[i].expert != expert) continue;
            some.push_back(pairs[i]);
            const auto row = row_of(i);
            expected.insert(expected.end(), row.begin(), row.end());
        }
        ASSERT_FALSE(some.empty());
        EXPECT_TRUE(same_bits(compute(*engine, *bank, rows, some), expected)) << expert;
    }
    bool equal = true;
    std::mt19937_64 random(3);
    for (size_t begin = 0; begin < pairs.size();) {
        const size_t end = std::min(pairs.size(), begin + 1 + random() % 7);
        const std::vector<PairIn> some(pairs.begin() + static_cast<long>(begin),
                                       pairs.begin() + static_cast<long>(end));
        const auto got = compute(*engine, *bank, rows, some);
        for (size_t i = begin; i < end; ++i) {
            equal &= std::memcmp(got.data() + (i - begin) * kIn, row_of(i).data(),
                                 kIn * sizeof(float)) == 0;
        }
        begin = end;
    }
    EXPECT_TRUE(equal || depends_on_grouping(type()));
}

TEST_P(EveryType, Q8KRowsAreExactlyAsGoodWhereTheyAreTaken) {
    const Stack& stack = stack_of(type());
    auto engine = make_engine(threads());
    const auto bank = stack.prepare(*engine);
    ASSERT_TRUE(bank);
    switch (type()) {
        case GGML_TYPE_Q2_K:
        case GGML_TYPE_Q3_K:
        case GGML_TYPE_Q4_K:
        case GGML_TYPE_Q5_K:
        case GGML_TYPE_Q6_K:
            EXPECT_TRUE(bank->takes_q8k);
            break;
        case GGML_TYPE_F32:
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16:
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_Q8_0:
            EXPECT_FALSE(bank->takes_q8k);
            break;
        default:
            break;
    }
    EXPECT_FALSE(bank->takes_q8k && depends_on_grouping(type()));
    for (size_t tokens : {1, 20}) {
        auto rows = random_floats(tokens * kIn, 21);
        std::fill_n(rows.begin(), kIn / 2, 0.0f);  // blocks of nothing but zeros too
        const auto pairs = pairs_of(random_ids(tokens, 2, 22), 2);
        std::vector<uint8_t> quantised(row_bytes(kRowQ8K, kIn) * tokens);
        ASSERT_TRUE(
            engine->quantise(rows.data(), static_cast<uint32_t>(tokens), kIn, quantised.data()));
        auto out = engine->compute(*bank, kRowQ8K, static_cast<uint32_t>(tokens), quantised, pairs);
        if (!bank->takes_q8k) {
            ASSERT_FALSE(out);
            EXPECT_EQ(out.error().code, Errc::kProtocol);
            continue;
        }
        ASSERT_TRUE(out) << out.error().detail;
        const std::vector<float> got(out->begin(), out->end());
        EXPECT_TRUE(same_bits(got, compute(*engine, *bank, rows, pairs))) << tokens;
    }
}

constexpr int kTypes[] = {GGML_TYPE_F32,    GGML_TYPE_F16,    GGML_TYPE_BF16,    GGML_TYPE_Q4_0,
                          GGML_TYPE_Q4_1,   GGML_TYPE_Q5_0,   GGML_TYPE_Q5_1,    GGML_TYPE_Q8_0,
                          GGML_TYPE_Q2_K,   GGML_TYPE_Q3_K,   GGML_TYPE_Q4_K,    GGML_TYPE_Q5_K,
                          GGML_TYPE_Q6_K,   GGML_TYPE_IQ4_NL, GGML_TYPE_IQ4_XS,  GGML_TYPE_IQ2_XXS,
                          GGML_TYPE_IQ2_XS, GGML_TYPE_IQ2_S,  GGML_TYPE_IQ3_XXS, GGML_TYPE_IQ3_S,
                          GGML_TYPE_IQ1_S,  GGML_TYPE_IQ1_M,  GGML_TYPE_TQ1_0,   GGML_TYPE_TQ2_0,
                          GGML_TYPE_MXFP4,  GGML_TYPE_NVFP4,  GGML_TYPE_Q1_0,    GGML_TYPE_Q2_0};
std::string type_and_threads(const ::testing::TestParamInfo<std::tuple<int, uint32_t>>& param) {
    return std::string(ggml_type_name(static_cast<ggml_type>(std::get<0>(param.param)))) +
           "_threads" + std::to_string(std::get<1>(param.param));
}
INSTANTIATE_TEST_SUITE_P(OneThread, EveryType,
                         ::testing::Combine(::testing::ValuesIn(kTypes), ::testing::Values(1u)),
                         type_and_threads);
// ggml's threads spin at barriers, which is slow where every core is taken: one type of each
// family.
INSTANTIATE_TEST_SUITE_P(
    TwoThreads, EveryType,
    ::testing::Combine(::testing::Values(int{GGML_TYPE_F16}, int{GGML_TYPE_Q4_K},
                                         int{GGML_TYPE_Q8_0}, int{GGML_TYPE_IQ4_XS}),
                       ::testing::Values(2u)),
    type_and_threads);

// From how many rows on a grid type's kernel changes, as ggml documents it (GGML_IQP_MIN_BATCH):
// the reason for keeping all rows of an expert in one call. Below it, any grouping gives the same
// bits.
TEST(GridTypes, FewRowsOfAnExpertAreTheSameInAnyGrouping) {
    const Stack& stack = stack_of(GGML_TYPE_IQ3_S);
    auto engine = make_engine();
    const auto bank = stack.prepare(*engine);
    const auto rows = random_floats(32 * kIn, 4);
    size_t first_other = 0;
    for (size_t count = 1; count <= 32 && first_other == 0; ++count) {
        std::vector<PairIn> pairs;
        for (uint32_t i = 0; i < count; ++i) pairs.push_back({i, 2});
        const auto together = compute(*engine, *bank, rows, pairs);
        std::vector<float> apart;
        for (const PairIn& pair : pairs) {
            const auto one = compute(*engine, *bank, rows, {pair});
            apart.insert(apart.end(), one.begin(), one.end());
        }
        if (!same_bits(together, apart)) first_other = count;
    }
    RecordProperty("rows_from_which_bits_change", static_cast<int>(first_other));
    EXPECT_TRUE(first_other == 0 || first_other >= 8) << first_other;
}

// ---- other chains than SwiGLU ------------------------------------------------------------------

TEST(Chains, BiasesScalesClampsAndOaiGiveTheBitsOfLlama) {
    const Stack& stack = stack_of(GGML_TYPE_Q4_K);
    moe::ProgramOp clamp = step(OpKind::kClamp, 1);
    clamp.f0 = -0.5f;
    clamp.f1 = 0.75f;
    moe::ProgramOp scale = step(OpKind::kScale, 2);
    scale.f0 = 1.25f;
    scale.f1 = 0.125f;
    moe::ProgramOp oai = step(OpKind::kGlu, 5, 3, static_cast<uint8_t>(GluKind::kSwigluOai));
    oai.f0 = 1.702f;
    oai.f1 = 7.0f;
    moe::ProgramOp down_bias = step(OpKind::kAddBias, 7);
    down_bias.role = SlabRole::kDown;
    moe::ProgramOp down_scale = step(OpKind::kMulScale, 8);
    down_scale.role = SlabRole::kDown;
    const Program program{{product(SlabRole::kUp, 0), clamp, scale, product(SlabRole::kGate, 0),
                           step(OpKind::kAddBias, 4), oai, product(SlabRole::kDown, 6), down_bias,
                           down_scale}};
    auto engine = make_engine();
    const auto bank = stack.prepare(*engine, program);
    ASSERT_TRUE(bank);
    for (size_t tokens : {1, 12}) {
        const auto rows = random_floats(tokens * kIn, 31);
        const auto ids = random_ids(tokens, 2, 32);
        Reference graph;
        ggml_context* c = graph.context();
        ggml_tensor* x = graph.rows(rows, kIn);
        ggml_tensor* i = graph.ids(ids, 2);
        ggml_tensor* up = ggml_mul_mat_id(c, stack.get(SlabRole::kUp), x, i);
        up = ggml_scale_bias(c, ggml_clamp(c, up, -0.5f, 0.75f), 1.25f, 0.125f);
        ggml_tensor* gate = ggml_mul_mat_id(c, stack.get(SlabRole::kGate), x, i);
        gate = ggml_add_id(c, gate, stack.get(SlabRole::kGate, SlabPart::kBias), i);
        ggml_tensor* h = ggml_swiglu_oai(c, gate, up, 1.702f, 7.0f);
        ggml_tensor* y = ggml_mul_mat_id(c, stack.get(SlabRole::kDown), h, i);
        y = ggml_add_id(c, y, stack.get(SlabRole::kDown, SlabPart::kBias), i);
        ggml_tensor* s =
            ggml_reshape_3d(c, stack.get(SlabRole::kDown, SlabPart::kScale), 1, kExperts, 1);
        s = ggml_repeat_4d(c, s, 1, kExperts, static_cast<int64_t>(tokens), 1);
        y = ggml_mul(c, y, ggml_get_rows(c, s, i));
        EXPECT_TRUE(same_bits(compute(*engine, *bank, rows, pairs_of(ids, 2)), graph.run(y)))
            << tokens;
    }
}

TEST(Chains, SquaredReluWithoutGateGivesTheBitsOfLlama) {
    const Stack& stack = stack_of(GGML_TYPE_Q8_0);
    const Program program{{product(SlabRole::kUp, 0),
                           step(OpKind::kUnary, 1, 0, static_cast<uint8_t>(moe::UnaryKind::kRelu)),
                           step(OpKind::kSqr, 2), product(SlabRole::kDown, 3)}};
    auto engine = make_engine();
    const auto bank = stack.prepare(*engine, program);
    ASSERT_TRUE(bank);
    const auto rows = random_floats(5 * kIn, 41);
    const auto ids = random_ids(5, 2, 42);
    Reference graph;
    ggml_context* c = graph.context();
    ggml_tensor* i = graph.ids(ids, 2);
    ggml_tensor* h = ggml_mul_mat_id(c, stack.get(SlabRole::kUp), graph.rows(rows, kIn), i);
    h = ggml_sqr(c, ggml_relu(c, h));
    EXPECT_TRUE(same_bits(compute(*engine, *bank, rows, pairs_of(ids, 2)),
                          graph.run(ggml_mul_mat_id(c, stack.get(SlabRole::kDown), h, i))));
}

// Every kind of operation, on views and whole registers, with one row for all pairs and with many:
// whatever validate() lets through must run, since ggml aborts on shapes that do not fit.
TEST(Chains, WhatIsValidRuns) {
    const Stack& stack = stack_of(GGML_TYPE_F32);
    auto engine = make_engine();
    const auto rows = random_floats(3 * kHidden, 51);
    std::mt19937_64 random(52);
    int ran = 0;
    for (int round = 0; round < 12000; ++round) {
        Program program;
        const size_t count = 1 + random() % 8;
        for (size_t i = 0; i < count; ++i) {
            moe::ProgramOp op;
            op.kind = static_cast<OpKind>(1 + random() % 11);
            op.role = static_cast<SlabRole>(random() % 4);
            op.a = static_cast<uint8_t>(random() % (i + 1));
            op.b = static_cast<uint8_t>(random() % (i + 1));
            if (op.kind == OpKind::kUnary || op.kind == OpKind::kGlu)
                op.sub = static_cast<uint8_t>(1 + random() % 7);
            op.view_begin = static_cast<uint32_t>(random() % 64);
            op.view_count = static_cast<uint32_t>(1 + random() % 512);
            op.f1 = 1;
            program.ops.push_back(op);
        }
        if (!moe::validate(program, stack.meta())) continue;
        auto bank = engine->prepare(stack.meta(), stack.weights(), program);
        if (!bank) continue;
        ++ran;
        for (uint32_t row_count : {1u, 3u}) {
            const std::vector<PairIn> pairs = {
                {0, 1}, {row_count - 1, 5}, {0, 1}, {row_count - 1, 0}};
            auto out = engine->compute(
                **bank, kRowF32, row_count,
                as_bytes(rows).first(row_count * (*bank)->shape.input() * sizeof(float)), pairs);
            ASSERT_TRUE(out) << out.error().detail;
            ASSERT_EQ(out->size(), pairs.size() * (*bank)->shape.output());
            // Equal pairs, equal rows: nothing depends on what was in memory before.
            const size_t bytes = (*bank)->shape.output() * sizeof(float);
            ASSERT_EQ(std::memcmp(out->data(), out->data() + 2 * (*bank)->shape.output(), bytes), 0)
                << round;
        }
    }
    EXPECT_GT(ran, 50);
}

// ---- nonsense -----------------------------------------------------------------------------------

// A product whose first value is one bit off.
void off_by_a_bit(uint32_t width, const uint8_t* weights, size_t stride, uint32_t weight_rows,
                  const kernels::Row* rows, uint32_t row_count, float* out, size_t out_stride) {
    reference_kernels().dot[kernels::index_of(kernels::WeightType::kQ4_K)](
        width, weights, stride, weight_rows, rows, row_count, out, out_stride);
    out[0] = std::nextafter(out[0], 1e9f);
}

// Kernels that do not give the bits of this very ggml are not used, and the log says so.
TEST(WrongKernels, AreNoticedWhenABankIsPrepared) {
    Stack stack(GGML_TYPE_Q4_K);
    const kernels::NumericClass numeric = numeric_class();
    if (numeric == kernels::NumericClass::kOther) GTEST_SKIP() << "ggml is of another processor";
    const Program program{{product(SlabRole::kGate, 0)}};
    kernels::Kernels wrong = reference_kernels();
    auto right = ExpertEngine::make(cpu(), 1, ComputeWith::kKernels, &wrong);
    ASSERT_TRUE(right);
    EXPECT_THAT(stack.prepare(**right, program)->computed_by(), StartsWith("kernels "));
    wrong.dot[kernels::index_of(kernels::WeightType::kQ4_K)] = off_by_a_bit;
    auto engine = ExpertEngine::make(cpu(), 1, ComputeWith::kKernels, &wrong);
    ASSERT_TRUE(engine);
    const kvasir::testing::LogCapture log;
    const auto bank = stack.prepare(**engine, program);
    EXPECT_EQ(bank->computed_by(), "ggml: the kernels give other bits than this ggml");
    EXPECT_EQ(log.with("the kernels give other bits than this ggml: not used").size(), 1u);
    // And the answer is ggml's.
    auto graph = make_engine(1, ComputeWith::kGraph);
    const auto wanted_bank = stack.prepare(*graph, program);
    const auto x = random_floats(kIn, 8);
    const PairIn pair{0, 2};
    const auto got = (*engine)->compute(*bank, kRowF32, 1, as_bytes(x), {&pair, 1});
    const auto wanted = graph->compute(*wanted_bank, kRowF32, 1, as_bytes(x), {&pair, 1});
    ASSERT_TRUE(got && wanted);
    EXPECT_THAT(*got, ::testing::ElementsAreArray(*wanted));
    // The other class's bits are not this ggml's to judge: the backbone's challenge does that.
    const auto other = numeric == kernels::NumericClass::kX86V3 ? kernels::NumericClass::kX86V4
                                                                : kernels::NumericClass::kX86V3;
    const auto unjudged = (*engine)->prepare(stack.meta(), stack.weights(), program, other);
    ASSERT_TRUE(unjudged);
    EXPECT_THAT((*unjudged)->computed_by(), StartsWith("kernels "));
}

TEST(BadCalls, AreTypedErrorsAndTheNextCallIsRight) {
    const Stack& stack = stack_of(GGML_TYPE_Q4_K);
    auto engine = make_engine();
    const auto bank = stack.prepare(*engine);
    const auto rows = random_floats(4 * kIn, 61);
    const auto ids = random_ids(4, 2, 62);
    const auto good = pairs_of(ids, 2);
    const auto want = reference_swiglu(stack, rows, ids, 2);
    const uint64_t row = kIn * sizeof(float);
    constexpr uint32_t kMax = std::numeric_limits<uint32_t>::max();
    struct Case {
        const char* what;
        uint32_t type, row_count;
        uint64_t bytes;
        std::vector<PairIn> pairs;
        Errc code;
    };
    const Case cases[] = {
        {"expert = n", 0, 4, 4 * row, {{0, kExperts}}, Errc::kNotHeld},
        {"expert = n + 1", 0, 4, 4 * row, {{0, kExperts + 1}}, Errc::kNotHeld},
        {"expert = 2^31 - 1", 0, 4, 4 * row, {{0, 0x7fffffff}}, Errc::kNotHeld},
        {"expert = -1", 0, 4, 4 * row, {{0, kMax}}, Errc::kNotHeld},
        {"a bad one behind good ones", 0, 4, 4 * row, {{0, 0}, {1, 1}, {2, kMax}}, Errc::kNotHeld},
        {"row = n", 0, 4, 4 * row, {{4, 0}}, Errc::kProtocol},
        {"row = -1", 0, 4, 4 * row, {{kMax, 0}}, Errc::kProtocol},
        {"one byte short", 0, 4, 4 * row - 1, {{0, 0}}, Errc::kProtocol},
        {"one row short", 0, 4, 3 * row, {{0, 0}}, Errc::kProtocol},
        {"one row more", 0, 3, 4 * row, {{0, 0}}, Errc::kProtocol},
        {"no rows but bytes", 0, 0, 4 * row, {}, Errc::kProtocol},
        {"no rows but a pair", 0, 0, 0, {{0, 0}}, Errc::kProtocol},
        {"2^32 - 1 rows", 0, kMax, 4 * row, {{0, 0}}, Errc::kProtocol},
        {"f16 rows", 1, 4, 2 * row, {{0, 0}}, Errc::kProtocol},
        {"f32 bytes called Q8_K", kRowQ8K, 4, 4 * row, {{0, 0}}, Errc::kProtocol},
        {"type 4", 4, 4, 4 * row, {{0, 0}}, Errc::kProtocol},
        {"type 2^31", 0x80000000u, 4, 4 * row, {{0, 0}}, Errc::kProtocol},
        {"type -1", kMax, 4, 4 * row, {{0, 0}}, Errc::kProtocol},
    };
    for (const Case& c : cases) {
        const auto out =
            engine->compute(*bank, c.type, c.row_count, as_bytes(rows).first(c.bytes), c.pairs);
        ASSERT_FALSE(out) << c.what;
        EXPECT_EQ(out.error().code, c.code) << c.what << ": " << out.error().detail;
        EXPECT_TRUE(same_bits(compute(*engine, *bank, rows, good), want)) << "after " << c.what;
    }
    const auto nothing = engine->compute(*bank, 0, 4, as_bytes(rows), {});
    ASSERT_TRUE(nothing);
    EXPECT_TRUE(nothing->empty());
    EXPECT_TRUE(engine->compute(*bank, 0, 0, {}, {}));
}

TEST(BadCalls, BanksThatTheDeviceCannotRunAreRefused) {
    auto engine = make_engine();
    const Stack& stack = stack_of(GGML_TYPE_F32);
    auto meta = stack.meta();
    for (auto& slab : meta.tensors) {
        if (slab.part == SlabPart::kBias) slab.type = GGML_TYPE_F16;
    }
    const auto bank = engine->prepare(meta, stack.weights(), swiglu());
    ASSERT_FALSE(bank);
    EXPECT_EQ(bank.error().code, Errc::kUnsupported);
}

// More graphs than are kept, growing and shrinking: no answer depends on what came before.
TEST(Scratch, ManyDifferentCallsInAnyOrderGiveTheSameBits) {
    const Stack& stack = stack_of(GGML_TYPE_Q4_0);
    auto engine = make_engine();
    const auto first = stack.prepare(*engine);
    const auto second = stack.prepare(*engine);
    const auto rows = random_floats(200 * kIn, 71);
    std::map<size_t, std::vector<float>> seen;
    std::mt19937_64 random(72);
    for (int round = 0; round < 100; ++round) {
        const size_t count = 1 + random() % (round % 10 == 0 ? 200 : 70);
        std::vector<PairIn> pairs;
        for (uint32_t i = 0; i < count; ++i) pairs.push_back({i, i % uint32_t{kExperts}});
        const auto out = compute(*engine, round % 2 ? *first : *second, rows, pairs);
        const auto [known, fresh] = seen.emplace(count, out);
        EXPECT_TRUE(same_bits(known->second, out)) << count;
    }
}

// ---- mapped files -------------------------------------------------------------------------------

// Slabs at the very end of a mapping, with nothing readable behind them.
TEST(Mapped, TheLastByteIsTheLastOneRead) {
    const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    for (int number : kTypes) {
        const Stack& stack = stack_of(static_cast<ggml_type>(number));
        auto engine = make_engine();
        const auto plain = stack.prepare(*engine);
        ASSERT_TRUE(plain);
        BankWeights::Tensors tensors = {};
        std::vector<std::pair<void*, size_t>> mappings;
        const ggml_init_params params = {ggml_tensor_overhead() * 8, nullptr, true};
        ggml_context_ptr context(ggml_init(params));
        for (SlabRole role : {SlabRole::kGate, SlabRole::kUp, SlabRole::kDown}) {
            ggml_tensor* copy = ggml_dup_tensor(context.get(), stack.get(role));
            const size_t bytes = ggml_nbytes(copy);
            const size_t whole = (bytes + page - 1) / page * page;
            void* base = ::mmap(nullptr, whole + page, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            ASSERT_NE(base, MAP_FAILED);
            ASSERT_EQ(::mprotect(static_cast<char*>(base) + whole, page, PROT_NONE), 0);
            copy->data = static_cast<char*>(base) + (whole - bytes);
            std::memcpy(copy->data, stack.get(role)->data, bytes);
            tensors[BankWeights::index(role, SlabPart::kWeight)] = copy;
            mappings.emplace_back(base, whole + page);
        }
        auto meta = stack.meta();
        std::erase_if(meta.tensors,
                      [](const auto& slab) { return slab.part != SlabPart::kWeight; });
        auto at_end = engine->prepare(meta, WeightsForTests::over(tensors), swiglu());
        ASSERT_TRUE(at_end) << at_end.error().detail;
        for (size_t tokens : {1, 20}) {
            const auto rows = random_floats(tokens * kIn, 81);
            std::vector<PairIn> pairs;
            for (uint32_t i = 0; i < tokens; ++i) pairs.push_back({i, kExperts - 1});
            EXPECT_TRUE(same_bits(compute(*engine, **at_end, rows, pairs),
                                  compute(*engine, *plain, rows, pairs)))
                << ggml_type_name(static_cast<ggml_type>(number));
        }
        for (const auto& [base, size] : mappings) ::munmap(base, size);
    }
}

// A file whose tensors lie at odd multiples of 32 bytes gives the bits of one that is aligned to
// pages.
TEST(Mapped, SlabsAtOddMultiplesOf32AreFine) {
    const Folder folder;
    for (uint32_t type : {12u, 20u}) {
        auto spec = toy_spec(3, type);
        spec.layers = 1;
        const Toy odd(write_toy(folder, "odd.gguf", spec));
        spec.alignment = 4096;
        const Toy even(write_toy(folder, "even.gguf", spec));
        auto engine = make_engine();
        bool any_odd = false;
        for (const auto& bank : odd.model.banks) {
            for (const auto& slab : bank.tensors) any_odd |= slab.offset % 64 != 0;
            const auto rows = random_floats(3 * odd.model.n_embd, 91);
            const std::vector<PairIn> pairs = {{0, 0}, {1, 7}, {2, 3}, {0, 5}};
            const auto a = odd.prepare(*engine, bank.key);
            const auto b = even.prepare(*engine, bank.key);
            EXPECT_TRUE(
                same_bits(compute(*engine, *a, rows, pairs), compute(*engine, *b, rows, pairs)))
                << type;
        }
        EXPECT_TRUE(any_odd) << "or this test sees nothing, type " << type;
    }
}

TEST(Runtime, UnknownDevicesAreListed) {
    (void)cpu();
    const auto device = find_device("nothing");
    ASSERT_FALSE(device);
    EXPECT_EQ(device.error().code, Errc::kUsage);
    EXPECT_NE(device.error().detail.find("CPU"), std::string::npos);
    EXPECT_FALSE(fingerprint().engine.empty());
    EXPECT_FALSE(fingerprint().isa.empty());
}

TEST(RowBytes, OnlyKnownTypesAndWholeBlocks) {
    EXPECT_EQ(row_bytes(kRowF32, 7), 28u);
    EXPECT_EQ(row_bytes(kRowQ8K, 256), 292u);
    EXPECT_EQ(row_bytes(kRowQ8K, 3072), 3504u);
    EXPECT_EQ(row_bytes(kRowQ8K, 257), 0u);
    EXPECT_EQ(row_bytes(kRowF32, 0), 0u);
    for (uint32_t type : {1u, 2u, 4u, 12u, 39u, 43u, 255u, 0xffffffffu})
        EXPECT_EQ(row_bytes(type, 256), 0u) << type;
}

}  // namespace
}  // namespace kvasir::engine
