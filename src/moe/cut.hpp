// Which bytes of a model make up a slice: the planning that write_slice() and plan_slice() share.
//
// Used by slice.cpp and outline.cpp only; cut.cpp also has plan_slice() of outline.hpp. A Cut names
// the experts and everything that the slice's header is made of; byte_ranges() says which ranges of
// the shards follow that header. Needs the model's banks and the names of its shards, not their
// bytes. Thread: pure functions. Owns: nothing. Limits: those of the model.
#pragma once

#include <string>
#include <vector>

#include "base/result.hpp"
#include "moe/manifest.hpp"
#include "moe/model.hpp"
#include "moe/outline.hpp"
#include "moe/slice_metadata.hpp"

namespace kvasir::moe {

// What the slice takes from one bank of the source.
struct BankCut {
    size_t bank = 0;                  // index into Model::banks
    std::vector<uint32_t> positions;  // of the experts in the source's stacks, ascending
};

struct Cut {
    std::vector<BankCut> banks;
    SliceSpec spec;  // the digests zero at first
    uint64_t bytes_slabs = 0;
};

// `model_id` is hex, or empty: not known. Errors: kUsage (experts that the model lacks, or none).
Result<Cut> plan_cut(const Model& model, const std::vector<Segment>& segments,
                     std::vector<std::vector<uint8_t>> kept_keys, std::string model_id);

// Errors: kMismatch when the manifest is not of a model of this shape.
Status check_manifest(const Model& model, const Manifest& manifest);
void take_digests(const Manifest& manifest, Cut& cut);

// Ordered by `to`; adjacent experts of a tensor are one range. `offsets` are those of the slice's
// tensors.
std::vector<SliceRange> byte_ranges(const Model& model, const Cut& cut,
                                    const std::vector<uint64_t>& offsets);

}  // namespace kvasir::moe
