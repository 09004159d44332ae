#include "synth/random.hpp"

#include <ggml.h>
#include <gtest/gtest.h>

#include <cmath>

namespace kvasir::synth {
namespace {

TensorPlan tensor_of(uint32_t type, uint64_t row, uint64_t rows, Fill fill, float scale) {
    TensorPlan tensor;
    tensor.name = "t";
    tensor.type = type;
    tensor.dims = 2;
    tensor.ne = {row, rows, 1, 1};
    tensor.fill = fill;
    tensor.scale = scale;
    tensor.sources = {{"t", rows}};
    return tensor;
}

std::vector<float> decode(const TensorPlan& tensor, const std::vector<uint8_t>& bytes) {
    std::vector<float> values(tensor.ne[0] * tensor.ne[1]);
    if (tensor.type == GGML_TYPE_F32) {
        std::copy(bytes.begin(), bytes.end(), reinterpret_cast<uint8_t*>(values.data()));
    } else {
        ggml_get_type_traits(static_cast<ggml_type>(tensor.type))
            ->to_float(bytes.data(), values.data(), static_cast<int64_t>(values.size()));
    }
    return values;
}

std::vector<uint8_t> make(const TensorPlan& tensor, bool direct, uint64_t seed,
                          uint64_t rows_at_once) {
    RowMaker maker(tensor, direct);
    Random random(seed, "t", 0);
    std::vector<uint8_t> bytes(tensor.ne[1] * maker.row_bytes());
    for (uint64_t row = 0; row < tensor.ne[1]; row += rows_at_once) {
        const uint64_t rows = std::min(rows_at_once, tensor.ne[1] - row);
        maker.make(random,
                   std::span(bytes).subspan(row * maker.row_bytes(), rows * maker.row_bytes()));
    }
    return bytes;
}

struct Moments {
    double mean = 0, deviation = 0;
};
Moments moments(const std::vector<float>& values) {
    double sum = 0, squares = 0;
    for (float value : values) {
        EXPECT_TRUE(std::isfinite(value));
        sum += value;
        squares += double{value} * value;
    }
    const double mean = sum / static_cast<double>(values.size());
    return {mean, std::sqrt(squares / static_cast<double>(values.size()) - mean * mean)};
}

TEST(Random, StreamsDifferBySeedNameAndIndex) {
    const auto first = [](uint64_t seed, const char* name, uint64_t index) {
        return Random(seed, name, index).next();
    };
    EXPECT_EQ(first(1, "a", 0), first(1, "a", 0));
    EXPECT_NE(first(1, "a", 0), first(2, "a", 0));
    EXPECT_NE(first(1, "a", 0), first(1, "b", 0));
    EXPECT_NE(first(1, "a", 0), first(1, "a", 1));
    // Pinned: files made by older builds must not change.
    EXPECT_EQ(first(1, "blk.0.ffn_gate_exps.weight", 3), 17601924262203076342u);
}

TEST(RowMaker, EveryTypeKeepsMeanAndDeviation) {
    for (const std::string& name : type_names()) {
        // ggml builds tables for 4 to 12 seconds before its first block of these.
        if (name.starts_with("iq1") || name.starts_with("iq2") || name.starts_with("iq3")) continue;
        const uint32_t type = *parse_type(name);
        const TensorPlan tensor = tensor_of(type, 256, 64, Fill::kGaussian, 0.02F);
        const Moments m = moments(decode(tensor, make(tensor, false, 1, 64)));
        EXPECT_NEAR(m.mean, 0.0, 0.002) << name;
        // One- and two-bit types shrink or stretch; the rest stay close.
        EXPECT_GT(m.deviation, 0.010) << name;
        EXPECT_LT(m.deviation, 0.035) << name;
    }
}

TEST(RowMaker, DirectBlocksHaveTheScaleOfQuantisedOnes) {
    for (uint32_t type : {GGML_TYPE_F16, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K}) {
        for (float scale : {1.0F, 0.018F}) {
            const TensorPlan tensor = tensor_of(type, 1024, 256, Fill::kGaussian, scale);
            const Moments m = moments(decode(tensor, make(tensor, true, 7, 64)));
            EXPECT_NEAR(m.mean, 0.0, 0.01 * scale) << type;
            EXPECT_NEAR(m.deviation, scale, 0.03 * scale) << type;
        }
    }
}

TEST(RowMaker, BytesDoNotDependOnTheChunk) {
    for (bool direct : {false, true}) {
        for (uint32_t type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K}) {
            const TensorPlan tensor = tensor_of(type, 512, 13, Fill::kGaussian, 1.0F);
            EXPECT_EQ(make(tensor, direct, 3, 13), make(tensor, direct, 3, 1)) << type << direct;
            EXPECT_NE(make(tensor, direct, 3, 13), make(tensor, direct, 4, 13)) << type << direct;
        }
    }
    // Rows that are not a multiple of the four values of one draw.
    const TensorPlan odd = tensor_of(GGML_TYPE_F16, 5, 7, Fill::kGaussian, 1.0F);
    EXPECT_EQ(make(odd, true, 3, 7), make(odd, true, 3, 2));
    EXPECT_EQ(make(odd, true, 3, 7), make(odd, false, 3, 7));
}

TEST(RowMaker, FillsKeepTheirRange) {
    const auto values = [](Fill fill, float scale) {
        const TensorPlan tensor = tensor_of(GGML_TYPE_F32, 4096, 1, fill, scale);
        return decode(tensor, make(tensor, false, 1, 1));
    };
    for (float value : values(Fill::kUniform, 1.0F))
        EXPECT_TRUE(value >= 0.5F && value < 1.5F) << value;
    for (float value : values(Fill::kDecay, 2.0F))
        EXPECT_TRUE(value <= -1.0F && value > -3.0F) << value;
    EXPECT_NEAR(moments(values(Fill::kNorm, 0.1F)).mean, 1.0, 0.01);
    EXPECT_NEAR(moments(values(Fill::kStep, 0.5F)).mean, -2.0, 0.05);
}

}  // namespace
}  // namespace kvasir::synth
