// How blocks of each weight type are taken apart, once for every vector instruction set.
//
// L (lanes_*.hpp) holds the vectors of an instruction set; dots.hpp multiplies what comes out.
// Thread: pure functions.
#pragma once

#include "engine/kernels/numeric.hpp"
#include "engine/kernels/weights.hpp"

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
    static constexpr Minima kMinima = Minima::kPanel;
};

// A type of 32 weights a block, two blocks at a time. kTwo: the even and the odd blocks have
// accumulators of their own.
template <class L>
struct Q80 {
    static constexpr WeightType kType = WeightType::kQ8_0;
    static constexpr bool kTwo = false;
    static float scale(const uint8_t* p) { return from_f16(load_u16(p)); }
    static typename L::Bytes blocks(const uint8_t* a, const uint8_t* b) {
        return L::load(a + 2, b + 2);
    }
};

template <class L>
struct Q40 {
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
    static constexpr WeightType kType = WeightType::kIq4Nl;
    static constexpr bool kTwo = true;
    static float scale(const uint8_t* p) { return from_f16(load_u16(p)); }
    static typename L::Bytes blocks(const uint8_t* a, const uint8_t* b) {
        return L::lookup(L::nibbles(a + 2, b + 2), kIq4Values);
    }
};

// from_e8m0_half() of every byte.
struct E8m0Halves {
    constexpr E8m0Halves() {
        for (uint32_t e = 0; e < 256; ++e) of[e] = from_e8m0_half(static_cast<uint8_t>(e));
    }
    float of[256] = {};
};
constexpr E8m0Halves kE8m0Halves;

template <class L>
struct Mxfp4 {
    static constexpr WeightType kType = WeightType::kMxfp4;
    static constexpr bool kTwo = true;
    static float scale(const uint8_t* p) { return kE8m0Halves.of[p[0]]; }
    static typename L::Bytes blocks(const uint8_t* a, const uint8_t* b) {
        return L::lookup(L::nibbles(a + 1, b + 1), kFp4Values);
    }
};

}  // namespace
}  // namespace kvasir::engine::kernels
