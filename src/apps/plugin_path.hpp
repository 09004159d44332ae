// Where libggml-kvasir.so is: beside the program as it is built or installed (bin/kvasir and
// lib/libggml-kvasir.so).
//
// Used by plugin-path and up. Thread: any. Owns: nothing.
#pragma once

#include <string>

#include "base/result.hpp"

namespace kvasir::apps {

// Errors: kEnvironment, saying where it was looked for.
Result<std::string> find_plugin();

}  // namespace kvasir::apps
