#include "backbone/replica.hpp"

#include <cstring>
#include <utility>

#include "base/log.hpp"
#include "engine/runtime.hpp"
#include "engine/tensor_check.hpp"

namespace kvasir::backbone {

Result<std::unique_ptr<Replica>> Replica::open(const std::string& model_path, bool need_manifest,
                                               const std::string& cache_dir) {
    auto model = moe::open_model(model_path);
    if (!model) return tl::unexpected(model.error());
    if (model->is_slice) {
        return fail(Errc::kBadInput,
                    model_path + " is a slice; the backbone needs the whole model");
    }
    if (model->banks.empty()) {
        return fail(Errc::kBadInput,
                    model_path + " has no experts: not a Mixture-of-Experts model");
    }
    auto mapping = moe::Mapping::make(*model);
    if (!mapping) return tl::unexpected(mapping.error());
    std::unique_ptr<Replica> replica(new Replica(std::move(*model), std::move(*mapping)));
    if (need_manifest) {
        auto manifest = moe::load_or_compute_manifest(replica->model_, cache_dir);
        if (!manifest) return tl::unexpected(manifest.error());
        replica->manifest_ = std::move(*manifest);
    }
    return replica;
}

Result<bool> Replica::learn(LayerKey layer, const moe::Program& program,
                            engine::ExpertEngine& engine) {
    {
        const std::lock_guard lock(mu_);
        if (const auto found = learned_.find(layer); found != learned_.end()) {
            if (found->second.bank->program == program) return false;
            return fail(Errc::kMismatch,
                        "layer " + to_string(layer) + " has another program than before");
        }
    }
    const moe::ExpertBank* meta = model_.find_bank(layer);
    if (meta == nullptr)
        return fail(Errc::kMismatch, "the model file has no experts in layer " + to_string(layer));
    auto device = engine::find_device("");
    if (!device) return tl::unexpected(device.error());
    auto weights = engine::BankWeights::map(*meta, mapping_, *device);
    if (!weights) return tl::unexpected(weights.error());
    auto bank = engine.prepare(*meta, std::move(*weights), program);
    if (!bank) return tl::unexpected(bank.error());
    const std::lock_guard lock(mu_);
    const auto id = static_cast<uint32_t>(learned_.size() + 1);
    return learned_.emplace(layer, LearnedBank{id, std::move(*bank)}).second;
}

std::optional<LearnedBank> Replica::learned(LayerKey layer) const {
    const std::lock_guard lock(mu_);
    const auto found = learned_.find(layer);
    return found == learned_.end() ? std::nullopt : std::optional(found->second);
}

std::vector<LayerKey> Replica::learned_layers() const {
    const std::lock_guard lock(mu_);
    std::vector<LayerKey> layers;
    for (const auto& [layer, bank] : learned_) layers.push_back(layer);
    return layers;
}

void Replica::warn_other_model(LayerKey layer) {
    if (warned_.exchange(true)) return;
    log(LogLevel::kWarn, "backbone",
        "a model of this process is not " + printable(model_.shards.front().path) + " (layer " +
            to_string(layer) + " differs): its experts are computed here, " +
            "not by workers; KVASIR_MODEL must name the file that the program runs");
}

bool Replica::same_weights(LayerKey layer, const engine::BankWeights::Tensors& tensors) const {
    const moe::ExpertBank* meta = model_.find_bank(layer);
    return meta != nullptr && engine::same_tensors(*meta, mapping_, tensors);
}

}  // namespace kvasir::backbone
