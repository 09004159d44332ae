// The market's model: its files, its outline, and which bytes of them a set of segments is.
//
// Used by the coordinator. The manifest is computed once (and cached); the outline is kept in
// memory that can be sent like a file, so that many slow readers cost nothing each.
// Thread: immutable after opening, any; read() blocks on the disk. Owns: descriptors.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "market/proof.hpp"
#include "moe/manifest.hpp"
#include "moe/model.hpp"
#include "net/http.hpp"

namespace kvasir::coordinator {

struct FileRange {
    uint32_t shard = 0;
    uint64_t begin = 0;
    uint64_t end = 0;
    auto operator<=>(const FileRange&) const = default;
};

class ModelFiles {
public:
    // Errors: those of moe::open_model(), load_or_compute_manifest() and make_outline();
    // kUnsupported for a model without experts.
    static Result<std::unique_ptr<ModelFiles>> open(const std::string& model_path,
                                                    const std::string& cache_dir,
                                                    const moe::Progress& progress);

    const moe::Model& model() const { return model_; }
    const Sha256& model_id() const { return model_id_; }
    const net::FileBody& outline() const { return outline_; }
    const std::vector<uint8_t>& outline_bytes() const { return outline_bytes_; }

    // By number ("0") or by the file's name. nullopt: no such shard.
    std::optional<uint32_t> find_shard(std::string_view text) const;
    std::string shard_name(uint32_t shard) const;
    uint64_t shard_bytes(uint32_t shard) const { return model_.shards[shard].file_bytes; }
    // Changes when the bytes do.
    std::string shard_tag(uint32_t shard) const;
    // Errors: kMismatch: the file was changed since the market started.
    Result<net::FileBody> body(uint32_t shard, const net::ByteSpan& span) const;
    // The bytes of a probe. Errors: kMismatch as of body(), kIo, kBadInput.
    Result<std::vector<uint8_t>> read(const market::Probe& probe, LayerKey layer) const;
    // The slabs of the segments, adjacent ones merged, ascending.
    std::vector<FileRange> ranges_of(std::span<const Segment> segments) const;

private:
    struct Shard {
        std::shared_ptr<const int> fd;
        int64_t changed_ns = 0;
    };
    ModelFiles() = default;
    Status open_shards();
    Status check_unchanged(uint32_t shard) const;
    Status keep_outline(std::vector<uint8_t> bytes);

    // Constant after construction.
    moe::Model model_;
    Sha256 model_id_ = {};
    std::vector<Shard> shards_;
    net::FileBody outline_;
    std::vector<uint8_t> outline_bytes_;
    // Any thread: a change of a file was told to the log.
    mutable std::atomic<bool> change_told_{false};
};

// Is [begin, end) of a shard inside one of the ranges? `ranges` as of ranges_of().
bool covers(std::span<const FileRange> ranges, const FileRange& wanted);

}  // namespace kvasir::coordinator
