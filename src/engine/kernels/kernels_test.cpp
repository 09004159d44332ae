#include "engine/kernels/kernels.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "engine/engine_testing.hpp"
#include "engine/kernels/blocks_testing.hpp"
#include "engine/kernels/gelu.hpp"
#include "engine/kernels/reference.hpp"
#include "engine/runtime.hpp"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

namespace kvasir::engine::kernels {
namespace {

std::string name_of(WeightType type) {
    return ggml_type_name(static_cast<ggml_type>(type));
}

NumericClass class_of_ggml() {
    testing::cpu();  // loads it
    return numeric_class();
}

bool same_bits(float a, float b) {
    return bits_of(a) == bits_of(b) || (std::isnan(a) && std::isnan(b));
}

// Activations of several rows, quantised and in the order that a set reads them.
class Rows {
public:
    // `shift`: how many elements each part lies behind the start of its memory.
    Rows(const Kernels& kernels, WeightType type, uint32_t width, const std::vector<float>& x,
         uint32_t shift)
        : count_(static_cast<uint32_t>(x.size() / width)),
          q_(x.size() + 64 + shift),
          d_(x.size() + shift),
          sums_(x.size() + shift),
          pairs_(x.size() + shift) {
        for (uint32_t r = 0; r < count_; ++r) {
            const float* row = x.data() + size_t{r} * width;
            const size_t at = size_t{r} * width + shift;
            rows_.push_back({&q_[at], &d_[at], &sums_[at], &pairs_[at]});
            if (row_kind(type) == RowKind::kQ8_0) {
                kernels.elementwise.quantise_q8_0(width, row, &q_[at], &d_[at]);
            } else {
                kernels.elementwise.quantise_q8_k(width, row, &q_[at], &d_[at], &sums_[at],
                                                  &pairs_[at]);
            }
            kernels.arrange(type, width, &q_[at]);
        }
    }
    const Row* data() const { return rows_.data(); }
    uint32_t count() const { return count_; }

private:
    uint32_t count_;
    std::vector<int8_t> q_;
    std::vector<float> d_;
    std::vector<int16_t> sums_, pairs_;
    std::vector<Row> rows_;
};

std::vector<float> products(const Kernels& kernels, WeightType type, uint32_t width,
                            const uint8_t* weights, uint32_t weight_rows,
                            const std::vector<float>& x, uint32_t shift = 0) {
    const Rows rows(kernels, type, width, x, shift);
    std::vector<float> out(size_t{weight_rows} * rows.count());
    const DotRows dot = takes_panel(type, weight_rows, rows.count()) ? kernels.dot_panel
                                                                     : kernels.dot[index_of(type)];
    dot(width, weights, row_bytes(type, width), weight_rows, rows.data(), rows.count(), out.data(),
        weight_rows);
    return out;
}

// The same through ggml's MUL_MAT_ID, with one expert.
class Ggml {
public:
    // One thread: ggml's wait for each other by spinning, for longer than such products take.
    Ggml()
        : backend_(ggml_backend_dev_init(testing::cpu(), nullptr)),
          pool_(set_threads(backend_.get(), 1)) {}
    Ggml(const Ggml&) = delete;
    Ggml& operator=(const Ggml&) = delete;
    ~Ggml() {
        backend_.reset();
        free_threads(pool_);
    }

    std::vector<float> products(WeightType type, uint32_t width,
                                const std::vector<uint8_t>& weights, uint32_t weight_rows,
                                const std::vector<float>& x) {
        const auto rows = static_cast<int64_t>(x.size() / width);
        return run([&](ggml_context* context) {
            ggml_tensor* w =
                ggml_new_tensor_3d(context, static_cast<ggml_type>(type), width, weight_rows, 1);
            ggml_tensor* in = ggml_new_tensor_3d(context, GGML_TYPE_F32, width, 1, rows);
            ggml_tensor* ids = ggml_new_tensor_2d(context, GGML_TYPE_I32, 1, rows);
            set_ = [=, &weights, &x] {
                ggml_backend_tensor_set(w, weights.data(), 0, weights.size());
                ggml_backend_tensor_set(in, x.data(), 0, x.size() * sizeof(float));
                ggml_backend_tensor_memset(ids, 0, 0, ggml_nbytes(ids));
            };
            return ggml_mul_mat_id(context, w, in, ids);
        });
    }

