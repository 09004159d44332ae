// Every callback of the KVASIR device, buffer type and buffer, called by itself.
#include "plugin/device.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "base/check.hpp"
#include "engine/runtime.hpp"
#include "ggml-backend-impl.h"
#include "ggml-cpp.h"
#include "ggml.h"

namespace kvasir::plugin {
namespace {

ggml_backend_dev_t device() {
    KVASIR_CHECK(engine::load_ggml().has_value());
    return ggml_backend_reg_dev_get(make_registry(nullptr), 0);
}

class Buffer : public ::testing::TestWithParam<bool> {
protected:
    Buffer() : memory_(8192 + 64) {
        ggml_backend_dev_t dev = device();
        if (GetParam()) {
            auto* base = reinterpret_cast<uint8_t*>(
                (reinterpret_cast<uintptr_t>(memory_.data()) + 63) / 64 * 64);
            buffer_.reset(ggml_backend_dev_buffer_from_host_ptr(dev, base, 8192, 8192));
        } else {
            buffer_.reset(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(dev), 8192));
        }
        const ggml_init_params params = {ggml_tensor_overhead() * 8, nullptr, true};
        context_.reset(ggml_init(params));
        tensor_ = ggml_new_tensor_1d(context_.get(), GGML_TYPE_F32, 64);
        ggml_backend_tensor_alloc(buffer_.get(), tensor_,
                                  ggml_backend_buffer_get_base(buffer_.get()));
    }

    std::vector<uint8_t> memory_;
    ggml_backend_buffer_ptr buffer_;
    ggml_context_ptr context_;
    ggml_tensor* tensor_ = nullptr;
};

TEST_P(Buffer, NamesAndSizes) {
    ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(device());
    EXPECT_STREQ(ggml_backend_buft_name(type), "KVASIR");
    EXPECT_STREQ(ggml_backend_buffer_name(buffer_.get()), "KVASIR");
    EXPECT_EQ(ggml_backend_buffer_get_type(buffer_.get()), type);
    EXPECT_EQ(ggml_backend_buft_get_device(type), device());
    EXPECT_TRUE(ggml_backend_buffer_is_host(buffer_.get()));
    EXPECT_TRUE(ggml_backend_buft_is_host(type));
    EXPECT_GE(ggml_backend_buffer_get_size(buffer_.get()), 8192u);
    EXPECT_GE(ggml_backend_buffer_get_alignment(buffer_.get()), 32u);
    EXPECT_GT(ggml_backend_buffer_get_max_size(buffer_.get()), size_t{1} << 40);
    EXPECT_EQ(ggml_backend_buffer_get_alloc_size(buffer_.get(), tensor_), 256u);
    EXPECT_TRUE(ggml_backend_dev_supports_buft(device(), type));
}

TEST_P(Buffer, EveryCallbackOfTheInterface) {
    std::vector<float> in(64), out(64);
    for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i);
    ggml_backend_tensor_set(tensor_, in.data(), 0, 256);
    ggml_backend_tensor_get(tensor_, out.data(), 0, 256);
    EXPECT_EQ(in, out);
    ggml_backend_tensor_get(tensor_, out.data(), 4, 4);
    EXPECT_EQ(out[0], 1.0f);
    ggml_backend_tensor_memset(tensor_, 0, 8, 4);
    ggml_backend_tensor_get(tensor_, out.data(), 0, 256);
    EXPECT_EQ(out[2], 0.0f);
    EXPECT_EQ(out[3], 3.0f);
    ggml_backend_tensor_set_2d(tensor_, in.data(), 0, 4, 8, 16, 4);  // every fourth value
    ggml_backend_tensor_get_2d(tensor_, out.data(), 0, 4, 8, 16, 4);
    for (size_t i = 0; i < 8; ++i) EXPECT_EQ(out[i], in[i]);
    ggml_tensor* other = ggml_new_tensor_1d(context_.get(), GGML_TYPE_F32, 64);
    auto* base = static_cast<uint8_t*>(ggml_backend_buffer_get_base(buffer_.get()));
    ggml_backend_tensor_alloc(buffer_.get(), other, base + 4096);
    ggml_backend_tensor_copy(tensor_, other);
    EXPECT_EQ(std::memcmp(base, base + 4096, 256), 0);
    ggml_backend_buffer_clear(buffer_.get(), 7);
    EXPECT_EQ(base[0], 7);
    EXPECT_EQ(base[8191], 7);
    ggml_backend_buffer_set_usage(buffer_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    EXPECT_EQ(ggml_backend_buffer_get_usage(buffer_.get()), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_tensor* view = ggml_view_1d(context_.get(), tensor_, 4, 16);
    EXPECT_EQ(ggml_backend_view_init(view), GGML_STATUS_SUCCESS);
    ggml_backend_buffer_reset(buffer_.get());
}

INSTANTIATE_TEST_SUITE_P(OwnAndMapped, Buffer, ::testing::Values(false, true));

TEST(Device, DescribesItself) {
    ggml_backend_dev_t dev = device();
    EXPECT_STREQ(ggml_backend_dev_name(dev), "KVASIR");
    EXPECT_NE(std::string(ggml_backend_dev_description(dev)), "");
    EXPECT_EQ(ggml_backend_dev_type(dev), GGML_BACKEND_DEVICE_TYPE_ACCEL);
    EXPECT_STREQ(ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev)), "KVASIR");
    EXPECT_EQ(ggml_backend_reg_dev_count(make_registry(nullptr)), 1u);
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(dev, &props);
    EXPECT_TRUE(props.caps.buffer_from_host_ptr);
    EXPECT_FALSE(props.caps.async);
    EXPECT_EQ(ggml_backend_dev_host_buffer_type(dev), nullptr);
    EXPECT_EQ(ggml_backend_reg_get_proc_address(make_registry(nullptr), "nothing"), nullptr);
}

