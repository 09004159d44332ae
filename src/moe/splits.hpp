// Split sets: from one named part to all parts of a model, in order.
//
// Used by model.cpp. Parts are `PREFIX-0000K-of-0000N.gguf` when they keep llama.cpp's names; when
// they were renamed, the .gguf files of the same folder are searched. The order comes from the key
// split.no, never from names or from the folder's listing. Thread: reads files, no shared state.
// Owns: nothing. Limits: kSplitPartsMax parts, kFolderFilesMax files searched.
#pragma once

#include <string>
#include <vector>

#include "base/result.hpp"
#include "moe/gguf.hpp"

namespace kvasir::moe {

constexpr uint64_t kSplitPartsMax = 65535;  // split.no is a u16 in llama.cpp
constexpr size_t kFolderFilesMax = 65536;

// The headers of all parts, in split order; just one for a file without split keys or with
// split.count 0 or 1 (a merged file keeps them). Errors: those of read_gguf_header; kBadInput
// naming the missing and doubled parts, or parts joined by plain concatenation.
Result<std::vector<GgufHeader>> collect_shards(const std::string& path);

}  // namespace kvasir::moe
