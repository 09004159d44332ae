// Vectors of NEON on 64-bit ARM, for dots.hpp (there: what each function is).
//
// Included once for processors with the dot product instruction (armv8.2) and once for all others
// (armv8.0), where two widening products and two pairwise sums do the same. Four products of
// neighbours are a lane of the order of operations, which is what both give.
#pragma once

#include <arm_neon.h>

#include "engine/kernels/weights.hpp"

namespace kvasir::engine::kernels {
namespace {

struct Neon {
    static constexpr int kRowsAtOnce = 4;
    static constexpr uint32_t kStreams = 4;
    static constexpr bool kFlipped = false;

    struct F {
        float32x4_t low, high;
    };
    using F4 = float32x4_t;
    struct Ints {
        int32x4_t low, high;
    };
    using Ints4 = int32x4_t;
    using Minima8 = int16x8_t;
    struct Bytes {  // 64, signed or not: no unsigned weight is above 63
        uint8x16_t v[4];
    };
    using Signed = Bytes;
    using Sums = Ints;
    struct Scales {  // of 16 weights each
        int16x8_t low, high;
    };
    using Scale = int32x4_t;  // of the four vectors of Bytes

    static F zero() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
    static F4 zero4() { return vdupq_n_f32(0); }
    static F all(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
    static F fused(F a, F b, F c) {
        return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
    }
    static F fused_less(F a, F b, F c) {
        return {vfmsq_f32(c.low, a.low, b.low), vfmsq_f32(c.high, a.high, b.high)};
    }
    static F plus(F a, F b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
    static F to_float(Ints a) { return {vcvtq_f32_s32(a.low), vcvtq_f32_s32(a.high)}; }
    static F4 two_f16(const uint8_t* p) {
        return vcvt_f32_f16(vreinterpret_f16_u32(vdup_n_u32(load_u32(p))));
    }
    static F4 one_f16(const uint8_t* p) {
        return vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(load_u16(p))));
    }
    static F4 times(F4 scales, float x) { return vmulq_n_f32(scales, x); }
    static F first(F4 scales) {
        const float32x4_t x = vdupq_laneq_f32(scales, 0);
        return {x, x};
    }
    static F second(F4 scales) {
        const float32x4_t x = vdupq_laneq_f32(scales, 1);
        return {x, x};
    }
    static float first4(F4 scales) { return vgetq_lane_f32(scales, 0); }
    static float second4(F4 scales) { return vgetq_lane_f32(scales, 1); }
    static F4 fused4_less(F4 scales, Ints4 b, F4 c) {
        return vfmsq_laneq_f32(c, vcvtq_f32_s32(b), scales, 1);
    }
    static float sum(F a) { return sum4(vaddq_f32(a.high, a.low)); }
    static float sum4(F4 a) {
        const float32x2_t two = vadd_f32(vget_low_f32(a), vget_high_f32(a));
        return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
    }
    static int32_t sum_ints4(Ints4 a) { return vaddvq_s32(a); }
    static int32_t sum_ints8(Ints a) { return vaddvq_s32(vaddq_s32(a.low, a.high)); }
    static Minima8 minima8(uint64_t bytes) {
        return vreinterpretq_s16_u16(vmovl_u8(vcreate_u8(bytes)));
    }
    static Ints4 madd_8(int16x8_t a, const int16_t* p) {
        const int16x8_t b = vld1q_s16(p);
        return vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b));
    }
    static Ints madd_16(Scales factors, const int16_t* sums) {
        return {madd_8(factors.low, sums), madd_8(factors.high, sums + 8)};
    }
    static Ints minus_32_times(Ints a, Ints b) {
        return {vsubq_s32(a.low, vshlq_n_s32(b.low, 5)), vsubq_s32(a.high, vshlq_n_s32(b.high, 5))};
    }

