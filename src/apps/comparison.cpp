#include "apps/comparison.hpp"

#include <algorithm>

#include "base/check.hpp"

namespace kvasir::apps {
namespace {

// splitmix64: a fixed, well-mixed sequence.
uint64_t next_random(uint64_t& state) {
    state += 0x9e3779b97f4a7c15ULL;
    uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
}

}  // namespace

Work make_work(uint32_t vocabulary, uint32_t prompt_tokens, uint32_t steps) {
    KVASIR_CHECK(vocabulary > 0);
    uint64_t state = 1;
    const auto draw = [&](size_t count) {
        std::vector<generate::Token> tokens(count);
        for (auto& token : tokens) {
            token = static_cast<generate::Token>(next_random(state) % vocabulary);
        }
        return tokens;
    };
    Work work;
    work.prompt = draw(prompt_tokens);
    work.forced = draw(static_cast<size_t>(steps) + 1);
    return work;
}

Result<std::vector<Series>> compare(const std::vector<Contender>& contenders, const Work& work,
                                    uint32_t rounds) {
    std::vector<Series> out(contenders.size());
    std::string expected;
    for (uint32_t round = 0; round <= rounds; ++round) {
        const bool measured = round > 0;
        for (size_t turn = 0; turn < contenders.size(); ++turn) {
            // Round 0 starts with the reference, so that `expected` is there for the others.
            const size_t i = round % 2 == 0 ? turn : contenders.size() - 1 - turn;
            const Contender& contender = contenders[i];
            generate::Request request;
            request.prompt_tokens = work.prompt;
            request.forced = work.forced;
            request.on_prompt_done = contender.on_prompt_done;
            const auto generation = contender.session->generate(request);
            if (!generation) {
                return fail(generation.error().code,
                            contender.name + ": " + generation.error().detail);
            }
            const std::string digest = to_hex(generation->logits_sha256);
            if (expected.empty()) expected = digest;
            Series& series = out[i];
            series.name = contender.name;
            series.bit_exact = series.bit_exact && digest == expected;
            series.logits_sha256 = digest;
            if (!measured) continue;
            series.gen_tok_s.push_back(generation->gen_tok_s());
            series.prompt_tok_s.push_back(generation->prompt_tok_s());
            if (contender.on_measured) contender.on_measured(*generation);
        }
    }
    return out;
}

double median(std::vector<double> values) {
    if (values.empty()) return 0;
    std::sort(values.begin(), values.end());
    const size_t middle = values.size() / 2;
    return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

double median_ratio(const std::vector<double>& part, const std::vector<double>& whole) {
    KVASIR_CHECK(part.size() == whole.size());
    std::vector<double> ratios;
    for (size_t i = 0; i < part.size(); ++i)
        ratios.push_back(whole[i] > 0 ? part[i] / whole[i] : 0);
    return median(std::move(ratios));
}

}  // namespace kvasir::apps
