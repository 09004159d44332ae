#include "engine/q8k.hpp"

#include <cmath>
#include <cstring>

namespace kvasir::engine {
namespace {

// Rounds to the nearest integer, ties to even, by pushing the fraction out of the mantissa:
// 1.5 * 2^23 has a unit in the last place of 1.
int32_t round_to_int(float value) {
    const float shifted = value + 12582912.0f;
    int32_t bits;
    std::memcpy(&bits, &shifted, sizeof(bits));
    return (bits & 0x007fffff) - 0x00400000;
}

// The value of the first element whose magnitude is the largest; 0 when all are zero (or not
// numbers).
float signed_maximum(const float* x) {
    float largest = 0;
    for (uint32_t i = 0; i < kQ8KBlock; ++i) {
        const float magnitude = std::fabs(x[i]);
        largest = magnitude > largest ? magnitude : largest;
    }
    if (largest == 0) return 0;
    for (uint32_t i = 0; i < kQ8KBlock; ++i) {
        if (std::fabs(x[i]) == largest) return x[i];
    }
    return 0;
}

void quantise_block(const float* x, uint8_t* out) {
    const float maximum = signed_maximum(x);
    if (maximum == 0) {
        std::memset(out, 0, kQ8KBlockBytes);
        return;
    }
    const float inverse = -127.0f / maximum;
    int8_t q[kQ8KBlock];
    for (uint32_t i = 0; i < kQ8KBlock; ++i) {
        const int32_t rounded = round_to_int(inverse * x[i]);
        q[i] = static_cast<int8_t>(rounded < 127 ? rounded : 127);
    }
    int16_t sums[kQ8KBlock / 16];
    for (uint32_t i = 0; i < kQ8KBlock / 16; ++i) {
        int32_t sum = 0;
        for (uint32_t j = 0; j < 16; ++j) sum += q[i * 16 + j];
        sums[i] = static_cast<int16_t>(sum);
    }
    const float d = 1 / inverse;
    std::memcpy(out, &d, sizeof(d));
    std::memcpy(out + sizeof(d), q, sizeof(q));
    std::memcpy(out + sizeof(d) + sizeof(q), sums, sizeof(sums));
}

}  // namespace

void quantise_q8k(const float* row, uint32_t width, uint8_t* out) {
    for (uint32_t begin = 0; begin < width; begin += kQ8KBlock, out += kQ8KBlockBytes) {
        quantise_block(row + begin, out);
    }
}

}  // namespace kvasir::engine
