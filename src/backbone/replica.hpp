// Replica: the backbone's own copy of every expert, memory-mapped, and the programs learned so far.
//
// Used by the verifier (what a worker's answer must be) and by lanes (what the backbone computes
// itself). Costs no memory until pages are touched. Thread: any; programs are guarded by mu_. Owns:
// model, mapping, banks.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/result.hpp"
#include "engine/expert_engine.hpp"
#include "moe/manifest.hpp"
#include "moe/mapping.hpp"
#include "moe/model.hpp"

namespace kvasir::backbone {

struct LearnedBank {
    uint32_t program_id = 0;
    std::shared_ptr<const engine::Bank> bank;
};

class Replica {
public:
    // Errors: those of moe::open_model, Mapping, manifest; kBadInput for a slice or a model without
    // experts.
    static Result<std::unique_ptr<Replica>> open(const std::string& model_path, bool need_manifest,
                                                 const std::string& cache_dir);

    // Constant after open().
    const moe::Model& model() const { return model_; }
    const moe::Mapping& mapping() const { return mapping_; }
    const moe::Manifest* manifest() const { return manifest_ ? &*manifest_ : nullptr; }

    // Prepares the bank with its program; true when it is new. A second, different program for a
    // bank is refused (kMismatch).
    Result<bool> learn(LayerKey layer, const moe::Program& program, engine::ExpertEngine& engine);
    std::optional<LearnedBank> learned(LayerKey layer) const;
    std::vector<LayerKey> learned_layers() const;

    // Are these tensors of llama.cpp the ones of our file? Types and shapes, and bytes sampled from
    // several slabs. Another model in the same process (a draft model) has the same names.
    bool same_weights(LayerKey layer, const engine::BankWeights::Tensors& tensors) const;
    // Says once that a model of this process is not the one that workers hold.
    void warn_other_model(LayerKey layer);

private:
    Replica(moe::Model model, moe::Mapping mapping)
        : model_(std::move(model)), mapping_(std::move(mapping)) {}
    moe::Model model_;
    moe::Mapping mapping_;
    std::optional<moe::Manifest> manifest_;
    std::atomic<bool> warned_{false};
    mutable std::mutex mu_;
    std::map<LayerKey, LearnedBank> learned_;  // Guarded by mu_
};

}  // namespace kvasir::backbone
