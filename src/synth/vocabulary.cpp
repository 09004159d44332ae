#include "synth/vocabulary.hpp"

#include <string_view>

#include "base/check.hpp"
#include "synth/spec.hpp"

namespace kvasir::synth {
namespace {

constexpr std::string_view kConsonants = "bdfghjklmnprstvz";
constexpr std::string_view kVowels = "aeio";
constexpr uint32_t kSyllables = 64;
constexpr std::string_view kSpace = "\xc4\xa0";  // U+0120: the byte alphabet's space
constexpr int32_t kNormal = 1;
constexpr int32_t kControl = 3;

std::string utf8(uint32_t code_point) {
    if (code_point < 0x80) return std::string(1, static_cast<char>(code_point));
    return {static_cast<char>(0xc0 | (code_point >> 6)),
            static_cast<char>(0x80 | (code_point & 0x3f))};
}

// GPT-2's byte alphabet: printable bytes are themselves, the rest follow from U+0100.
void add_bytes(std::vector<std::string>& tokens) {
    const auto printable_byte = [](uint32_t byte) {
        return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    };
    for (uint32_t byte = 0; byte < 256; ++byte) {
        if (printable_byte(byte)) tokens.push_back(utf8(byte));
    }
    uint32_t next = 256;
    for (uint32_t byte = 0; byte < 256; ++byte) {
        if (!printable_byte(byte)) tokens.push_back(utf8(next++));
    }
}

std::string syllable(uint32_t index) {
    return {kConsonants[index / kVowels.size()], kVowels[index % kVowels.size()]};
}

// The word number `index` among those of `count` syllables.
std::string word(uint32_t index, uint32_t count) {
    std::string text;
    for (uint32_t i = 0; i < count; ++i, index /= kSyllables)
        text = syllable(index % kSyllables) + text;
    return std::string(kSpace) + text;
}

}  // namespace

Vocabulary make_vocabulary(uint32_t size) {
    KVASIR_CHECK(size >= kVocabMin && size <= kVocabMax);
    Vocabulary vocabulary;
    const uint32_t normal = size - 3;
    auto& tokens = vocabulary.tokens;
    tokens.reserve(size);
    add_bytes(tokens);
    for (uint32_t i = 0; i < kSyllables && tokens.size() < normal; ++i) {
        const std::string text = syllable(i);
        tokens.push_back(text);
        vocabulary.merges.push_back(std::string(1, text[0]) + " " + text[1]);
    }
    uint32_t words = kSyllables;
    for (uint32_t count = 1; tokens.size() < normal; ++count, words *= kSyllables) {
        for (uint32_t i = 0; i < words && tokens.size() < normal; ++i) {
            tokens.push_back(word(i, count));
            const std::string last = syllable(i % kSyllables);
            if (count == 1) vocabulary.merges.push_back(std::string(kSpace) + " " + last);
            if (count == 2) vocabulary.merges.push_back(word(i / kSyllables, 1) + " " + last);
        }
    }
    vocabulary.types.assign(normal, kNormal);
    for (std::string_view control : {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}) {
        tokens.emplace_back(control);
        vocabulary.types.push_back(kControl);
    }
    vocabulary.end_of_text = normal;
    vocabulary.end_of_turn = normal + 2;
    return vocabulary;
}

}  // namespace kvasir::synth
