// Who is measured by kernels_bench: an expert of one shape and weight type, computed by the
// kernels, by a ggml graph over plain buffers, by one over repacked buffers; and the weights merely
// read.
//
// Used by kernels_bench.cpp. Every expert is a copy of the same random one at another place in
// memory, so that taking them in turn streams weights that no cache holds. Thread: one.
// Owns: the weights, once plain and, where ggml has such a layout, once repacked.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/kernel_plan.hpp"
#include "engine/kernel_runner.hpp"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

namespace kvasir::bench {

// Gate and up from `hidden` to `width`, SwiGLU, down to `hidden`.
struct ExpertShape {
    std::string name;
    uint32_t hidden;
    uint32_t width;
    ggml_type gate_up;
    ggml_type down;
    uint64_t bytes() const;  // of one expert
};

class Experts {
public:
    // At least `bytes` of them, and at least two.
    Experts(const ExpertShape& shape, uint64_t bytes);

    const ExpertShape& shape() const { return shape_; }
    uint32_t count() const { return count_; }
    const engine::KernelPlan& plan() const { return *plan_; }
    // A slab of an expert, as it is in the file; part: 0 gate, 1 up, 2 down.
    std::span<const uint8_t> slab(uint32_t part, uint32_t expert) const;
    ggml_backend_t backend() const { return backend_.get(); }
    ggml_tensor* const* plain() const { return plain_; }
    // Null where ggml repacks none of the three, or not for this processor.
    ggml_tensor* const* repacked() const { return repacked_[0] ? repacked_ : nullptr; }

private:
    void make(ggml_tensor* (&tensors)[3], ggml_context_ptr& context) const;
    void fill_plain();
    void repack();

    ExpertShape shape_;
    uint32_t count_;
    ggml_backend_ptr backend_;
    ggml_context_ptr plain_context_, repacked_context_;
    ggml_backend_buffer_ptr plain_buffer_;
    std::vector<ggml_backend_buffer_ptr> repacked_buffers_;
    ggml_tensor* plain_[3] = {};
    ggml_tensor* repacked_[3] = {};
    std::optional<engine::KernelPlan> plan_;
};

// The graph that llama.cpp has for an expert, for `rows` rows of one.
class GgmlPeer {
public:
    GgmlPeer(const Experts& experts, ggml_tensor* const* weights, uint32_t rows);
    void run(std::span<const float> rows, uint32_t expert);
    std::span<const float> out() const;

private:
    ggml_backend_t backend_;
    ggml_context_ptr context_;
    ggml_backend_buffer_ptr buffer_;
    ggml_cgraph* graph_;
    ggml_tensor *in_, *ids_, *out_;
    std::vector<int32_t> id_values_;
};

// The same by the kernels.
class KernelPeer {
public:
    KernelPeer(const Experts& experts, const engine::kernels::Kernels* set, uint32_t threads = 1);
    void run(std::span<const float> rows, uint32_t expert);  // all rows through one expert
    void run(std::span<const float> rows, std::span<const engine::PairIn> pairs);
    std::span<const float> out() const { return out_; }

private:
    const Experts& experts_;
    engine::KernelRunner runner_;
    std::vector<engine::PairIn> pairs_;
    std::span<const float> out_;
};

// Reads an expert's weights and does next to nothing with them.
uint64_t read_weights(const Experts& experts, uint32_t expert);

}  // namespace kvasir::bench
