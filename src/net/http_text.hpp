// The text of HTTP that needs no parser library: targets, bearer tokens, ranges. No I/O.
//
// Private to net/; parse_range() and HttpRequest::bearer() (net/http.hpp) live in the same file.
// Thread: any. Owns: nothing. Limits: the caller's limit of the header.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "base/result.hpp"

namespace kvasir::net {

struct Target {
    std::string path;  // decoded; starts with "/"; ends with it only if that is all
    std::map<std::string, std::string> query;  // decoded; the first of a name counts
};

// The target of a request line, in origin form ("/a/b?x=y"). Errors: kBadInput (not that form,
// malformed percent sign, control characters, "..", "." or empty parts, also encoded ones).
Result<Target> parse_target(std::string_view target);

// "%41+" to "A+" (or "A " with plus_is_space). nullopt: a percent sign without two hex digits.
std::optional<std::string> decode_percent(std::string_view text, bool plus_is_space);

// The token of "Bearer TOKEN"; empty if it is anything else.
std::string_view parse_bearer(std::string_view authorization);

}  // namespace kvasir::net
