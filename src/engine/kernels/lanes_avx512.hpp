// Vectors of AVX-512 (F, BW, VL, DQ, VNNI), for dots.hpp (there: what each function is).
#pragma once

#include "engine/kernels/lanes_avx2.hpp"

namespace kvasir::engine::kernels {
namespace {

// A load of 64 bytes of packed weights has two runs of 32 that are not neighbours in Q4_K and Q5_K
// (0 and 2, 1 and 3, ...), Q2_K and Q3_K (0 and 4, 1 and 5, ...). The activations are arranged to
// that: this is the run of 32 that they have at place `i` of a block.
constexpr uint32_t wide_group(WeightType type, uint32_t i) {
    switch (type) {
        case WeightType::kQ4_K:
        case WeightType::kQ5_K:
            return i / 4 * 4 + i % 2 * 2 + i / 2 % 2;
        case WeightType::kQ2_K:
        case WeightType::kQ3_K:
            return i % 2 * 4 + i / 2;
        default:
            return i;
    }
}

struct Avx512 : Floats8 {
    static constexpr int kRowsAtOnce = 8;
    static constexpr uint32_t kStreams = 4;
    static constexpr bool kFlipped = true;

    using Bytes = __m512i;
    struct Signed {
        __m512i magnitudes;
        __mmask64 negative;
    };
    using Sums = __m512i;
    using Scales = __m512i;  // the low 16 int16, or the low 8
    using Scale = __m512i;

    static __m512i two(const void* a, const void* b) {
        const __m256i low = _mm256_loadu_si256(static_cast<const __m256i*>(a));
        const __m256i high = _mm256_loadu_si256(static_cast<const __m256i*>(b));
        return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }
    static __m512i in_halves(int16_t a, int16_t b) {
        return _mm512_inserti64x4(_mm512_set1_epi16(a), _mm256_set1_epi16(b), 1);
    }

