#include "moe/model.hpp"

#include <algorithm>
#include <map>
#include <set>

#include "base/check.hpp"
#include "base/log.hpp"
#include "moe/classify.hpp"
#include "moe/layout.hpp"
#include "moe/splits.hpp"

namespace kvasir::moe {
namespace {

std::string text(uint64_t number) {
    return std::to_string(number);
}

tl::unexpected<Error> bad(const std::string& detail) {
    return fail(Errc::kBadInput, detail);
}

// Counts past 32 bits are nonsense in these keys; the tensors decide anyway.
uint32_t small(std::optional<uint64_t> value) {
    return static_cast<uint32_t>(std::min<uint64_t>(value.value_or(0), UINT32_MAX));
}

class ModelBuilder {
public:
    explicit ModelBuilder(std::vector<GgufHeader> shards) { model_.shards = std::move(shards); }

    Result<Model> run() {
        for (auto step : {&ModelBuilder::read_identity, &ModelBuilder::check_tensor_set,
                          &ModelBuilder::read_banks, &ModelBuilder::classify,
                          &ModelBuilder::check_routers, &ModelBuilder::read_slice}) {
            if (auto done = (this->*step)(); !done) {
                return tl::unexpected<Error>(std::move(done.error()));
            }
        }
        read_layers();
        if (!model_.is_slice) compare_with_metadata();
        return std::move(model_);
    }

private:
    const GgufHeader& head() const { return model_.shards.front(); }
    std::string where() const { return printable(head().path, 400); }
    std::string key(const char* suffix) const { return model_.arch + "." + suffix; }
    std::optional<uint64_t> number(const char* suffix) const { return head().get_u64(key(suffix)); }
    void warn(std::string line) { model_.warnings.push_back(std::move(line)); }

    Status read_identity() {
        if (model_.shards.empty()) return bad("a model without files");
        const auto arch = head().get_text("general.architecture");
        if (!arch || arch->empty()) {
            return bad(where() +
                       ": key 'general.architecture' is missing; is this really a model?");
        }
        model_.arch = *arch;
        model_.name = head().get_text("general.name").value_or("");
        model_.n_embd = number("embedding_length").value_or(0);
        model_.experts_used = small(number("expert_used_count"));
        if (const GgufArray* per_layer = head().get_array(key("expert_used_count"))) {
            for (const int64_t used : per_layer->integers) {
                model_.experts_used =
                    std::max(model_.experts_used, small(std::max<int64_t>(used, 0)));
            }
        }
        return {};
    }

    // Names are unique over all shards and the declared total is there.
    Status check_tensor_set() {
        std::map<std::string_view, uint32_t> seen;
        for (uint32_t i = 0; i < model_.shards.size() && model_.shards.size() > 1; ++i) {
            for (const GgufTensor& tensor : model_.shards[i].tensors) {
                const auto [place, is_new] = seen.emplace(tensor.name, i);
                if (is_new) continue;
                return bad(describe(model_.shards[i], tensor) + " is also in " +
                           printable(model_.shards[place->second].path, 400) +
                           ": the parts do not belong together");
            }
        }
        const auto declared = head().get_u64("split.tensors.count");
        uint64_t found = 0;
        for (const GgufHeader& shard : model_.shards) found += shard.tensors.size();
        if (!declared || *declared == found) return {};
        const std::string line = "split.tensors.count says " + text(*declared) + " tensors, " +
                                 text(found) + " are there";
        if (model_.shards.size() > 1)
            return bad(where() + ": " + line + ": parts of different models?");
        warn(line);
        return {};
    }

    Status read_banks() {
        for (const GgufHeader& shard : model_.shards) {
            for (const GgufTensor& tensor : shard.tensors) {
                if (!is_one_tensor_per_expert(tensor.name)) continue;
                return fail(Errc::kUnsupported,
                            describe(shard, tensor) +
                                " is in the old layout of one tensor per "
                                "expert; convert the model again with a current llama.cpp, which "
                                "stacks experts (ffn_*_exps)");
            }
        }
        auto banks = lay_out_banks(model_.shards);
        if (!banks) return tl::unexpected<Error>(std::move(banks.error()));
        model_.banks = std::move(*banks);
        expert_count_ = small(number("expert_count"));
        for (const ExpertBank& bank : model_.banks)
            bank_experts_ = std::max(bank_experts_, bank.experts);
        return {};
    }

    Status classify() {
        const uint64_t n_expert = expert_count_ > 0 ? expert_count_ : bank_experts_;
        for (const GgufHeader& shard : model_.shards) {
            for (const GgufTensor& tensor : shard.tensors) {
                const auto found = classify_tensor(tensor, n_expert);
                if (!found) {
                    return bad(
                        describe(shard, tensor) +
                        " has an expert dimension or an expert name, but is no kind of expert "
                        "tensor this version knows; it will not guess how to cut it");
                }
                ClassTotal& total = model_.totals[static_cast<size_t>(*found)];
                total.tensors += 1;
                total.bytes += tensor.bytes;
                const TensorName name = parse_tensor_name(tensor.name);
                if (!name.layer) continue;
                layers_seen_ = std::max(layers_seen_, *name.layer + 1);
                if (name.base.starts_with("nextn.")) mtp_seen_.insert(*name.layer);
                if (name.base == "ffn_gate_inp" && name.suffix == "weight") {
                    routers_.emplace(*name.layer, tensor.ne[1]);
                }
            }
        }
        return {};
    }