    // `make` gets two rows of values.
    std::vector<float> elementwise(
        const std::vector<float>& x, const std::vector<float>& g,
        const std::function<ggml_tensor*(ggml_context*, ggml_tensor*, ggml_tensor*)>& make) {
        return run([&](ggml_context* context) {
            const auto count = static_cast<int64_t>(x.size());
            ggml_tensor* a = ggml_new_tensor_1d(context, GGML_TYPE_F32, count);
            ggml_tensor* b = ggml_new_tensor_1d(context, GGML_TYPE_F32, count);
            ggml_set_input(b);
            set_ = [=, &x, &g] {
                ggml_backend_tensor_set(a, x.data(), 0, x.size() * sizeof(float));
                ggml_backend_tensor_set(b, g.data(), 0, g.size() * sizeof(float));
            };
            return make(context, a, b);
        });
    }

private:
    std::vector<float> run(const std::function<ggml_tensor*(ggml_context*)>& make) {
        const ggml_init_params params = {16 * ggml_tensor_overhead() + ggml_graph_overhead(),
                                         nullptr, true};
        ggml_context_ptr context(ggml_init(params));
        ggml_tensor* out = make(context.get());
        ggml_cgraph* graph = ggml_new_graph(context.get());
        ggml_build_forward_expand(graph, out);
        ggml_backend_buffer_ptr buffer(
            ggml_backend_alloc_ctx_tensors(context.get(), backend_.get()));
        set_();
        EXPECT_EQ(ggml_backend_graph_compute(backend_.get(), graph), GGML_STATUS_SUCCESS);
        std::vector<float> values(static_cast<size_t>(ggml_nelements(out)));
        ggml_backend_tensor_get(out, values.data(), 0, ggml_nbytes(out));
        return values;
    }

