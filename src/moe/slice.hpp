// Slices: mini-GGUFs with some experts of a model, cut by copying byte ranges.
//
// Used by `kvasir slice`, `kvasir verify` and the worker. A slice is a valid GGUF: same tensor
// names, ne[last] = local expert count, alignment 32, general.architecture and the model's own
// small keys kept (no tokenizer), plus
//   kvasir.version u32 = 1          kvasir.model_id string (64 hex; absent when not known)
//   kvasir.banks array<u32>         per bank: layer, bank, experts
//   kvasir.expert_ids array<u32>    the global ids of all banks, in bank order, ascending in each
//   kvasir.slab_sha256 array<string> 64 hex: per bank, per tensor (canonical order), per expert
//   kvasir.header_sha256 string     SHA-256 of all before the tensor data, these 64 taken as '0'
// docs/slices.md has the whole format. The file appears under its name only when complete:
// temporary name, fsync, rename, fsync of the folder. The same experts of the same model give the
// same bytes, however the model is split into files. Thread: functions are reentrant; cutting
// without a manifest starts one hashing thread and joins it. Owns: nothing. Limits: those of
// gguf.hpp.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "moe/manifest.hpp"
#include "moe/model.hpp"

namespace kvasir::moe {

constexpr uint64_t kSliceAlignment = 32;
constexpr uint32_t kSliceVersion = 1;

struct SliceReport {
    uint64_t bytes_file = 0;
    uint64_t bytes_slabs = 0;
    uint64_t experts = 0;
    uint64_t ranges = 0;  // byte ranges copied (adjacent experts merged)
};

// Steps of a cut, in order; kCopying comes once for each 128 MiB copied and at the end.
enum class SliceStep { kCreated, kCopying, kCopied, kHeaderWritten, kCommitted };
using SliceObserver =
    std::function<void(SliceStep step, uint64_t bytes_done, uint64_t bytes_total)>;

struct SliceOptions {
    bool replace = true;     // false: an existing file is kept and the cut fails with kUsage
    SliceObserver observer;  // called in the caller's thread
};

// Writes the slice of `segments` (any order; global expert ids) to `path`. Uses copy_file_range
// where the kernel can, else read/write. The digests come from `manifest`, which must be that of
// `model` (or slice_manifest() of it); it costs no hashing, so bytes that rotted since are found by
// verify_slice(). On any error (kIo: a full disk says so; kBadInput; kUsage: experts that
// the model lacks, or `path` is one of its own files) no file remains and an existing `path` is
// untouched.
Result<SliceReport> write_slice(const Model& model, const Manifest& manifest,
                                const std::vector<Segment>& segments, const std::string& path,
                                const SliceOptions& options = {});

// The same without a manifest: hashes the slabs it copies (one thread beside the copying one) and
// leaves kvasir.model_id out.
Result<SliceReport> write_slice(const Model& model, const std::vector<Segment>& segments,
                                const std::string& path, const SliceOptions& options = {});

}  // namespace kvasir::moe
