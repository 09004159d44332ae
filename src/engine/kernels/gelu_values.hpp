// The values of GELU that ggml keeps in a table, and how the table is read.
//
// Used by gelu.cpp and kernels_wasm.cpp; all is internal and without a C library (see numeric.hpp).
// Thread: pure functions over the caller's table.
#pragma once

#include "engine/kernels/numeric.hpp"

namespace kvasir::engine::kernels {
namespace {

constexpr uint32_t kHalves = 1 << 16;

// e^x in double, to about its last bit, without a C library's: 2^n times a Taylor series over
// |r| <= ln 2 / 2. |x| <= 64.
inline double exp_double(double x) {
    constexpr double kRound = 0x1.8p52;
    const double n = x * 0x1.71547652b82fep+0 + kRound - kRound;
    const double r = (x - n * 0x1.62e42fefa39efp-1) - n * 0x1.abc9e3b39803fp-56;
    double sum = 1;
    for (int i = 18; i >= 1; --i) sum = 1 + r / i * sum;
    const auto exponent = static_cast<int64_t>(n) + 1023;
    return sum * __builtin_bit_cast(double, static_cast<uint64_t>(exponent) << 52);
}

inline float tanh_float(float x) {
    if (x != x) return x;  // NaN is no number of bits to shift by
    const double clamped = x > 20 ? 20 : x < -20 ? -20 : static_cast<double>(x);
    const double e = exp_double(2 * clamped);
    return static_cast<float>((e - 1) / (e + 1));
}

// 0.5 x (1 + tanh(sqrt(2 / pi) x (1 + 0.044715 x^2))), in float; Hendrycks and Gimpel, "Gaussian
// Error Linear Units", 2016.
inline float gelu_float(float x) {
    constexpr float kRoot = 0.79788456080286535587989211986876f;
    const float inner = kRoot * x * fma(0.044715f * x, x, 1.0f);
    return 0.5f * x * (1.0f + tanh_float(inner));
}

inline void fill_gelu_table(uint16_t* table) {
    for (uint32_t half = 0; half < kHalves; ++half) {
        table[half] = to_f16(gelu_float(from_f16(static_cast<uint16_t>(half))));
    }
}

// As gelu() (gelu.hpp), with the table given.
inline void gelu_from(const uint16_t* table, uint32_t count, const float* x, const float* g,
                      float* y) {
    for (uint32_t i = 0; i < count; ++i) {
        const float value = x[i];
        float out;
        if (value <= -10.0f) {
            y[i] = 0.0f;
            continue;
        }
        if (value >= 10.0f) {
            out = value;
        } else {
            out = from_f16(table[to_f16(value)]);
        }
        y[i] = g == nullptr ? out : out * g[i];
    }
}

}  // namespace
}  // namespace kvasir::engine::kernels
