#include "engine/q8k.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "engine/runtime.hpp"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

namespace kvasir::engine {
namespace {

// The same row through ggml's CPU backend: a copy into a Q8_K tensor uses its own quantiser.
std::vector<uint8_t> by_ggml(const std::vector<float>& row) {
    EXPECT_TRUE(load_ggml());
    ggml_backend_ptr backend(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    ggml_threadpool* pool = set_threads(backend.get(), 1);  // its default is four that spin
    const ggml_init_params params = {
        ggml_tensor_overhead() * 4 + ggml_graph_overhead_custom(4, false), nullptr, true};
    ggml_context_ptr context(ggml_init(params));
    const auto width = static_cast<int64_t>(row.size());
    ggml_tensor* source = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, width);
    ggml_tensor* target = ggml_new_tensor_1d(context.get(), GGML_TYPE_Q8_K, width);
    ggml_cgraph* graph = ggml_new_graph_custom(context.get(), 4, false);
    ggml_build_forward_expand(graph, ggml_cpy(context.get(), source, target));
    ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(context.get(), backend.get()));
    ggml_backend_buffer_clear(buffer.get(), 0);
    ggml_backend_tensor_set(source, row.data(), 0, row.size() * sizeof(float));
    EXPECT_EQ(ggml_backend_graph_compute(backend.get(), graph), GGML_STATUS_SUCCESS);
    std::vector<uint8_t> out(ggml_nbytes(target));
    ggml_backend_tensor_get(target, out.data(), 0, out.size());
    backend.reset();
    free_threads(pool);
    return out;
}

void expect_equal(const std::vector<float>& row, const std::string& what) {
    std::vector<uint8_t> ours(row.size() / kQ8KBlock * kQ8KBlockBytes, 0xee);
    quantise_q8k(row.data(), static_cast<uint32_t>(row.size()), ours.data());
    EXPECT_EQ(ours, by_ggml(row)) << what;
}

TEST(Q8K, SizesAreGgmls) {
    EXPECT_EQ(kQ8KBlock, static_cast<uint32_t>(ggml_blck_size(GGML_TYPE_Q8_K)));
    EXPECT_EQ(kQ8KBlockBytes, ggml_type_size(GGML_TYPE_Q8_K));
}

TEST(Q8K, RandomRowsHaveGgmlsBits) {
    std::mt19937_64 random(7);
    for (int trial = 0; trial < 300; ++trial) {
        std::vector<float> row(kQ8KBlock * (1 + random() % 12));
        std::normal_distribution<float> normal(
            0, std::pow(10.0f, static_cast<float>(random() % 12) - 6.0f));
        for (float& value : row) value = normal(random);
        expect_equal(row, "trial " + std::to_string(trial));
    }
}

TEST(Q8K, TiesSignsAndHalves) {
    std::vector<float> row(kQ8KBlock, 0);
    expect_equal(row, "zero");
    row[3] = -2;
    row[200] = 2;
    expect_equal(row, "two maxima, the negative first");
    std::swap(row[3], row[200]);
    expect_equal(row, "two maxima, the positive first");
    for (uint32_t i = 0; i < kQ8KBlock; ++i) row[i] = (static_cast<float>(i) - 127.5f) / 2;
    expect_equal(row, "halves");
    for (uint32_t i = 0; i < kQ8KBlock; ++i)
        row[i] = (i % 2 ? -1.0f : 1.0f) * std::numeric_limits<float>::denorm_min();
    expect_equal(row, "subnormal");
    for (uint32_t i = 0; i < kQ8KBlock; ++i)
        row[i] = (i % 3 ? -1.0f : 1.0f) * std::numeric_limits<float>::max();
    expect_equal(row, "huge");
}

}  // namespace
}  // namespace kvasir::engine
