// Verification: is a slice what it says, and what the model says.
//
// Used by `kvasir verify`, and by the worker before it computes with a slice. Between the three
// checks of verify_slice() (header digest, slab digests, padding and length) every bit of the file
// is covered. Thread: functions are reentrant; hashing may use threads of its own. Owns: nothing.
// Limits: those of gguf.hpp and hash_ranges.hpp.
#pragma once

#include <cstdint>

#include "base/result.hpp"
#include "moe/manifest.hpp"
#include "moe/model.hpp"

namespace kvasir::moe {

// The digests stored in a slice, checked for shape against its banks; model_id all zero if it has
// none. Reads the file's header only. Errors: kBadInput (not a slice, or its kvasir.* keys are
// malformed), kEnvironment, kIo.
Result<Manifest> slice_manifest(const Model& slice);

struct VerifyReport {
    uint64_t slabs = 0;
    uint64_t bytes = 0;  // of slabs
};

// Hashes every slab of the slice and compares with its stored digests; about 1.8 GB/s a thread.
// Errors: kMismatch names tensor and expert (the first that differ, and how many do) or the header;
// kBadInput (file too long or too short, as slice_manifest()), kIo, kEnvironment.
Result<VerifyReport> verify_slice(const Model& slice, const HashOptions& options = {});

// Compares every slab with the model's own, byte for byte; needs no manifest. Does not include
// verify_slice(). Errors: kMismatch names tensor and expert, or what the model lacks; kIo,
// kBadInput.
Result<VerifyReport> verify_slice_against(const Model& slice, const Model& model,
                                          const Progress& progress = {});

}  // namespace kvasir::moe
