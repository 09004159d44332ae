// Inspect: the tensor-level analysis of a model, as numbers, as a table and as JSON.
//
// Used by `kvasir inspect` and by tests. make_report() and the two formatters are pure. One MB is
// 10^6 bytes here, as on a label of a disk. Thread: values. Owns: the report, no tensor data.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "moe/model.hpp"

namespace kvasir::moe {

// Is there a kernel for this bank's weights? Who computes is above this floor.
using HasKernels = std::function<bool(const ExpertBank&)>;

struct InspectOptions {
    std::string path;
    bool json = false;
    bool per_layer = false;       // the table lists every layer; JSON always does
    HasKernels has_kernels = {};  // empty: nothing is said about kernels
};

// One bank of experts (nearly always: one layer).
struct LayerReport {
    LayerKey key;
    uint32_t experts = 0;
    bool is_mtp = false;
    std::string layout;         // ExpertBank::layout_name()
    std::string types;          // of the weights, canonical order: "q4_K q4_K q6_K"
    uint64_t expert_bytes = 0;  // of one expert
    uint64_t bytes = 0;         // of the bank
    std::optional<bool> has_kernels = {};
};

// What a node with `budget_bytes` could hold, smallest first.
struct BudgetReport {
    uint64_t budget_bytes = 0;
    uint64_t experts = 0;  // at expert grain
    uint64_t experts_bytes = 0;
    uint64_t layers = 0;  // at the grain of all experts of a layer
    uint64_t layers_bytes = 0;
};

struct SlabReport {
    uint64_t tensors = 0;
    uint64_t slabs = 0;
    // Slabs that fail each check; all 0 in a model that open_model() accepted.
    uint64_t not_contiguous = 0;
    uint64_t not_block_aligned = 0;
    uint64_t outside_file = 0;
    bool ok() const { return not_contiguous + not_block_aligned + outside_file == 0; }
};

struct InspectReport {
    std::string path;  // untrusted text until printed
    std::string name;
    std::string arch;
    std::string slice_model_id;  // empty unless a slice
    uint64_t files = 0;
    uint64_t n_embd = 0;
    uint32_t layers_total = 0;
    uint32_t mtp_layers = 0;
    uint32_t layers = 0;             // with experts, MTP ones included
    uint32_t experts_per_layer = 0;  // the most of any bank 0
    uint32_t experts_used = 0;
    uint64_t experts_total = 0;
    uint64_t bytes_total = 0;
    uint64_t bytes_experts = 0;
    double share_experts = 0;  // of all tensor bytes, 0..1
    uint64_t expert_bytes_min = 0;
    double expert_bytes_mean = 0;
    uint64_t expert_bytes_max = 0;
    std::array<ClassTotal, static_cast<size_t>(TensorClass::kCount_)> classes = {};
    std::vector<LayerReport> per_layer;
    std::vector<BudgetReport> budgets;  // of kBudgetsMb
    SlabReport slabs;
    std::vector<std::string> warnings;
};

constexpr std::array<uint64_t, 3> kBudgetsMb = {42, 340, 1400};

InspectReport make_report(const Model& model, const HasKernels& has_kernels = {});
// A table for a terminal, 80 columns, printable ASCII, ends in a newline.
std::string inspect_text(const InspectReport& report, bool per_layer);
// One JSON object, indented by two, ends in a newline.
std::string inspect_json(const InspectReport& report);

// "12,544"
std::string count_text(uint64_t count);

// Opens the model and formats the report. Errors: those of open_model().
Result<std::string> run_inspect(const InspectOptions& options);

}  // namespace kvasir::moe
