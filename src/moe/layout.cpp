#include "moe/layout.hpp"

#include <algorithm>
#include <map>
#include <numeric>

#include "base/log.hpp"
#include "moe/classify.hpp"

namespace kvasir::moe {
namespace {

tl::unexpected<Error> refuse(const std::string& where, const std::string& what,
                             Errc code = Errc::kBadInput) {
    return fail(code, where + ": " + what);
}

std::string text(uint64_t number) {
    return std::to_string(number);
}

// Cuts one stacked tensor into slabs.
Result<SlabTensor> cut_tensor(const GgufHeader& shard, uint32_t shard_index,
                              const GgufTensor& tensor, const ExpertTensorName& name) {
    const std::string where = describe(shard, tensor);
    const auto info = type_info(tensor.type);
    const uint64_t experts = expert_count(tensor, name.part);
    if (!info || experts == 0 || tensor.bytes % experts != 0) {
        return refuse(where, "ne: its " + text(tensor.bytes) + " bytes are not " + text(experts) +
                                 " whole slabs");
    }
    if (experts > kBankExpertsMax) {
        return refuse(
            where,
            "has " + text(experts) + " experts, above the supported " + text(kBankExpertsMax),
            Errc::kLimit);
    }
    SlabTensor slab;
    slab.name = tensor.name;
    slab.role = name.role;
    slab.part = name.part;
    slab.type = tensor.type;
    slab.n_in = name.part == SlabPart::kWeight ? tensor.ne[0] : 0;
    slab.n_out = name.part == SlabPart::kWeight ? tensor.ne[1]
                 : name.part == SlabPart::kBias ? tensor.ne[0]
                                                : 1;
    slab.shard = shard_index;
    slab.offset = tensor.offset;
    slab.slab_bytes = tensor.bytes / experts;
    if (slab.slab_bytes % info->block_bytes != 0 ||
        (name.part == SlabPart::kScale && info->block != 1)) {
        return refuse(where, "type " + std::string(info->name) +
                                 ": a slab is not a whole number of its blocks of " +
                                 text(info->block) + " elements");
    }
    // What the header reader promised; a slab outside the file would be read by the engine.
    if (tensor.bytes > shard.file_bytes || tensor.offset > shard.file_bytes - tensor.bytes) {
        return refuse(where, "offset: its data ends outside the file");
    }
    return slab;
}

std::string layer_text(LayerKey key) {
    return "layer " + to_string(key);
}

// The matrices of one expert fit each other and none is missing.
Status check_bank(const std::string& path, const ExpertBank& bank) {
    const std::string where = printable(path, 400) + ": " + layer_text(bank.key);
    const std::string stem = bank.key.bank == 0 ? "_exps" : "_chexps";
    const auto weight = [&](SlabRole role) { return bank.find(role, SlabPart::kWeight); };
    const SlabTensor* gate = weight(SlabRole::kGate);
    const SlabTensor* up = weight(SlabRole::kUp);
    const SlabTensor* down = weight(SlabRole::kDown);
    const SlabTensor* gate_up = weight(SlabRole::kGateUp);
    for (const SlabTensor& tensor : bank.tensors) {
        const SlabTensor* matrix = weight(tensor.role);
        if (matrix == nullptr) {
            return refuse(where, "has '" + printable(tensor.name) +
                                     "' without its weight tensor: "
                                     "a tensor is missing from the model");
        }
        if (tensor.part == SlabPart::kBias && tensor.n_out != matrix->n_out) {
            return refuse(where, "tensor '" + printable(tensor.name) +
                                     "': ne[0] = " + text(tensor.n_out) + " but the weight has " +
                                     text(matrix->n_out) + " rows");
        }
    }
    if (gate_up != nullptr && (gate != nullptr || up != nullptr)) {
        return refuse(where, "has ffn_gate_up" + stem +
                                 " beside a separate gate or up tensor; "
                                 "only one of the two layouts can be meant");
    }
    if (down == nullptr || (up == nullptr && gate_up == nullptr)) {
        return refuse(where, std::string("tensor ffn_") + (down == nullptr ? "down" : "up") + stem +
                                 ".weight is missing from the model, though other expert tensors "
                                 "of the layer exist");
    }
    const SlabTensor* first = gate_up != nullptr ? gate_up : up;
    if (gate_up != nullptr && gate_up->n_out % 2 != 0) {
        return refuse(where, "tensor '" + printable(gate_up->name) + "': ne[1] = " +
                                 text(gate_up->n_out) + " cannot be halved into gate and up");
    }
    const uint64_t width = gate_up != nullptr ? gate_up->n_out / 2 : up->n_out;
    if (gate != nullptr && (gate->n_in != up->n_in || gate->n_out != up->n_out)) {
        return refuse(where, "tensors '" + printable(gate->name) + "' and '" + printable(up->name) +
                                 "' have different shapes");
    }
    if (down->n_in != width) {
        return refuse(where, "tensor '" + printable(down->name) + "': ne[0] = " + text(down->n_in) +
                                 " but '" + printable(first->name) + "' gives " + text(width) +
                                 " values");
    }
    return {};
}

}  // namespace

std::string describe(const GgufHeader& shard, const GgufTensor& tensor) {
    return printable(shard.path, 400) + ": tensor '" + printable(tensor.name) + "'";
}

Result<std::vector<ExpertBank>> lay_out_banks(const std::vector<GgufHeader>& shards) {
    std::map<LayerKey, ExpertBank> banks;
    uint64_t experts_total = 0;
    for (uint32_t i = 0; i < shards.size(); ++i) {
        for (const GgufTensor& tensor : shards[i].tensors) {
            const auto name = parse_expert_name(tensor.name);
            if (!name) continue;
            const std::string where = describe(shards[i], tensor);
            if (!has_expert_shape(tensor, name->part)) {
                return refuse(where, "ne: has too many dimensions for a per-expert " +
                                         std::string(to_string(name->part)));
            }
            auto slab = cut_tensor(shards[i], i, tensor, *name);
            if (!slab) return tl::unexpected<Error>(std::move(slab.error()));
            const auto experts = static_cast<uint32_t>(expert_count(tensor, name->part));
            auto [place, is_new] = banks.try_emplace(name->key);
            ExpertBank& bank = place->second;
            if (is_new) {
                bank.key = name->key;
                bank.experts = experts;
                experts_total += experts;
            }
            if (bank.experts != experts) {
                return refuse(where, "ne: has " + text(experts) + " experts but '" +
                                         printable(bank.tensors.front().name) + "' has " +
                                         text(bank.experts));
            }
            if (bank.find(name->role, name->part) != nullptr) {
                return refuse(where, "the name appears twice");
            }
            if (experts_total > kModelExpertsMax) {
                return refuse(
                    where,
                    "brings the model above the supported " + text(kModelExpertsMax) + " experts",
                    Errc::kLimit);
            }
            bank.tensors.push_back(std::move(*slab));
        }
    }
    std::vector<ExpertBank> out;
    out.reserve(banks.size());
    for (auto& [key, bank] : banks) {
        std::ranges::sort(bank.tensors, {}, [](const SlabTensor& tensor) {
            return std::pair(tensor.role, tensor.part);
        });
        bank.global_ids.resize(bank.experts);
        std::iota(bank.global_ids.begin(), bank.global_ids.end(), uint32_t{0});
        if (auto checked = check_bank(shards.front().path, bank); !checked) {
            return tl::unexpected<Error>(std::move(checked.error()));
        }
        out.push_back(std::move(bank));
    }
    return out;
}

}  // namespace kvasir::moe
