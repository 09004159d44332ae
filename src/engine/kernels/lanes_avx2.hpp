// Vectors of AVX2 with FMA and F16C, for dots.hpp (there: what each function is).
#pragma once

#include <immintrin.h>

#include "engine/kernels/weights.hpp"

namespace kvasir::engine::kernels {
namespace {

// Eight float lanes, shared with the AVX-512 version, which keeps them in the same registers.
struct Floats8 {
    using F = __m256;
    using F4 = __m128;
    using Ints = __m256i;
    using Ints4 = __m128i;
    using Minima8 = __m128i;  // eight int16

    static F zero() { return _mm256_setzero_ps(); }
    static F4 zero4() { return _mm_setzero_ps(); }
    static F all(float x) { return _mm256_set1_ps(x); }
    static F fused(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F plus(F a, F b) { return _mm256_add_ps(a, b); }
    static F to_float(Ints a) { return _mm256_cvtepi32_ps(a); }
    static F fused_less(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
    // A block's scale, and the scale of its minima where it has one.
    static F4 two_f16(const uint8_t* p) {
        return _mm_cvtph_ps(_mm_cvtsi32_si128(static_cast<int>(load_u32(p))));
    }
    static F4 one_f16(const uint8_t* p) { return _mm_cvtph_ps(_mm_cvtsi32_si128(load_u16(p))); }
    static F4 times(F4 scales, float x) { return _mm_mul_ps(scales, _mm_set1_ps(x)); }
    static F first(F4 scales) { return _mm256_broadcastss_ps(scales); }
    static F second(F4 scales) { return _mm256_broadcastss_ps(_mm_movehdup_ps(scales)); }
    static float first4(F4 scales) { return _mm_cvtss_f32(scales); }
    static float second4(F4 scales) { return _mm_cvtss_f32(_mm_movehdup_ps(scales)); }
    // c - second * b
    static F4 fused4_less(F4 scales, Ints4 b, F4 c) {
        return _mm_fnmadd_ps(_mm_shuffle_ps(scales, scales, 0x55), _mm_cvtepi32_ps(b), c);
    }
    static float sum(F a) {
        return sum4(_mm_add_ps(_mm256_extractf128_ps(a, 1), _mm256_castps256_ps128(a)));
    }
    // (0 + 2) + (1 + 3)
    static float sum4(F4 a) {
        const __m128 two = _mm_add_ps(a, _mm_movehl_ps(a, a));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }
    static int32_t sum_ints4(Ints4 a) {
        const __m128i two = _mm_add_epi32(a, _mm_unpackhi_epi64(a, a));
        return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
    }
    static int32_t sum_ints8(Ints a) {
        return sum_ints4(_mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)));
    }
    static Minima8 minima8(uint64_t bytes) {
        return _mm_cvtepu8_epi16(_mm_cvtsi64_si128(static_cast<int64_t>(bytes)));
    }
    static Ints4 madd_8(Minima8 minima, const int16_t* pairs) {
        return _mm_madd_epi16(minima, _mm_loadu_si128(reinterpret_cast<const __m128i*>(pairs)));
    }
    static Ints madd_16(__m256i factors, const int16_t* sums) {
        return _mm256_madd_epi16(factors,
                                 _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums)));
    }
    static Ints minus_32_times(Ints a, Ints b) {
        return _mm256_sub_epi32(a, _mm256_slli_epi32(b, 5));
    }
    // Sixteen int16.
    static __m256i signed_scales_of_16(uint64_t low, uint64_t high) {
        return _mm256_cvtepi8_epi16(
            _mm_set_epi64x(static_cast<int64_t>(high), static_cast<int64_t>(low)));
    }
};

struct Avx2 : Floats8, InOrder<Avx2> {
    static constexpr int kRowsAtOnce = 4;
    static constexpr uint32_t kStreams = 3;
    static constexpr bool kFlipped = false;

    struct Bytes {
        __m256i first, second;
    };
    struct Signed {
        Bytes weights, magnitudes;
    };
    using Sums = __m256i;
    using Scales = __m256i;  // sixteen int16; of 32: the same eight twice
    struct Scale {
        __m256i first, second;
    };

