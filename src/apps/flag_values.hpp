// Text of flags turned into values, and values into text for tables.
//
// Used by run and bench.
// Thread: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"

namespace kvasir::apps {

// "3,5,7" (blanks allowed around numbers). Errors: kUsage, naming the item.
Result<std::vector<int32_t>> parse_tokens(std::string_view text);
// "100%", "62.5%" or "100": a share from 0 to 1. Errors: kUsage.
Result<double> parse_share(std::string_view text);

// "512 B", "1.4 KB", "5.3 MB", "77.1 GB" (powers of 1000).
std::string format_bytes(double bytes);

}  // namespace kvasir::apps
