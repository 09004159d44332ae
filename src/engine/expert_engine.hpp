// ExpertEngine: runs an expert program over a bank's weights, with the kernels (kernels/) where
// they cover it, else as a graph on one ggml device.
//
// Used by the worker for everything and by the backbone for what it computes itself. compute() is
// the pure function (rows, pairs) -> rows: one output row a pair, in the order of the pairs, with
// the bits that ggml_mul_mat_id and its neighbours give in llama.cpp's own graph. For types
// that depends_on_grouping(), all rows of an expert must be in one call.
//
// Thread: one thread at a time per engine; several engines may share weights.
// Owns: backend, thread pool, one scratch arena (grows to the largest request, bounded by Limits).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "engine/kernels/numeric.hpp"
#include "engine/runtime.hpp"
#include "engine/weights.hpp"
#include "moe/program.hpp"

struct ggml_backend_device;

namespace kvasir::engine {

constexpr uint32_t kRowF32 = 0;  // ggml type numbers
constexpr uint32_t kRowQ8K = 15;

// Bytes of one row of `width` values; 0 for an unknown type or a width that does not fit it.
uint64_t row_bytes(uint32_t row_type, uint32_t width);

// Do the kernels of this ggml type give a row other bits by how many rows its expert gets?
// (ggml-cpu's panel path for the grid based IQ types, which also reads f32 rows.)
bool depends_on_grouping(uint32_t ggml_type);

struct PairIn {
    uint32_t row = 0;     // index into the rows
    uint32_t expert = 0;  // index into the bank
};

class KernelPlan;
namespace kernels {
struct Kernels;
}

// What computes a bank.
enum class ComputeWith : uint8_t {
    kKernels,  // the kernels where they cover the bank, else a graph of the device
    kGraph,    // always a graph of the device
};

// A bank with its program, ready to run. Immutable.
struct Bank {
    BankWeights weights;
    moe::Program program;
    moe::ProgramShape shape;
    uint32_t experts = 0;
    uint64_t id = 0;  // of this preparation, unique in the process
    // Q8_K rows give the same bits as f32 rows: every product of the input uses Q8_K internally.
    bool takes_q8k = false;
    std::shared_ptr<const KernelPlan> plan = nullptr;  // null: a graph of the device computes it
    std::string why_graph = {};                        // what the kernels lack for it, in words
    uint64_t scratch_bytes_per_pair() const;
    std::string computed_by() const;  // "kernels avx512 as x86-v4", "ggml: weights of type iq2_xs"
};

class ExpertEngine {
public:
    // `threads` >= 1. `kernels`: must outlive the engine and its banks; null for the fastest that
    // this processor runs. Errors: kEnvironment.
    static Result<std::unique_ptr<ExpertEngine>> make(ggml_backend_device* device, uint32_t threads,
                                                      ComputeWith with = ComputeWith::kKernels,
                                                      const kernels::Kernels* kernels = nullptr);
    virtual ~ExpertEngine() = default;

    // Checks the program against the bank's tensors and the device. `numeric`: whose bits the
    // kernels are to give (a graph gives the device's own, whatever is asked). Errors: as
    // moe::validate, kUnsupported when the device cannot run an operation.
    virtual Result<std::shared_ptr<const Bank>> prepare(
        const moe::ExpertBank& meta, BankWeights weights, const moe::Program& program,
        kernels::NumericClass numeric = numeric_class()) = 0;

    // rows: row_count rows of row_bytes(row_type, shape.input()) each, contiguous. Returns
    // pairs.size() rows of shape.output() floats, valid until the next call. Errors: kNotHeld
    // (expert out of range), kProtocol (row out of range, wrong size or type), kEnvironment
    // (memory, device failure).
    virtual Result<std::span<const float>> compute(const Bank& bank, uint32_t row_type,
                                                   uint32_t row_count,
                                                   std::span<const uint8_t> rows,
                                                   std::span<const PairIn> pairs) = 0;

    virtual ComputeWith with() const = 0;

    // Quantises f32 rows to Q8_K with the device's own routine, as its products would. `out` must
    // have room for count rows. Errors: kEnvironment.
    virtual Status quantise(const float* rows, uint32_t count, uint32_t width, uint8_t* out) = 0;
};

}  // namespace kvasir::engine
