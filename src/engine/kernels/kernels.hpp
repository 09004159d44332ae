// The kernels of one instruction set, and the choice among them.
//
// Used by KernelRunner (engine/kernel_runner.hpp). Every set gives the same bits; they differ in
// speed.
// Thread: pure functions over the caller's memory; the sets are constants.
// Limits: rows and weights may have any alignment; nothing past their ends is read.
#pragma once

#include "engine/kernels/numeric.hpp"
#include "engine/kernels/weights.hpp"

namespace kvasir::engine::kernels {

// out[a * out_stride + w] = weights row w . activation row a, for weight_rows rows of weights that
// start `stride` bytes apart and row_count activations, each of `width` values.
using DotRows = void (*)(uint32_t width, const uint8_t* weights, size_t stride,
                         uint32_t weight_rows, const Row* rows, uint32_t row_count, float* out,
                         size_t out_stride);

// y[i] = f(x[i]), or f(x[i]) * g[i] where the operation has a second input. x, g and y may be one.
using Activation = void (*)(uint32_t count, const float* x, const float* g, float* y);

// ggml takes IQ4_XS another way when an expert has so many rows, if its matrix has whole panels of
// eight weight rows: one integer sum and one float for each product.
constexpr uint32_t kPanelRows = 8;
constexpr bool takes_panel(WeightType type, uint32_t weight_rows, uint32_t rows_of_expert) {
    return type == WeightType::kIq4Xs && weight_rows % 8 == 0 && rows_of_expert >= kPanelRows;
}

struct Elementwise {
    Activation silu_v3, silu_v4;      // x / (1 + exp(-x)) as each class computes it
    Activation swiglu_v3, swiglu_v4;  // silu(x) * g
    // a / (1 + exp(-alpha a)) * (b + 1) with a = min(x, limit), b = g clamped to +-limit.
    void (*swiglu_oai)(uint32_t count, const float* x, const float* g, float alpha, float limit,
                       float* y);
    // `width` values, a multiple of the block, to the parts of a Row, before arrange().
    void (*quantise_q8_k)(uint32_t width, const float* x, int8_t* q, float* d, int16_t* sums,
                          int16_t* pairs);
    void (*quantise_q8_0)(uint32_t width, const float* x, int8_t* q, float* d);
};

struct Kernels {
    const char* name;
    DotRows dot[kWeightTypeCount];  // by index_of()
    DotRows dot_panel;              // of kIq4Xs where takes_panel()
    // Puts the `width` values of a quantised row into the order and the form in which dot[type]
    // reads them.
    void (*arrange)(WeightType type, uint32_t width, int8_t* q);
    Elementwise elementwise;
};

// Sets that this build has and this processor runs, fastest first; the reference is the last.
struct KernelSets {
    const Kernels* const* begin;
    uint32_t count;
};
KernelSets available_kernels();

}  // namespace kvasir::engine::kernels
