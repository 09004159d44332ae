// Text of flags turned into values.
//
// Used by run, up, bench and worker.
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

// "340M", "1.5 GB", "512MiB", "12000000": bytes; k, M, G and T are powers of 1000, Ki, Mi, Gi and
// Ti of 1024. Errors: kUsage (not a size, less than one byte, or over 2^60).
Result<uint64_t> parse_size(std::string_view text);

}  // namespace kvasir::apps