    ggml_backend_ptr backend_;
    ggml_threadpool* pool_;
    std::function<void()> set_;
};

// kFull, kEmpty: every field at its largest, or its least (signed ones at their largest negative),
// against activations that are all equal: sums as far out as they go. kFullDown, kEmptyDown:
// activations of the other sign.
enum class Kind {
    kRandom,
    kZero,
    kSubnormal,
    kHuge,
    kExtreme,
    kFull,
    kFullDown,
    kEmpty,
    kEmptyDown
};
constexpr Kind kKinds[] = {Kind::kRandom,   Kind::kZero,    Kind::kSubnormal,
                           Kind::kHuge,     Kind::kExtreme, Kind::kFull,
                           Kind::kFullDown, Kind::kEmpty,   Kind::kEmptyDown};

uint8_t byte_of(Kind kind, std::mt19937_64& random) {
    switch (kind) {
        case Kind::kExtreme:  // all fields full, or all empty
            return random() % 4 ? 0xff : 0x00;
        case Kind::kFull:
        case Kind::kFullDown:
            return 0xff;
        case Kind::kEmpty:
        case Kind::kEmptyDown:
            return 0x00;
        default:
            return static_cast<uint8_t>(random());
    }
}

bool has_full_fields(Kind kind) {
    return kind >= Kind::kExtreme;
}

constexpr size_t kScalesOfQ6K = 192;  // 16 signed bytes, in the block

uint16_t scale_of(Kind kind, std::mt19937_64& random) {
    const auto any = static_cast<uint16_t>(random());
    switch (kind) {
        case Kind::kZero:
            return any & 0x8000;
        case Kind::kSubnormal:
            return any & 0x83ff;
        case Kind::kHuge:
            return static_cast<uint16_t>((any & 0x83ff) | 0x7800);
        default:
            return static_cast<uint16_t>((any & 0x83ff) | 0x2400 | (any & 0x0c00) >> 1);
    }
}

std::vector<uint8_t> make_weights(WeightType type, uint32_t width, uint32_t rows, Kind kind,
                                  std::mt19937_64& random) {
    std::vector<uint8_t> weights(row_bytes(type, width) * rows);
    for (uint8_t& byte : weights) {
        byte = byte_of(kind, random);
        if (has_full_fields(kind) && type == WeightType::kQ8_0) byte ^= 0x7f;
    }
    for (size_t b = 0; b < weights.size(); b += block_bytes(type)) {
        if (type == WeightType::kQ6_K && kind >= Kind::kFull) {
            std::memset(&weights[b + kScalesOfQ6K], byte_of(kind, random) ^ 0x7f, 16);
        }
        for (uint32_t at : scales_at(type)) {
            const uint16_t scale = scale_of(kind, random);
            std::memcpy(&weights[b + at], &scale, sizeof(scale));
        }
        if (type != WeightType::kMxfp4) continue;
        weights[b] = static_cast<uint8_t>(kind == Kind::kSubnormal ? random() % 4
                                          : kind == Kind::kHuge    ? 240 + random() % 10
                                          : kind == Kind::kZero    ? 0
                                                                   : 110 + random() % 30);
    }
    return weights;
}

std::vector<float> make_rows(size_t count, Kind kind, std::mt19937_64& random) {
    std::normal_distribution<float> normal;
    std::vector<float> x(count);
    for (float& value : x) {
        value = normal(random);
        if (kind == Kind::kZero && random() % 3) value = 0;
        if (kind == Kind::kSubnormal) value *= 1e-39f;
        if (kind == Kind::kHuge) value *= 1e20f;
        if (kind == Kind::kExtreme) value = value < 0 ? -3.0f : 3.0f;
        if (kind == Kind::kFull || kind == Kind::kEmpty) value = 3.0f;
        if (kind == Kind::kFullDown || kind == Kind::kEmptyDown) value = -3.0f;
    }
    if (kind == Kind::kZero) std::fill(x.begin(), x.begin() + static_cast<long>(count / 2), 0.0f);
    return x;
}

struct Shape {
    uint32_t width, weight_rows, rows;
};
constexpr Shape kShapes[] = {{256, 7, 1},  {512, 5, 2},   {1024, 3, 3}, {3072, 4, 5},
                             {8192, 1, 4}, {2048, 3, 7},  {256, 3, 65}, {256, 2, 9},
                             {512, 8, 8},  {256, 16, 13}, {32, 3, 2},   {96, 2, 17},
                             {2880, 5, 3}, {1056, 33, 1}, {16640, 2, 3}};

TEST(Kernels, ReferenceIsGgmls) {
    if (class_of_ggml() == NumericClass::kOther) GTEST_SKIP() << "ggml is of another processor";
    Ggml ggml;
    std::mt19937_64 random(20);
    for (WeightType type : kWeightTypes) {
        for (const Shape& s : kShapes) {
            if (s.width % block_width(type) != 0) continue;
            for (Kind kind : kKinds) {
                const auto weights = make_weights(type, s.width, s.weight_rows, kind, random);
                const auto x = make_rows(size_t{s.width} * s.rows, kind, random);
                const auto wanted = ggml.products(type, s.width, weights, s.weight_rows, x);
                const auto got = products(testing::reference_kernels(), type, s.width,
                                          weights.data(), s.weight_rows, x);
                ASSERT_EQ(wanted.size(), got.size());
                for (size_t i = 0; i < got.size(); ++i) {
                    ASSERT_TRUE(same_bits(wanted[i], got[i]))
                        << name_of(type) << " width " << s.width << " rows " << s.rows << " kind "
                        << static_cast<int>(kind) << ": " << wanted[i] << " and " << got[i];
                }
            }
        }
    }
}

TEST(Kernels, EverySetIsTheReference) {
    const KernelSets sets = available_kernels();
    ASSERT_STREQ(testing::reference_kernels().name, "reference");
    std::mt19937_64 random(21);
    for (WeightType type : kWeightTypes) {
        for (const Shape& s : kShapes) {
            if (s.width % block_width(type) != 0) continue;
            for (Kind kind : kKinds) {
                const auto weights = make_weights(type, s.width, s.weight_rows, kind, random);
                const auto x = make_rows(size_t{s.width} * s.rows, kind, random);
                const auto wanted = products(testing::reference_kernels(), type, s.width,
                                             weights.data(), s.weight_rows, x);
                for (uint32_t k = 0; k + 1 < sets.count; ++k) {
                    const auto got =
                        products(*sets.begin[k], type, s.width, weights.data(), s.weight_rows, x);
                    for (size_t i = 0; i < got.size(); ++i) {
                        ASSERT_TRUE(same_bits(wanted[i], got[i]))
                            << sets.begin[k]->name << " " << name_of(type) << " width " << s.width
                            << " rows " << s.rows << " kind " << static_cast<int>(kind) << ": "
                            << wanted[i] << " and " << got[i];
                    }
                }
            }
        }
    }
}

// Weights and rows shifted by 0 to 63: the bits do not depend on where they lie.
TEST(Kernels, AnyAlignment) {
    const KernelSets sets = available_kernels();
    std::mt19937_64 random(24);
    for (WeightType type : kWeightTypes) {
        const uint32_t width = 3 * block_width(type);
        const auto weights = make_weights(type, width, 3, Kind::kRandom, random);
        const auto x = make_rows(size_t{width} * 9, Kind::kRandom, random);
        std::vector<uint8_t> memory(weights.size() + 2 * 64);
        auto* even = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
        for (uint32_t k = 0; k < sets.count; ++k) {
            const auto wanted = products(*sets.begin[k], type, width, weights.data(), 3, x);
            for (uint32_t offset = 0; offset < 64; ++offset) {
                std::memcpy(even + offset, weights.data(), weights.size());
                EXPECT_EQ(products(*sets.begin[k], type, width, even + offset, 3, x, offset),
                          wanted)
                    << sets.begin[k]->name << " " << name_of(type) << " at " << offset;
            }
        }
    }
}

// Weights that end where the next page may not be read.
TEST(Kernels, NothingPastTheEndIsRead) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const KernelSets sets = available_kernels();
    std::mt19937_64 random(22);
    for (WeightType type : kWeightTypes) {
        const uint32_t width = 3 * block_width(type);
        const auto weights = make_weights(type, width, 3, Kind::kRandom, random);
        const size_t pages = (weights.size() + page - 1) / page + 1;
        auto* memory = static_cast<uint8_t*>(mmap(nullptr, pages * page, PROT_READ | PROT_WRITE,
                                                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        ASSERT_NE(memory, MAP_FAILED);
        ASSERT_EQ(mprotect(memory + (pages - 1) * page, page, PROT_NONE), 0);
        uint8_t* at = memory + (pages - 1) * page - weights.size();
        std::memcpy(at, weights.data(), weights.size());
        const auto x = make_rows(size_t{width} * 11, Kind::kRandom, random);
        for (uint32_t k = 0; k < sets.count; ++k) {
            EXPECT_EQ(products(*sets.begin[k], type, width, at, 3, x),
                      products(*sets.begin[k], type, width, weights.data(), 3, x));
        }
        munmap(memory, pages * page);
    }
}

// Every 2^stride-th float, and the ends of the range.
std::vector<float> many_floats(uint32_t stride_bits) {
    std::vector<float> x;
    for (uint64_t bits = 0; bits < (1ull << 32); bits += 1ull << stride_bits) {
        x.push_back(float_of(static_cast<uint32_t>(bits + (bits >> stride_bits) % 97)));
    }
    for (float edge : {0.0f, -0.0f, 87.0f, 88.3f, 88.8f, -87.4f, -103.9f, -104.1f, 126.5f, 133.0f,
                       134.0f, -133.0f, -134.0f, 9.99f, 10.0f, -10.0f, -9.99f}) {
        x.push_back(edge);
    }
    x.resize(x.size() / 32 * 32);
    return x;
}

void expect_same(const std::vector<float>& x, const std::vector<float>& wanted,
                 const std::vector<float>& got, const std::string& what) {
    ASSERT_EQ(wanted.size(), got.size());
    for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_TRUE(same_bits(wanted[i], got[i]))
            << what << "(" << x[i] << ") is " << wanted[i] << ", not " << got[i];
    }
}

TEST(Kernels, ActivationsAreGgmls) {
    const NumericClass numeric = class_of_ggml();
    if (numeric == NumericClass::kOther) GTEST_SKIP() << "ggml is of another processor";
    const bool v4 = numeric == NumericClass::kX86V4;
    Ggml ggml;
    const std::vector<float> x = many_floats(13);
    std::mt19937_64 random(23);
    const std::vector<float> g = make_rows(x.size(), Kind::kRandom, random);
    const KernelSets sets = available_kernels();
    const auto silu =
        ggml.elementwise(x, g, [](auto* c, auto* a, auto*) { return ggml_silu(c, a); });
    const auto swiglu = ggml.elementwise(
        x, g, [](auto* c, auto* a, auto* b) { return ggml_swiglu_split(c, a, b); });
    const auto oai = ggml.elementwise(
        x, g, [](auto* c, auto* a, auto* b) { return ggml_swiglu_oai(c, a, b, 1.702f, 7.0f); });
    const auto count = static_cast<uint32_t>(x.size());
    for (uint32_t k = 0; k < sets.count; ++k) {
        const Elementwise& set = sets.begin[k]->elementwise;
        std::vector<float> y(x.size());
        (v4 ? set.silu_v4 : set.silu_v3)(count, x.data(), nullptr, y.data());
        expect_same(x, silu, y, std::string(sets.begin[k]->name) + " silu");
        (v4 ? set.swiglu_v4 : set.swiglu_v3)(count, x.data(), g.data(), y.data());
        expect_same(x, swiglu, y, std::string(sets.begin[k]->name) + " swiglu");
        set.swiglu_oai(count, x.data(), g.data(), 1.702f, 7.0f, y.data());
        expect_same(x, oai, y, std::string(sets.begin[k]->name) + " swiglu_oai");
    }
    std::vector<float> y(x.size());
    gelu(count, x.data(), nullptr, y.data());
    expect_same(x, ggml.elementwise(x, g, [](auto* c, auto* a, auto*) { return ggml_gelu(c, a); }),
                y, "gelu");
    gelu(count, x.data(), g.data(), y.data());
    expect_same(
        x,
        ggml.elementwise(x, g, [](auto* c, auto* a, auto* b) { return ggml_geglu_split(c, a, b); }),
        y, "geglu");
}

// All of the table that GELU looks up.
TEST(Kernels, GeluOfEveryHalf) {
    if (class_of_ggml() == NumericClass::kOther) GTEST_SKIP() << "ggml is of another processor";
    Ggml ggml;
    std::vector<float> x;
    for (uint32_t half = 0; half < 0x10000; ++half) {
        x.push_back(from_f16(static_cast<uint16_t>(half)));
    }
    std::vector<float> y(x.size());
    gelu(static_cast<uint32_t>(x.size()), x.data(), nullptr, y.data());
    expect_same(x, ggml.elementwise(x, x, [](auto* c, auto* a, auto*) { return ggml_gelu(c, a); }),
                y, "gelu");
}

// Both classes on every set: that of this build's ggml is held to ggml above.
TEST(Kernels, BothClassesOnEverySet) {
    const std::vector<float> x = many_floats(12);
    const KernelSets sets = available_kernels();
    const Elementwise& reference = testing::reference_kernels().elementwise;
    const auto count = static_cast<uint32_t>(x.size());
    for (auto function : {&Elementwise::silu_v3, &Elementwise::silu_v4}) {
        std::vector<float> wanted(x.size()), got(x.size());
        (reference.*function)(count, x.data(), nullptr, wanted.data());
        for (uint32_t k = 0; k + 1 < sets.count; ++k) {
            (sets.begin[k]->elementwise.*function)(count, x.data(), nullptr, got.data());
            expect_same(x, wanted, got, sets.begin[k]->name);
        }
    }
}

TEST(Kernels, HalvesBothWays) {
    for (uint32_t half = 0; half < 0x10000; ++half) {
        const float value = from_f16(static_cast<uint16_t>(half));
        EXPECT_TRUE(same_bits(value, ggml_fp16_to_fp32(static_cast<ggml_fp16_t>(half)))) << half;
        if (std::isnan(value)) continue;
        EXPECT_EQ(to_f16(value), half);
    }
    for (float value : many_floats(10)) {
        if (std::isnan(value)) continue;
        ASSERT_EQ(to_f16(value), ggml_fp32_to_fp16(value)) << value;
    }
}

}  // namespace
}  // namespace kvasir::engine::kernels
