// The part of a split model that llama.cpp wants to be given: the first.
//
// Used by run and bench, so that any part of a set may be named. Thread: reads files, no shared
// state.
#pragma once

#include <string>

#include "base/result.hpp"

namespace kvasir::apps {

// `path` itself for a model in one file. Errors: those of moe::collect_shards (a part is missing).
Result<std::string> first_part(const std::string& path);

}  // namespace kvasir::apps
