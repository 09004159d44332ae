// Small files that only their owner may use, in a state folder.
//
// Used by MarketPins and the API's server (llama-server's token). Thread: any; one writer of a path
// at a time. Owns: nothing. Limits: the caller's.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "base/result.hpp"

namespace kvasir::apps {

// Replaces the file (mode 0600): a reader finds the old text or the new one, never half of one.
// `what` is in it, for errors: kNoSpace, kIo.
Status write_owner_file(const std::string& path, std::string_view text, const std::string& what);

// Null: there is no such file. Errors: kEnvironment (cannot be read; others than its owner may use
// it: says chmod 600), kBadInput (not a regular file; longer than `bytes_max`), kIo.
Result<std::optional<std::string>> read_owner_file(const std::string& path, size_t bytes_max);

}  // namespace kvasir::apps
