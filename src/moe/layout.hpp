// Expert banks from tensor tables: which slabs exist, where they lie, that they are whole.
//
// Used by model.cpp. Groups the stacked expert tensors of all shards by (layer, bank), orders them
// canonically, and checks shapes and completeness. Thread: pure functions. Owns: nothing.
// Limits: kBankExpertsMax, kModelExpertsMax.
#pragma once

#include <vector>

#include "base/result.hpp"
#include "moe/model.hpp"

namespace kvasir::moe {

// "FILE: tensor 'NAME'", printable: how every error of the layout begins.
std::string describe(const GgufHeader& shard, const GgufTensor& tensor);

// Banks ordered by key; `global_ids` are 0..experts-1 and `is_mtp` is false.
// Errors: kBadInput (shape, tensor missing, two layouts mixed in a layer), kLimit.
Result<std::vector<ExpertBank>> lay_out_banks(const std::vector<GgufHeader>& shards);

}  // namespace kvasir::moe
