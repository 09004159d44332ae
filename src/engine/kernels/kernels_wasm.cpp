// kernels.wasm: the kernels for browsers and other hosts of WebAssembly, without a C library.
//
// Compiled by tools/wasm.sh. Everything is in the module's own memory, in an arena that grows:
// offsets are bytes in it, numbers are u32 unless noted. The host writes what it passes.
//
//   kv_alloc(bytes) -> offset          a multiple of 64; 0 when memory cannot grow so far
//   kv_mark() -> mark, kv_release(mark)   gives back all that was allocated since
//   kv_block_width(type), kv_row_bytes(type, width) -> of weights; 0 for a type that is not here
//   kv_quantise(type, width, rows, x) -> activations of `rows` rows of f32 at x, made ready for
//       weights of `type`, allocated from the arena; 0 when it does not fit
//   kv_take_q8_k(type, width, rows, bytes) -> the same of rows of Q8_K as they travel (each 256:
//   f32
//       scale, int8[256], int16 sums[16])
//   kv_dot_rows(type, width, weights, stride, weight_rows, activations, rows, out, out_stride) -> 1
//       out[r * out_stride + w] (f32) = weights row w . activation row r; 0 for a wrong type or
//       width. Give it all rows of an expert in one call: IQ4_XS has another order of operations
//       for many (takes_panel() in kernels.hpp)
//   kv_silu(class, count, x, y)        class: 1 x86-v3, 2 x86-v4 (NumericClass); x, g, y may be one
//   kv_swiglu(class, count, x, g, y)   silu(x) * g
//   kv_swiglu_oai(count, x, g, f32 alpha, f32 limit, y)
//   kv_gelu(count, x, g, y)            g: 0 for none
//
// `type` is ggml's number. Activations are an array of four offsets a row: int8 values, f32 scales,
// int16 sums of 16, int16 sums of 32 (the sums for types with blocks of 256 only).
// The host checks sizes against what it allocated: the module reads and writes what it is told.
// Thread: one instance, one thread.
#include "engine/kernels/dots.hpp"
#include "engine/kernels/gelu_values.hpp"
#include "engine/kernels/lanes_wasm.hpp"

#define KVASIR_EXPORT(name) extern "C" __attribute__((export_name(#name), used))

extern "C" uint8_t __heap_base;  // the linker's: where its own data end

