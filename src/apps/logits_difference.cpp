#include "apps/logits_difference.hpp"

#include <algorithm>
#include <cmath>

namespace kvasir::apps {
namespace {

// -ln of the token's probability.
double surprise(std::span<const float> row, int32_t token) {
    const double most = *std::ranges::max_element(row);
    double sum = 0;
    for (const float logit : row) sum += std::exp(logit - most);
    return most + std::log(sum) - row[static_cast<size_t>(token)];
}

bool fits(std::span<const float> a, std::span<const float> b, int32_t token) {
    return !a.empty() && a.size() == b.size() && token >= 0 &&
           static_cast<size_t>(token) < a.size();
}

}  // namespace

Result<LogitsDifference> compare_logits(std::span<const std::vector<float>> run,
                                        std::span<const std::vector<float>> reference,
                                        std::span<const int32_t> tokens) {
    if (run.empty() || run.size() != reference.size() || run.size() != tokens.size())
        return fail(Errc::kUsage, "the two runs did not do the same work");
    LogitsDifference out;
    out.rows = run.size();
    double sum = 0, surprise_run = 0, surprise_reference = 0;
    uint64_t count = 0;
    for (size_t r = 0; r < run.size(); ++r) {
        if (!fits(run[r], reference[r], tokens[r]))
            return fail(Errc::kUsage, "the two runs did not do the same work");
        for (size_t i = 0; i < run[r].size(); ++i) {
            const double apart = std::abs(double{run[r][i]} - double{reference[r][i]});
            out.max_abs = std::max(out.max_abs, apart);
            sum += apart;
        }
        count += run[r].size();
        const auto likeliest = std::ranges::max_element(run[r]) - run[r].begin();
        const auto expected = std::ranges::max_element(reference[r]) - reference[r].begin();
        if (likeliest != expected) ++out.other_likeliest;
        surprise_run += surprise(run[r], tokens[r]);
        surprise_reference += surprise(reference[r], tokens[r]);
    }
    const auto rows = static_cast<double>(run.size());
    out.mean_abs = sum / static_cast<double>(count);
    out.perplexity = std::exp(surprise_run / rows);
    out.perplexity_reference = std::exp(surprise_reference / rows);
    return out;
}

}  // namespace kvasir::apps
