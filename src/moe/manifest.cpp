#include "moe/manifest.hpp"

#include <algorithm>
#include <map>
#include <string_view>

#include "base/bytes.hpp"
#include "base/check.hpp"
#include "crypto/hash.hpp"

namespace kvasir::moe {
namespace {

constexpr std::string_view kModelIdDomain{"kvasir-model-1\0", 15};

std::optional<size_t> position_of(const BankDigests& bank, uint32_t global_id) {
    const auto found = std::lower_bound(bank.global_ids.begin(), bank.global_ids.end(), global_id);
    if (found == bank.global_ids.end() || *found != global_id) return std::nullopt;
    return static_cast<size_t>(found - bank.global_ids.begin());
}

struct Entry {
    const GgufTensor* tensor = nullptr;
    uint32_t shard = 0;
    const std::vector<Sha256>* slabs = nullptr;  // stacked expert tensors only
    Sha256 digest = {};
};

// All tensors by name, which is unique over the shards of an opened model.
std::map<std::string_view, Entry> entries_of(const Model& model,
                                             const std::vector<BankDigests>& banks) {
    std::map<std::string_view, Entry> entries;
    for (uint32_t shard = 0; shard < model.shards.size(); ++shard) {
        for (const GgufTensor& tensor : model.shards[shard].tensors) {
            entries[tensor.name] = Entry{&tensor, shard, nullptr, {}};
        }
    }
    for (size_t b = 0; b < model.banks.size(); ++b) {
        for (size_t t = 0; t < model.banks[b].tensors.size(); ++t) {
            const auto found = entries.find(model.banks[b].tensors[t].name);
            KVASIR_CHECK(found != entries.end());
            found->second.slabs = &banks[b].slabs[t];
        }
    }
    return entries;
}

std::vector<HashRange> ranges_of(const Model& model, std::vector<BankDigests>& banks,
                                 std::map<std::string_view, Entry>& entries) {
    std::vector<HashRange> ranges;
    for (size_t b = 0; b < model.banks.size(); ++b) {
        const ExpertBank& bank = model.banks[b];
        for (size_t t = 0; t < bank.tensors.size(); ++t) {
            const SlabTensor& tensor = bank.tensors[t];
            for (uint32_t e = 0; e < bank.experts; ++e) {
                ranges.push_back({tensor.shard, tensor.offset + e * tensor.slab_bytes,
                                  tensor.slab_bytes, &banks[b].slabs[t][e]});
            }
        }
    }
    for (auto& [name, entry] : entries) {
        if (entry.slabs != nullptr) continue;
        ranges.push_back({entry.shard, entry.tensor->offset, entry.tensor->bytes, &entry.digest});
    }
    return ranges;
}

Sha256 digest_of_digests(const std::vector<Sha256>& digests) {
    crypto::Hasher hasher;
    for (const Sha256& digest : digests) hasher.update(digest);
    return hasher.finish();
}

Sha256 model_id_of(const std::map<std::string_view, Entry>& entries) {
    ByteWriter out;
    out.text(kModelIdDomain);
    out.u64(entries.size());
    for (const auto& [name, entry] : entries) {
        out.u32(static_cast<uint32_t>(name.size()));
        out.text(name);
        out.u32(entry.tensor->type);
        for (uint64_t count : entry.tensor->ne) out.u64(count);
        out.u64(entry.tensor->bytes);
    }
    for (const auto& [name, entry] : entries) {
        out.bytes(entry.slabs != nullptr ? digest_of_digests(*entry.slabs) : entry.digest);
    }
    return crypto::sha256(out.data());
}

}  // namespace

const BankDigests* Manifest::find(LayerKey key) const {
    for (const BankDigests& bank : banks) {
        if (bank.key == key) return &bank;
    }
    return nullptr;
}

bool Manifest::holds(const Segment& segment) const {
    const BankDigests* bank = find(segment.layer);
    if (bank == nullptr || segment.begin > segment.end) return false;
    if (segment.count() == 0) return true;
    const auto first = position_of(*bank, segment.begin);
    const auto last = position_of(*bank, segment.end - 1);
    // Ids ascend without doubles, so the distance decides.
    return first && last && *last - *first == segment.count() - 1;
}

Sha256 Manifest::segment_digest(const Segment& segment) const {
    KVASIR_CHECK(holds(segment));
    const BankDigests& bank = *find(segment.layer);
    crypto::Hasher hasher;
    for (uint32_t id = segment.begin; id < segment.end; ++id) {
        const size_t position = *position_of(bank, id);
        for (const auto& tensor : bank.slabs) hasher.update(tensor[position]);
    }
    return hasher.finish();
}

std::vector<BankDigests> empty_digests(const Model& model) {
    std::vector<BankDigests> banks;
    for (const ExpertBank& bank : model.banks) {
        banks.push_back({bank.key, bank.experts, bank.global_ids,
                         std::vector(bank.tensors.size(), std::vector<Sha256>(bank.experts))});
    }
    return banks;
}

Result<Manifest> compute_manifest(const Model& model, const HashOptions& options) {
    Manifest manifest;
    manifest.banks = empty_digests(model);
    auto entries = entries_of(model, manifest.banks);
    auto status = hash_ranges(model, ranges_of(model, manifest.banks, entries), options);
    if (!status) return tl::unexpected(std::move(status.error()));
    manifest.model_id = model_id_of(entries);
    return manifest;
}

}  // namespace kvasir::moe
