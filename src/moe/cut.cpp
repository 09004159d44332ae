#include "moe/cut.hpp"

#include <algorithm>
#include <array>
#include <map>

#include "base/log.hpp"
#include "moe/segments.hpp"

namespace kvasir::moe {
namespace {

Result<std::vector<BankCut>> choose_experts(const Model& model,
                                            const std::vector<Segment>& segments) {
    std::map<LayerKey, std::vector<uint32_t>> wanted;
    for (const Segment& segment : normalise(segments)) {
        const ExpertBank* bank = model.find_bank(segment.layer);
        for (uint32_t id = segment.begin; id < segment.end; ++id) {
            const bool has = bank != nullptr && std::ranges::binary_search(bank->global_ids, id);
            if (!has) {
                return fail(Errc::kUsage, printable(model.shards.front().path) + ": layer " +
                                              to_string(segment.layer) + " has no expert " +
                                              std::to_string(id) +
                                              "; see kvasir inspect --per-layer");
            }
            const auto found = std::ranges::lower_bound(bank->global_ids, id);
            wanted[segment.layer].push_back(
                static_cast<uint32_t>(found - bank->global_ids.begin()));
        }
    }
    if (wanted.empty()) return fail(Errc::kUsage, "no experts named: nothing to put in a slice");
    std::vector<BankCut> cuts;
    for (size_t b = 0; b < model.banks.size(); ++b) {
        const auto found = wanted.find(model.banks[b].key);
        if (found != wanted.end()) cuts.push_back({b, std::move(found->second)});
    }
    return cuts;
}

// The shape of a stacked tensor with `experts` experts.
std::array<uint64_t, 4> slice_shape(const SlabTensor& tensor, uint64_t experts) {
    switch (tensor.part) {
        case SlabPart::kWeight:
            return {tensor.n_in, tensor.n_out, experts, 1};
        case SlabPart::kBias:
            return {tensor.n_out, experts, 1, 1};
        case SlabPart::kScale:
            return {experts, 1, 1, 1};
    }
    return {};
}

}  // namespace

Result<Cut> plan_cut(const Model& model, const std::vector<Segment>& segments,
                     std::vector<std::vector<uint8_t>> kept_keys, std::string model_id) {
    auto banks = choose_experts(model, segments);
    if (!banks) return tl::unexpected(std::move(banks.error()));
    Cut cut;
    cut.spec.kept_keys = std::move(kept_keys);
    cut.spec.model_id = std::move(model_id);
    for (const BankCut& part : *banks) {
        const ExpertBank& bank = model.banks[part.bank];
        const auto experts = static_cast<uint32_t>(part.positions.size());
        cut.spec.banks.insert(cut.spec.banks.end(), {bank.key.layer, bank.key.bank, experts});
        for (uint32_t position : part.positions) {
            cut.spec.expert_ids.push_back(bank.global_ids[position]);
        }
        for (const SlabTensor& tensor : bank.tensors) {
            const uint64_t bytes = tensor.slab_bytes * experts;
            cut.spec.tensors.push_back(
                {tensor.name, tensor.type, slice_shape(tensor, experts), bytes});
            cut.spec.digests.resize(cut.spec.digests.size() + experts);
            cut.bytes_slabs += bytes;
        }
    }
    cut.banks = std::move(*banks);
    return cut;
}

Status check_manifest(const Model& model, const Manifest& manifest) {
    bool fits = manifest.banks.size() == model.banks.size();
    for (size_t b = 0; fits && b < model.banks.size(); ++b) {
        fits = manifest.banks[b].key == model.banks[b].key &&
               manifest.banks[b].global_ids == model.banks[b].global_ids &&
               manifest.banks[b].slabs.size() == model.banks[b].tensors.size();
        for (size_t t = 0; fits && t < manifest.banks[b].slabs.size(); ++t) {
            fits = manifest.banks[b].slabs[t].size() == model.banks[b].experts;
        }
    }
    if (fits) return {};
    return fail(Errc::kMismatch, printable(model.shards.front().path) +
                                     ": the manifest given is that of another model");
}

void take_digests(const Manifest& manifest, Cut& cut) {
    cut.spec.digests.clear();
    for (const BankCut& part : cut.banks) {
        for (const auto& tensor : manifest.banks[part.bank].slabs) {
            for (uint32_t position : part.positions) {
                cut.spec.digests.push_back(tensor[position]);
            }
        }
    }
}

std::vector<SliceRange> byte_ranges(const Model& model, const Cut& cut,
                                    const std::vector<uint64_t>& offsets) {
    std::vector<SliceRange> ranges;
    size_t index = 0;
    for (const BankCut& part : cut.banks) {
        for (const SlabTensor& tensor : model.banks[part.bank].tensors) {
            uint64_t to = offsets[index++];
            for (size_t i = 0; i < part.positions.size(); ++i) {
                const uint64_t from = tensor.offset + part.positions[i] * tensor.slab_bytes;
                const bool follows = i > 0 && part.positions[i] == part.positions[i - 1] + 1;
                if (follows) {
                    ranges.back().bytes += tensor.slab_bytes;
                } else {
                    ranges.push_back({tensor.shard, from, to, tensor.slab_bytes});
                }
                to += tensor.slab_bytes;
            }
        }
    }
    return ranges;
}

Result<SlicePlan> plan_slice(const Outline& outline, const std::vector<Segment>& segments) {
    auto cut =
        plan_cut(outline.model, segments, outline.kept_keys, to_hex(outline.manifest.model_id));
    if (!cut) return tl::unexpected(std::move(cut.error()));
    take_digests(outline.manifest, *cut);
    auto metadata = make_slice_metadata(cut->spec);
    if (!metadata) return tl::unexpected(std::move(metadata.error()));
    SlicePlan plan;
    plan.file_bytes = metadata->file_bytes;
    plan.bytes_slabs = cut->bytes_slabs;
    plan.ranges = byte_ranges(outline.model, *cut, metadata->offsets);
    size_t index = 0;  // of the tensor in the slice
    for (const BankCut& part : cut->banks) {
        const ExpertBank& bank = outline.model.banks[part.bank];
        for (uint32_t t = 0; t < bank.tensors.size(); ++t) {
            uint64_t to = metadata->offsets[index++];
            for (const uint32_t position : part.positions) {
                SliceSlab slab;
                slab.to = to;
                slab.bytes = bank.tensors[t].slab_bytes;
                slab.digest = outline.manifest.banks[part.bank].slabs[t][position];
                slab.expert = {bank.key, bank.global_ids[position]};
                slab.tensor = t;
                plan.slabs.push_back(slab);
                to += slab.bytes;
            }
        }
    }
    plan.header = std::move(metadata->bytes);
    return plan;
}

}  // namespace kvasir::moe
