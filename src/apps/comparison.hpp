// Comparison: the same teacher-forced work done by several sessions in turn, timed and compared bit
// by bit.
//
// Used by bench.cpp and its tests. Rounds go A B C, C B A, A B C ...: a machine that slows down
// over time does not favour whoever comes first. One round before is not measured (page cache),
// but compared.
// Thread: main thread. Owns: the numbers; sessions belong to the caller.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "generate/session.hpp"

namespace kvasir::apps {

struct Contender {
    std::string name;
    generate::Session* session = nullptr;
    std::function<void()> on_prompt_done;  // may be empty
    // After each measured run; may be empty.
    std::function<void(const generate::Generation&)> on_measured;
};

struct Series {
    std::string name;
    std::vector<double> gen_tok_s;  // one per measured round
    std::vector<double> prompt_tok_s;
    bool bit_exact = true;  // every round's logits equal those of the first contender
    std::string logits_sha256;
};

struct Work {
    std::vector<generate::Token> prompt;
    std::vector<generate::Token> forced;  // decoding steps = size - 1
};

// Tokens spread over the vocabulary, the same for the same numbers.
Work make_work(uint32_t vocabulary, uint32_t prompt_tokens, uint32_t steps);

// Series in the order of the contenders. Errors: those of Session::generate.
Result<std::vector<Series>> compare(const std::vector<Contender>& contenders, const Work& work,
                                    uint32_t rounds);

double median(std::vector<double> values);  // 0 for none
// Median over rounds of `part[i] / whole[i]`; 0 where a whole is 0.
double median_ratio(const std::vector<double>& part, const std::vector<double>& whole);

}  // namespace kvasir::apps
