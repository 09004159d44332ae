// Numbers as the kernels use them: f16, fused multiply-add, and which build of ggml to agree with.
//
// Used by every file of kernels/, which are compiled once per instruction set and also without a C
// library: nothing here needs one, and every function has internal linkage, so that the linker
// cannot hand one file's AVX-512 code to another. Thread: values.
//
// Needs -ffp-contract=off: a product that is to be fused is written fma(), all others are not.
#pragma once

#include <stdint.h>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace kvasir::engine::kernels {

// Whose bits: ggml's CPU backend built for AVX2+FMA, or for AVX-512. They differ in the exponential
// of SiLU only (docs/numerics.md). Wire values: never renumber.
enum class NumericClass : uint8_t {
    kOther = 0,  // a backend that these kernels do not imitate
    kX86V3 = 1,
    kX86V4 = 2,
};

static inline uint32_t bits_of(float value) {
    return __builtin_bit_cast(uint32_t, value);
}

static constexpr float float_of(uint32_t bits) {
    return __builtin_bit_cast(float, bits);
}

// a * b + c, rounded once.
static inline float fma(float a, float b, float c) {
#if defined(__wasm__)
    // The product of two floats is exact in double. Its sum with c is rounded to odd, so that the
    // second rounding, to float, gives what one rounding would have given (Boldo and Melquiond,
    // "Emulation of FMA and correctly rounded sums", 2008).
    const double product = static_cast<double>(a) * b;
    const double addend = c;
    double sum = product + addend;
    const double part = sum - product;
    const double rest = (product - (sum - part)) + (addend - part);
    uint64_t bits = __builtin_bit_cast(uint64_t, sum);
    // An infinite sum leaves a rest that is not a number, and is left as it is.
    if ((rest > 0 || rest < 0) && (bits & 1) == 0) {
        bits += ((rest > 0) == (sum > 0)) ? 1 : -1;
        sum = __builtin_bit_cast(double, bits);
    }
    return static_cast<float>(sum);
#else
    return __builtin_fmaf(a, b, c);
#endif
}

// Exact.
static inline float from_f16(uint16_t half) {
#if defined(__F16C__)
    return _cvtsh_ss(half);
#elif defined(__aarch64__)
    return static_cast<float>(__builtin_bit_cast(__fp16, half));
#else
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
    const uint32_t magnitude = half & 0x7fff;
    if (magnitude >= 0x7c00) {  // infinite, or not a number: quiet, as the processors give it
        const uint32_t fraction = (magnitude & 0x3ff) << 13;
        return float_of(sign | 0x7f800000 | fraction | (fraction ? 0x400000 : 0));
    }
    if (magnitude < 0x400) {  // subnormal: a multiple of 2^-24
        const float value = static_cast<float>(magnitude) * 0x1p-24f;
        return float_of(sign | bits_of(value));
    }
    return float_of(sign | ((magnitude << 13) + (112u << 23)));
#endif
}

// To nearest, ties to even.
static inline uint16_t to_f16(float value) {
#if defined(__F16C__)
    return _cvtss_sh(value, 0);
#elif defined(__aarch64__)
    return __builtin_bit_cast(uint16_t, static_cast<__fp16>(value));
#else
    const uint32_t bits = bits_of(value);
    const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) {  // not a number
        return static_cast<uint16_t>(sign | 0x7e00 | ((magnitude >> 13) & 0x3ff));
    }
    if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
    if (magnitude < 0x38800000) {  // subnormal: adding 0.5 rounds to a multiple of 2^-24
        const float shifted = float_of(magnitude) + 0.5f;
        return static_cast<uint16_t>(sign | (bits_of(shifted) - 0x3f000000));
    }
    const uint32_t odd = (magnitude >> 13) & 1;
    return static_cast<uint16_t>(sign | ((magnitude - (112u << 23) + 0xfff + odd) >> 13));
#endif
}

// 2^(e - 128): the scale of an MXFP4 block, for weights stored doubled (OCP Microscaling Formats
// v1.0, section 5.4).
static constexpr float from_e8m0_half(uint8_t e) {
    return float_of(e < 2 ? 0x00200000u << e : static_cast<uint32_t>(e - 1) << 23);
}

// Little-endian loads from any address.
static inline uint16_t load_u16(const uint8_t* p) {
    return static_cast<uint16_t>(p[0] | p[1] << 8);
}
static inline uint32_t load_u32(const uint8_t* p) {
    uint32_t value;
    __builtin_memcpy(&value, p, sizeof(value));
    return value;
}
static inline uint64_t load_u64(const uint8_t* p) {
    uint64_t value;
    __builtin_memcpy(&value, p, sizeof(value));
    return value;
}
static inline float load_f32(const uint8_t* p) {
    float value;
    __builtin_memcpy(&value, p, sizeof(value));
    return value;
}

}  // namespace kvasir::engine::kernels