    static constexpr uint32_t group(WeightType, uint32_t i) { return i; }
    static Bytes load(const uint8_t* a, const uint8_t* b) {
        return {{vld1q_u8(a), vld1q_u8(a + 16), vld1q_u8(b), vld1q_u8(b + 16)}};
    }
    template <int From, int Mask>
    static uint8x16_t field(uint8x16_t x) {
        if constexpr (From > 0) x = vshrq_n_u8(x, From);
        if constexpr ((255 >> From) != Mask) x = vandq_u8(x, vdupq_n_u8(Mask));
        return x;
    }
    template <int A, int B, int Mask>
    static Bytes fields(const uint8_t* a, const uint8_t* b) {
        const Bytes x = load(a, b);
        return {{field<A, Mask>(x.v[0]), field<A, Mask>(x.v[1]), field<B, Mask>(x.v[2]),
                 field<B, Mask>(x.v[3])}};
    }
    // low, which is below 2^To, with the bits of x that Mask << From covers at To and above.
    template <int From, int To, int Mask>
    static uint8x16_t insert(uint8x16_t low, uint8x16_t x) {
        if constexpr (From == To) {
            return vorrq_u8(low, vandq_u8(x, vdupq_n_u8(Mask << To)));
        } else {
            return vsliq_n_u8(low, field<From, Mask>(x), To);
        }
    }
    template <int A, int B, int To, int Mask>
    static Bytes insert_fields(Bytes low, const uint8_t* p) {
        const uint8x16_t x = vld1q_u8(p), y = vld1q_u8(p + 16);
        return {{insert<A, To, Mask>(low.v[0], x), insert<A, To, Mask>(low.v[1], y),
                 insert<B, To, Mask>(low.v[2], x), insert<B, To, Mask>(low.v[3], y)}};
    }
    static Bytes either(Bytes a, Bytes b) {
        for (int i = 0; i < 4; ++i) a.v[i] = vorrq_u8(a.v[i], b.v[i]);
        return a;
    }
    template <int Value>
    static Bytes subtract(Bytes a) {
        for (uint8x16_t& x : a.v) x = vsubq_u8(x, vdupq_n_u8(Value));
        return a;
    }
    static Bytes nibbles(const uint8_t* a, const uint8_t* b) {
        const uint8x16_t x = vld1q_u8(a), y = vld1q_u8(b);
        return {{field<0, 15>(x), field<4, 15>(x), field<0, 15>(y), field<4, 15>(y)}};
    }
    static Bytes lookup(Bytes index, const int8_t* table) {
        const uint8x16_t values = vreinterpretq_u8_s8(vld1q_s8(table));
        for (uint8x16_t& x : index.v) x = vqtbl1q_u8(values, x);
        return index;
    }
    template <int J>
    static Bytes q4_k(const uint8_t* nibbles) {
        return fields<0, 4, 15>(nibbles + 32 * J, nibbles + 32 * J);
    }
    template <int J>
    static Bytes q5_k(const uint8_t* nibbles, const uint8_t* high) {
        return insert_fields<2 * J, 2 * J + 1, 4, 1>(q4_k<J>(nibbles), high);
    }
    template <int J>
    static Bytes q6_k(const uint8_t* nibbles, const uint8_t* high) {
        constexpr int kShift = J % 2 * 4;
        const uint8_t* low = nibbles + J / 2 * 64;
        return insert_fields<kShift, kShift + 2, 4, 3>(fields<kShift, kShift, 15>(low, low + 32),
                                                       high + J / 2 * 32);
    }
    template <int J>
    static Bytes q2_k(const uint8_t* two) {
        const uint8_t* p = two + J / 2 * 32;
        return fields<J % 2 * 4, J % 2 * 4 + 2, 3>(p, p);
    }
    template <int J>
    static Bytes q3_k(const uint8_t* two, const uint8_t* high) {
        return subtract<4>(insert_fields<2 * J, 2 * J + 1, 2, 1>(q2_k<J>(two), high));
    }

    static Scales each_twice(int16x8_t x) { return {vzip1q_s16(x, x), vzip2q_s16(x, x)}; }
    static Scales scales_of_32(uint64_t bytes) { return each_twice(minima8(bytes)); }
    static Scales signed_scales_of_32(uint64_t bytes) {
        return each_twice(vmovl_s8(vcreate_s8(bytes)));
    }
    static Scales signed_scales_of_16(uint64_t low, uint64_t high) {
        return {vmovl_s8(vcreate_s8(low)), vmovl_s8(vcreate_s8(high))};
    }
    template <WeightType, int J>
    static Scale of_16(Scales s) {
        const int16x8_t half = J < 2 ? s.low : s.high;
        return J % 2 == 0 ? vmovl_s16(vget_low_s16(half)) : vmovl_high_s16(half);
    }
    template <WeightType T, int J>
    static Scale of_32(Scales s) {
        return of_16<T, J>(s);
    }

    static Sums none() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
    static Ints fold(Sums s) { return s; }
    // Sums of four products each.
    static int32x4_t fours(uint8x16_t weights, const int8_t* p) {
        const int8x16_t w = vreinterpretq_s8_u8(weights), q = vld1q_s8(p);
#if defined(__ARM_FEATURE_DOTPROD)
        return vdotq_s32(vdupq_n_s32(0), w, q);
#else
        // Two products fit int16: no type has weights of -128 but Q8_0, whose activations are never
        // -128.
        return vpaddlq_s16(
            vpaddq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(q)), vmull_high_s8(w, q)));
#endif
    }
    template <WeightType, int J>
    static Sums add_signed(Sums s, const Bytes& w, const int8_t* q, Scale scale) {
        q += 64 * J;
        s.low = vmlaq_laneq_s32(s.low, fours(w.v[0], q), scale, 0);
        s.high = vmlaq_laneq_s32(s.high, fours(w.v[1], q + 16), scale, 1);
        s.low = vmlaq_laneq_s32(s.low, fours(w.v[2], q + 32), scale, 2);
        s.high = vmlaq_laneq_s32(s.high, fours(w.v[3], q + 48), scale, 3);
        return s;
    }
    template <WeightType T, int J>
    static Sums add_unsigned(Sums s, const Bytes& w, const int8_t* q, Scale scale) {
        return add_signed<T, J>(s, w, q, scale);
    }
    static Signed split_signs(Bytes w) {
        return w;
    }
    // Weights of types of 32, made ready.
    using Small = Signed;
    static Small small(Bytes w) {
        return split_signs(w);
    }
    static void two_products(const Small& w, const int8_t* q, F& first, F& second) {
        first = to_float({fours(w.v[0], q), fours(w.v[1], q + 16)});
        second = to_float({fours(w.v[2], q + 32), fours(w.v[3], q + 48)});
    }
};

}  // namespace
}  // namespace kvasir::engine::kernels
