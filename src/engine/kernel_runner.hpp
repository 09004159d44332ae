// Runs a KernelPlan: the pairs of a call grouped by expert, each group through the phases.
//
// Used by ExpertEngine. With one thread a group goes through all phases while its rows are in the
// cache. With more, the products are cut into runs of weight rows; whoever finishes the last run of
// a phase of a group does what follows it, and no one waits for all groups.
//
// Thread: one at a time; uses a Pool of its own. Owns: threads, scratch (grows to the largest call,
// bounded by the callers' limits on rows and pairs).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/expert_engine.hpp"
#include "engine/kernel_plan.hpp"

namespace kvasir::engine {

class KernelRunner {
public:
    // `kernels`: must outlive this and its plans; null for the fastest that this processor runs.
    explicit KernelRunner(uint32_t threads, const kernels::Kernels* kernels = nullptr);
    ~KernelRunner();

    // As ExpertEngine::compute(), with arguments already checked and pairs not empty.
    std::span<const float> compute(const KernelPlan& plan, uint32_t row_type, uint32_t row_count,
                                   std::span<const uint8_t> rows, std::span<const PairIn> pairs);

private:
    class Call;
    struct Scratch;

    const kernels::Kernels* kernels_;
    uint32_t threads_;
    std::unique_ptr<Scratch> scratch_;
};

}  // namespace kvasir::engine
