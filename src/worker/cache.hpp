// SliceCache: the folder in which a joined worker keeps its key, the outline and its slices.
//
// Used by the agent. Names: "key"; "lock" (held while a worker runs: two would be one node);
// "outline.<16 hex>"; slices "<16 hex of the model id>.<16 hex of the plan>.gguf", the same with
// ".part" while bytes are missing. Only files with names of that form are ever removed. A slice is
// used after its digests were checked, never because its name is there.
// Thread: functions are reentrant; the state is the folder's. Owns: the lock. Limits: bytes_max for
// all slices together.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "moe/file.hpp"
#include "moe/outline.hpp"

namespace kvasir::worker {

// Where the bytes of a slab are that some slice in the cache says to have.
struct SlabSource {
    Sha256 digest = {};
    uint32_t file = 0;  // index into Donors::paths
    uint64_t offset = 0;
};
struct Donors {
    std::vector<std::string> paths;
    std::vector<SlabSource> slabs;  // sorted by digest
    const SlabSource* find(const Sha256& digest) const;
};

class SliceCache {
public:
    // Makes the folder (0700) where it is missing. Errors: kEnvironment (no permission), kUsage
    // (another worker uses it), kNoSpace.
    static Result<SliceCache> open(const std::string& folder, uint64_t bytes_max);

    std::string key_path() const { return folder_ + "/key"; }
    const std::string& folder() const { return folder_; }
    // The slice of these segments (normalised) of that model.
    std::string slice_path(const Sha256& model_id, const std::vector<Segment>& segments) const;
    // What whole slices of that model say they hold, merged.
    std::vector<Segment> have(const Sha256& model_id) const;
    // What the part of that model that was written last is to hold, merged. Of that one only: were
    // it several, the market would choose among them, and each choice would be another slice.
    std::vector<Segment> begun(const Sha256& model_id) const;
    // The slabs of all slices of that model, parts included, without `except` and its part.
    Donors donors(const Sha256& model_id, const std::string& except) const;

    // What the slice or its part takes on the disk now.
    uint64_t bytes_of(const std::string& path) const;
    uint64_t bytes_used() const;  // of slices, as the disk counts them
    // Removes slices that are not in `keep` (nor are their parts), the longest unused first, until
    // `bytes` more fit below bytes_max. Errors: kNoSpace when they do not even then.
    Status make_room(uint64_t bytes, const std::vector<std::string>& keep);
    // Removes all slices that are not in `keep`. Returns the bytes freed.
    uint64_t remove_others(const std::vector<std::string>& keep);
    void touch(const std::string& path) const;  // it was used now

    // The signed outline stored under this name, unchecked.
    std::optional<std::vector<uint8_t>> load_outline(const Sha256& name) const;
    // Written whole or not at all; others are removed.
    Status store_outline(const Sha256& name, std::span<const uint8_t> signed_outline) const;

private:
    struct Entry {
        std::string path;
        uint64_t bytes = 0;
        int64_t used_ns = 0;
    };
    SliceCache(std::string folder, uint64_t bytes_max, moe::Fd lock)
        : folder_(std::move(folder)), bytes_max_(bytes_max), lock_(std::move(lock)) {}
    std::vector<Entry> entries() const;  // slices and parts, the longest unused first

    std::string folder_;
    uint64_t bytes_max_ = 0;
    moe::Fd lock_;
};

// $XDG_CACHE_HOME/kvasir/worker or ~/.cache/kvasir/worker. Errors: kUsage (neither is set).
Result<std::string> default_cache_folder();

}  // namespace kvasir::worker