// Without a backbone the expert FFN is computed here; the number of threads changes between prompt
// and answer.
TEST(Device, ComputesAloneWithChangingThreads) {
    ggml_backend_ptr backend(ggml_backend_dev_init(device(), nullptr));
    ASSERT_TRUE(backend);
    EXPECT_STREQ(ggml_backend_name(backend.get()), "KVASIR");
    auto set_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml_backend_reg_get_proc_address(make_registry(nullptr), "ggml_backend_set_n_threads"));
    ASSERT_NE(set_threads, nullptr);
    const ggml_init_params params = {size_t{1} << 20, nullptr, true};
    ggml_context_ptr context(ggml_init(params));
    ggml_tensor* weights = ggml_new_tensor_3d(context.get(), GGML_TYPE_F32, 32, 32, 4);
    ggml_set_name(weights, "blk.0.ffn_up_exps.weight");
    ggml_tensor* rows = ggml_new_tensor_3d(context.get(), GGML_TYPE_F32, 32, 1, 2);
    ggml_tensor* ids = ggml_new_tensor_2d(context.get(), GGML_TYPE_I32, 2, 2);
    ggml_tensor* out = ggml_mul_mat_id(context.get(), weights, rows, ids);
    ggml_cgraph* graph = ggml_new_graph(context.get());
    ggml_build_forward_expand(graph, out);
    EXPECT_TRUE(ggml_backend_dev_supports_op(device(), out));
    ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors_from_buft(
        context.get(), ggml_backend_dev_buffer_type(device())));
    ASSERT_TRUE(buffer);
    std::vector<float> ones(32 * 32 * 4, 1.0f);
    ggml_backend_tensor_set(weights, ones.data(), 0, ggml_nbytes(weights));
    ggml_backend_tensor_set(rows, ones.data(), 0, ggml_nbytes(rows));
    const int32_t which[] = {0, 3, 1, 2};
    ggml_backend_tensor_set(ids, which, 0, sizeof(which));
    for (const int threads : {1, 2, 1, 2, 0, -1, 2, 1}) {
        set_threads(backend.get(), threads);
        ASSERT_EQ(ggml_backend_graph_compute(backend.get(), graph), GGML_STATUS_SUCCESS);
        EXPECT_EQ(static_cast<const float*>(out->data)[0], 32.0f);
    }
}

}  // namespace
}  // namespace kvasir::plugin
