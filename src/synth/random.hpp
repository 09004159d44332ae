// Seeded random streams and the tensor rows made from them.
//
// Used by plan.cpp (tensor order) and writer.cpp (tensor data). A stream is named by (seed, name,
// matrix index); its values depend on nothing else, so tensors can be written in any order, into
// any shard, fused or apart, and hold the same values. No libm in the values: the same bytes on
// every machine (ggml's quantisers permitting).
// Thread: a Random and a RowMaker belong to one thread. Limits: rows of whole blocks only.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "synth/plan.hpp"

namespace kvasir::synth {

// xoshiro256** seeded through splitmix64.
class Random {
public:
    Random(uint64_t seed, std::string_view stream, uint64_t index);

    uint64_t next() {
        const uint64_t result = rotate(state_[1] * 5, 7) * 9;
        const uint64_t t = state_[1] << 17;
        state_[2] ^= state_[0];
        state_[3] ^= state_[1];
        state_[1] ^= state_[2];
        state_[0] ^= state_[3];
        state_[2] ^= t;
        state_[3] = rotate(state_[3], 45);
        return result;
    }

private:
    static uint64_t rotate(uint64_t value, int bits) {
        return (value << bits) | (value >> (64 - bits));
    }
    std::array<uint64_t, 4> state_;
};

// Makes rows of one tensor, in its type.
class RowMaker {
public:
    // `direct`: random blocks where the type has a direct form (F16, Q4_K, Q6_K).
    RowMaker(const TensorPlan& tensor, bool direct);

    uint64_t row_bytes() const { return row_bytes_; }
    // Fills `out` (a whole number of rows) from the stream, which moves on by as much.
    void make(Random& random, std::span<uint8_t> out);

private:
    void make_values(Random& random, std::span<float> row) const;
    void make_direct(Random& random, std::span<uint8_t> out) const;
    void prepare_direct();

    uint32_t type_ = 0;
    uint64_t row_ = 0;  // elements
    uint64_t row_bytes_ = 0;
    Fill fill_ = Fill::kGaussian;
    float scale_ = 1.0F;
    bool direct_ = false;
    std::vector<float> values_;      // scratch of make()
    std::vector<float> importance_;  // all ones, for types that ask for it
    std::vector<uint16_t> halves_;   // direct F16: the gaussian table times scale
    std::vector<uint8_t> heads_;     // direct k-quants: a pool of block scales
};

}  // namespace kvasir::synth