    // A router without experts means that tensors are missing, not that the layer is dense.
    Status check_routers() {
        for (const auto& [layer, experts] : routers_) {
            const ExpertBank* bank = model_.find_bank({layer, 0});
            if (bank == nullptr) {
                return bad(where() + ": layer " + text(layer) +
                           " has a router (ffn_gate_inp) but its "
                           "expert tensors (ffn_*_exps) are missing from the model");
            }
            if (bank->experts != experts && !model_.is_slice) {
                warn("layer " + text(layer) + ": the router chooses among " + text(experts) +
                     " experts, the layer has " + text(bank->experts));
            }
        }
        return {};
    }

    Status read_slice() {
        if (!head().keys.contains("kvasir.version")) return {};
        model_.is_slice = true;
        if (head().get_u64("kvasir.version") != uint64_t{1}) {
            return fail(Errc::kUnsupported, where() +
                                                ": key 'kvasir.version': this is a slice of "
                                                "another Kvasir version; cut it again");
        }
        // Absent in a slice that was cut without hashing the whole model.
        if (head().keys.contains("kvasir.model_id")) {
            const auto id = head().get_text("kvasir.model_id");
            if (!id || id->size() != 64 || id->find_first_not_of("0123456789abcdef") != id->npos) {
                return bad(where() + ": key 'kvasir.model_id' must be 64 hex digits");
            }
            model_.slice_model_id = *id;
        }
        const GgufArray* banks = head().get_array("kvasir.banks");
        const GgufArray* ids = head().get_array("kvasir.expert_ids");
        if (banks == nullptr || banks->integers.size() != model_.banks.size() * 3) {
            return bad(where() + ": key 'kvasir.banks' must hold layer, bank and experts of its " +
                       text(model_.banks.size()) + " banks");
        }
        if (ids == nullptr || ids->integers.size() != model_.experts_total()) {
            return bad(where() + ": key 'kvasir.expert_ids' must hold " +
                       text(model_.experts_total()) + " numbers, one for each expert");
        }
        return place_global_ids(banks->integers, ids->integers);
    }

    Status place_global_ids(const std::vector<int64_t>& banks, const std::vector<int64_t>& ids) {
        size_t next = 0;
        for (size_t i = 0; i < model_.banks.size(); ++i) {
            ExpertBank& bank = model_.banks[i];
            if (banks[3 * i] != bank.key.layer || banks[3 * i + 1] != bank.key.bank ||
                banks[3 * i + 2] != bank.experts) {
                return bad(where() + ": key 'kvasir.banks' disagrees with the tensors of layer " +
                           to_string(bank.key));
            }
            const uint64_t experts_max = bank.key.bank == 0 && expert_count_ > 0
                                             ? std::min<uint64_t>(expert_count_, kBankExpertsMax)
                                             : kBankExpertsMax;
            int64_t before = -1;
            for (uint32_t& global : bank.global_ids) {
                const int64_t id = ids[next++];
                if (id <= before || static_cast<uint64_t>(id) >= experts_max) {
                    return bad(where() + ": key 'kvasir.expert_ids': layer " + to_string(bank.key) +
                               ": " + std::to_string(id) + " is out of order or not an expert");
                }
                global = static_cast<uint32_t>(id);
                before = id;
            }
        }
        return {};
    }

    void read_layers() {
        const uint32_t declared = small(number("block_count"));
        model_.layers_total = declared > 0 ? declared : layers_seen_;
        const uint32_t mtp = std::min(small(number("nextn_predict_layers")), model_.layers_total);
        const uint32_t mtp_begin = model_.layers_total - mtp;
        model_.mtp_layers = mtp;
        for (const uint32_t layer : mtp_seen_) model_.mtp_layers += layer < mtp_begin ? 1 : 0;
        for (ExpertBank& bank : model_.banks) {
            const uint32_t layer = bank.key.layer;
            bank.is_mtp = (layer >= mtp_begin && mtp > 0) || mtp_seen_.contains(layer);
        }
    }

