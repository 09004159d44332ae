// Vectors of WebAssembly's 128-bit SIMD, for dots.hpp (there: what each function is).
//
// Sums are of two products each, and folded to eight lanes once a block: there is an instruction
// for two (a product of int16 that adds neighbours) and none for four. Weights are multiplied by
// their scales first, which fits int16 in every type and happens once for all rows. There is no
// fused multiply-add: see fused2.
#pragma once

#include <wasm_simd128.h>

#include "engine/kernels/weights.hpp"

namespace kvasir::engine::kernels {
namespace {

struct Wasm : InOrder<Wasm> {
    static constexpr int kRowsAtOnce = 4;
    static constexpr uint32_t kStreams = 1;
    static constexpr bool kFlipped = false;

    struct F {
        v128_t low, high;
    };
    using F4 = v128_t;
    struct Ints {
        v128_t low, high;
    };
    using Ints4 = v128_t;
    using Minima8 = v128_t;
    struct Four {
        v128_t v[4];
    };
    using Bytes = Four;
    using Signed = Four;
    using Sums = Four;  // of bytes 0 - 7, 8 - 15, 16 - 23 and 24 - 31 of each run of 32
    using Scale = Four;
    struct Scales {  // of 16 weights each
        v128_t low, high;
    };

    // Two products and sums in double: the product exact, the sum with what its rounding took off.
    struct Pair {
        v128_t sum, rest;
    };
    static Pair exact(v128_t a, v128_t b, v128_t c) {
        const v128_t x =
            wasm_f64x2_mul(wasm_f64x2_promote_low_f32x4(a), wasm_f64x2_promote_low_f32x4(b));
        const v128_t y = wasm_f64x2_promote_low_f32x4(c);
        const v128_t sum = wasm_f64x2_add(x, y);
        const v128_t part = wasm_f64x2_sub(sum, x);
        const v128_t rest =
            wasm_f64x2_add(wasm_f64x2_sub(x, wasm_f64x2_sub(sum, part)), wasm_f64x2_sub(y, part));
        return {sum, rest};
    }
    // The sum rounded to odd (see fma() in numeric.hpp): towards zero, then the last bit set.
    static v128_t to_odd(Pair p) {
        const v128_t none = wasm_f64x2_const_splat(0);
        const v128_t more = wasm_f64x2_gt(p.rest, none), less = wasm_f64x2_lt(p.rest, none);
        const v128_t beyond = wasm_v128_bitselect(less, more, wasm_f64x2_gt(p.sum, none));
        const v128_t inexact = wasm_u64x2_shr(wasm_v128_or(more, less), 63);
        return wasm_v128_or(wasm_i64x2_add(p.sum, beyond), inexact);
    }
    static v128_t high(v128_t x) { return wasm_i64x2_shuffle(x, x, 1, 1); }
    static v128_t to_floats(v128_t low, v128_t high) {
        return wasm_i64x2_shuffle(wasm_f32x4_demote_f64x2_zero(low),
                                  wasm_f32x4_demote_f64x2_zero(high), 0, 2);
    }
    // a * b + c, rounded once. Most sums are exact in double.
    static v128_t fused2(v128_t a, v128_t b, v128_t c) {
        Pair x = exact(a, b, c), y = exact(high(a), high(b), high(c));
        if (wasm_v128_any_true(wasm_v128_or(x.rest, y.rest))) {
            x.sum = to_odd(x);
            y.sum = to_odd(y);
        }
        return to_floats(x.sum, y.sum);
    }

