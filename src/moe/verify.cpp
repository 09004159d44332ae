#include "moe/verify.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "base/bytes.hpp"
#include "base/log.hpp"
#include "crypto/hash.hpp"
#include "moe/file.hpp"
#include "moe/slice.hpp"
#include "moe/slice_metadata.hpp"

namespace kvasir::moe {
namespace {

constexpr size_t kHexDigits = 64;
constexpr size_t kCompareBytes = size_t{1} << 20;

std::string where(const Model& model) {
    return printable(model.shards.front().path) + ": ";
}

std::string describe(const SlabTensor& tensor, uint32_t global_id) {
    return "tensor '" + printable(tensor.name) + "', expert " + std::to_string(global_id);
}

Result<std::vector<uint8_t>> read_record(const Model& slice, std::string_view key) {
    const GgufHeader& header = slice.shards.front();
    const auto found = header.keys.find(key);
    if (found == header.keys.end()) {
        return fail(Errc::kBadInput, where(slice) + "key '" + std::string(key) +
                                         "' is missing; cut the slice again");
    }
    auto fd = open_for_reading(header.path);
    if (!fd) return tl::unexpected(std::move(fd.error()));
    std::vector<uint8_t> record(static_cast<size_t>(found->second.bytes));
    auto status = read_exactly(fd->get(), header.path, found->second.offset, record);
    if (!status) return tl::unexpected(std::move(status.error()));
    return record;
}

// Reads the digests of kvasir.slab_sha256 into the shape of the banks.
Status read_digests(const Model& slice, std::vector<BankDigests>& banks) {
    constexpr std::string_view kKey = "kvasir.slab_sha256";
    auto record = read_record(slice, kKey);
    if (!record) return tl::unexpected(std::move(record.error()));
    uint64_t expected = 0;
    for (const BankDigests& bank : banks) expected += bank.slabs.size() * bank.experts;
    const auto bad = [&](const std::string& what) {
        return fail(Errc::kBadInput, where(slice) + "key '" + std::string(kKey) + "' " + what +
                                         "; get the slice again");
    };
    ByteReader in(*record);
    in.text(in.u64());
    const auto type = static_cast<GgufValueType>(in.u32());
    const auto element = static_cast<GgufValueType>(in.u32());
    const uint64_t count = in.u64();
    if (type != GgufValueType::kArray || element != GgufValueType::kString || count != expected) {
        return bad("must be an array of " + std::to_string(expected) + " digests");
    }
    for (BankDigests& bank : banks) {
        for (auto& tensor : bank.slabs) {
            for (Sha256& digest : tensor) {
                const auto parsed = crypto::parse_hex(in.text(in.u64()));
                if (!parsed) return bad("holds something that is not 64 hex digits");
                digest = *parsed;
            }
        }
    }
    return in.finished() ? Status{} : bad("is longer than it says");
}

Status check_header(const Model& slice) {
    constexpr std::string_view kKey = "kvasir.header_sha256";
    const GgufHeader& header = slice.shards.front();
    const auto text = header.get_text(kKey);
    const auto stored = text ? crypto::parse_hex(*text) : std::nullopt;
    if (!stored) {
        return fail(Errc::kBadInput, where(slice) + "key '" + std::string(kKey) +
                                         "' must be 64 hex digits; cut the slice again");
    }
    auto fd = open_for_reading(header.path);
    if (!fd) return tl::unexpected(std::move(fd.error()));
    std::vector<uint8_t> bytes(static_cast<size_t>(header.data_offset));
    if (auto status = read_exactly(fd->get(), header.path, 0, bytes); !status) return status;
    const GgufKey& key = header.keys.find(kKey)->second;
    const uint64_t value_offset = key.offset + key.bytes - kHexDigits;
    if (header_digest(bytes, value_offset) == *stored) return {};
    return fail(Errc::kMismatch, where(slice) +
                                     "the header (keys and tensor table) does not match its "
                                     "digest; the file is damaged: get it again");
}

// The length that the tensor table implies, and zeros wherever no slab is.
Status check_padding(const Model& slice) {
    const GgufHeader& header = slice.shards.front();
    std::vector<std::pair<uint64_t, uint64_t>> spans;  // offset, bytes
    for (const GgufTensor& tensor : header.tensors) spans.emplace_back(tensor.offset, tensor.bytes);
    std::ranges::sort(spans);
    auto fd = open_for_reading(header.path);
    if (!fd) return tl::unexpected(std::move(fd.error()));
    uint64_t end = header.data_offset;
    spans.emplace_back((spans.empty() ? end : spans.back().first + spans.back().second), 0);
    spans.back().first =
        (spans.back().first + kSliceAlignment - 1) / kSliceAlignment * kSliceAlignment;
    if (spans.back().first != header.file_bytes) {
        return fail(Errc::kBadInput, where(slice) + "the file has " +
                                         std::to_string(header.file_bytes) +
                                         " bytes, its tensors "
                                         "end at " +
                                         std::to_string(spans.back().first) + "; get it again");
    }
    for (const auto& [offset, bytes] : spans) {
        if (offset < end || offset - end >= kSliceAlignment) {
            return fail(Errc::kBadInput, where(slice) +
                                             "its tensors overlap or leave gaps; cut "
                                             "the slice again");
        }
        std::vector<uint8_t> gap(static_cast<size_t>(offset - end));
        if (auto status = read_exactly(fd->get(), header.path, end, gap); !status) return status;
        if (std::ranges::any_of(gap, [](uint8_t byte) { return byte != 0; })) {
            return fail(Errc::kMismatch, where(slice) + "the padding before byte " +
                                             std::to_string(offset) +
                                             " is not zero; the file is damaged: get it again");
        }
        end = offset + bytes;
    }
    return {};
}

// If the bytes found belong to another expert of the same tensor, that says more than "differs".
std::string belongs_to(const ExpertBank& bank, const std::vector<Sha256>& stored,
                       const Sha256& found) {
    const auto other = std::ranges::find(stored, found);
    if (other == stored.end()) return {};
    const auto position = static_cast<size_t>(other - stored.begin());
    return " (its bytes are those of expert " + std::to_string(bank.global_ids[position]) + ")";
}

// Counts slabs that differ and keeps the words for the first.
struct Differences {
    uint64_t count = 0;
    std::string first;
    void add(std::string what) {
        if (count++ == 0) first = std::move(what);
    }
    Error error(const std::string& prefix, const std::string& advice) const {
        std::string detail = prefix + first;
        if (count > 1) detail += ", and " + std::to_string(count - 1) + " more";
        return Error{Errc::kMismatch, detail + "; " + advice};
    }
};

}  // namespace

Result<Manifest> slice_manifest(const Model& slice) {
    if (!slice.is_slice || slice.shards.size() != 1) {
        return fail(Errc::kBadInput, where(slice) +
                                         "is not a slice (no key 'kvasir.version'); make one with "
                                         "kvasir slice");
    }
    Manifest manifest;
    manifest.banks = empty_digests(slice);
    if (auto status = read_digests(slice, manifest.banks); !status) {
        return tl::unexpected(std::move(status.error()));
    }
    if (!slice.slice_model_id.empty()) {
        const auto id = crypto::parse_hex(slice.slice_model_id);
        if (!id) return fail(Errc::kBadInput, where(slice) + "key 'kvasir.model_id' is malformed");
        manifest.model_id = *id;
    }
    return manifest;
}

Result<VerifyReport> verify_slice(const Model& slice, const HashOptions& options) {
    const auto stored = slice_manifest(slice);
    if (!stored) return tl::unexpected(stored.error());
    for (const auto check : {check_header, check_padding}) {
        if (auto status = check(slice); !status) return tl::unexpected(std::move(status.error()));
    }
    auto found = empty_digests(slice);
    std::vector<HashRange> ranges;
    VerifyReport report;
    for (size_t b = 0; b < slice.banks.size(); ++b) {
        for (size_t t = 0; t < slice.banks[b].tensors.size(); ++t) {
            const SlabTensor& tensor = slice.banks[b].tensors[t];
            for (uint32_t e = 0; e < slice.banks[b].experts; ++e) {
                ranges.push_back({tensor.shard, tensor.offset + e * tensor.slab_bytes,
                                  tensor.slab_bytes, &found[b].slabs[t][e]});
                report.bytes += tensor.slab_bytes;
            }
        }
    }
    report.slabs = ranges.size();
    if (auto status = hash_ranges(slice, std::move(ranges), options); !status) {
        return tl::unexpected(std::move(status.error()));
    }
    Differences differences;
    for (size_t b = 0; b < slice.banks.size(); ++b) {
        const ExpertBank& bank = slice.banks[b];
        for (size_t t = 0; t < bank.tensors.size(); ++t) {
            const auto& expected = stored->banks[b].slabs[t];
            for (uint32_t e = 0; e < bank.experts; ++e) {
                const Sha256& digest = found[b].slabs[t][e];
                if (digest == expected[e]) continue;
                differences.add(describe(bank.tensors[t], bank.global_ids[e]) +
                                " does not match its digest" + belongs_to(bank, expected, digest));
            }
        }
    }
    if (differences.count == 0) return report;
    return tl::unexpected(
        differences.error(where(slice), "the file is damaged: get it or cut it again"));
}

namespace {

// Where one slab lies on both sides.
struct SlabPair {
    const GgufHeader* slice = nullptr;
    const GgufHeader* model = nullptr;
    uint64_t slice_offset = 0;
    uint64_t model_offset = 0;
    uint64_t bytes = 0;
};

class Comparer {
public:
    // True if the bytes are equal.
    Result<bool> compare(const SlabPair& pair) {
        if (auto status = left_.open(*pair.slice); !status) {
            return tl::unexpected(std::move(status.error()));
        }
        if (auto status = right_.open(*pair.model); !status) {
            return tl::unexpected(std::move(status.error()));
        }
        for (uint64_t done = 0; done < pair.bytes;) {
            const auto step =
                static_cast<size_t>(std::min<uint64_t>(pair.bytes - done, kCompareBytes));
            auto a = left_.read(pair.slice_offset + done, step);
            if (!a) return tl::unexpected(std::move(a.error()));
            auto b = right_.read(pair.model_offset + done, step);
            if (!b) return tl::unexpected(std::move(b.error()));
            if (std::memcmp(a->data(), b->data(), step) != 0) return false;
            done += step;
        }
        return true;
    }

private:
    struct Side {
        Fd fd;
        const GgufHeader* header = nullptr;
        std::unique_ptr<uint8_t[]> buffer =
            std::make_unique_for_overwrite<uint8_t[]>(kCompareBytes);