namespace kvasir::engine::kernels {
namespace {

constexpr uint64_t kPage = 64 * 1024, kLine = 64;
constexpr uint32_t kQ8KBytes = 4 + kSuper + 32;

constexpr Kernels kKernels = make_kernels<Wasm>("wasm");

uint64_t used = 0;  // bytes of memory; 0 before the first call
uint16_t gelu_table[kHalves];
bool has_gelu_table = false;

uint64_t lines(uint64_t bytes) {
    return (bytes + kLine - 1) / kLine * kLine;
}

uint64_t begin() {
    if (used == 0) used = lines(reinterpret_cast<uintptr_t>(&__heap_base));
    return used;
}

uint8_t* take(uint64_t bytes) {
    const uint64_t at = begin(), end = at + lines(bytes);
    const uint64_t size = __builtin_wasm_memory_size(0) * kPage;
    if (end > size) {
        const uint64_t pages = (end - size + kPage - 1) / kPage;
        if (pages > 0xffff || __builtin_wasm_memory_grow(0, pages) == SIZE_MAX) return nullptr;
    }
    used = end;
    return reinterpret_cast<uint8_t*>(at);
}

// Rows to be filled: null when there is no room.
Row* make_rows(WeightType type, uint32_t width, uint32_t count) {
    if (!covers(type, width)) return nullptr;
    const uint64_t blocks = width / block_width(type);
    const bool super = row_kind(type) == RowKind::kQ8_K;
    const uint64_t q = lines(width), d = lines(blocks * sizeof(float));
    const uint64_t sums = super ? lines(blocks * 32) : 0, pairs = super ? lines(blocks * 16) : 0;
    const uint64_t each = q + d + sums + pairs, array = lines(uint64_t{count} * sizeof(Row));
    if (count != 0 && each > (uint64_t{1} << 32) / count) return nullptr;
    uint8_t* memory = take(array + each * count);
    if (memory == nullptr) return nullptr;
    auto* rows = reinterpret_cast<Row*>(memory);
    uint8_t* at = memory + array;
    for (uint32_t r = 0; r < count; ++r, at += each) {
        rows[r].q = reinterpret_cast<int8_t*>(at);
        rows[r].d = reinterpret_cast<float*>(at + q);
        rows[r].sums = super ? reinterpret_cast<int16_t*>(at + q + d) : nullptr;
        rows[r].pairs = super ? reinterpret_cast<int16_t*>(at + q + d + sums) : nullptr;
    }
    return rows;
}

}  // namespace

KVASIR_EXPORT(kv_alloc) uint8_t* kv_alloc(uint32_t bytes) {
    return take(bytes);
}

KVASIR_EXPORT(kv_mark) uint32_t kv_mark() {
    return static_cast<uint32_t>(begin());
}

KVASIR_EXPORT(kv_release) void kv_release(uint32_t mark) {
    used = mark;
}

KVASIR_EXPORT(kv_block_width) uint32_t kv_block_width(WeightType type) {
    return covers(type, 0) ? block_width(type) : 0;
}

KVASIR_EXPORT(kv_row_bytes) uint32_t kv_row_bytes(WeightType type, uint32_t width) {
    return covers(type, width) ? static_cast<uint32_t>(row_bytes(type, width)) : 0;
}

KVASIR_EXPORT(kv_quantise)
const Row* kv_quantise(WeightType type, uint32_t width, uint32_t count, const float* x) {
    Row* rows = make_rows(type, width, count);
    if (rows == nullptr) return nullptr;
    for (uint32_t r = 0; r < count; ++r, x += width) {
        auto* q = const_cast<int8_t*>(rows[r].q);
        auto* d = const_cast<float*>(rows[r].d);
        if (row_kind(type) == RowKind::kQ8_0) {
            quantise_q8_0(width, x, q, d);
        } else {
            quantise_q8_k(width, x, q, d, const_cast<int16_t*>(rows[r].sums),
                          const_cast<int16_t*>(rows[r].pairs));
        }
    }
    return rows;
}

KVASIR_EXPORT(kv_take_q8_k)
const Row* kv_take_q8_k(WeightType type, uint32_t width, uint32_t count, const uint8_t* bytes) {
    if (!covers(type, width) || row_kind(type) != RowKind::kQ8_K) return nullptr;
    Row* rows = make_rows(type, width, count);
    if (rows == nullptr) return nullptr;
    for (uint32_t r = 0; r < count; ++r) {
        auto* sums = const_cast<int16_t*>(rows[r].sums);
        auto* pairs = const_cast<int16_t*>(rows[r].pairs);
        for (uint32_t b = 0; b < width / kSuper; ++b, bytes += kQ8KBytes) {
            const_cast<float*>(rows[r].d)[b] = load_f32(bytes);
            __builtin_memcpy(const_cast<int8_t*>(rows[r].q) + b * kSuper, bytes + 4, kSuper);
            __builtin_memcpy(sums + b * 16, bytes + 4 + kSuper, 32);
        }
        for (uint32_t i = 0; i < width / 32; ++i) {
            pairs[i] = static_cast<int16_t>(sums[2 * i] + sums[2 * i + 1]);
        }
    }
    return rows;
}

KVASIR_EXPORT(kv_dot_rows)
uint32_t kv_dot_rows(WeightType type, uint32_t width, const uint8_t* weights, uint32_t stride,
                     uint32_t weight_rows, const Row* rows, uint32_t row_count, float* out,
                     uint32_t out_stride) {
    if (!covers(type, width)) return 0;
    const bool panel = takes_panel(type, weight_rows, row_count);
    (panel ? kKernels.dot_panel : kKernels.dot[index_of(type)])(width, weights, stride, weight_rows,
                                                                rows, row_count, out, out_stride);
    return 1;
}

KVASIR_EXPORT(kv_silu)
void kv_silu(NumericClass numeric, uint32_t count, const float* x, float* y) {
    (numeric == NumericClass::kX86V4 ? silu_v4 : silu_v3)(count, x, nullptr, y);
}

KVASIR_EXPORT(kv_swiglu)
void kv_swiglu(NumericClass numeric, uint32_t count, const float* x, const float* g, float* y) {
    (numeric == NumericClass::kX86V4 ? swiglu_v4 : swiglu_v3)(count, x, g, y);
}

KVASIR_EXPORT(kv_swiglu_oai)
void kv_swiglu_oai(uint32_t count, const float* x, const float* g, float alpha, float limit,
                   float* y) {
    swiglu_oai(count, x, g, alpha, limit, y);
}

KVASIR_EXPORT(kv_gelu)
void kv_gelu(uint32_t count, const float* x, const float* g, float* y) {
    if (!has_gelu_table) fill_gelu_table(gelu_table);
    has_gelu_table = true;
    gelu_from(gelu_table, count, x, g, y);
}

}  // namespace kvasir::engine::kernels