    static F zero() { return {zero4(), zero4()}; }
    static F4 zero4() { return wasm_f32x4_const_splat(0); }
    static F all(float x) { return {wasm_f32x4_splat(x), wasm_f32x4_splat(x)}; }
    static F fused(F a, F b, F c) {
        return {fused2(a.low, b.low, c.low), fused2(a.high, b.high, c.high)};
    }
    static F fused_less(F a, F b, F c) {
        return fused({wasm_f32x4_neg(a.low), wasm_f32x4_neg(a.high)}, b, c);
    }
    static F plus(F a, F b) {
        return {wasm_f32x4_add(a.low, b.low), wasm_f32x4_add(a.high, b.high)};
    }
    static F to_float(Ints a) {
        return {wasm_f32x4_convert_i32x4(a.low), wasm_f32x4_convert_i32x4(a.high)};
    }
    // As a float with a tiny exponent, times 2^112: exact, subnormal halves too.
    static F4 from_halves(v128_t halves) {
        const v128_t bits =
            wasm_i32x4_shl(wasm_v128_and(halves, wasm_i32x4_const_splat(0x7fff)), 13);
        const v128_t value = wasm_f32x4_mul(bits, wasm_f32x4_const_splat(0x1p112f));
        const v128_t not_finite =
            wasm_v128_and(wasm_i32x4_gt(bits, wasm_i32x4_const_splat(0x0f7fffff)),
                          wasm_i32x4_const_splat(0x7f800000));
        const v128_t sign =
            wasm_i32x4_shl(wasm_v128_and(halves, wasm_i32x4_const_splat(0x8000)), 16);
        return wasm_v128_or(wasm_v128_or(value, not_finite), sign);
    }
    static F4 two_f16(const uint8_t* p) {
        return from_halves(
            wasm_u32x4_extend_low_u16x8(wasm_i32x4_splat(static_cast<int32_t>(load_u32(p)))));
    }
    static F4 one_f16(const uint8_t* p) { return from_halves(wasm_i32x4_splat(load_u16(p))); }
    static F4 times(F4 scales, float x) { return wasm_f32x4_mul(scales, wasm_f32x4_splat(x)); }
    static F first(F4 scales) {
        const v128_t x = wasm_i32x4_shuffle(scales, scales, 0, 0, 0, 0);
        return {x, x};
    }
    static v128_t all_second(F4 scales) { return wasm_i32x4_shuffle(scales, scales, 1, 1, 1, 1); }
    static F second(F4 scales) { return {all_second(scales), all_second(scales)}; }
    static float first4(F4 scales) { return wasm_f32x4_extract_lane(scales, 0); }
    static float second4(F4 scales) { return wasm_f32x4_extract_lane(scales, 1); }
    static F4 fused4_less(F4 scales, Ints4 b, F4 c) {
        return fused2(wasm_f32x4_neg(all_second(scales)), wasm_f32x4_convert_i32x4(b), c);
    }
    static float sum(F a) { return sum4(wasm_f32x4_add(a.high, a.low)); }
    static float sum4(F4 a) {
        const v128_t two = wasm_f32x4_add(a, high(a));
        return wasm_f32x4_extract_lane(two, 0) + wasm_f32x4_extract_lane(two, 1);
    }
    static int32_t sum_ints4(Ints4 a) {
        const v128_t two = wasm_i32x4_add(a, high(a));
        return wasm_i32x4_extract_lane(two, 0) + wasm_i32x4_extract_lane(two, 1);
    }
    static int32_t sum_ints8(Ints a) { return sum_ints4(wasm_i32x4_add(a.low, a.high)); }
    static Minima8 minima8(uint64_t bytes) {
        return wasm_u16x8_extend_low_u8x16(wasm_i64x2_splat(static_cast<int64_t>(bytes)));
    }
    static Ints4 madd_8(v128_t a, const int16_t* p) {
        return wasm_i32x4_dot_i16x8(a, wasm_v128_load(p));
    }
    static Ints madd_16(Scales factors, const int16_t* sums) {
        return {madd_8(factors.low, sums), madd_8(factors.high, sums + 8)};
    }
    static Ints minus_32_times(Ints a, Ints b) {
        return {wasm_i32x4_sub(a.low, wasm_i32x4_shl(b.low, 5)),
                wasm_i32x4_sub(a.high, wasm_i32x4_shl(b.high, 5))};
    }

    static constexpr uint32_t group(WeightType, uint32_t i) { return i; }
    static Bytes load(const uint8_t* a, const uint8_t* b) {
        return {
            {wasm_v128_load(a), wasm_v128_load(a + 16), wasm_v128_load(b), wasm_v128_load(b + 16)}};
    }
    template <int From, int Mask>
    static v128_t field(v128_t x) {
        return wasm_v128_and(From == 0 ? x : wasm_u16x8_shr(x, From), wasm_i8x16_const_splat(Mask));
    }
    template <int A, int B, int Mask>
    static Bytes fields(const uint8_t* a, const uint8_t* b) {
        const Bytes x = load(a, b);
        return {{field<A, Mask>(x.v[0]), field<A, Mask>(x.v[1]), field<B, Mask>(x.v[2]),
                 field<B, Mask>(x.v[3])}};
    }
    static Bytes either(Bytes a, Bytes b) {
        for (int i = 0; i < 4; ++i) a.v[i] = wasm_v128_or(a.v[i], b.v[i]);
        return a;
    }
    template <int Count>
    static Bytes shift_left(Bytes a) {
        for (v128_t& x : a.v) x = wasm_i16x8_shl(x, Count);
        return a;
    }
    template <int Value>
    static Bytes subtract(Bytes a) {
        for (v128_t& x : a.v) x = wasm_i8x16_sub(x, wasm_i8x16_const_splat(Value));
        return a;
    }
    static Bytes nibbles(const uint8_t* a, const uint8_t* b) {
        const v128_t x = wasm_v128_load(a), y = wasm_v128_load(b);
        return {{field<0, 15>(x), field<4, 15>(x), field<0, 15>(y), field<4, 15>(y)}};
    }
    static Bytes lookup(Bytes index, const int8_t* table) {
        const v128_t values = wasm_v128_load(table);
        for (v128_t& x : index.v) x = wasm_i8x16_swizzle(values, x);
        return index;
    }

