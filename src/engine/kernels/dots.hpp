// Products of weight rows and activation rows, written once for every vector instruction set.
//
// L (lanes_*.hpp) holds the vectors of an instruction set: Bytes (64 weights), Sums (int32 sums of
// products that fold to eight lanes), F (eight floats), F4 (four). The order of operations is that
// of reference.cpp, which the tests hold every instance to. A weight block is unpacked once for up
// to N activation rows. Included by one file per instruction set, in an unnamed namespace of its
// own (see numeric.hpp). Thread: pure functions.
#pragma once

#include "engine/kernels/elementwise.hpp"
#include "engine/kernels/unpack.hpp"

namespace kvasir::engine::kernels {
namespace {

// Weights are asked for ahead of the products, as the processor's own prefetching stops at every
// page. How far was measured (bench/kernels_bench.cpp).
inline void prefetch(const uint8_t* p, uint32_t bytes) {
    constexpr size_t kAhead = 2048;
    for (uint32_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + kAhead + at, 0, 3);
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

// Block b's integers, and what its minima take off, to the lanes of one product.
template <class L, class T>
inline __attribute__((always_inline)) void add_block(const typename T::Head& head,
                                                     typename L::Sums sums, const Row& row,
                                                     uint32_t b, typename L::F& acc,
                                                     typename L::F4& four, float& one) {
    const auto d = L::times(head.d, row.d[b]);
    auto ints = L::fold(sums);
    if constexpr (T::kMinima == Minima::kSixteen) {
        const auto less = L::madd_16(head.minima, row.sums + b * 16);
        acc = L::fused_less(L::second(d), L::to_float(less), acc);
    } else if constexpr (T::kMinima == Minima::kThirtyTwo) {
        ints = L::minus_32_times(ints, L::madd_16(head.scales, row.sums + b * 16));
    } else if constexpr (T::kMinima == Minima::kFour) {
        four = L::fused4_less(d, L::madd_8(head.minima, row.pairs + b * 8), four);
    } else if constexpr (T::kMinima == Minima::kOne) {
        const auto less = L::madd_8(head.minima, row.pairs + b * 8);
        one = fma(-L::second4(d), static_cast<float>(L::sum_ints4(less)), one);
    }
    if constexpr (T::kMinima == Minima::kPanel) {
        one = fma(static_cast<float>(L::sum_ints8(ints)), L::first4(d), one);
    } else {
        acc = L::fused(L::first(d), L::to_float(ints), acc);
    }
}

// W weight rows `stride` bytes apart, N activation rows; out[a * out_stride + w * w_stride].
template <class L, class T, int W, int N>
inline __attribute__((always_inline)) void dot_super(uint32_t width, const uint8_t* p,
                                                     size_t stride, const Row* rows, float* out,
                                                     size_t w_stride, size_t out_stride) {
    typename L::F acc[W][N];
    typename L::F4 four[W][N];
    float one[W][N];
    for (int w = 0; w < W; ++w) {
        for (int a = 0; a < N; ++a) {
            acc[w][a] = L::zero();
            four[w][a] = L::zero4();
            one[w][a] = 0;
        }
    }
    constexpr uint32_t kBytes = block_bytes(T::kType);
    for (uint32_t b = 0; b < width / kSuper; ++b, p += kBytes) {
        typename T::Head head[W];
        typename L::Sums sums[W][N];
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) {
            prefetch(p + w * stride, kBytes);
            head[w] = T::head(p + w * stride);
            for (int a = 0; a < N; ++a) sums[w][a] = L::none();
        }
        const size_t at = size_t{b} * kSuper;
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) step<L, T, N, 0>(p + w * stride, head[w], rows, at, sums[w]);
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) step<L, T, N, 1>(p + w * stride, head[w], rows, at, sums[w]);
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) step<L, T, N, 2>(p + w * stride, head[w], rows, at, sums[w]);
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) step<L, T, N, 3>(p + w * stride, head[w], rows, at, sums[w]);
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) {
#pragma GCC unroll 8
            for (int a = 0; a < N; ++a) {
                add_block<L, T>(head[w], sums[w][a], rows[a], b, acc[w][a], four[w][a], one[w][a]);
            }
        }
    }
    for (int w = 0; w < W; ++w) {
        for (int a = 0; a < N; ++a) {
            float total = L::sum(acc[w][a]);
            if constexpr (T::kMinima == Minima::kFour) total += L::sum4(four[w][a]);
            if constexpr (T::kMinima == Minima::kOne) total += one[w][a];
            if constexpr (T::kMinima == Minima::kPanel) total = one[w][a];
            out[a * out_stride + w * w_stride] = total;
        }
    }
}