    static __m512i at(const void* p) { return _mm512_loadu_si512(p); }
    static __m512i twice(const uint8_t* p) {
        return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    // low | (x & Mask)
    template <int Mask>
    static Bytes merge(Bytes low, Bytes x) {
        return _mm512_ternarylogic_epi32(low, x, _mm512_set1_epi8(Mask), 0xf8);
    }
    static Bytes either(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }
    template <int Value>
    static Bytes subtract(Bytes a) {
        return _mm512_sub_epi8(a, _mm512_set1_epi8(Value));
    }

    static constexpr uint32_t group(WeightType type, uint32_t i) { return wide_group(type, i); }
    template <int J>
    static Bytes q4_k(const uint8_t* nibbles) {
        const __m512i x = at(nibbles + J / 2 * 64);
        return _mm512_and_si512(J % 2 ? _mm512_srli_epi16(x, 4) : x, _mm512_set1_epi8(15));
    }
    template <int J>
    static Bytes q5_k(const uint8_t* nibbles, const uint8_t* high) {
        // Bits g and g + 2 of the high bits to bit 4 of each weight.
        constexpr int kBit = J / 2 * 4 + J % 2;
        const __m512i x = twice(high);
        if constexpr (J < 2) {
            return merge<16>(q4_k<J>(nibbles), _mm512_sllv_epi16(x, in_halves(4 - kBit, 2 - kBit)));
        }
        return merge<16>(q4_k<J>(nibbles), _mm512_srlv_epi16(x, in_halves(kBit - 4, kBit - 2)));
    }
    template <int J>
    static Bytes q6_k(const uint8_t* nibbles, const uint8_t* high) {
        const __m512i x = twice(high + J / 2 * 32);
        if constexpr (J % 2 == 0) {
            return merge<0x30>(q4_k<J>(nibbles), _mm512_sllv_epi16(x, in_halves(4, 2)));
        }
        return merge<0x30>(q4_k<J>(nibbles), _mm512_srlv_epi16(x, in_halves(0, 2)));
    }
    template <int J>
    static Bytes q2_k(const uint8_t* two_bits) {
        return _mm512_and_si512(_mm512_srli_epi16(at(two_bits), 2 * J), _mm512_set1_epi8(3));
    }
    template <int J>
    static Bytes q3_k(const uint8_t* two_bits, const uint8_t* high) {
        const __m512i x = twice(high);
        // Bits J and J + 4 of the high bits to bit 2 of each weight.
        if constexpr (J < 2) {
            return subtract<4>(merge<4>(q2_k<J>(two_bits), shifted(x, 2 - J, -2 - J)));
        }
        return subtract<4>(
            merge<4>(q2_k<J>(two_bits), _mm512_srlv_epi16(x, in_halves(J - 2, J + 2))));
    }
    // Left by a in the first half, right by -b in the second.
    static __m512i shifted(__m512i x, int16_t a, int16_t b) {
        return _mm512_srlv_epi16(_mm512_sllv_epi16(x, in_halves(a, 0)),
                                 in_halves(0, static_cast<int16_t>(-b)));
    }
    static Bytes load(const uint8_t* a, const uint8_t* b) { return two(a, b); }
    static Bytes nibbles(const uint8_t* a, const uint8_t* b) {
        const __m512i x = _mm512_inserti64x4(
            _mm512_castsi256_si512(
                _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a)))),
            _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b))), 1);
        const __m512i shifts = _mm512_set_epi64(0x0004000400040004, 0x0004000400040004, 0, 0,
                                                0x0004000400040004, 0x0004000400040004, 0, 0);
        return _mm512_and_si512(_mm512_srlv_epi16(x, shifts), _mm512_set1_epi8(15));
    }
    static Bytes lookup(Bytes index, const int8_t* table) {
        const __m512i values =
            _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
        return _mm512_shuffle_epi8(values, index);
    }

    static Scales scales_of_32(uint64_t bytes) { return _mm512_castsi128_si512(minima8(bytes)); }
    static Scales signed_scales_of_32(uint64_t bytes) {
        return _mm512_castsi128_si512(
            _mm_cvtepi8_epi16(_mm_cvtsi64_si128(static_cast<int64_t>(bytes))));
    }
    static Scales signed_scales_of_16(uint64_t low, uint64_t high) {
        return _mm512_castsi256_si512(Floats8::signed_scales_of_16(low, high));
    }
    template <WeightType T, int J>
    static Scale of_32(Scales s) {
        return _mm512_permutexvar_epi16(in_halves(group(T, 2 * J), group(T, 2 * J + 1)), s);
    }
    template <WeightType T, int J>
    static Scale of_16(Scales s) {
        constexpr int64_t kSame = 0x0001000100010001;
        constexpr int64_t kFirst = 2 * group(T, 2 * J), kSecond = 2 * group(T, 2 * J + 1);
        const __m512i index = _mm512_set_epi64(
            (kSecond + 1) * kSame, (kSecond + 1) * kSame, kSecond * kSame, kSecond * kSame,
            (kFirst + 1) * kSame, (kFirst + 1) * kSame, kFirst * kSame, kFirst * kSame);
        return _mm512_permutexvar_epi16(index, s);
    }
    static Ints madd_16(Scales factors, const int16_t* sums) {
        return Floats8::madd_16(_mm512_castsi512_si256(factors), sums);
    }

    static Sums none() { return _mm512_setzero_si512(); }
    static Ints fold(Sums s) {
        return _mm256_add_epi32(_mm512_castsi512_si256(s), _mm512_extracti64x4_epi64(s, 1));
    }
    template <WeightType, int J>
    static Sums add_unsigned(Sums s, Bytes w, const int8_t* q, Scale scale) {
        return _mm512_dpwssd_epi32(s, _mm512_maddubs_epi16(w, at(q + 64 * J)), scale);
    }
    static Signed split_signs(Bytes w) { return {_mm512_abs_epi8(w), _mm512_movepi8_mask(w)}; }
    // The activations with the weights' signs.
    static __m512i turned(const Signed& w, const int8_t* q) {
        const __m512i x = _mm512_loadu_si512(q);
        return _mm512_mask_sub_epi8(x, w.negative, _mm512_setzero_si512(), x);
    }
    template <WeightType, int J>
    static Sums add_signed(Sums s, const Signed& w, const int8_t* q, Scale scale) {
        return _mm512_dpwssd_epi32(s, _mm512_maddubs_epi16(w.magnitudes, turned(w, q + 64 * J)),
                                   scale);
    }
};

}  // namespace
}  // namespace kvasir::engine::kernels
