#include "moe/slice.hpp"

#include <algorithm>
#include <atomic>
#include <map>
#include <optional>
#include <string_view>
#include <thread>

#include <sys/stat.h>

#include "base/check.hpp"
#include "base/log.hpp"
#include "moe/file.hpp"
#include "moe/segments.hpp"
#include "moe/slice_metadata.hpp"

namespace kvasir::moe {
namespace {

constexpr uint64_t kWritebackBytes = uint64_t{128} << 20;

// What the slice takes from one bank of the source.
struct BankCut {
    size_t bank = 0;                  // index into Model::banks
    std::vector<uint32_t> positions;  // of the experts in the source's stacks, ascending
};

// One byte range of the source and where it goes; adjacent experts of a tensor are one range.
struct ByteRange {
    uint32_t shard = 0;
    uint64_t from = 0;
    uint64_t to = 0;
    uint64_t bytes = 0;
};

struct Cut {
    std::vector<BankCut> banks;
    SliceSpec spec;
    uint64_t bytes_slabs = 0;
};

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

Result<Cut> plan_cut(const Model& model, const std::vector<Segment>& segments,
                     std::string model_id) {
    auto banks = choose_experts(model, segments);
    if (!banks) return tl::unexpected(std::move(banks.error()));
    auto keys = read_kept_keys(model);
    if (!keys) return tl::unexpected(std::move(keys.error()));
    Cut cut;
    cut.spec.kept_keys = std::move(*keys);
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

void take_digests(const Cut& cut, const Manifest& manifest, std::vector<Sha256>& out) {
    out.clear();
    for (const BankCut& part : cut.banks) {
        for (const auto& tensor : manifest.banks[part.bank].slabs) {
            for (uint32_t position : part.positions) out.push_back(tensor[position]);
        }
    }
}

// Where the bytes of every slab lie in the source, in the order of the digests.
std::vector<HashRange> slabs_of(const Model& model, const Cut& cut, std::vector<Sha256>& digests) {
    std::vector<HashRange> slabs;
    for (const BankCut& part : cut.banks) {
        for (const SlabTensor& tensor : model.banks[part.bank].tensors) {
            for (uint32_t position : part.positions) {
                slabs.push_back({tensor.shard, tensor.offset + position * tensor.slab_bytes,
                                 tensor.slab_bytes, &digests[slabs.size()]});
            }
        }
    }
    return slabs;
}

std::vector<ByteRange> byte_ranges(const Model& model, const Cut& cut,
                                   const SliceMetadata& metadata) {
    std::vector<ByteRange> ranges;
    size_t index = 0;
    for (const BankCut& part : cut.banks) {
        for (const SlabTensor& tensor : model.banks[part.bank].tensors) {
            uint64_t to = metadata.offsets[index++];
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

// Copies the tensor data. One source file is open at a time: models come in a thousand parts.
class Copier {
public:
    Copier(const Model& model, AtomicFile& out, const SliceOptions& options, uint64_t bytes_total)
        : model_(model), out_(out), options_(options), bytes_total_(bytes_total) {}

    Status copy(const ByteRange& range) {
        if (auto status = open(range.shard); !status) return status;
        for (uint64_t done = 0; done < range.bytes;) {
            const uint64_t step = std::min(range.bytes - done, kWritebackBytes - pending_);
            auto status = copy_bytes({in_.get(), model_.shards[shard_].path, range.from + done},
                                     {out_.fd(), out_.path(), range.to + done}, step);
            if (!status) return status;
            done += step;
            bytes_done_ += step;
            pending_ += step;
            end_ = range.to + done;
            if (pending_ == kWritebackBytes) flush();
        }
        return {};
    }

    // Lets the disk start on what has been copied since the last time.
    void flush() {
        if (pending_ == 0) return;
        // Ranges follow each other with at most the alignment between them.
        out_.begin_writeback(begin_, end_ - begin_);
        begin_ = end_;
        pending_ = 0;
        if (options_.observer) options_.observer(SliceStep::kCopying, bytes_done_, bytes_total_);
    }

private:
    Status open(uint32_t shard) {
        if (in_.is_open() && shard_ == shard) return {};
        const GgufHeader& header = model_.shards[shard];
        auto fd = open_unchanged(header.path, header.file_bytes);
        if (!fd) return tl::unexpected(std::move(fd.error()));
        in_ = std::move(*fd);
        shard_ = shard;
        return {};
    }

    const Model& model_;
    AtomicFile& out_;
    const SliceOptions& options_;
    const uint64_t bytes_total_;
    Fd in_;
    uint32_t shard_ = 0;
    uint64_t bytes_done_ = 0;
    uint64_t pending_ = 0;
    uint64_t begin_ = 0;
    uint64_t end_ = 0;
};

// Replacing a part of the model by a slice of it would destroy the model.
Status refuse_own_files(const Model& model, const std::string& path) {
    struct stat target = {};
    if (::stat(path.c_str(), &target) != 0) return {};
    for (const GgufHeader& header : model.shards) {
        struct stat source = {};
        if (::stat(header.path.c_str(), &source) == 0 && source.st_dev == target.st_dev &&
            source.st_ino == target.st_ino) {
            return fail(Errc::kUsage, printable(path) +
                                          ": is a file of the model being cut; choose another "
                                          "name for the slice");
        }
    }
    return {};
}

// Runs hash_ranges beside the copying; destroyed before finish(), it stops early.
class Hashing {
public:
    Hashing(const Model& model, std::vector<HashRange> slabs)
        : thread_([this, &model, ranges = std::move(slabs)]() mutable {
              status_ = hash_ranges(model, std::move(ranges),
                                    {.threads = 1, .progress = {}, .cancelled = &cancelled_});
          }) {}
    ~Hashing() {
        cancelled_ = true;
        if (thread_.joinable()) thread_.join();
    }
    Status finish() {
        thread_.join();
        return status_;
    }

private:
    std::atomic<bool> cancelled_ = false;
    Status status_;
    std::thread thread_;  // last: it uses the others
};

Status fill(AtomicFile& file, const Model& model, const Manifest* manifest, Cut& cut,
            const SliceOptions& options, SliceReport& report) {
    const auto observe = [&](SliceStep step, uint64_t done) {
        if (options.observer) options.observer(step, done, cut.bytes_slabs);
    };
    if (manifest != nullptr) take_digests(cut, *manifest, cut.spec.digests);
    // Without a manifest the digests are still zero here: the header's size does not depend on
    // them.
    auto metadata = make_slice_metadata(cut.spec);
    if (!metadata) return tl::unexpected(std::move(metadata.error()));
    observe(SliceStep::kCreated, 0);

    std::optional<Hashing> hashing;
    if (manifest == nullptr) hashing.emplace(model, slabs_of(model, cut, cut.spec.digests));
    Copier copier(model, file, options, cut.bytes_slabs);
    const auto ranges = byte_ranges(model, cut, *metadata);
    for (const ByteRange& range : ranges) {
        if (auto status = copier.copy(range); !status) return status;
    }
    copier.flush();
    // The last tensor's padding: zeros up to the end that the header implies.
    const uint64_t data_end = metadata->offsets.back() + cut.spec.tensors.back().bytes;
    const std::vector<uint8_t> padding(static_cast<size_t>(metadata->file_bytes - data_end));
    if (auto status = file.write(data_end, padding); !status) return status;
    observe(SliceStep::kCopied, cut.bytes_slabs);

    if (hashing) {
        if (auto status = hashing->finish(); !status) return status;
        const uint64_t bytes_before = metadata->bytes.size();
        metadata = make_slice_metadata(cut.spec);
        if (!metadata) return tl::unexpected(std::move(metadata.error()));
        KVASIR_CHECK(metadata->bytes.size() == bytes_before);
    }
    if (auto status = file.write(0, metadata->bytes); !status) return status;
    observe(SliceStep::kHeaderWritten, cut.bytes_slabs);
    report.bytes_file = metadata->file_bytes;
    report.bytes_slabs = cut.bytes_slabs;
    report.experts = cut.spec.expert_ids.size();
    report.ranges = ranges.size();
    return {};
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

Result<SliceReport> cut_slice(const Model& model, const Manifest* manifest,
                              const std::vector<Segment>& segments, const std::string& path,
                              const SliceOptions& options) {
    if (auto status = refuse_own_files(model, path); !status) {
        return tl::unexpected(std::move(status.error()));
    }
    const bool has_id = manifest != nullptr && manifest->has_model_id();
    auto cut = plan_cut(model, segments, has_id ? to_hex(manifest->model_id) : std::string());
    if (!cut) return tl::unexpected(std::move(cut.error()));
    const FileSizeSignalGuard guard;
    auto file = AtomicFile::create(path);
    if (!file) return tl::unexpected(std::move(file.error()));
    SliceReport report;
    if (auto status = fill(*file, model, manifest, *cut, options, report); !status) {
        return tl::unexpected(std::move(status.error()));
    }
    if (auto status = file->commit(options.replace); !status) {
        return tl::unexpected(std::move(status.error()));
    }
    if (options.observer) {
        options.observer(SliceStep::kCommitted, report.bytes_slabs, report.bytes_slabs);
    }
    return report;
}

}  // namespace

Result<SliceReport> write_slice(const Model& model, const Manifest& manifest,
                                const std::vector<Segment>& segments, const std::string& path,
                                const SliceOptions& options) {
    if (auto status = check_manifest(model, manifest); !status) {
        return tl::unexpected(std::move(status.error()));
    }
    return cut_slice(model, &manifest, segments, path, options);
}

Result<SliceReport> write_slice(const Model& model, const std::vector<Segment>& segments,
                                const std::string& path, const SliceOptions& options) {
    return cut_slice(model, nullptr, segments, path, options);
}

}  // namespace kvasir::moe