        Status open(const GgufHeader& wanted) {
            if (header == &wanted) return {};
            auto opened = open_for_reading(wanted.path);
            if (!opened) return tl::unexpected(std::move(opened.error()));
            fd = std::move(*opened);
            header = &wanted;
            return {};
        }
        Result<std::span<const uint8_t>> read(uint64_t offset, size_t bytes) {
            const std::span<uint8_t> out(buffer.get(), bytes);
            auto status = read_exactly(fd.get(), header->path, offset, out);
            if (!status) return tl::unexpected(std::move(status.error()));
            return std::span<const uint8_t>(out);
        }
    };
    Side left_;
    Side right_;
};

// The tensor and bank of the model that a slice's tensor was cut from.
Result<const SlabTensor*> counterpart(const Model& slice, const Model& model,
                                      const ExpertBank& bank, const SlabTensor& tensor) {
    const ExpertBank* other = model.find_bank(bank.key);
    const SlabTensor* found = other == nullptr ? nullptr : other->find(tensor.role, tensor.part);
    const bool same_shape = found != nullptr && found->name == tensor.name &&
                            found->type == tensor.type && found->n_in == tensor.n_in &&
                            found->n_out == tensor.n_out && found->slab_bytes == tensor.slab_bytes;
    if (same_shape && other->tensors.size() == bank.tensors.size()) return found;
    return fail(Errc::kMismatch, where(slice) + "tensor '" + printable(tensor.name) +
                                     "': " + printable(model.shards.front().path) +
                                     " has none of that type and shape, so the slice is of "
                                     "another model");
}

}  // namespace

Result<VerifyReport> verify_slice_against(const Model& slice, const Model& model,
                                          const Progress& progress) {
    VerifyReport report;
    Differences differences;
    Comparer comparer;
    const uint64_t bytes_total = slice.bytes_experts();
    for (const ExpertBank& bank : slice.banks) {
        for (const SlabTensor& tensor : bank.tensors) {
            const auto other = counterpart(slice, model, bank, tensor);
            if (!other) return tl::unexpected(other.error());
            const auto& ids = model.find_bank(bank.key)->global_ids;
            for (uint32_t e = 0; e < bank.experts; ++e) {
                const uint32_t id = bank.global_ids[e];
                const auto found = std::ranges::lower_bound(ids, id);
                if (found == ids.end() || *found != id) {
                    return fail(Errc::kMismatch, where(slice) + describe(tensor, id) + ": " +
                                                     printable(model.shards.front().path) +
                                                     " has no such expert");
                }
                const auto position = static_cast<uint64_t>(found - ids.begin());
                const auto equal = comparer.compare(
                    {&slice.shards[tensor.shard], &model.shards[(*other)->shard],
                     tensor.offset + e * tensor.slab_bytes,
                     (*other)->offset + position * tensor.slab_bytes, tensor.slab_bytes});
                if (!equal) return tl::unexpected(equal.error());
                if (!*equal) differences.add(describe(tensor, id) + " differs from the model's");
                report.slabs += 1;
                report.bytes += tensor.slab_bytes;
            }
            if (progress) progress(report.bytes, bytes_total);
        }
    }
    if (differences.count == 0) return report;
    return tl::unexpected(
        differences.error(where(slice), "the slice is damaged or of another model"));
}

}  // namespace kvasir::moe
