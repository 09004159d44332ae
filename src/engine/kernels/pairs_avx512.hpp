// Products of several activation rows in vectors of 64 bytes: the eight lanes of two rows side by
// side, or the four lanes that minima have of four rows. The lanes are the same as one row's
// (dots.hpp: Lanes), so the bits are; there are half as many operations after the integers.
#pragma once

#include "engine/kernels/dots.hpp"
#include "engine/kernels/lanes_avx512.hpp"

namespace kvasir::engine::kernels {
namespace {

// What several rows have of each block, side by side.
template <class T, int N>
struct TilePairs {
    static constexpr int kSlots = N < 4 ? 4 : N;  // rows, and zeros
    static constexpr bool kHasPairs = T::kMinima == Minima::kFour || T::kMinima == Minima::kOne;
    static constexpr bool kHasSums =
        T::kMinima == Minima::kSixteen || T::kMinima == Minima::kThirtyTwo;
    static constexpr size_t kBlocks = kTileWidthMax / kSuper;

    TilePairs(const Row* rows, uint32_t width) {
        for (uint32_t b = 0; b < width / kSuper; ++b) {
            for (int a = 0; a < 8; ++a) d[b][a] = a < N ? rows[a].d[b] : 0.0f;
            for (int a = 0; a < kSlots && kHasPairs; ++a) {
                const __m128i eight = a < N ? load(rows[a].pairs + b * 8) : _mm_setzero_si128();
                _mm_storeu_si128(reinterpret_cast<__m128i*>(pairs[b][a]), eight);
            }
            for (int a = 0; a < N && kHasSums; ++a) {
                __builtin_memcpy(sums[b][a], rows[a].sums + b * 16, sizeof(sums[b][a]));
            }
        }
    }
    static __m128i load(const int16_t* p) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    }

