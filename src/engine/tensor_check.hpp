// Are llama.cpp's expert tensors the ones of our model file? Types, shapes, and bytes sampled from
// slabs.
//
// Used by the backbone before it lets a graph use workers that hold that file's experts. Thread:
// reentrant.
#pragma once

#include "engine/weights.hpp"

namespace kvasir::engine {

// True when every non-null tensor equals its counterpart in the bank. Reads up to 512 bytes of
// every slab.
bool same_tensors(const moe::ExpertBank& bank, const moe::Mapping& mapping,
                  const BankWeights::Tensors& tensors);

}  // namespace kvasir::engine
