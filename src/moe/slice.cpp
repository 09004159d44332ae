#include "moe/slice.hpp"

#include <algorithm>
#include <atomic>
#include <optional>
#include <thread>

#include <sys/stat.h>

#include "base/check.hpp"
#include "base/log.hpp"
#include "moe/cut.hpp"
#include "moe/file.hpp"
#include "moe/slice_metadata.hpp"

namespace kvasir::moe {
namespace {

constexpr uint64_t kWritebackBytes = uint64_t{128} << 20;

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

// Copies the tensor data. One source file is open at a time: models come in a thousand parts.
class Copier {
public:
    Copier(const Model& model, AtomicFile& out, const SliceOptions& options, uint64_t bytes_total)
        : model_(model), out_(out), options_(options), bytes_total_(bytes_total) {}

    Status copy(const SliceRange& range) {
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
    if (manifest != nullptr) take_digests(*manifest, cut);
    // Without a manifest the digests are still zero here: the header's size does not depend on
    // them.
    auto metadata = make_slice_metadata(cut.spec);
    if (!metadata) return tl::unexpected(std::move(metadata.error()));
    observe(SliceStep::kCreated, 0);

    std::optional<Hashing> hashing;
    if (manifest == nullptr) hashing.emplace(model, slabs_of(model, cut, cut.spec.digests));
    Copier copier(model, file, options, cut.bytes_slabs);
    const auto ranges = byte_ranges(model, cut, metadata->offsets);
    for (const SliceRange& range : ranges) {
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

Result<SliceReport> cut_slice(const Model& model, const Manifest* manifest,
                              const std::vector<Segment>& segments, const std::string& path,
                              const SliceOptions& options) {
    if (auto status = refuse_own_files(model, path); !status) {
        return tl::unexpected(std::move(status.error()));
    }
    const bool has_id = manifest != nullptr && manifest->has_model_id();
    auto keys = read_kept_keys(model);
    if (!keys) return tl::unexpected(std::move(keys.error()));
    auto cut = plan_cut(model, segments, std::move(*keys),
                        has_id ? to_hex(manifest->model_id) : std::string());
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
