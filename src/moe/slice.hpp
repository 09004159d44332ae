// Slices: mini-GGUFs with some experts of a model, cut by copying byte ranges.
//
// Used by `kvasir slice`, `kvasir verify` and the worker. A slice is a valid GGUF: same tensor names,
// ne[last] = local expert count, general.architecture and the model's own hparams kept, plus
//   kvasir.version u32 = 1          kvasir.model_id string (64 hex)
//   kvasir.banks array<u32>         per bank: layer, bank, experts
//   kvasir.expert_ids array<u32>    the global ids of all banks, in bank order
//   kvasir.slab_sha256 array<string> 64-hex digests: per bank, per tensor (canonical order), per expert
// The file appears under its name only when complete: temporary name, fsync, rename, fsync of the folder.
// Thread: functions are reentrant. Limits: those of gguf.hpp.
#pragma once

#include <string>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "moe/manifest.hpp"
#include "moe/model.hpp"

namespace kvasir::moe {

struct SliceReport {
    uint64_t bytes_file = 0;
    uint64_t bytes_slabs = 0;
    uint64_t experts = 0;
    uint64_t ranges = 0;   // byte ranges copied (adjacent experts merged)
};

// Writes the slice of `segments` (normalised) to `path`. Uses copy_file_range where the kernel can, else
// read/write. On any error (kIo: a full disk says so; kBadInput) no file remains and an existing `path` is untouched.
Result<SliceReport> write_slice(const Model& model, const Manifest& manifest,
                                const std::vector<Segment>& segments, const std::string& path);

// The digests stored in a slice, checked for shape against its banks. Errors: kBadInput.
Result<Manifest> slice_manifest(const Model& slice);

struct VerifyReport {
    uint64_t slabs = 0;
    uint64_t bytes = 0;
};
// Hashes every slab of the slice and compares with its stored digests: kMismatch names tensor and expert.
Result<VerifyReport> verify_slice(const Model& slice);
// Compares with the model itself as well, byte for byte. kMismatch likewise.
Result<VerifyReport> verify_slice_against(const Model& slice, const Model& model);

}  // namespace kvasir::moe
