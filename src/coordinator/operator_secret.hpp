// The operator's secret: who has the file may make invites and revoke nodes.
//
// Used by the coordinator at start. The file has one line of 64 hex digits and mode 0600.
// Thread: any. Limits: none.
#pragma once

#include <string>

#include "base/result.hpp"

namespace kvasir::coordinator {

// Makes the file when there is none. Errors: kEnvironment (permissions; readable by others: says
// chmod), kBadInput (malformed).
Result<std::string> load_or_make_operator_secret(const std::string& path);

}  // namespace kvasir::coordinator
