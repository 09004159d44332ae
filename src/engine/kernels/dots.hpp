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

// The float lanes of N products of one weight row: a set may specialise it to hold several rows'
// lanes in one vector. Tile: what it reads of the rows.
template <class L, class T, int N>
struct Lanes {
    struct Tile {
        Tile(const Row* of, uint32_t) : rows(of) {}
        const Row* rows;
    };

    Lanes() {
        for (int a = 0; a < N; ++a) {
            acc[a] = L::zero();
            four[a] = L::zero4();
            one[a] = 0;
        }
    }

    // Block b's integers, and what its minima take off.
    inline __attribute__((always_inline)) void add(const typename T::Head& head,
                                                   const typename L::Sums (&sums)[N],
                                                   const Tile& tile, uint32_t b) {
#pragma GCC unroll 8
        for (int a = 0; a < N; ++a) {
            const Row& row = tile.rows[a];
            const auto d = L::times(head.d, row.d[b]);
            auto ints = L::fold(sums[a]);
            if constexpr (T::kMinima == Minima::kSixteen) {
                const auto less = L::madd_16(head.minima, row.sums + b * 16);
                acc[a] = L::fused_less(L::second(d), L::to_float(less), acc[a]);
            } else if constexpr (T::kMinima == Minima::kThirtyTwo) {
                ints = L::minus_32_times(ints, L::madd_16(head.scales, row.sums + b * 16));
            } else if constexpr (T::kMinima == Minima::kFour) {
                four[a] = L::fused4_less(d, L::madd_8(head.minima, row.pairs + b * 8), four[a]);
            } else if constexpr (T::kMinima == Minima::kOne) {
                const auto less = L::madd_8(head.minima, row.pairs + b * 8);
                one[a] = fma(-L::second4(d), static_cast<float>(L::sum_ints4(less)), one[a]);
            }
            if constexpr (T::kMinima == Minima::kPanel) {
                one[a] = fma(static_cast<float>(L::sum_ints8(ints)), L::first4(d), one[a]);
            } else {
                acc[a] = L::fused(L::first(d), L::to_float(ints), acc[a]);
            }
        }
    }

    float total(int a) const {
        if constexpr (T::kMinima == Minima::kPanel) return one[a];
        const float sum = L::sum(acc[a]);
        if constexpr (T::kMinima == Minima::kFour) return sum + L::sum4(four[a]);
        if constexpr (T::kMinima == Minima::kOne) return sum + one[a];
        return sum;
    }

    typename L::F acc[N];
    typename L::F4 four[N];
    float one[N];
};

// A tile of activation rows may keep a copy of what it reads: wider rows go one at a time.
constexpr uint32_t kTileWidthMax = 64 * kSuper;

// W weight rows `stride` bytes apart, N activation rows; out[a * out_stride + w * w_stride].
template <class L, class T, int W, int N>
inline __attribute__((always_inline)) void dot_super(uint32_t width, const uint8_t* p,
                                                     size_t stride, const Row* rows,
                                                     const typename Lanes<L, T, N>::Tile& tile,
                                                     float* out, size_t w_stride,
                                                     size_t out_stride) {
    Lanes<L, T, N> lanes[W];
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
        for (int w = 0; w < W; ++w) lanes[w].add(head[w], sums[w], tile, b);
    }
    for (int w = 0; w < W; ++w) {
        for (int a = 0; a < N; ++a) out[a * out_stride + w * w_stride] = lanes[w].total(a);
    }
}

// The same for types of 32 weights a block, of which two are taken at a time.
template <class L, class T, int N>
struct SmallLanes {
    // Two blocks of a weight row.
    struct Blocks {
        Blocks(const uint8_t* a, const uint8_t* b)
            : weights(L::small(T::blocks(a, b))), first(T::scale(a)), second(T::scale(b)) {}
        typename L::Small weights;
        float first, second;
    };

    SmallLanes() {
        for (int a = 0; a < N; ++a) even[a] = odd[a] = L::zero();
    }

    // Blocks b and b + 1.
    inline __attribute__((always_inline)) void add(const Blocks& blocks, const Row* rows,
                                                   uint32_t b) {
#pragma GCC unroll 8
        for (int a = 0; a < N; ++a) {
            typename L::F x, y;
            L::two_products(blocks.weights, rows[a].q + size_t{b} * kSmall, x, y);
            even[a] = L::fused(L::all(blocks.first * rows[a].d[b]), x, even[a]);
            auto& other = T::kTwo ? odd[a] : even[a];
            other = L::fused(L::all(blocks.second * rows[a].d[b + 1]), y, other);
        }
    }

