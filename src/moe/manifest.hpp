// The manifest: SHA-256 of every slab, and the model id that follows from them.
//
// Used by slice, verify, worker and the backbone's join check.
//   model id = SHA-256( "kvasir-model-1\0" ‖ table ‖ digests )
// where table is the canonical tensor table (name, type, dims, bytes; sorted by name) and digests are the SHA-256 of
// each tensor's data in the same order; the digest of a stacked expert tensor is the SHA-256 over
// its slab digests. So the id does not depend on splits, order, alignment, padding or other metadata.
// Computing it reads the whole model once; the result is cached by (path, size, mtime) under the
// user's cache folder. Thread: immutable after making. Owns: digests.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "moe/model.hpp"

namespace kvasir::moe {

struct BankDigests {
    LayerKey key;
    uint32_t experts = 0;
    // [tensor][expert], tensors in ExpertBank::tensors order.
    std::vector<std::vector<Sha256>> slabs;
};

struct Manifest {
    Sha256 model_id = {};
    std::vector<BankDigests> banks;  // same order as Model::banks

    const BankDigests* find(LayerKey key) const;
    // SHA-256 over the slab digests of the segment, expert by expert, each in canonical slab order.
    // Precondition (KVASIR_CHECK): the segment lies inside the bank.
    Sha256 segment_digest(const Segment& segment) const;
};

using Progress = std::function<void(uint64_t bytes_done, uint64_t bytes_total)>;

// Hashes every tensor of `model` (reads through a mapping, sequentially, dropping pages behind it when the
// model is larger than half the memory). Errors: kEnvironment, kIo.
Result<Manifest> compute_manifest(const Model& model, const Progress& progress = {});

// The same through the cache: `cache_dir` empty means $XDG_CACHE_HOME/kvasir or ~/.cache/kvasir.
// A cache file that is unreadable, stale or damaged (it ends in a digest of itself) is recomputed and replaced.
Result<Manifest> load_or_compute_manifest(const Model& model, const std::string& cache_dir = {},
                                          const Progress& progress = {});

}  // namespace kvasir::moe