    void compare_with_metadata() {
        if (model_.layers_total < layers_seen_) {
            warn(key("block_count") + " says " + text(model_.layers_total) +
                 " layers, tensors name " + text(layers_seen_));
        }
        const uint32_t mtp = small(number("nextn_predict_layers"));
        if (mtp_seen_.size() > mtp) {
            warn(key("nextn_predict_layers") + " says " + text(mtp) + ", but " +
                 text(mtp_seen_.size()) + " layers have nextn tensors");
        }
        if (model_.banks.empty()) {
            if (expert_count_ > 0) {
                warn(key("expert_count") + " says " + text(expert_count_) +
                     ", but no layer has experts");
            }
            return;
        }
        if (model_.experts_used == 0) warn(key("expert_used_count") + " is missing or 0");
        if (model_.experts_used > bank_experts_) {
            warn(key("expert_used_count") + " says " + text(model_.experts_used) + " of " +
                 text(bank_experts_) + " experts");
        }
        for (const ExpertBank& bank : model_.banks) {
            if (bank.key.bank != 0 || bank.experts == expert_count_) continue;
            warn(key("expert_count") + " says " + text(expert_count_) + ", layer " +
                 to_string(bank.key) + " has " + text(bank.experts));
            break;
        }
        compare_dense_layers();
    }

    // Which layers are dense is what the tensors say; metadata is only compared with it.
    void compare_dense_layers() {
        const auto declared = number("leading_dense_block_count");
        if (!declared) return;
        const uint32_t first = model_.banks.front().key.layer;
        const bool is_interleaved = number("interleave_moe_layer_step").value_or(1) > 1 ||
                                    number("moe_every_n_layers").value_or(1) > 1;
        if (first < *declared || (first > *declared && !is_interleaved)) {
            warn(key("leading_dense_block_count") + " says " + text(*declared) +
                 ", but the first layer with experts is " + text(first));
        }
    }

    Model model_;
    uint32_t expert_count_ = 0;  // metadata
    uint32_t bank_experts_ = 0;  // largest bank
    uint32_t layers_seen_ = 0;
    std::set<uint32_t> mtp_seen_;
    std::map<uint32_t, uint64_t> routers_;  // layer -> experts it chooses among
};

}  // namespace

std::string_view to_string(SlabRole role) {
    switch (role) {
        case SlabRole::kGate:
            return "gate";
        case SlabRole::kUp:
            return "up";
        case SlabRole::kDown:
            return "down";
        case SlabRole::kGateUp:
            return "gate_up";
    }
    return "?";
}

std::string_view to_string(SlabPart part) {
    switch (part) {
        case SlabPart::kWeight:
            return "weight";
        case SlabPart::kBias:
            return "bias";
        case SlabPart::kScale:
            return "scale";
    }
    return "?";
}

std::string_view to_string(TensorClass tensor_class) {
    switch (tensor_class) {
        case TensorClass::kExpert:
            return "expert";
        case TensorClass::kAttention:
            return "attention";
        case TensorClass::kRecurrent:
            return "recurrent";
        case TensorClass::kNorm:
            return "norm";
        case TensorClass::kRouter:
            return "router";
        case TensorClass::kSharedExpert:
            return "shared_expert";
        case TensorClass::kDenseFfn:
            return "dense_ffn";
        case TensorClass::kEmbedding:
            return "embedding";
        case TensorClass::kOutput:
            return "output";
        case TensorClass::kOther:
            return "other";
        case TensorClass::kCount_:
            break;
    }
    return "?";
}

uint64_t ExpertBank::expert_bytes() const {
    uint64_t sum = 0;
    for (const SlabTensor& tensor : tensors) sum += tensor.slab_bytes;
    return sum;
}

const SlabTensor* ExpertBank::find(SlabRole role, SlabPart part) const {
    for (const SlabTensor& tensor : tensors) {
        if (tensor.role == role && tensor.part == part) return &tensor;
    }
    return nullptr;
}

std::string ExpertBank::layout_name() const {
    std::string out;
    bool has_bias = false;
    bool has_scale = false;
    for (const SlabRole role :
         {SlabRole::kGateUp, SlabRole::kGate, SlabRole::kUp, SlabRole::kDown}) {
        has_bias = has_bias || find(role, SlabPart::kBias) != nullptr;
        has_scale = has_scale || find(role, SlabPart::kScale) != nullptr;
        if (find(role, SlabPart::kWeight) == nullptr) continue;
        out += (out.empty() ? "" : "+") + std::string(to_string(role));
    }
    if (has_bias) out += "+bias";
    if (has_scale) out += "+scale";
    return out;
}

uint64_t Model::bytes_total() const {
    uint64_t sum = 0;
    for (const ClassTotal& total : totals) sum += total.bytes;
    return sum;
}

uint64_t Model::bytes_experts() const {
    return totals[static_cast<size_t>(TensorClass::kExpert)].bytes;
}

uint64_t Model::experts_total() const {
    uint64_t sum = 0;
    for (const ExpertBank& bank : banks) sum += bank.experts;
    return sum;
}

const ExpertBank* Model::find_bank(LayerKey key) const {
    const auto found = std::ranges::lower_bound(banks, key, {}, &ExpertBank::key);
    return found != banks.end() && found->key == key ? &*found : nullptr;
}

Result<Model> lay_out_model(std::vector<GgufHeader> shards) {
    return ModelBuilder(std::move(shards)).run();
}

Result<Model> open_model(const std::string& path) {
    auto shards = collect_shards(path);
    if (!shards) return tl::unexpected<Error>(std::move(shards.error()));
    return lay_out_model(std::move(*shards));
}

}  // namespace kvasir::moe
