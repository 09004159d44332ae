// What tests know of weight blocks beyond their sizes. Used by kernels_test.cpp and kernels_digest.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/kernels/weights.hpp"

namespace kvasir::engine::kernels {

// Where a block's f16 scales are.
inline std::vector<uint32_t> scales_at(WeightType type) {
    switch (type) {
        case WeightType::kQ2_K:
            return {80, 82};
        case WeightType::kQ3_K:
            return {108};
        case WeightType::kQ4_K:
        case WeightType::kQ5_K:
            return {0, 2};
        case WeightType::kQ6_K:
            return {208};
        case WeightType::kMxfp4:
            return {};
        default:
            return {0};
    }
}

}  // namespace kvasir::engine::kernels
