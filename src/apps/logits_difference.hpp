// How far the logits of one run are from those of another that did the same work.
//
// Used by `kvasir run --check` with workers whose bits may differ. Thread: values. Owns: nothing.
// Limits: both have the same shape, one row for each token.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.hpp"

namespace kvasir::apps {

struct LogitsDifference {
    double max_abs = 0;            // over all logits of all rows
    double mean_abs = 0;           // the same
    uint64_t other_likeliest = 0;  // rows whose largest logit is that of another token
    uint64_t rows = 0;
    double perplexity = 0;            // of the tokens, by the logits of the run
    double perplexity_reference = 0;  // and by those of the reference
};

// `tokens`: what was taken after each row. Errors: kUsage when the shapes differ or a token is
// outside its row.
Result<LogitsDifference> compare_logits(std::span<const std::vector<float>> run,
                                        std::span<const std::vector<float>> reference,
                                        std::span<const int32_t> tokens);

}  // namespace kvasir::apps