// As dot_super.
template <class L, class T, int W, int N>
inline __attribute__((always_inline)) void dot_small(uint32_t width, const uint8_t* p,
                                                     size_t stride, const Row* rows, float* out,
                                                     size_t w_stride, size_t out_stride) {
    constexpr uint32_t kBytes = block_bytes(T::kType);
    const uint32_t blocks = width / kSmall;
    typename L::F even[W][N], odd[W][N];
    for (int w = 0; w < W; ++w) {
        for (int a = 0; a < N; ++a) even[w][a] = odd[w][a] = L::zero();
    }
    uint32_t b = 0;
    for (; b + 1 < blocks; b += 2, p += 2 * kBytes) {
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) {
            const uint8_t* two = p + w * stride;
            prefetch(two, 2 * kBytes);
            const auto split = L::split_signs(T::blocks(two, two + kBytes));
            const float first = T::scale(two), second = T::scale(two + kBytes);
#pragma GCC unroll 8
            for (int a = 0; a < N; ++a) {
                typename L::F x, y;
                L::two_products(split, rows[a].q + size_t{b} * kSmall, x, y);
                even[w][a] = L::fused(L::all(first * rows[a].d[b]), x, even[w][a]);
                auto& other = T::kTwo ? odd[w][a] : even[w][a];
                other = L::fused(L::all(second * rows[a].d[b + 1]), y, other);
            }
        }
    }
    for (int w = 0; w < W; ++w) {
        for (int a = 0; a < N; ++a) {
            float* to = out + a * out_stride + w * w_stride;
            if (b < blocks) {  // a last block alone: its 32 bytes twice, the second result unused
                const uint8_t* last = p + w * stride;
                alignas(64) int8_t q[64] = {};
                for (uint32_t i = 0; i < kSmall; ++i) q[i] = rows[a].q[size_t{b} * kSmall + i];
                typename L::F x, y;
                L::two_products(L::split_signs(T::blocks(last, last)), q, x, y);
                const float scale = T::scale(last) * rows[a].d[b];
                if (T::kTwo) {
                    *to = fma(scale, L::sum(x), L::sum(L::plus(even[w][a], odd[w][a])));
                    continue;
                }
                even[w][a] = L::fused(L::all(scale), x, even[w][a]);
            }
            *to = L::sum(T::kTwo ? L::plus(even[w][a], odd[w][a]) : even[w][a]);
        }
    }
}

template <class L, class T, int W, int N>
inline __attribute__((always_inline)) void dot_runs(uint32_t width, const uint8_t* p, size_t stride,
                                                    const Row* rows, float* out, size_t w_stride,
                                                    size_t out_stride) {
    if constexpr (row_kind(T::kType) == RowKind::kQ8_K)
        dot_super<L, T, W, N>(width, p, stride, rows, out, w_stride, out_stride);
    if constexpr (row_kind(T::kType) == RowKind::kQ8_0)
        dot_small<L, T, W, N>(width, p, stride, rows, out, w_stride, out_stride);
}

// Few activation rows leave the memory as the limit, and one stream from it does not reach that:
// weight rows of so many runs, far apart, are taken side by side (bench/kernels_bench.cpp).
template <class L, int N>
constexpr uint32_t kStreamsOf = N == 1   ? L::kStreams
                                : N == 2 ? (L::kStreams + 1) / 2
                                         : 1;

// N activation rows against all weight rows.
template <class L, class T, int N>
__attribute__((noinline)) void dot_tile(uint32_t width, const uint8_t* weights, size_t stride,
                                        uint32_t weight_rows, const Row* rows, float* out,
                                        size_t out_stride) {
    constexpr uint32_t kRuns = kStreamsOf<L, N>;
    const uint32_t run = weight_rows / kRuns;
    for (uint32_t w = 0; w < run; ++w) {
        dot_runs<L, T, kRuns, N>(width, weights + w * stride, run * stride, rows, out + w, run,
                                 out_stride);
    }
    for (uint32_t w = run * kRuns; w < weight_rows; ++w) {
        dot_runs<L, T, 1, N>(width, weights + w * stride, 0, rows, out + w, 0, out_stride);
    }
}

// Weight rows that stay in the second-level cache while all activation rows pass over them.
constexpr size_t kPanelBytes = 128 * 1024;

template <class L, class T>
void dot_rows(uint32_t width, const uint8_t* weights, size_t stride, uint32_t weight_rows,
              const Row* rows, uint32_t row_count, float* out, size_t out_stride) {
    auto panel = static_cast<uint32_t>(stride < kPanelBytes ? kPanelBytes / stride : 1);
    if (row_count <= 2) panel = weight_rows;  // once over all of them
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
        tile.template operator()<1>();
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
