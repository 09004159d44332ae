// Products of several activation rows with AVX2: the four lanes that minima have of two rows side
// by side. The lanes are the same as one row's (dots.hpp: Lanes), so the bits are.
#pragma once

#include <concepts>

#include "engine/kernels/dots.hpp"
#include "engine/kernels/lanes_avx2.hpp"

namespace kvasir::engine::kernels {
namespace {

template <class L, class T, int N>
requires(std::derived_from<L, Avx2>&& N > 1 && T::kMinima == Minima::kFour) struct Lanes<L, T, N> {
    // What several rows have of each block, side by side; scales four times.
    struct Tile {
        static constexpr size_t kBlocks = kTileWidthMax / kSuper;
        Tile(const Row* rows, uint32_t width) {
            for (uint32_t b = 0; b < width / kSuper; ++b) {
                for (int a = 0; a < N; ++a) {
                    for (float& x : d[b][a]) x = rows[a].d[b];
                    __builtin_memcpy(pairs[b][a], rows[a].pairs + b * 8, sizeof(pairs[b][a]));
                }
            }
        }
        alignas(32) float d[kBlocks][N][4];
        alignas(32) int16_t pairs[kBlocks][N][8];
    };

    Lanes() {
        for (__m256& x : eights) x = _mm256_setzero_ps();
        for (__m256& x : fours) x = _mm256_setzero_ps();
    }

    inline __attribute__((always_inline)) void add(const typename T::Head& head,
                                                   const __m256i (&integers)[N], const Tile& tile,
                                                   uint32_t b) {
        const __m256 d = Avx2::first(head.d), d_min = Avx2::second(head.d);
        const __m256i minima = _mm256_broadcastsi128_si256(head.minima);
#pragma GCC unroll 4
        for (int i = 0; i < N / 2; ++i) {
            const __m256i less = _mm256_madd_epi16(minima, Avx2::at(tile.pairs[b][2 * i]));
            const __m256 scales = _mm256_mul_ps(d_min, _mm256_load_ps(tile.d[b][2 * i]));
            fours[i] = _mm256_fnmadd_ps(scales, _mm256_cvtepi32_ps(less), fours[i]);
        }
#pragma GCC unroll 8
        for (int a = 0; a < N; ++a) {
            const __m256 scale = _mm256_mul_ps(d, _mm256_broadcast_ss(tile.d[b][a]));
            eights[a] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(integers[a]), eights[a]);
        }
    }

    float total(int a) const {
        const __m256 both = fours[a / 2];
        const __m128 four = a % 2 ? _mm256_extractf128_ps(both, 1) : _mm256_castps256_ps128(both);
        return Avx2::sum(eights[a]) + Avx2::sum4(four);
    }

    __m256 eights[N];
    __m256 fours[N / 2];
};

}  // namespace
}  // namespace kvasir::engine::kernels