    static Scales each_twice(v128_t x) {
        return {wasm_i16x8_shuffle(x, x, 0, 0, 1, 1, 2, 2, 3, 3),
                wasm_i16x8_shuffle(x, x, 4, 4, 5, 5, 6, 6, 7, 7)};
    }
    static v128_t signed_8(uint64_t bytes) {
        return wasm_i16x8_extend_low_i8x16(wasm_i64x2_splat(static_cast<int64_t>(bytes)));
    }
    static Scales scales_of_32(uint64_t bytes) { return each_twice(minima8(bytes)); }
    static Scales signed_scales_of_32(uint64_t bytes) { return each_twice(signed_8(bytes)); }
    static Scales signed_scales_of_16(uint64_t low, uint64_t high) {
        return {signed_8(low), signed_8(high)};
    }
    template <int I>
    static v128_t spread(v128_t x) {
        return wasm_i16x8_shuffle(x, x, I, I, I, I, I, I, I, I);
    }
    template <WeightType, int J>
    static Scale of_16(Scales s) {
        const v128_t half = J < 2 ? s.low : s.high;
        constexpr int kFirst = J % 2 * 4;
        return {{spread<kFirst>(half), spread<kFirst + 1>(half), spread<kFirst + 2>(half),
                 spread<kFirst + 3>(half)}};
    }
    template <WeightType T, int J>
    static Scale of_32(Scales s) {
        return of_16<T, J>(s);
    }

    static Sums none() {
        const v128_t x = wasm_i32x4_const_splat(0);
        return {{x, x, x, x}};
    }
    static v128_t add_neighbours(v128_t a, v128_t b) {
        return wasm_i32x4_add(wasm_i32x4_shuffle(a, b, 0, 2, 4, 6),
                              wasm_i32x4_shuffle(a, b, 1, 3, 5, 7));
    }
    static Ints fold(Sums s) {
        return {add_neighbours(s.v[0], s.v[1]), add_neighbours(s.v[2], s.v[3])};
    }
    static void add(v128_t& sum, v128_t weights, const int8_t* q) {
        sum = wasm_i32x4_add(sum, wasm_i32x4_dot_i16x8(weights, wasm_i16x8_load8x8(q)));
    }
    template <WeightType, int J>
    static Sums add_signed(Sums s, const Bytes& w, const int8_t* q, const Scale& scale) {
        for (int i = 0; i < 4; ++i) {
            const v128_t low = wasm_i16x8_extend_low_i8x16(w.v[i]);
            const v128_t high = wasm_i16x8_extend_high_i8x16(w.v[i]);
            const int at = 64 * J + 16 * i, to = i % 2 * 2;
            add(s.v[to], wasm_i16x8_mul(low, scale.v[i]), q + at);
            add(s.v[to + 1], wasm_i16x8_mul(high, scale.v[i]), q + at + 8);
        }
        return s;
    }
    template <WeightType T, int J>
    static Sums add_unsigned(Sums s, const Bytes& w, const int8_t* q, const Scale& scale) {
        return add_signed<T, J>(s, w, q, scale);
    }
    static Signed split_signs(Bytes w) { return w; }
    static v128_t fours(v128_t w, const int8_t* q) {
        return add_neighbours(
            wasm_i32x4_dot_i16x8(wasm_i16x8_extend_low_i8x16(w), wasm_i16x8_load8x8(q)),
            wasm_i32x4_dot_i16x8(wasm_i16x8_extend_high_i8x16(w), wasm_i16x8_load8x8(q + 8)));
    }
    // Weights of types of 32, made ready.
    using Small = Signed;
    static Small small(Bytes w) { return split_signs(w); }
    static void two_products(const Small& w, const int8_t* q, F& first, F& second) {
        first = to_float({fours(w.v[0], q), fours(w.v[1], q + 16)});
        second = to_float({fours(w.v[2], q + 32), fours(w.v[3], q + 48)});
    }
};

}  // namespace
}  // namespace kvasir::engine::kernels
