// A byte-level BPE vocabulary of any size: bytes, syllables, words of syllables, control tokens.
//
// Used by plan.cpp. llama.cpp tokenises any text with it ("gpt2" model): the 256 byte tokens always
// apply, and merges build the words of one and two syllables; longer words are filler that only
// generation prints. Thread: values. Limits: size >= kVocabMin.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvasir::synth {

struct Vocabulary {
    std::vector<std::string> tokens;  // unique, in GPT-2's byte alphabet
    std::vector<int32_t> types;       // llama.cpp token types: 1 normal, 3 control
    std::vector<std::string> merges;  // "left right", both sides and their join are tokens
    uint32_t end_of_text = 0;
    uint32_t end_of_turn = 0;
};

Vocabulary make_vocabulary(uint32_t size);

}  // namespace kvasir::synth
