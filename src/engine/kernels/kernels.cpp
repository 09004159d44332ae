#include "engine/kernels/kernels.hpp"

#include "engine/kernels/elementwise.hpp"
#include "engine/kernels/reference.hpp"
#include "engine/kernels/sets.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace kvasir::engine::kernels {
namespace {

template <WeightType Type>
void reference_rows(uint32_t width, const uint8_t* weights, size_t stride, uint32_t weight_rows,
                    const Row* rows, uint32_t row_count, float* out, size_t out_stride) {
    for (uint32_t a = 0; a < row_count; ++a) {
        for (uint32_t w = 0; w < weight_rows; ++w) {
            out[a * out_stride + w] = reference_dot(Type, width, weights + w * stride, rows[a]);
        }
    }
}

void reference_panel_rows(uint32_t width, const uint8_t* weights, size_t stride,
                          uint32_t weight_rows, const Row* rows, uint32_t row_count, float* out,
                          size_t out_stride) {
    for (uint32_t a = 0; a < row_count; ++a) {
        for (uint32_t w = 0; w < weight_rows; ++w) {
            out[a * out_stride + w] = reference_dot_panel(width, weights + w * stride, rows[a]);
        }
    }
}

constexpr Kernels make_reference() {
    Kernels k = {};
    k.name = "reference";
    k.dot[0] = reference_rows<kWeightTypes[0]>;
    k.dot[1] = reference_rows<kWeightTypes[1]>;
    k.dot[2] = reference_rows<kWeightTypes[2]>;
    k.dot[3] = reference_rows<kWeightTypes[3]>;
    k.dot[4] = reference_rows<kWeightTypes[4]>;
    k.dot[5] = reference_rows<kWeightTypes[5]>;
    k.dot[6] = reference_rows<kWeightTypes[6]>;
    k.dot[7] = reference_rows<kWeightTypes[7]>;
    k.dot[8] = reference_rows<kWeightTypes[8]>;
    k.dot[9] = reference_rows<kWeightTypes[9]>;
    k.dot[10] = reference_rows<kWeightTypes[10]>;
    static_assert(kWeightTypeCount == 11);
    k.dot_panel = reference_panel_rows;
    k.arrange = [](WeightType, uint32_t, int8_t*) {};
    k.elementwise = kElementwise;
    return k;
}

constexpr Kernels kReference = make_reference();

struct Available {
    const Kernels* sets[4] = {};
    uint32_t count = 0;
    void add(const Kernels& kernels) { sets[count++] = &kernels; }
};

#if defined(__x86_64__)
// Not every compiler's __builtin_cpu_supports() knows these two.
bool has_avx_vnni() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & 1u << 4) != 0;
}
bool has_f16c() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

Available find_available() {
    Available found;
#if defined(__x86_64__)
    const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi2") && has_f16c();
    const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vnni");
    if (v3 && v4) found.add(kKernelsAvx512);
    if (v3 && has_avx_vnni()) found.add(kKernelsAvxVnni);
    if (v3) found.add(kKernelsAvx2);
#elif defined(__aarch64__)
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) found.add(kKernelsNeonDot);
    found.add(kKernelsNeon);
#endif
    found.add(kReference);
    return found;
}

}  // namespace

KernelSets available_kernels() {
    static const Available found = find_available();
    return {found.sets, found.count};
}

}  // namespace kvasir::engine::kernels
