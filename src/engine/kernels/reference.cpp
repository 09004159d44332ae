#include "engine/kernels/reference.hpp"

#include "engine/kernels/numeric.hpp"

namespace kvasir::engine::kernels {
namespace {

constexpr uint32_t kLanes = 8;

// Eight running sums. Lane l of a product takes elements 4l .. 4l + 3 of each run of 32.
struct Lanes {
    float v[kLanes] = {};
};

struct IntLanes {
    int32_t v[kLanes] = {};
};

float sum(const Lanes& a) {
    const float s0 = (a.v[4] + a.v[0]) + (a.v[6] + a.v[2]);
    const float s1 = (a.v[5] + a.v[1]) + (a.v[7] + a.v[3]);
    return s0 + s1;
}

void accumulate(Lanes& lanes, float scale, const IntLanes& ints) {
    for (uint32_t l = 0; l < kLanes; ++l) {
        lanes.v[l] = fma(scale, static_cast<float>(ints.v[l]), lanes.v[l]);
    }
}

int32_t wrapping_add(int32_t a, int32_t b) {
    return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}

// One k-quant block, unpacked.
struct Block {
    float d = 0;
    float dmin = 0;
    int32_t weight[kSuper] = {};  // without the block's scales
    int32_t scale[16] = {};       // of 16 weights each
    int32_t min[16] = {};         // Q2_K: 16; Q4_K and Q5_K: 8
};

// The six-bit scales and minima of Q4_K and Q5_K: four bytes of low halves of each, then the high
// bits of the second four of both.
void unpack_six_bit(const uint8_t* packed, Block& block) {
    for (uint32_t i = 0; i < 8; ++i) {
        int32_t scale, min;
        if (i < 4) {
            scale = packed[i] & 63;
            min = packed[i + 4] & 63;
        } else {
            scale = (packed[i + 4] & 15) | (packed[i - 4] >> 6) << 4;
            min = (packed[i + 4] >> 4) | (packed[i] >> 6) << 4;
        }
        block.scale[2 * i] = block.scale[2 * i + 1] = scale;
        block.min[i] = min;
    }
}

// Nibbles of 64 weights are 32 bytes: the low halves are the first 32 weights.
uint32_t nibble(const uint8_t* nibbles, uint32_t i) {
    const uint8_t byte = nibbles[i / 64 * 32 + i % 32];
    return i % 64 < 32 ? byte & 15 : byte >> 4;
}

// Two-bit fields of 128 weights are 32 bytes: bits 0-1 are the first 32 weights, and so on.
uint32_t two_bits(const uint8_t* fields, uint32_t i) {
    return (fields[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3;
}

void unpack_q2_k(const uint8_t* p, Block& block) {
    for (uint32_t i = 0; i < kSuper; ++i) {
        block.weight[i] = static_cast<int32_t>(two_bits(p + 16, i));
    }
    for (uint32_t i = 0; i < 16; ++i) {
        block.scale[i] = p[i] & 15;
        block.min[i] = p[i] >> 4;
    }
    block.d = from_f16(load_u16(p + 80));
    block.dmin = from_f16(load_u16(p + 82));
}

void unpack_q3_k(const uint8_t* p, Block& block) {
    for (uint32_t i = 0; i < kSuper; ++i) {
        const bool high = (p[i % 32] >> (i / 32)) & 1;
        block.weight[i] = static_cast<int32_t>(two_bits(p + 32, i)) - (high ? 0 : 4);
    }
    const uint8_t* packed = p + 96;
    for (uint32_t i = 0; i < 16; ++i) {
        const int32_t low = i < 8 ? packed[i] & 15 : packed[i - 8] >> 4;
        const int32_t high = (packed[8 + i % 4] >> (i / 4 * 2)) & 3;
        block.scale[i] = (low | high << 4) - 32;
    }
    block.d = from_f16(load_u16(p + 108));
}

void unpack_q4_k(const uint8_t* p, Block& block) {
    for (uint32_t i = 0; i < kSuper; ++i) block.weight[i] = static_cast<int32_t>(nibble(p + 16, i));
    unpack_six_bit(p + 4, block);
    block.d = from_f16(load_u16(p));
    block.dmin = from_f16(load_u16(p + 2));
}

void unpack_q5_k(const uint8_t* p, Block& block) {
    for (uint32_t i = 0; i < kSuper; ++i) {
        const uint32_t high = (p[16 + i % 32] >> (i / 32)) & 1;
        block.weight[i] = static_cast<int32_t>(nibble(p + 48, i) | high << 4);
    }
    unpack_six_bit(p + 4, block);
    block.d = from_f16(load_u16(p));
    block.dmin = from_f16(load_u16(p + 2));
}

// Weights here are 0 .. 63; the 32 to be taken off is in dot_q6_k.
void unpack_q6_k(const uint8_t* p, Block& block) {
    for (uint32_t i = 0; i < kSuper; ++i) {
        // 128 weights: 64 bytes of low nibbles, the low halves first; 32 bytes of two-bit fields.
        const uint8_t low_byte = p[i / 128 * 64 + i % 64];
        const uint32_t low = i % 128 < 64 ? low_byte & 15 : low_byte >> 4;
        block.weight[i] = static_cast<int32_t>(low | two_bits(p + 128, i) << 4);
    }
    for (uint32_t i = 0; i < 16; ++i) block.scale[i] = static_cast<int8_t>(p[192 + i]);
    block.d = from_f16(load_u16(p + 208));
}

void unpack_iq4_xs(const uint8_t* p, Block& block) {
    const uint16_t high = load_u16(p + 2);
    for (uint32_t i = 0; i < kSuper; ++i) {
        const uint8_t byte = p[8 + i / 32 * 16 + i % 16];
        block.weight[i] = kIq4Values[i % 32 < 16 ? byte & 15 : byte >> 4];
    }
    for (uint32_t g = 0; g < 8; ++g) {
        const int32_t low = g % 2 ? p[4 + g / 2] >> 4 : p[4 + g / 2] & 15;
        const int32_t scale = (low | ((high >> (2 * g)) & 3) << 4) - 32;
        block.scale[2 * g] = block.scale[2 * g + 1] = scale;
    }
    block.d = from_f16(load_u16(p));
}

IntLanes products(const Block& block, const int8_t* q) {
    IntLanes lanes;
    for (uint32_t i = 0; i < kSuper; ++i) {
        lanes.v[i % 32 / 4] += block.scale[i / 16] * block.weight[i] * q[i];
    }
    return lanes;
}

// The sums of 16 weighted by `factor`: lane l takes the sums 2l and 2l + 1.
IntLanes weighted_sums(const int32_t* factor, const int16_t* sums) {
    IntLanes lanes;
    for (uint32_t l = 0; l < kLanes; ++l) {
        lanes.v[l] = factor[2 * l] * sums[2 * l] + factor[2 * l + 1] * sums[2 * l + 1];
    }
    return lanes;
}

// The minima of Q4_K and Q5_K: four lanes, each of two minima times two sums of 32.
void weighted_pairs(const Block& block, const int16_t* pairs, int32_t (&out)[4]) {
    for (uint32_t l = 0; l < 4; ++l) {
        out[l] = block.min[2 * l] * pairs[2 * l] + block.min[2 * l + 1] * pairs[2 * l + 1];
    }
}

template <typename Each>
void for_each_block(WeightType type, uint32_t width, const uint8_t* weights, const Row& row,
                    void (*unpack)(const uint8_t*, Block&), Each each) {
    for (uint32_t b = 0; b < width / kSuper; ++b, weights += block_bytes(type)) {
        Block block;
        unpack(weights, block);
        each(block, row.d[b], row.q + b * kSuper, b);
    }
}

float dot_plain(WeightType type, uint32_t width, const uint8_t* weights, const Row& row,
                void (*unpack)(const uint8_t*, Block&)) {
    Lanes lanes;
    for_each_block(type, width, weights, row, unpack,
                   [&](const Block& block, float d, const int8_t* q, uint32_t) {
                       accumulate(lanes, d * block.d, products(block, q));
                   });
    return sum(lanes);
}

float dot_q2_k(uint32_t width, const uint8_t* weights, const Row& row) {
    Lanes lanes;
    for_each_block(WeightType::kQ2_K, width, weights, row, unpack_q2_k,
                   [&](const Block& block, float d, const int8_t* q, uint32_t b) {
                       accumulate(lanes, -d * block.dmin,
                                  weighted_sums(block.min, row.sums + b * 16));
                       accumulate(lanes, d * block.d, products(block, q));
                   });
    return sum(lanes);
}

float dot_q4_k(uint32_t width, const uint8_t* weights, const Row& row) {
    Lanes lanes;
    float minima[4] = {};
    for_each_block(WeightType::kQ4_K, width, weights, row, unpack_q4_k,
                   [&](const Block& block, float d, const int8_t* q, uint32_t b) {
                       int32_t weighted[4];
                       weighted_pairs(block, row.pairs + b * 8, weighted);
                       for (uint32_t l = 0; l < 4; ++l) {
                           minima[l] =
                               fma(-d * block.dmin, static_cast<float>(weighted[l]), minima[l]);
                       }
                       accumulate(lanes, d * block.d, products(block, q));
                   });
    return sum(lanes) + ((minima[0] + minima[2]) + (minima[1] + minima[3]));
}

float dot_q5_k(uint32_t width, const uint8_t* weights, const Row& row) {
    Lanes lanes;
    float minima = 0;
    for_each_block(WeightType::kQ5_K, width, weights, row, unpack_q5_k,
                   [&](const Block& block, float d, const int8_t* q, uint32_t b) {
                       int32_t weighted[4];
                       weighted_pairs(block, row.pairs + b * 8, weighted);
                       const int32_t all = weighted[0] + weighted[1] + weighted[2] + weighted[3];
                       minima = fma(-d * block.dmin, static_cast<float>(all), minima);
                       accumulate(lanes, d * block.d, products(block, q));
                   });
    return sum(lanes) + minima;
}

float dot_q6_k(uint32_t width, const uint8_t* weights, const Row& row) {
    Lanes lanes;
    for_each_block(WeightType::kQ6_K, width, weights, row, unpack_q6_k,
                   [&](const Block& block, float d, const int8_t* q, uint32_t b) {
                       IntLanes ints = products(block, q);
                       const IntLanes less = weighted_sums(block.scale, row.sums + b * 16);
                       for (uint32_t l = 0; l < kLanes; ++l) {
                           const auto off =
                               static_cast<int32_t>(static_cast<uint32_t>(less.v[l]) << 5);
                           ints.v[l] = wrapping_add(ints.v[l], wrapping_add(~off, 1));
                       }
                       accumulate(lanes, d * block.d, ints);
                   });
    return sum(lanes);
}

// One block of 32 weights. Returns its scale.
float unpack_small(WeightType type, const uint8_t* p, int32_t (&weight)[kSmall]) {
    for (uint32_t i = 0; i < kSmall; ++i) {
        if (type == WeightType::kQ8_0) {
            weight[i] = static_cast<int8_t>(p[2 + i]);
            continue;
        }
        const uint32_t nibbles_at = type == WeightType::kMxfp4  ? 1
                                    : type == WeightType::kQ5_0 ? 6
                                                                : 2;
        const uint8_t byte = p[nibbles_at + i % 16];
        const uint32_t index = i < 16 ? byte & 15 : byte >> 4;
        if (type == WeightType::kQ5_0) {
            const uint32_t high = (load_u32(p + 2) >> i) & 1;
            weight[i] = static_cast<int32_t>(index | high << 4) - 16;
            continue;
        }
        weight[i] = type == WeightType::kQ4_0    ? static_cast<int32_t>(index) - 8
                    : type == WeightType::kIq4Nl ? kIq4Values[index]
                                                 : kFp4Values[index];
    }
    return type == WeightType::kMxfp4 ? from_e8m0_half(p[0]) : from_f16(load_u16(p));
}

// Q4_0, Q5_0 and Q8_0 keep one set of lanes. IQ4_NL and MXFP4 keep two, of the even and the odd
// blocks, and a last block without a partner is added to the sum as one number.
float dot_small(WeightType type, uint32_t width, const uint8_t* weights, const Row& row) {
    const bool two = type == WeightType::kIq4Nl || type == WeightType::kMxfp4;
    const uint32_t blocks = width / kSmall;
    Lanes lanes[2];
    float last = 0;
    bool has_last = false;
    float last_scale = 0;
    for (uint32_t b = 0; b < blocks; ++b, weights += block_bytes(type)) {
        int32_t weight[kSmall];
        const float scale = unpack_small(type, weights, weight) * row.d[b];
        IntLanes ints;
        for (uint32_t i = 0; i < kSmall; ++i) ints.v[i / 4] += weight[i] * row.q[b * kSmall + i];
        if (two && b % 2 == 0 && b + 1 == blocks) {
            int32_t all = 0;
            for (int32_t lane : ints.v) all += lane;
            last = static_cast<float>(all);
            last_scale = scale;
            has_last = true;
            continue;
        }
        accumulate(lanes[two ? b % 2 : 0], scale, ints);
    }
    if (!two) return sum(lanes[0]);
    for (uint32_t l = 0; l < kLanes; ++l) lanes[0].v[l] = lanes[0].v[l] + lanes[1].v[l];
    return has_last ? fma(last_scale, last, sum(lanes[0])) : sum(lanes[0]);
}

}  // namespace

float reference_dot_panel(uint32_t width, const uint8_t* weights, const Row& row) {
    float total = 0;
    for_each_block(WeightType::kIq4Xs, width, weights, row, unpack_iq4_xs,
                   [&](const Block& block, float d, const int8_t* q, uint32_t) {
                       int32_t all = 0;
                       for (int32_t lane : products(block, q).v) all += lane;
                       total = fma(static_cast<float>(all), d * block.d, total);
                   });
    return total;
}

float reference_dot(WeightType type, uint32_t width, const uint8_t* weights, const Row& row) {
    switch (type) {
        case WeightType::kQ2_K:
            return dot_q2_k(width, weights, row);
        case WeightType::kQ3_K:
            return dot_plain(type, width, weights, row, unpack_q3_k);
        case WeightType::kQ4_K:
            return dot_q4_k(width, weights, row);
        case WeightType::kQ5_K:
            return dot_q5_k(width, weights, row);
        case WeightType::kQ6_K:
            return dot_q6_k(width, weights, row);
        case WeightType::kIq4Xs:
            return dot_plain(type, width, weights, row, unpack_iq4_xs);
        case WeightType::kQ4_0:
        case WeightType::kQ5_0:
        case WeightType::kQ8_0:
        case WeightType::kIq4Nl:
        case WeightType::kMxfp4:
            return dot_small(type, width, weights, row);
    }
    return 0;
}

}  // namespace kvasir::engine::kernels
