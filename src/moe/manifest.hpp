// The manifest: SHA-256 of every slab, and the model id that follows from them.
//
// Used by slice, verify, worker and the backbone's join check.
//   model id = SHA-256( "kvasir-model-1\0" ‖ table ‖ digests )
// where table is u64 count, then per tensor {u32 name bytes, name, u32 type, 4 x u64 ne (1 where
// absent), u64 data bytes}, little-endian, sorted by name, and digests are the SHA-256 of each
// tensor's data in the same order; the digest of a stacked expert tensor is the SHA-256 over its
// slab digests. So the id does not depend on splits, order, alignment, padding or other metadata.
// Computing it reads the whole model once; the result is cached under the user's cache folder by
// path, size, times and inode of every shard. docs/slices.md shows the cache file.
// Thread: immutable after making; the functions are reentrant. Owns: digests.
// Limits: kCacheBytesMax for a cache file, kCacheFilesMax files (the oldest go).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "moe/hash_ranges.hpp"
#include "moe/model.hpp"

namespace kvasir::moe {

constexpr uint64_t kCacheBytesMax = uint64_t{1} << 30;
constexpr size_t kCacheFilesMax = 64;

struct BankDigests {
    LayerKey key;
    uint32_t experts = 0;              // in the file: a slice has its local count
    std::vector<uint32_t> global_ids;  // size `experts`, ascending; 0..experts-1 for a whole model
    // [tensor][expert], tensors in ExpertBank::tensors order, experts in file order.
    std::vector<std::vector<Sha256>> slabs;
};

struct Manifest {
    Sha256 model_id = {};            // all zero: not known (a slice cut without one)
    std::vector<BankDigests> banks;  // same order as Model::banks

    bool has_model_id() const { return model_id != Sha256{}; }
    const BankDigests* find(LayerKey key) const;
    // True if every expert of the segment (global ids) is here.
    bool holds(const Segment& segment) const;
    // SHA-256 over the slab digests of the segment (global ids), expert by expert, each in
    // canonical slab order: the same for a model and for any slice of it. Precondition
    // (KVASIR_CHECK): holds().
    Sha256 segment_digest(const Segment& segment) const;
};

// The banks of `model` with all digests zero: the shape that digests are filled into.
std::vector<BankDigests> empty_digests(const Model& model);

// Hashes every tensor of `model`, each shard once in file order; drops the pages behind it when the
// model is larger than half the memory, and does not read holes of sparse files. For a slice the id
// is that of the slice as a file of its own; what it was cut from is in slice_manifest(). Errors:
// kEnvironment, kIo, kBadInput (the file changed meanwhile).
Result<Manifest> compute_manifest(const Model& model, const HashOptions& options = {});

// The manifest in the cache, if a valid one for exactly these files is there.
// `cache_dir` empty means $XDG_CACHE_HOME/kvasir or ~/.cache/kvasir.
std::optional<Manifest> cached_manifest(const Model& model, const std::string& cache_dir = {});

// The same, else computed and cached. A cache file that is unreadable, stale or damaged (it ends in
// a digest of itself) is replaced; a cache that cannot be written is a warning in the log.
Result<Manifest> load_or_compute_manifest(const Model& model, const std::string& cache_dir = {},
                                          const Progress& progress = {});

}  // namespace kvasir::moe
