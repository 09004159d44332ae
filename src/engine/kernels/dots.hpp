// Products of weight rows and activation rows, written once for every vector instruction set.
//
// L (lanes_*.hpp) holds the vectors of an instruction set: Bytes (64 weights), Sums (int32 sums of
// products that fold to eight lanes), F (eight floats), F4 (four). The order of operations is that
// of reference.cpp, which the tests hold every instance to. A weight block is unpacked once for up
// to N activation rows. Included by one file per instruction set, in an unnamed namespace of its
// own (see numeric.hpp). Thread: pure functions.
#pragma once

#include "engine/kernels/elementwise.hpp"

namespace kvasir::engine::kernels {
namespace {

// What is done about a type's minima, which the integers leave out; kPanel: nothing, and all
// integers of a block are one sum.
enum class Minima { kNone, kSixteen, kFour, kOne, kThirtyTwo, kPanel };

struct SixBit {
    uint64_t scales;
    uint64_t minima;
};

// Q4_K and Q5_K pack eight six-bit scales and eight minima into 12 bytes; one byte each comes out.
inline SixBit unpack_six_bit(const uint8_t* packed) {
    const uint32_t a = load_u32(packed), b = load_u32(packed + 4), c = load_u32(packed + 8);
    const uint64_t scale_low = a & 0x3f3f3f3f, min_low = b & 0x3f3f3f3f;
    const uint64_t scale_high = (c & 0x0f0f0f0f) | ((a >> 6) & 0x03030303) << 4;
    const uint64_t min_high = ((c >> 4) & 0x0f0f0f0f) | ((b >> 6) & 0x03030303) << 4;
    return {scale_low | scale_high << 32, min_low | min_high << 32};
}

// A type of 256 weights a block. part<J>() are 64 of them, J = 0 .. 3: two runs of 32, which ones
// is for L to say (L::group(), to which the activations are arranged).
template <class L>
struct Q4K {
    template <class M>
    using With = Q4K<M>;
    static constexpr WeightType kType = WeightType::kQ4_K;
    static constexpr bool kSigned = false;
    static constexpr Minima kMinima = Minima::kFour;
    static constexpr bool kScalesOf32 = true;
    struct Head {
        typename L::F4 d;
        typename L::Scales scales;
        typename L::Minima8 minima;
    };
    static Head head(const uint8_t* p) {
        const SixBit six = unpack_six_bit(p + 4);
        return {L::two_f16(p), L::scales_of_32(six.scales), L::minima8(six.minima)};
    }
    template <int J>
    static typename L::Bytes part(const uint8_t* p) {
        return L::template q4_k<J>(p + 16);
    }
};

template <class L>
struct Q5K {
    template <class M>
    using With = Q5K<M>;
    static constexpr WeightType kType = WeightType::kQ5_K;
    static constexpr bool kSigned = false;
    static constexpr Minima kMinima = Minima::kOne;
    static constexpr bool kScalesOf32 = true;
    using Head = typename Q4K<L>::Head;
    static Head head(const uint8_t* p) { return Q4K<L>::head(p); }
    template <int J>
    static typename L::Bytes part(const uint8_t* p) {
        return L::template q5_k<J>(p + 48, p + 16);
    }
};

template <class L>
struct Q6K {
    template <class M>
    using With = Q6K<M>;
    static constexpr WeightType kType = WeightType::kQ6_K;
    static constexpr bool kSigned = false;
    static constexpr Minima kMinima = Minima::kThirtyTwo;
    static constexpr bool kScalesOf32 = false;
    struct Head {
        typename L::F4 d;
        typename L::Scales scales;
    };
    static Head head(const uint8_t* p) {
        return {L::one_f16(p + 208), L::signed_scales_of_16(load_u64(p + 192), load_u64(p + 200))};
    }
    template <int J>
    static typename L::Bytes part(const uint8_t* p) {
        return L::template q6_k<J>(p, p + 128);
    }
};

template <class L>
struct Q2K {
    template <class M>
    using With = Q2K<M>;
    static constexpr WeightType kType = WeightType::kQ2_K;
    static constexpr bool kSigned = false;
    static constexpr Minima kMinima = Minima::kSixteen;
    static constexpr bool kScalesOf32 = false;
    struct Head {
        typename L::F4 d;
        typename L::Scales scales;
        typename L::Scales minima;
    };
    static Head head(const uint8_t* p) {
        constexpr uint64_t kLow = 0x0f0f0f0f0f0f0f0f;
        const uint64_t a = load_u64(p), b = load_u64(p + 8);
        return {L::two_f16(p + 80), L::signed_scales_of_16(a & kLow, b & kLow),
                L::signed_scales_of_16(a >> 4 & kLow, b >> 4 & kLow)};
    }
    template <int J>
    static typename L::Bytes part(const uint8_t* p) {
        return L::template q2_k<J>(p + 16);
    }
};

template <class L>
struct Q3K {
    template <class M>
    using With = Q3K<M>;
    static constexpr WeightType kType = WeightType::kQ3_K;
    static constexpr bool kSigned = true;
    static constexpr Minima kMinima = Minima::kNone;
    static constexpr bool kScalesOf32 = false;
    struct Head {
        typename L::F4 d;
        typename L::Scales scales;
    };
    static Head head(const uint8_t* p) {
        const uint32_t a = load_u32(p + 96), b = load_u32(p + 100), c = load_u32(p + 104);
        constexpr uint32_t kLow = 0x0f0f0f0f, kHigh = 0x03030303;
        const uint64_t first = (a & kLow) | (c & kHigh) << 4;
        const uint64_t second = (b & kLow) | (c >> 2 & kHigh) << 4;
        const uint64_t third = (a >> 4 & kLow) | (c >> 4 & kHigh) << 4;
        const uint64_t fourth = (b >> 4 & kLow) | (c >> 6 & kHigh) << 4;
        // Six bits less 32, byte by byte: the top bits are set so that no byte borrows.
        constexpr uint64_t kTop = 0x8080808080808080, kOff = 0x2020202020202020;
        const auto less = [](uint64_t x) { return ((x | kTop) - kOff) ^ kTop; };
        return {L::one_f16(p + 108),
                L::signed_scales_of_16(less(first | second << 32), less(third | fourth << 32))};
    }
    template <int J>
    static typename L::Bytes part(const uint8_t* p) {
        return L::template q3_k<J>(p + 32, p);
    }
};

template <class L>
struct Iq4Xs {
    template <class M>
    using With = Iq4Xs<M>;
    static constexpr WeightType kType = WeightType::kIq4Xs;
    static constexpr bool kSigned = true;
    static constexpr Minima kMinima = Minima::kNone;
    static constexpr bool kScalesOf32 = true;
    struct Head {
        typename L::F4 d;
        typename L::Scales scales;
    };
    static Head head(const uint8_t* p) {
        const uint32_t high = load_u16(p + 2), low = load_u32(p + 4);
        uint64_t scales = 0;
        for (uint32_t g = 0; g < 8; ++g) {
            const uint32_t six = (low >> (4 * g) & 15) | (high >> (2 * g) & 3) << 4;
            scales |= static_cast<uint64_t>((six - 32) & 0xff) << (8 * g);
        }
        return {L::one_f16(p), L::signed_scales_of_32(scales)};
    }
    template <int J>
    static typename L::Bytes part(const uint8_t* p) {
        return L::lookup(L::nibbles(p + 8 + 32 * J, p + 24 + 32 * J), kIq4Values);
    }
};

// How the 256 weights of a block are taken apart where vectors hold 32 bytes at most: in order.
template <class L>
struct InOrder {
    template <int J>
    static auto q4_k(const uint8_t* nibbles) {
        return L::template fields<0, 4, 15>(nibbles + 32 * J, nibbles + 32 * J);
    }
    template <int J>
    static auto q5_k(const uint8_t* nibbles, const uint8_t* high) {
        return L::either(
            q4_k<J>(nibbles),
            L::template shift_left<4>(L::template fields<2 * J, 2 * J + 1, 1>(high, high)));
    }
    template <int J>
    static auto q6_k(const uint8_t* nibbles, const uint8_t* high) {
        const uint8_t* low = nibbles + J / 2 * 64;
        const uint8_t* two = high + J / 2 * 32;
        constexpr int kShift = J % 2 * 4;
        return L::either(
            L::template fields<kShift, kShift, 15>(low, low + 32),
            L::template shift_left<4>(L::template fields<kShift, kShift + 2, 3>(two, two)));
    }
    template <int J>
    static auto q2_k(const uint8_t* two) {
        const uint8_t* p = two + J / 2 * 32;
        return L::template fields<J % 2 * 4, J % 2 * 4 + 2, 3>(p, p);
    }
    template <int J>
    static auto q3_k(const uint8_t* two, const uint8_t* high) {
        const auto bits = L::template fields<2 * J, 2 * J + 1, 1>(high, high);
        return L::template subtract<4>(L::either(q2_k<J>(two), L::template shift_left<2>(bits)));
    }
};

// The same bits of another order: see Kernels::dot_panel.
template <class L>
struct Iq4XsPanel : Iq4Xs<L> {
    template <class M>
    using With = Iq4XsPanel<M>;
    static constexpr Minima kMinima = Minima::kPanel;
};

// Weights are asked for ahead of the products, as the processor's own prefetching stops at every
// page. How far, and into which cache, was measured (bench/kernels_bench.cpp): with one activation
// row the memory is the limit.
template <int N>
inline void prefetch(const uint8_t* p, uint32_t bytes) {
    constexpr size_t kAhead = N == 1 ? 4096 : 2048;
    constexpr int kCache = N == 1 ? 2 : 3;  // the second level, the first
    for (uint32_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + kAhead + at, 0, kCache);
}

template <class L, class T, int N, int J>
inline __attribute__((always_inline)) void step(const uint8_t* p, const typename T::Head& head,
                                                const Row* rows, size_t at,
                                                typename L::Sums (&sums)[N]) {
    const auto weights = T::template part<J>(p);
    const auto scale = [&] {
        if constexpr (T::kScalesOf32) return L::template of_32<T::kType, J>(head.scales);
        if constexpr (!T::kScalesOf32) return L::template of_16<T::kType, J>(head.scales);
    }();
    if constexpr (T::kSigned) {
        const auto split = L::split_signs(weights);
#pragma GCC unroll 8
        for (int a = 0; a < N; ++a) {
            sums[a] = L::template add_signed<T::kType, J>(sums[a], split, rows[a].q + at, scale);
        }
    } else {
#pragma GCC unroll 8
        for (int a = 0; a < N; ++a) {
            sums[a] =
                L::template add_unsigned<T::kType, J>(sums[a], weights, rows[a].q + at, scale);
        }
    }
}

// One weight row, N activation rows; out[a * out_stride].
template <class L, class T, int N>
inline __attribute__((always_inline)) void dot_super(uint32_t width, const uint8_t* p,
                                                     const Row* rows, float* out,
                                                     size_t out_stride) {
    typename L::F acc[N];
    typename L::F4 four[N];
    float one[N];
    for (int a = 0; a < N; ++a) {
        acc[a] = L::zero();
        four[a] = L::zero4();
        one[a] = 0;
    }
    constexpr uint32_t kBytes = block_bytes(T::kType);
    for (uint32_t b = 0; b < width / kSuper; ++b, p += kBytes) {
        prefetch<N>(p, kBytes);
        const typename T::Head head = T::head(p);
        typename L::Sums sums[N];
        for (int a = 0; a < N; ++a) sums[a] = L::none();
        const size_t at = size_t{b} * kSuper;
        step<L, T, N, 0>(p, head, rows, at, sums);
        step<L, T, N, 1>(p, head, rows, at, sums);
        step<L, T, N, 2>(p, head, rows, at, sums);
        step<L, T, N, 3>(p, head, rows, at, sums);
#pragma GCC unroll 8
        for (int a = 0; a < N; ++a) {
            const auto d = L::times(head.d, rows[a].d[b]);
            auto ints = L::fold(sums[a]);
            if constexpr (T::kMinima == Minima::kSixteen) {
                const auto less = L::madd_16(head.minima, rows[a].sums + b * 16);
                acc[a] = L::fused_less(L::second(d), L::to_float(less), acc[a]);
            } else if constexpr (T::kMinima == Minima::kThirtyTwo) {
                ints = L::minus_32_times(ints, L::madd_16(head.scales, rows[a].sums + b * 16));
            } else if constexpr (T::kMinima == Minima::kFour) {
                const auto less = L::madd_8(head.minima, rows[a].pairs + b * 8);
                four[a] = L::fused4_less(d, less, four[a]);
            } else if constexpr (T::kMinima == Minima::kOne) {
                const auto less = L::madd_8(head.minima, rows[a].pairs + b * 8);
                one[a] = fma(-L::second4(d), static_cast<float>(L::sum_ints4(less)), one[a]);
            }
            if constexpr (T::kMinima == Minima::kPanel) {
                one[a] = fma(static_cast<float>(L::sum_ints8(ints)), L::first4(d), one[a]);
            } else {
                acc[a] = L::fused(L::first(d), L::to_float(ints), acc[a]);
            }
        }
    }
    for (int a = 0; a < N; ++a) {
        float total = L::sum(acc[a]);
        if constexpr (T::kMinima == Minima::kFour) total += L::sum4(four[a]);
        if constexpr (T::kMinima == Minima::kOne) total += one[a];
        if constexpr (T::kMinima == Minima::kPanel) total = one[a];
        out[a * out_stride] = total;
    }
}

// A type of 32 weights a block, two blocks at a time. kTwo: the even and the odd blocks have
// accumulators of their own.
template <class L>
struct Q80 {
    template <class M>
    using With = Q80<M>;
    static constexpr WeightType kType = WeightType::kQ8_0;
    static constexpr bool kTwo = false;
    static float scale(const uint8_t* p) { return from_f16(load_u16(p)); }
    static typename L::Bytes blocks(const uint8_t* a, const uint8_t* b) {
        return L::load(a + 2, b + 2);
    }
};

template <class L>
struct Q40 {
    template <class M>
    using With = Q40<M>;
    static constexpr WeightType kType = WeightType::kQ4_0;
    static constexpr bool kTwo = false;
    static float scale(const uint8_t* p) { return from_f16(load_u16(p)); }
    static typename L::Bytes blocks(const uint8_t* a, const uint8_t* b) {
        return L::template subtract<8>(L::nibbles(a + 2, b + 2));
    }
};

// Bit i of eight to bit 4 of byte i.
inline uint64_t spread_bits(uint8_t bits) {
    const uint64_t one_each = (uint64_t{bits} * 0x0101010101010101) & 0x8040201008040201;
    return ((one_each + 0x7f7f7f7f7f7f7f7f) & 0x8080808080808080) >> 3;
}

template <class L>
struct Q50 {
    template <class M>
    using With = Q50<M>;
    static constexpr WeightType kType = WeightType::kQ5_0;
    static constexpr bool kTwo = false;
    static float scale(const uint8_t* p) { return from_f16(load_u16(p)); }
    static typename L::Bytes blocks(const uint8_t* a, const uint8_t* b) {
        alignas(64) uint64_t high[8];
        for (uint32_t i = 0; i < 4; ++i) {
            high[i] = spread_bits(a[2 + i]);
            high[4 + i] = spread_bits(b[2 + i]);
        }
        const auto* bytes = reinterpret_cast<const uint8_t*>(high);
        return L::template subtract<16>(
            L::either(L::nibbles(a + 6, b + 6), L::load(bytes, bytes + 32)));
    }
};

template <class L>
struct Iq4Nl {
    template <class M>
    using With = Iq4Nl<M>;
    static constexpr WeightType kType = WeightType::kIq4Nl;
    static constexpr bool kTwo = true;
    static float scale(const uint8_t* p) { return from_f16(load_u16(p)); }
    static typename L::Bytes blocks(const uint8_t* a, const uint8_t* b) {
        return L::lookup(L::nibbles(a + 2, b + 2), kIq4Values);
    }
};

template <class L>
struct Mxfp4 {
    template <class M>
    using With = Mxfp4<M>;
    static constexpr WeightType kType = WeightType::kMxfp4;
    static constexpr bool kTwo = true;
    static float scale(const uint8_t* p) { return from_e8m0_half(p[0]); }
    static typename L::Bytes blocks(const uint8_t* a, const uint8_t* b) {
        return L::lookup(L::nibbles(a + 1, b + 1), kFp4Values);
    }
};

template <class L, class T, int N>
inline __attribute__((always_inline)) void dot_small(uint32_t width, const uint8_t* p,
                                                     const Row* rows, float* out,
                                                     size_t out_stride) {
    constexpr uint32_t kBytes = block_bytes(T::kType);
    const uint32_t blocks = width / kSmall;
    typename L::F even[N], odd[N];
    for (int a = 0; a < N; ++a) even[a] = odd[a] = L::zero();
    uint32_t b = 0;
    for (; b + 1 < blocks; b += 2, p += 2 * kBytes) {
        prefetch<N>(p, 2 * kBytes);
        const auto split = L::split_signs(T::blocks(p, p + kBytes));
        const float first = T::scale(p), second = T::scale(p + kBytes);
#pragma GCC unroll 8
        for (int a = 0; a < N; ++a) {
            typename L::F x, y;
            L::two_products(split, rows[a].q + size_t{b} * kSmall, x, y);
            even[a] = L::fused(L::all(first * rows[a].d[b]), x, even[a]);
            auto& other = T::kTwo ? odd[a] : even[a];
            other = L::fused(L::all(second * rows[a].d[b + 1]), y, other);
        }
    }
    for (int a = 0; a < N; ++a) {
        if (b < blocks) {  // a last block alone: its 32 bytes twice, the second result unused
            alignas(64) int8_t q[64] = {};
            for (uint32_t i = 0; i < kSmall; ++i) q[i] = rows[a].q[size_t{b} * kSmall + i];
            typename L::F x, y;
            L::two_products(L::split_signs(T::blocks(p, p)), q, x, y);
            const float scale = T::scale(p) * rows[a].d[b];
            if (T::kTwo) {
                out[a * out_stride] = fma(scale, L::sum(x), L::sum(L::plus(even[a], odd[a])));
                continue;
            }
            even[a] = L::fused(L::all(scale), x, even[a]);
        }
        out[a * out_stride] = L::sum(T::kTwo ? L::plus(even[a], odd[a]) : even[a]);
    }
}

template <class L, class T, int N>
inline __attribute__((always_inline)) void dot_one(uint32_t width, const uint8_t* p,
                                                   const Row* rows, float* out, size_t stride) {
    if constexpr (row_kind(T::kType) == RowKind::kQ8_K)
        dot_super<L, T, N>(width, p, rows, out, stride);
    if constexpr (row_kind(T::kType) == RowKind::kQ8_0)
        dot_small<L, T, N>(width, p, rows, out, stride);
}

// N activation rows against all weight rows.
template <class L, class T, int N>
__attribute__((noinline)) void dot_tile(uint32_t width, const uint8_t* weights, size_t stride,
                                        uint32_t weight_rows, const Row* rows, float* out,
                                        size_t out_stride) {
    for (uint32_t w = 0; w < weight_rows; ++w) {
        dot_one<L, T, N>(width, weights + w * stride, rows, out + w, out_stride);
    }
}

// Weight rows that stay in the second-level cache while all activation rows pass over them.
constexpr size_t kPanelBytes = 128 * 1024;

template <class L, class T>
void dot_rows(uint32_t width, const uint8_t* weights, size_t stride, uint32_t weight_rows,
              const Row* rows, uint32_t row_count, float* out, size_t out_stride) {
    const auto panel = static_cast<uint32_t>(stride < kPanelBytes ? kPanelBytes / stride : 1);
    for (uint32_t first = 0; first < weight_rows; first += panel) {
        const uint32_t count = weight_rows - first < panel ? weight_rows - first : panel;
        const uint8_t* p = weights + first * stride;
        uint32_t a = 0;
        const auto tile = [&]<int N>() {
            for (; row_count - a >= N; a += N) {
                dot_tile<L, T, N>(width, p, stride, count, rows + a,
                                  out + size_t{a} * out_stride + first, out_stride);
            }
        };
        if constexpr (L::kRowsAtOnce >= 8) tile.template operator()<8>();
        tile.template operator()<4>();
        tile.template operator()<2>();
        for (; a < row_count; ++a) {
            using One = typename L::OneRow;
            dot_tile<One, typename T::template With<One>, 1>(width, p, stride, count, rows + a,
                                                             out + size_t{a} * out_stride + first,
                                                             out_stride);
        }
    }
}

template <class L>
constexpr Kernels make_kernels(const char* name) {
    Kernels k = {};
    k.name = name;
    k.group = [](WeightType type, uint32_t i) { return L::group(type, i); };
    k.dot[index_of(WeightType::kQ4_0)] = dot_rows<L, Q40<L>>;
    k.dot[index_of(WeightType::kQ5_0)] = dot_rows<L, Q50<L>>;
    k.dot[index_of(WeightType::kQ8_0)] = dot_rows<L, Q80<L>>;
    k.dot[index_of(WeightType::kQ2_K)] = dot_rows<L, Q2K<L>>;
    k.dot[index_of(WeightType::kQ3_K)] = dot_rows<L, Q3K<L>>;
    k.dot[index_of(WeightType::kQ4_K)] = dot_rows<L, Q4K<L>>;
    k.dot[index_of(WeightType::kQ5_K)] = dot_rows<L, Q5K<L>>;
    k.dot[index_of(WeightType::kQ6_K)] = dot_rows<L, Q6K<L>>;
    k.dot[index_of(WeightType::kIq4Nl)] = dot_rows<L, Iq4Nl<L>>;
    k.dot[index_of(WeightType::kIq4Xs)] = dot_rows<L, Iq4Xs<L>>;
    k.dot_panel = dot_rows<L, Iq4XsPanel<L>>;
    k.dot[index_of(WeightType::kMxfp4)] = dot_rows<L, Mxfp4<L>>;
    k.elementwise = kElementwise;
    return k;
}

}  // namespace
}  // namespace kvasir::engine::kernels
