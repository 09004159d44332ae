#include "kernels_peers.hpp"

#include <algorithm>
#include <cstring>

#include "base/check.hpp"
#include "engine/engine_testing.hpp"

namespace kvasir::bench {
namespace {

namespace toy = engine::testing;
using moe::SlabPart;
using moe::SlabRole;

constexpr SlabRole kRoles[] = {SlabRole::kGate, SlabRole::kUp, SlabRole::kDown};

// The device's buffer type that repacks, where it has one.
ggml_backend_buffer_type_t repacking_buffers(ggml_backend_dev_t device) {
    auto* get =
        reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(ggml_backend_reg_get_proc_address(
            ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts"));
    if (get == nullptr) return nullptr;
    for (auto* type = get(device); type != nullptr && *type != nullptr; ++type) {
        if (std::string(ggml_backend_buft_name(*type)).find("REPACK") != std::string::npos) {
            return *type;
        }
    }
    return nullptr;
}

}  // namespace

uint64_t ExpertShape::bytes() const {
    return 2 * ggml_row_size(gate_up, hidden) * width + ggml_row_size(down, width) * hidden;
}

Experts::Experts(const ExpertShape& shape, uint64_t bytes)
    : shape_(shape),
      count_(static_cast<uint32_t>(std::max<uint64_t>(2, bytes / shape.bytes() + 1))) {
    auto* device = toy::cpu();
    backend_.reset(ggml_backend_dev_init(device, nullptr));
    KVASIR_CHECK(backend_ != nullptr);
    engine::set_threads(backend_.get(), 1);  // the pool lives as long as the program
    make(plain_, plain_context_);
    plain_buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(
        plain_context_.get(), ggml_backend_dev_buffer_type(device)));
    KVASIR_CHECK(plain_buffer_ != nullptr);
    fill_plain();
    repack();
    engine::BankWeights::Tensors tensors = {};
    for (uint32_t i = 0; i < 3; ++i) {
        tensors[engine::BankWeights::index(kRoles[i], SlabPart::kWeight)] = plain_[i];
    }
    const engine::BankWeights weights = engine::WeightsForTests::over(tensors);
    const moe::ProgramShape widths{
        {shape_.hidden, shape_.width, shape_.width, shape_.width, shape_.hidden}};
    plan_ = engine::KernelPlan::make(toy::swiglu(), widths, weights, engine::numeric_class());
}

void Experts::make(ggml_tensor* (&tensors)[3], ggml_context_ptr& context) const {
    context.reset(ggml_init({4 * ggml_tensor_overhead(), nullptr, true}));
    const ExpertShape& s = shape_;
    tensors[0] = ggml_new_tensor_3d(context.get(), s.gate_up, s.hidden, s.width, count_);
    tensors[1] = ggml_new_tensor_3d(context.get(), s.gate_up, s.hidden, s.width, count_);
    tensors[2] = ggml_new_tensor_3d(context.get(), s.down, s.width, s.hidden, count_);
}

void Experts::fill_plain() {
    for (uint32_t i = 0; i < 3; ++i) {
        ggml_tensor* t = plain_[i];
        const auto values = toy::random_floats(static_cast<size_t>(t->ne[0] * t->ne[1]), i, 0.02f);
        const std::vector<float> even(static_cast<size_t>(t->ne[0]), 1.0f);
        auto* first = static_cast<uint8_t*>(t->data);
        ggml_quantize_chunk(t->type, values.data(), first, 0, t->ne[1], t->ne[0], even.data());
        for (uint32_t e = 1; e < count_; ++e) std::memcpy(first + e * t->nb[2], first, t->nb[2]);
    }
}

void Experts::repack() {
    auto* device = ggml_backend_get_device(backend_.get());
    ggml_backend_buffer_type_t type = repacking_buffers(device);
    if (type == nullptr) return;
    make(repacked_, repacked_context_);
    for (uint32_t i = 0; i < 3; ++i) {
        ggml_tensor* t = repacked_[i];
        const size_t bytes = ggml_backend_buft_get_alloc_size(type, t);
        repacked_buffers_.emplace_back(ggml_backend_buft_alloc_buffer(type, bytes));
        KVASIR_CHECK(repacked_buffers_.back() != nullptr);
        auto* base = ggml_backend_buffer_get_base(repacked_buffers_.back().get());
        KVASIR_CHECK(ggml_backend_tensor_alloc(repacked_buffers_.back().get(), t, base) ==
                     GGML_STATUS_SUCCESS);
        if (t->extra == nullptr) {  // no layout for this type: as a plain tensor
            std::fill(std::begin(repacked_), std::end(repacked_), nullptr);
            repacked_buffers_.clear();
            return;
        }
        ggml_backend_tensor_set(t, plain_[i]->data, 0, ggml_nbytes(t));
    }
}

std::span<const uint8_t> Experts::slab(uint32_t part, uint32_t expert) const {
    const ggml_tensor* t = plain_[part];
    return {static_cast<const uint8_t*>(t->data) + expert * t->nb[2], t->nb[2]};
}

GgmlPeer::GgmlPeer(const Experts& experts, ggml_tensor* const* weights, uint32_t rows)
    : backend_(experts.backend()), id_values_(rows) {
    context_.reset(ggml_init({16 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true}));
    ggml_context* c = context_.get();
    in_ = ggml_new_tensor_3d(c, GGML_TYPE_F32, experts.shape().hidden, 1, rows);
    ids_ = ggml_new_tensor_2d(c, GGML_TYPE_I32, 1, rows);
    ggml_tensor* gate = ggml_mul_mat_id(c, weights[0], in_, ids_);
    ggml_tensor* up = ggml_mul_mat_id(c, weights[1], in_, ids_);
    out_ = ggml_mul_mat_id(c, weights[2], ggml_swiglu_split(c, gate, up), ids_);
    graph_ = ggml_new_graph(c);
    ggml_build_forward_expand(graph_, out_);
    buffer_.reset(ggml_backend_alloc_ctx_tensors(c, backend_));
    KVASIR_CHECK(buffer_ != nullptr);
}

void GgmlPeer::run(std::span<const float> rows, uint32_t expert) {
    std::memcpy(in_->data, rows.data(), rows.size_bytes());
    std::fill(id_values_.begin(), id_values_.end(), static_cast<int32_t>(expert));
    std::memcpy(ids_->data, id_values_.data(), id_values_.size() * sizeof(int32_t));
    KVASIR_CHECK(ggml_backend_graph_compute(backend_, graph_) == GGML_STATUS_SUCCESS);
}

std::span<const float> GgmlPeer::out() const {
    return {static_cast<const float*>(out_->data), static_cast<size_t>(ggml_nelements(out_))};
}

KernelPeer::KernelPeer(const Experts& experts, const engine::kernels::Kernels* set,
                       uint32_t threads)
    : experts_(experts), runner_(threads, set) {}

void KernelPeer::run(std::span<const float> rows, uint32_t expert) {
    const auto count = static_cast<uint32_t>(rows.size() / experts_.shape().hidden);
    pairs_.resize(count);
    for (uint32_t r = 0; r < count; ++r) pairs_[r] = {r, expert};
    run(rows, pairs_);
}

void KernelPeer::run(std::span<const float> rows, std::span<const engine::PairIn> pairs) {
    const auto count = static_cast<uint32_t>(rows.size() / experts_.shape().hidden);
    out_ = runner_.compute(experts_.plan(), engine::kRowF32, count, toy::as_bytes(rows), pairs);
}

uint64_t read_weights(const Experts& experts, uint32_t expert) {
    constexpr uint32_t kSums = 8;
    using Words = uint64_t __attribute__((vector_size(16)));
    Words sums[kSums] = {};
    for (uint32_t part = 0; part < 3; ++part) {
        const std::span<const uint8_t> slab = experts.slab(part, expert);
        for (size_t at = 0; at + sizeof(sums) <= slab.size(); at += sizeof(sums)) {
            Words words[kSums];
            std::memcpy(words, slab.data() + at, sizeof(words));
            for (uint32_t i = 0; i < kSums; ++i) sums[i] ^= words[i];
        }
    }
    for (uint32_t i = 1; i < kSums; ++i) sums[0] ^= sums[i];
    return sums[0][0] ^ sums[0][1];
}

}  // namespace kvasir::bench
