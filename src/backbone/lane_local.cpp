// SwarmLane, the part that computes here: what nobody holds, and what came back without an answer.
#include <cstring>

#include "backbone/lane.hpp"

namespace kvasir::backbone {
namespace {

// Both keep the engine's scratch small; the kernels want many rows of an expert at a time.
constexpr uint32_t kLocalChunkPairs = 256;
constexpr uint32_t kKernelChunkPairs = 2048;

}  // namespace

Status SwarmLane::quantise_rows() {
    if (rows_quantised_) return {};
    const uint32_t width = learned_->bank->shape.input();
    quantised_.resize(engine::row_bytes(engine::kRowQ8K, width) * batch_->row_count);
    rows_quantised_ = true;
    return engine_->quantise(reinterpret_cast<const float*>(batch_->rows), batch_->row_count, width,
                             quantised_.data());
}

Status SwarmLane::compute_groups(std::span<const uint32_t> groups) {
    if (groups.empty()) return {};
    const auto start = net::Clock::now();
    const uint32_t most = uses_kernels() ? kKernelChunkPairs : kLocalChunkPairs;
    size_t begin = 0;
    while (begin < groups.size()) {
        size_t end = begin + 1;
        while (end < groups.size() && pairs_in(groups.subspan(begin, end + 1 - begin)) <= most)
            ++end;
        if (Status ok = compute_chunk(groups.subspan(begin, end - begin)); !ok) return ok;
        begin = end;
    }
    const auto took = net::Clock::now() - start;
    local_compute_ += took;
    // Nobody read the answers meanwhile, and a long one cannot be sent unread: not the workers'
    // time.
    for (const auto& call : calls_) {
        if (call->open) call->deadline += took;
    }
    return {};
}

Status SwarmLane::compute_chunk(std::span<const uint32_t> groups) {
    const engine::Bank& bank = *learned_->bank;
    engine_pairs_.clear();
    for (uint32_t g : groups) {
        for (uint32_t i = groups_[g].begin; i < groups_[g].end; ++i) {
            const LayerBatch::Pair& pair = batch_->pairs[order_[i]];
            engine_pairs_.push_back({pair.row, pair.expert});
        }
    }
    const std::span<const uint8_t> rows(batch_->rows, batch_->row_stride * batch_->row_count);
    auto out = engine_->compute(bank, engine::kRowF32, batch_->row_count, rows, engine_pairs_);
    if (!out) return tl::unexpected(out.error());
    const uint32_t width = bank.shape.output();
    const float* next = out->data();
    for (uint32_t g : groups) {
        for (uint32_t i = groups_[g].begin; i < groups_[g].end; ++i, next += width) {
            std::memcpy(batch_->pairs[order_[i]].out, next, width * sizeof(float));
        }
    }
    local_pairs_ += engine_pairs_.size();
    return {};
}

}  // namespace kvasir::backbone