    static __m256i at(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

    template <int A, int B, int Mask>
    static Bytes fields(const uint8_t* a, const uint8_t* b) {
        const __m256i mask = _mm256_set1_epi8(Mask);
        return {_mm256_and_si256(_mm256_srli_epi16(at(a), A), mask),
                _mm256_and_si256(_mm256_srli_epi16(at(b), B), mask)};
    }
    static Bytes either(Bytes a, Bytes b) {
        return {_mm256_or_si256(a.first, b.first), _mm256_or_si256(a.second, b.second)};
    }
    template <int Count>
    static Bytes shift_left(Bytes a) {
        return {_mm256_slli_epi16(a.first, Count), _mm256_slli_epi16(a.second, Count)};
    }
    template <int Value>
    static Bytes subtract(Bytes a) {
        const __m256i value = _mm256_set1_epi8(Value);
        return {_mm256_sub_epi8(a.first, value), _mm256_sub_epi8(a.second, value)};
    }
    static Bytes load(const uint8_t* a, const uint8_t* b) { return {at(a), at(b)}; }
    static __m256i nibbles_of_16(const uint8_t* p) {
        const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(x, 4), x), _mm256_set1_epi8(15));
    }
    static Bytes nibbles(const uint8_t* a, const uint8_t* b) {
        return {nibbles_of_16(a), nibbles_of_16(b)};
    }
    static Bytes lookup(Bytes index, const int8_t* table) {
        const __m256i values =
            _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
        return {_mm256_shuffle_epi8(values, index.first),
                _mm256_shuffle_epi8(values, index.second)};
    }

    static Scales scales_of_32(uint64_t bytes) {
        return _mm256_broadcastsi128_si256(minima8(bytes));
    }
    static Scales signed_scales_of_32(uint64_t bytes) {
        return _mm256_broadcastsi128_si256(
            _mm_cvtepi8_epi16(_mm_cvtsi64_si128(static_cast<int64_t>(bytes))));
    }
    // Bytes 2i and 2i + 1 of each half, over and over.
    static constexpr int16_t pick(int i) { return static_cast<int16_t>((2 * i + 1) * 256 + 2 * i); }
    template <WeightType, int J>
    static Scale of_32(Scales s) {
        return {_mm256_shuffle_epi8(s, _mm256_set1_epi16(pick(2 * J))),
                _mm256_shuffle_epi8(s, _mm256_set1_epi16(pick(2 * J + 1)))};
    }
    template <WeightType, int J>
    static Scale of_16(Scales s) {
        const __m256i half = _mm256_permute2x128_si256(s, s, J < 2 ? 0x00 : 0x11);
        constexpr int kFirst = J % 2 * 4;
        const auto two = [](int i) {
            return _mm256_set_m128i(_mm_set1_epi16(pick(i + 1)), _mm_set1_epi16(pick(i)));
        };
        return {_mm256_shuffle_epi8(half, two(kFirst)), _mm256_shuffle_epi8(half, two(kFirst + 2))};
    }

    static Sums none() { return _mm256_setzero_si256(); }
    static Ints fold(Sums s) { return s; }
    // Which run of 32 of a block the activations have at place `i`.
    static constexpr uint32_t group(WeightType, uint32_t i) { return i; }
    template <WeightType, int J>
    static Sums add_unsigned(Sums s, Bytes w, const int8_t* q, Scale scale) {
        const __m256i first = _mm256_maddubs_epi16(w.first, at(q + 64 * J));
        const __m256i second = _mm256_maddubs_epi16(w.second, at(q + 64 * J + 32));
        return _mm256_add_epi32(s, _mm256_add_epi32(_mm256_madd_epi16(first, scale.first),
                                                    _mm256_madd_epi16(second, scale.second)));
    }
    static Signed split_signs(Bytes w) {
        return {w, {_mm256_abs_epi8(w.first), _mm256_abs_epi8(w.second)}};
    }
    static __m256i signed_product(__m256i magnitude, __m256i weight, const int8_t* q) {
        return _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(at(q), weight));
    }
    template <WeightType, int J>
    static Sums add_signed(Sums s, const Signed& w, const int8_t* q, Scale scale) {
        const __m256i first = signed_product(w.magnitudes.first, w.weights.first, q + 64 * J);
        const __m256i second =
            signed_product(w.magnitudes.second, w.weights.second, q + 64 * J + 32);
        return _mm256_add_epi32(s, _mm256_add_epi32(_mm256_madd_epi16(first, scale.first),
                                                    _mm256_madd_epi16(second, scale.second)));
    }
    // Weights of types of 32, made ready.
    using Small = Signed;
    static Small small(Bytes w) { return split_signs(w); }
    static void two_products(const Small& w, const int8_t* q, F& first, F& second) {
        const __m256i ones = _mm256_set1_epi16(1);
        first = to_float(
            _mm256_madd_epi16(signed_product(w.magnitudes.first, w.weights.first, q), ones));
        second = to_float(
            _mm256_madd_epi16(signed_product(w.magnitudes.second, w.weights.second, q + 32), ones));
    }
};

}  // namespace
}  // namespace kvasir::engine::kernels
