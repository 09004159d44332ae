// The weight types that the kernels multiply, their block layouts, and activation rows made ready.
//
// Used by every file of kernels/ (see numeric.hpp for why all is internal). Block layouts are the
// GGUF format's. Thread: values.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace kvasir::engine::kernels {

constexpr uint32_t kSuper = 256;  // weights of a k-quant block
constexpr uint32_t kSmall = 32;   // weights of a block of the older types

// ggml's type numbers.
enum class WeightType : uint32_t {
    kQ4_0 = 2,
    kQ5_0 = 6,
    kQ8_0 = 8,
    kQ2_K = 10,
    kQ3_K = 11,
    kQ4_K = 12,
    kQ5_K = 13,
    kQ6_K = 14,
    kIq4Nl = 20,
    kIq4Xs = 23,
    kMxfp4 = 39,
};
constexpr WeightType kWeightTypes[] = {
    WeightType::kQ4_0,  WeightType::kQ8_0,  WeightType::kQ2_K, WeightType::kQ3_K,
    WeightType::kQ4_K,  WeightType::kQ5_K,  WeightType::kQ6_K, WeightType::kIq4Nl,
    WeightType::kIq4Xs, WeightType::kMxfp4, WeightType::kQ5_0,
};
constexpr uint32_t kWeightTypeCount = sizeof(kWeightTypes) / sizeof(kWeightTypes[0]);

// Place in kWeightTypes; kWeightTypeCount for a type that the kernels do not have.
constexpr uint32_t index_of(WeightType type) {
    uint32_t index = 0;
    while (index < kWeightTypeCount && kWeightTypes[index] != type) ++index;
    return index;
}

// What the activations are quantised to before the product.
enum class RowKind : uint8_t {
    kQ8_0,  // blocks of 32, scale in f16
    kQ8_K,  // blocks of 256, scale in f32, sums of 16
};

constexpr RowKind row_kind(WeightType type) {
    switch (type) {
        case WeightType::kQ4_0:
        case WeightType::kQ5_0:
        case WeightType::kQ8_0:
        case WeightType::kIq4Nl:
        case WeightType::kMxfp4:
            return RowKind::kQ8_0;
        default:
            return RowKind::kQ8_K;
    }
}

constexpr uint32_t block_width(WeightType type) {
    return row_kind(type) == RowKind::kQ8_0 ? kSmall : kSuper;
}

// Are there kernels for rows of `width` such weights?
constexpr bool covers(WeightType type, uint64_t width) {
    return index_of(type) < kWeightTypeCount && width % block_width(type) == 0;
}

// Bytes of a block of block_width(type) weights.
constexpr uint32_t block_bytes(WeightType type) {
    switch (type) {
        case WeightType::kQ4_0:  // f16 d, nibbles[16]
        case WeightType::kIq4Nl:
            return 18;
        case WeightType::kQ5_0:  // f16 d, high bits[4], nibbles[16]
            return 22;
        case WeightType::kQ8_0:  // f16 d, int8[32]
            return 34;
        case WeightType::kMxfp4:  // u8 exponent, nibbles[16]
            return 17;
        case WeightType::kQ2_K:  // scales[16], two bits[64], f16 d, f16 dmin
            return 84;
        case WeightType::kQ3_K:  // high bits[32], two bits[64], scales[12], f16 d
            return 110;
        case WeightType::kQ4_K:  // f16 d, f16 dmin, scales[12], nibbles[128]
            return 144;
        case WeightType::kQ5_K:  // f16 d, f16 dmin, scales[12], high bits[32], nibbles[128]
            return 176;
        case WeightType::kQ6_K:  // low nibbles[128], high two bits[64], int8 scales[16], f16 d
            return 210;
        case WeightType::kIq4Xs:  // f16 d, u16 scales_h, scales_l[4], nibbles[128]
            return 136;
    }
    return 0;
}

constexpr uint64_t row_bytes(WeightType type, uint32_t width) {
    return uint64_t{width} / block_width(type) * block_bytes(type);
}

// A quantised activation row, taken apart so that each part is contiguous. Of a kQ8_0 row there are
// q and d only.
struct Row {
    const int8_t* q = nullptr;       // width values
    const float* d = nullptr;        // one a block
    const int16_t* sums = nullptr;   // of 16 values each: 16 a block
    const int16_t* pairs = nullptr;  // sums[2i] + sums[2i + 1], wrapped: 8 a block
};

// Sixteen weights that a four-bit index stands for.
constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};
// E2M1 doubled.
constexpr int8_t kFp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

}  // namespace kvasir::engine::kernels
