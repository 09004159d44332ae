// SHA-256 of many byte ranges of a model's shards, read once and in file order.
//
// Used by manifest (all tensors), slice (the slabs it copies) and verify. Ranges that lie wholly in
// a hole of a sparse file are not read: their digest is that of as many zeros, computed once per
// length. Thread: hash_ranges() blocks; it may start threads of its own and joins them.
// Owns: nothing. Limits: kHashBufferBytes per thread, kHashThreadsMax threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "moe/model.hpp"

namespace kvasir::moe {

constexpr size_t kHashBufferBytes = size_t{256} << 10;
constexpr unsigned kHashThreadsMax = 8;

// Called with growing numbers, by one thread at a time (not always the same one).
using Progress = std::function<void(uint64_t bytes_done, uint64_t bytes_total)>;

struct HashRange {
    uint32_t shard = 0;
    uint64_t offset = 0;
    uint64_t bytes = 0;
    Sha256* digest = nullptr;  // where the answer goes; distinct for each range
};

struct HashOptions {
    unsigned threads = 0;  // 0: one per two cores
    Progress progress;
    const std::atomic<bool>* cancelled = nullptr;  // set from outside: returns kClosed soon
};

// Errors: kEnvironment (open), kIo (read), kBadInput (a shard is not as long as its header was when
// the model was opened), kClosed (cancelled). After an error the digests are unspecified.
Status hash_ranges(const Model& model, std::vector<HashRange> ranges,
                   const HashOptions& options = {});

}  // namespace kvasir::moe
