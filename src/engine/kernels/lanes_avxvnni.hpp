// Vectors of AVX2 with AVX-VNNI, for dots.hpp (there: what each function is).
#pragma once

#include "engine/kernels/pairs_avx2.hpp"

namespace kvasir::engine::kernels {
namespace {

// As Avx2, with the products of bytes and of int16 summed in one instruction.
struct AvxVnni : Avx2 {
    // Activations of types of 32 are q + 128, to which signed weights are multiplied as they are;
    // 128 times the weights go off again, once for all rows.
    static constexpr bool kFlipped = true;
    struct Small {
        Bytes weights;
        __m256i first_off, second_off;
    };
    static __m256i minus_128_times(__m256i weights) {
        const __m256i all =
            _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(-128), weights);
        return _mm256_sub_epi32(_mm256_setzero_si256(), all);
    }
    static Small small(Bytes w) { return {w, minus_128_times(w.first), minus_128_times(w.second)}; }
    static void two_products(const Small& w, const int8_t* q, F& first, F& second) {
        first = to_float(_mm256_dpbusd_avx_epi32(w.first_off, at(q), w.weights.first));
        second = to_float(_mm256_dpbusd_avx_epi32(w.second_off, at(q + 32), w.weights.second));
    }

    template <WeightType, int J>
    static Sums add_unsigned(Sums s, Bytes w, const int8_t* q, Scale scale) {
        const __m256i first = _mm256_maddubs_epi16(w.first, at(q + 64 * J));
        const __m256i second = _mm256_maddubs_epi16(w.second, at(q + 64 * J + 32));
        return _mm256_dpwssd_avx_epi32(_mm256_dpwssd_avx_epi32(s, first, scale.first), second,
                                       scale.second);
    }
    template <WeightType, int J>
    static Sums add_signed(Sums s, const Signed& w, const int8_t* q, Scale scale) {
        const __m256i first = signed_product(w.magnitudes.first, w.weights.first, q + 64 * J);
        const __m256i second =
            signed_product(w.magnitudes.second, w.weights.second, q + 64 * J + 32);
        return _mm256_dpwssd_avx_epi32(_mm256_dpwssd_avx_epi32(s, first, scale.first), second,
                                       scale.second);
    }
};

}  // namespace
}  // namespace kvasir::engine::kernels
