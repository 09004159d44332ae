// What happens to a row between its products, and how it is made ready for one.
//
// Plain loops, compiled once per instruction set with the compiler's vectors; in an unnamed
// namespace (see numeric.hpp). Sources: docs/numerics.md. Thread: pure functions.
#pragma once

#include "engine/kernels/kernels.hpp"

namespace kvasir::engine::kernels {
namespace {

// e^x as ggml's vector code has it: x = n ln 2 + b, a polynomial in b, times 2^n.
struct Reduced {
    float z, n, b, u;
};

inline Reduced reduce(float x) {
    constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer
    Reduced r;
    r.z = fma(x, 0x1.715476p+0f, kRound);
    r.n = r.z - kRound;
    r.b = fma(-r.n, 0x1.7f7d1cp-20f, fma(-r.n, 0x1.62e4p-1f, x));
    r.u = r.b * r.b;
    return r;
}

// The two upper terms of the polynomial, which both classes share.
inline float upper(const Reduced& r) {
    return fma(fma(0x1.0e4020p-7f, r.b, 0x1.573e2ep-5f), r.u,
               fma(0x1.555e66p-3f, r.b, 0x1.fffdb6p-2f));
}

inline float magnitude(float x) {
    return float_of(bits_of(x) & 0x7fffffff);
}

// AVX2: 2^n + 2^n j, with j = e^b - 1.
inline float exp_v3(float x) {
    const Reduced r = reduce(x);
    const uint32_t e = bits_of(r.z) << 23;
    const float k = float_of(e + 0x3f800000);
    const float j = fma(upper(r), r.u, 0x1.ffffecp-1f * r.b);
    const float usual = fma(j, k, k);
    // Far out, 2^n in two factors.
    const uint32_t g = r.n <= 0 ? 0x82000000 : 0;
    const float s1 = float_of(g + 0x7f000000);
    const float s2 = float_of(e - g);
    const float far = fma(s2, j, s2) * s1;
    const float farther = s1 * s1;
    const float n = magnitude(r.n);
    return n > 192 ? farther : n > 126 ? far : usual;
}

// AVX-512: e^b scaled by 2^n, rounded once. Half of n each time gives that: only the second product
// can leave the normal numbers.
inline float exp_v4(float x) {
    const Reduced r = reduce(x);
    const float j = fma(upper(r), r.u, fma(0x1.ffffecp-1f, r.b, 1.0f));
    const auto n = static_cast<int32_t>(bits_of(r.z) - 0x4b400000u);
    const int32_t half = n >> 1;
    const float first = float_of(static_cast<uint32_t>(half + 127) << 23);
    const float second = float_of(static_cast<uint32_t>(n - half + 127) << 23);
    const float usual = j * first * second;
    const float outside = r.n <= 0 ? 0.0f : __builtin_inff();
    return magnitude(r.n) > 192 ? outside : usual;
}

void silu_v3(uint32_t count, const float* x, const float*, float* y) {
    for (uint32_t i = 0; i < count; ++i) y[i] = x[i] / (1.0f + exp_v3(0.0f - x[i]));
}
void silu_v4(uint32_t count, const float* x, const float*, float* y) {
    for (uint32_t i = 0; i < count; ++i) y[i] = x[i] / (1.0f + exp_v4(0.0f - x[i]));
}
void swiglu_v3(uint32_t count, const float* x, const float* g, float* y) {
    for (uint32_t i = 0; i < count; ++i) y[i] = x[i] / (1.0f + exp_v3(0.0f - x[i])) * g[i];
}
void swiglu_v4(uint32_t count, const float* x, const float* g, float* y) {
    for (uint32_t i = 0; i < count; ++i) y[i] = x[i] / (1.0f + exp_v4(0.0f - x[i])) * g[i];
}

// 2^(i / 32).
constexpr double kExp2[32] = {
    0x1.0000000000000p+0, 0x1.059b0d3158574p+0, 0x1.0b5586cf9890fp+0, 0x1.11301d0125b51p+0,
    0x1.172b83c7d517bp+0, 0x1.1d4873168b9aap+0, 0x1.2387a6e756238p+0, 0x1.29e9df51fdee1p+0,
    0x1.306fe0a31b715p+0, 0x1.371a7373aa9cbp+0, 0x1.3dea64c123422p+0, 0x1.44e086061892dp+0,
    0x1.4bfdad5362a27p+0, 0x1.5342b569d4f82p+0, 0x1.5ab07dd485429p+0, 0x1.6247eb03a5585p+0,
    0x1.6a09e667f3bcdp+0, 0x1.71f75e8ec5f74p+0, 0x1.7a11473eb0187p+0, 0x1.82589994cce13p+0,
    0x1.8ace5422aa0dbp+0, 0x1.93737b0cdc5e5p+0, 0x1.9c49182a3f090p+0, 0x1.a5503b23e255dp+0,
    0x1.ae89f995ad3adp+0, 0x1.b7f76f2fb5e47p+0, 0x1.c199bdd85529cp+0, 0x1.cb720dcef9069p+0,
    0x1.d5818dcfba487p+0, 0x1.dfc97337b9b5fp+0, 0x1.ea4afa2a490dap+0, 0x1.f50765b6e4540p+0,
};

// e^x as the C library of x86 (glibc 2.27 and later) gives it: in double, x / ln 2 in 32nds, a
// table, a cubic (Arm, "Optimized Routines", expf). Not always the nearest float.
inline float exp_libm(float x) {
    if (x != x) return x + x;
    if (x > 0x1.62e42ep6f) return __builtin_inff();
    if (x < -0x1.9fe368p6f) return 0.0f;
    constexpr double kN = 32;
    constexpr double kC0 = 0x1.c6af84b912394p-5 / kN / kN / kN;
    constexpr double kC1 = 0x1.ebfce50fac4f3p-3 / kN / kN;
    constexpr double kC2 = 0x1.62e42ff0c52d6p-1 / kN;
    constexpr double kRound = 0x1.8p52;
    const double z = 0x1.71547652b82fep+0 * kN * x;
    const double shifted = z + kRound;
    const uint64_t k = __builtin_bit_cast(uint64_t, shifted);
    const double r = z - (shifted - kRound);
    // k / 32 into the exponent of 2^((k mod 32) / 32).
    const auto whole = static_cast<int64_t>(k << 12) >> 17;  // of the mantissa's 52 bits
    uint64_t bits = __builtin_bit_cast(uint64_t, kExp2[k % 32]);
    bits += static_cast<uint64_t>(whole) << 52;
    const double s = __builtin_bit_cast(double, bits);
    const double y = (kC0 * r + kC1) * (r * r) + (kC2 * r + 1);
    return static_cast<float>(y * s);
}

void swiglu_oai(uint32_t count, const float* x, const float* g, float alpha, float limit,
                float* y) {
    for (uint32_t i = 0; i < count; ++i) {
        const float a = limit < x[i] ? limit : x[i];
        const float b = g[i] < -limit ? -limit : limit < g[i] ? limit : g[i];
        y[i] = a / (1.0f + exp_libm(alpha * -a)) * (b + 1.0f);
    }
}

// Rounds to the nearest integer, ties to even, for |x| < 2^22. Of anything else some number of 23
// bits, the same everywhere.
inline int32_t round_to_int(float x) {
    return static_cast<int32_t>(bits_of(x + 12582912.0f) & 0x007fffff) - 0x00400000;
}

// ggml's reference routine, which its x86 and ARM backends use: the scale is -127 over the value of
// the first element of the largest magnitude.
void quantise_q8_k(uint32_t width, const float* x, int8_t* q, float* d, int16_t* sums,
                   int16_t* pairs) {
    for (uint32_t b = 0; b < width / kSuper;
         ++b, x += kSuper, q += kSuper, sums += 16, pairs += 8) {
        uint32_t largest = 0;
        for (uint32_t i = 0; i < kSuper; ++i) {
            // Not a number never counts as larger.
            const uint32_t bits = bits_of(x[i]) & 0x7fffffff;
            const uint32_t counted = bits > 0x7f800000 ? 0 : bits;
            largest = counted > largest ? counted : largest;
        }
        float signed_largest = 0;
        for (uint32_t i = kSuper; i-- > 0;) {
            signed_largest = (bits_of(x[i]) & 0x7fffffff) == largest ? x[i] : signed_largest;
        }
        const float inverse = largest ? -127.0f / signed_largest : 0;
        d[b] = largest ? 1 / inverse : 0;
        for (uint32_t i = 0; i < kSuper; ++i) {
            const int32_t rounded = largest ? round_to_int(inverse * x[i]) : 0;
            q[i] = static_cast<int8_t>(rounded < 127 ? rounded : 127);
        }
        for (uint32_t s = 0; s < 16; ++s) {
            int32_t sum = 0;
            for (uint32_t i = 0; i < 16; ++i) sum += q[16 * s + i];
            sums[s] = static_cast<int16_t>(sum);
        }
        for (uint32_t p = 0; p < 8; ++p) {
            pairs[p] = static_cast<int16_t>(sums[2 * p] + sums[2 * p + 1]);
        }
    }
}

// As ggml's AVX code: scale of the largest magnitude over 127, kept as f16; values times 127 over
// that magnitude.
void quantise_q8_0(uint32_t width, const float* x, int8_t* q, float* d) {
    for (uint32_t b = 0; b < width / kSmall; ++b, x += kSmall, q += kSmall) {
        float largest = 0;
        for (uint32_t i = 0; i < kSmall; ++i) {
            const float m = magnitude(x[i]);
            largest = m > largest ? m : largest;
        }
        d[b] = from_f16(to_f16(largest / 127.0f));
        const float inverse = largest != 0 ? 127.0f / largest : 0;
        for (uint32_t i = 0; i < kSmall; ++i) {
            const int32_t rounded = round_to_int(x[i] * inverse);
            q[i] = static_cast<int8_t>(rounded > 127 ? 127 : rounded < -128 ? -128 : rounded);
        }
    }
}

constexpr Elementwise kElementwise = {silu_v3,    silu_v4,       swiglu_v3,    swiglu_v4,
                                      swiglu_oai, quantise_q8_k, quantise_q8_0};

}  // namespace
}  // namespace kvasir::engine::kernels
