#include "engine/q8k.hpp"

#include <cstring>

#include "engine/kernels/kernels.hpp"

namespace kvasir::engine {

void quantise_q8k(const float* row, uint32_t width, uint8_t* out) {
    static_assert(kQ8KBlock == kernels::kSuper);
    const auto quantise = kernels::available_kernels().begin[0]->elementwise.quantise_q8_k;
    for (uint32_t begin = 0; begin < width; begin += kQ8KBlock, out += kQ8KBlockBytes) {
        int8_t q[kQ8KBlock];
        float d;
        int16_t sums[kQ8KBlock / 16], pairs[kQ8KBlock / 32];
        quantise(kQ8KBlock, row + begin, q, &d, sums, pairs);
        std::memcpy(out, &d, sizeof(d));
        std::memcpy(out + sizeof(d), q, sizeof(q));
        std::memcpy(out + sizeof(d) + sizeof(q), sums, sizeof(sums));
    }
}

}  // namespace kvasir::engine