    alignas(64) float d[kBlocks][8];
    alignas(64) int16_t pairs[kHasPairs ? kBlocks : 1][kSlots][8];
    alignas(64) int16_t sums[kHasSums ? kBlocks : 1][N][16];
};

template <class T, int N>
requires(N > 1) struct Lanes<Avx512, T, N> {
    using Tile = TilePairs<T, N>;

    Lanes() {
        for (__m512& x : eights) x = _mm512_setzero_ps();
        for (__m512& x : fours) x = _mm512_setzero_ps();
    }

    // One value for each row: of rows 2i and 2i + 1 eight times, of rows 4i .. 4i + 3 four times.
    static __m512 eight_times(__m256 values, int i) {
        const __m512i index =
            _mm512_inserti64x4(_mm512_set1_epi32(2 * i), _mm256_set1_epi32(2 * i + 1), 1);
        return _mm512_permutexvar_ps(index, _mm512_castps256_ps512(values));
    }
    static __m512 four_times(__m256 values, int i) {
        const int a = 4 * i;
        const __m512i index = _mm512_setr_epi32(a, a, a, a, a + 1, a + 1, a + 1, a + 1, a + 2,
                                                a + 2, a + 2, a + 2, a + 3, a + 3, a + 3, a + 3);
        return _mm512_permutexvar_ps(index, _mm512_castps256_ps512(values));
    }
    static __m512i twice(__m512i low_half) {
        return _mm512_shuffle_i64x2(low_half, low_half, 0x44);
    }
    // Four int32 to their sum, in each of the four.
    static __m512i sum_of_4(__m512i x) {
        const __m512i two = _mm512_add_epi32(x, _mm512_shuffle_epi32(x, _MM_PERM_BADC));
        return _mm512_add_epi32(two, _mm512_shuffle_epi32(two, _MM_PERM_CDAB));
    }
    static __m512i sum_of_8(__m512i x) {
        return sum_of_4(_mm512_add_epi32(x, _mm512_permutex_epi64(x, 0x4e)));
    }

    inline __attribute__((always_inline)) void add(const typename T::Head& head,
                                                   const __m512i (&integers)[N], const Tile& tile,
                                                   uint32_t b) {
        const __m256 rows = _mm256_load_ps(tile.d[b]);
        const __m256 d = _mm256_mul_ps(Avx512::first(head.d), rows);
        if constexpr (Tile::kHasPairs) {
            const __m256 d_min = _mm256_mul_ps(Avx512::second(head.d), rows);
            const __m512i minima = _mm512_broadcast_i32x4(head.minima);
#pragma GCC unroll 2
            for (int i = 0; i < Tile::kSlots / 4; ++i) {
                __m512i less = _mm512_madd_epi16(minima, _mm512_load_si512(tile.pairs[b][4 * i]));
                if constexpr (T::kMinima == Minima::kOne) less = sum_of_4(less);
                fours[i] =
                    _mm512_fnmadd_ps(four_times(d_min, i), _mm512_cvtepi32_ps(less), fours[i]);
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < N / 2; ++i) {
            const __m512i one = integers[2 * i], two = integers[2 * i + 1];
            __m512i ints = _mm512_add_epi32(_mm512_shuffle_i64x2(one, two, 0x44),
                                            _mm512_shuffle_i64x2(one, two, 0xee));
            if constexpr (T::kMinima == Minima::kThirtyTwo) {
                const __m512i less =
                    _mm512_madd_epi16(twice(head.scales), _mm512_load_si512(tile.sums[b][2 * i]));
                ints = _mm512_sub_epi32(ints, _mm512_slli_epi32(less, 5));
            }
            if constexpr (T::kMinima == Minima::kSixteen) {
                const __m256 d_min = _mm256_mul_ps(Avx512::second(head.d), rows);
                const __m512i less =
                    _mm512_madd_epi16(twice(head.minima), _mm512_load_si512(tile.sums[b][2 * i]));
                eights[i] =
                    _mm512_fnmadd_ps(eight_times(d_min, i), _mm512_cvtepi32_ps(less), eights[i]);
            }
            if constexpr (T::kMinima == Minima::kPanel) ints = sum_of_8(ints);
            eights[i] = _mm512_fmadd_ps(eight_times(d, i), _mm512_cvtepi32_ps(ints), eights[i]);
        }
    }

    float total(int a) const {
        const __m512 both = eights[a / 2];
        const __m256 mine = a % 2 ? _mm512_extractf32x8_ps(both, 1) : _mm512_castps512_ps256(both);
        if constexpr (T::kMinima == Minima::kPanel) return _mm256_cvtss_f32(mine);
        float sum = Avx512::sum(mine);
        if constexpr (Tile::kHasPairs) {
            alignas(64) float values[16];
            _mm512_store_ps(values, fours[a / 4]);
            const __m128 four = _mm_load_ps(values + a % 4 * 4);
            sum += T::kMinima == Minima::kOne ? _mm_cvtss_f32(four) : Avx512::sum4(four);
        }
        return sum;
    }

    __m512 eights[N / 2];
    __m512 fours[Tile::kSlots / 4];
};

// Types of 32 weights a block: the activations are q + 128 (kFlipped), so that one instruction sums
// their products with signed weights; 128 times the weights go off again, once for all rows.
template <class T, int N>
struct SmallLanes<Avx512, T, N> {
    struct Blocks {
        Blocks(const uint8_t* a, const uint8_t* b) : weights(T::blocks(a, b)) {
            const __m512i all =
                _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(-128), weights);
            off = _mm512_sub_epi32(_mm512_setzero_si512(), all);
            scales = _mm512_mask_broadcastss_ps(_mm512_set1_ps(T::scale(a)), 0xff00,
                                                _mm_set_ss(T::scale(b)));
        }
        __m512 products(const int8_t* q) const {
            return _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(off, Avx512::at(q), weights));
        }
        // Of both blocks, with the activations' scales.
        __m512 scaled(float first, float second) const {
            const __m512 x = _mm512_mul_ps(scales, _mm512_set1_ps(first));
            return _mm512_mask_mul_ps(x, 0xff00, scales, _mm512_set1_ps(second));
        }
        __m512i weights, off;
        __m512 scales;
    };

    SmallLanes() {
        for (int a = 0; a < N; ++a) {
            two[a] = _mm512_setzero_ps();
            one[a] = _mm256_setzero_ps();
        }
    }
    static __m256 low(__m512 x) { return _mm512_castps512_ps256(x); }
    static __m256 high(__m512 x) { return _mm512_extractf32x8_ps(x, 1); }

    inline __attribute__((always_inline)) void add(const Blocks& blocks, const Row* rows,
                                                   uint32_t b) {
#pragma GCC unroll 8
        for (int a = 0; a < N; ++a) {
            const __m512 x = blocks.products(rows[a].q + size_t{b} * kSmall);
            const __m512 d = blocks.scaled(rows[a].d[b], rows[a].d[b + 1]);
            if constexpr (T::kTwo) {
                two[a] = _mm512_fmadd_ps(d, x, two[a]);
            } else {
                one[a] = _mm256_fmadd_ps(low(d), low(x), one[a]);
                one[a] = _mm256_fmadd_ps(high(d), high(x), one[a]);
            }
        }
    }

    float total(int a) const {
        return Avx512::sum(T::kTwo ? _mm256_add_ps(low(two[a]), high(two[a])) : one[a]);
    }
    float total(int a, const Blocks& last, const int8_t* q, float d) const {
        const __m256 x = low(last.products(q)), scale = low(last.scaled(d, d));
        if (T::kTwo) return fma(_mm256_cvtss_f32(scale), Avx512::sum(x), total(a));
        return Avx512::sum(_mm256_fmadd_ps(scale, x, one[a]));
    }

    __m512 two[N];  // kTwo: the even blocks' lanes, the odd blocks'
    __m256 one[N];
};

}  // namespace
}  // namespace kvasir::engine::kernels
