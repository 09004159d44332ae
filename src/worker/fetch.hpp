// fetch_slice: from a plan to a slice file whose every byte was checked.
//
// Used by the agent. The bytes go to "<path>.part" (locked, mode 0600) and get the name `path` only
// when every slab has the digest of the plan and the disk has them. What is there already counts
// when its digest is right, never because of a note about it: after kill -9 the part's slabs are
// hashed, a damaged slice becomes a part again, and slabs of other slices are copied. Of the rest,
// neighbours are one byte range each; every slab is hashed as its bytes arrive, and fetched again
// when wrong as far as 1 % of the download and 256 KiB reach. A full disk leaves the part for the
// next try. Thread: one at a time per path; `cancelled` from any. Owns: the part while it runs.
// Limits: kRefetchRounds further rounds for wrong slabs; memory: kFetchBufferBytes and what
// HttpClient needs.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "moe/outline.hpp"
#include "net/client.hpp"
#include "worker/cache.hpp"

namespace kvasir::worker {

constexpr size_t kFetchBufferBytes = size_t{256} << 10;
constexpr int kRefetchRounds = 2;

struct FetchShard {
    std::string url;
    uint64_t file_bytes = 0;
};

struct FetchTarget {
    std::string path;                // of the slice
    std::vector<FetchShard> shards;  // as the outline numbers them
    net::HeaderList secret_headers;  // for the shards' own origin
    Donors donors;
};

// The steps after which a process may be killed by tests.
enum class FetchStep { kOpened, kHeaderWritten, kSlabWritten, kSynced, kRenamed };

struct FetchOptions {
    net::RangeOptions ranges;
    // Of the plan's slabs: whole ones so far. On the caller's thread.
    std::function<void(const moe::SliceSlab& slab)> on_slab;
    std::function<void()> on_piece;  // may pause: a limited processor
    std::function<void(FetchStep step)> on_step;
    const std::atomic<bool>* cancelled = nullptr;
};

struct FetchReport {
    uint64_t bytes_found = 0;    // of slabs that were in the part or the slice
    uint64_t bytes_copied = 0;   // from other slices
    uint64_t bytes_fetched = 0;  // of slabs that came over the network
    uint64_t bytes_pulled = 0;   // bodies received, wasted ones included
    uint64_t ranges = 0;         // asked for, wrong slabs' included
    uint64_t slabs_wrong = 0;
};

// Errors: those of HttpClient::download(); kNoSpace (disk full, quota); kMismatch (the origin's
// bytes are not those of the plan: the file changed, or the origin is broken); kBusy (another
// process writes this slice); kIo; kEnvironment; kClosed (cancelled).
Result<FetchReport> fetch_slice(net::HttpClient& http, const moe::SlicePlan& plan,
                                const FetchTarget& target, const FetchOptions& options);

}  // namespace kvasir::worker