    float total(int a) const {
        return L::sum(T::kTwo ? L::plus(even[a], odd[a]) : even[a]);
    }

    // With a last block alone, given twice; q: its activations, and 32 of any.
    inline __attribute__((always_inline)) float total(int a, const Blocks& last, const int8_t* q,
                                                      float d) const {
        typename L::F x, y;
        L::two_products(last.weights, q, x, y);
        const float scale = last.first * d;
        if (T::kTwo) return fma(scale, L::sum(x), total(a));
        return L::sum(L::fused(L::all(scale), x, even[a]));
    }

    typename L::F even[N], odd[N];
};

// As dot_super.
template <class L, class T, int W, int N>
inline __attribute__((always_inline)) void dot_small(uint32_t width, const uint8_t* p,
                                                     size_t stride, const Row* rows, float* out,
                                                     size_t w_stride, size_t out_stride) {
    using Sums = SmallLanes<L, T, N>;
    constexpr uint32_t kBytes = block_bytes(T::kType);
    const uint32_t blocks = width / kSmall;
    Sums lanes[W];
    uint32_t b = 0;
    for (; b + 1 < blocks; b += 2, p += 2 * kBytes) {
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) {
            const uint8_t* two = p + w * stride;
            prefetch(two, 2 * kBytes);
            lanes[w].add(typename Sums::Blocks(two, two + kBytes), rows, b);
        }
    }
    for (int w = 0; w < W; ++w) {
        for (int a = 0; a < N; ++a) {
            float& to = out[a * out_stride + w * w_stride];
            if (b == blocks) {
                to = lanes[w].total(a);
                continue;
            }
            const uint8_t* last = p + w * stride;
            alignas(64) int8_t q[64] = {};
            __builtin_memcpy(q, rows[a].q + size_t{b} * kSmall, kSmall);
            to = lanes[w].total(a, typename Sums::Blocks(last, last), q, rows[a].d[b]);
        }
    }
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
    const auto all = [&](auto dot) {
        for (uint32_t w = 0; w < run; ++w) dot.template operator()<kRuns>(w);
        for (uint32_t w = run * kRuns; w < weight_rows; ++w) dot.template operator()<1>(w);
    };
    if constexpr (row_kind(T::kType) == RowKind::kQ8_K) {
        const typename Lanes<L, T, N>::Tile tile(rows, width);
        all([&]<int W>(uint32_t w) __attribute__((always_inline)) {
            dot_super<L, T, W, N>(width, weights + w * stride, run * stride, rows, tile, out + w,
                                  run, out_stride);
        });
    } else {
        all([&]<int W>(uint32_t w) __attribute__((always_inline)) {
            dot_small<L, T, W, N>(width, weights + w * stride, run * stride, rows, out + w, run,
                                  out_stride);
        });
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
        if (width <= kTileWidthMax) {
            if constexpr (L::kRowsAtOnce >= 8) tile.template operator()<8>();
            tile.template operator()<4>();
            tile.template operator()<2>();
        }
        tile.template operator()<1>();
    }
}

// L::group(): which run of 32 of a block the activations have at place `i`. L::kFlipped: the top
// bit of activations for types of 32 is turned over, which makes q + 128 of it, without a sign.
template <class L>
void arrange(WeightType type, uint32_t width, int8_t* q) {
    if (row_kind(type) == RowKind::kQ8_0) {
        for (uint32_t i = 0; i < width && L::kFlipped; ++i) q[i] = static_cast<int8_t>(q[i] ^ 0x80);
        return;
    }
    bool natural = true;
    for (uint32_t i = 0; i < 8; ++i) natural = natural && L::group(type, i) == i;
    if (natural) return;
    for (uint32_t b = 0; b < width; b += kSuper) {
        int8_t block[kSuper];
        __builtin_memcpy(block, q + b, kSuper);
        for (uint32_t i = 0; i < 8; ++i) {
            __builtin_memcpy(q + b + 32 * i, block + 32 * L::group(type, i), 32);
        }
    }
}

template <class L>
constexpr Kernels make_kernels(const char* name) {
    Kernels k = {};
    k.name = name;
    k.arrange = arrange<L>;
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
