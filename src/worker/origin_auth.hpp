// Credentials of the model's origins, from files named on the command line.
//
// Used by `kvasir worker --join`. Thread: values. Limits: 8 KiB a header; 64 of them.
#pragma once

#include <string>
#include <vector>

#include "base/result.hpp"
#include "net/origin.hpp"

namespace kvasir::worker {

constexpr const char* kOriginAuthFlag = "--origin-auth";

// "ORIGIN=FILE" each: FILE's first line is the value of the Authorization header. The market's own
// origin is refused, as its token goes there. Errors, which name no content: kUsage (form, origin,
// plain http to another machine, two of one origin), kEnvironment (no such file; others may use
// it), kBadInput (no header's value).
Result<net::OriginSecrets> load_origin_auth(const std::vector<std::string>& flags,
                                            const std::string& market_url);

}  // namespace kvasir::worker
