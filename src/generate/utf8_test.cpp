#include "generate/utf8.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace kvasir::generate {
namespace {

TEST(Utf8Stream, EveryCutOfAMixedTextGivesWholeCharacters) {
    const std::string text = "a\xc3\xa9\xe2\x82\xac\xf0\x9f\x90\x99z\xed\x9f\xbf\xf4\x8f\xbf\xbf!";
    for (size_t first = 0; first <= text.size(); ++first) {
        for (size_t second = first; second <= text.size(); ++second) {
            Utf8Stream stream;
            std::vector<std::string> parts = {stream.push(text.substr(0, first)),
                                              stream.push(text.substr(first, second - first)),
                                              stream.push(text.substr(second))};
            std::string joined;
            for (const std::string& part : parts) {
                EXPECT_EQ(unfinished_tail_bytes(part), 0U);
                // A part never starts in the middle of a character.
                if (!part.empty()) {
                    EXPECT_NE(static_cast<unsigned char>(part[0]) & 0xc0, 0x80);
                }
                joined += part;
            }
            EXPECT_EQ(joined, text);
            EXPECT_EQ(stream.finish(), "");
        }
    }
}

TEST(Utf8Stream, UnfinishedEndIsGivenByFinishOnce) {
    Utf8Stream stream;
    EXPECT_EQ(stream.push("ab\xf0\x9f\x90"), "ab");
    EXPECT_EQ(stream.finish(), "\xf0\x9f\x90");
    EXPECT_EQ(stream.finish(), "");
}

TEST(Utf8Stream, BytesThatCanNeverBecomeACharacterAreNotHeld) {
    const std::vector<std::string> hopeless = {"\x80",         "\xff",
                                               "\xc0",         "\xc1\x80",
                                               "\xf5",         "\xe0\x80",
                                               "\xed\xa0",     "\xf0\x80\x80",
                                               "\xf4\x90\x80", "\x80\x80\x80\x80",
                                               "a\xbf",        "\xe2\x82\xac\x80"};
    for (const std::string& bytes : hopeless) {
        Utf8Stream stream;
        EXPECT_EQ(stream.push(bytes), bytes);
        EXPECT_EQ(stream.finish(), "");
    }
}

TEST(Utf8Stream, TailLengths) {
    EXPECT_EQ(unfinished_tail_bytes(""), 0U);
    EXPECT_EQ(unfinished_tail_bytes("a"), 0U);
    EXPECT_EQ(unfinished_tail_bytes("\xc3"), 1U);
    EXPECT_EQ(unfinished_tail_bytes("\xe2\x82"), 2U);
    EXPECT_EQ(unfinished_tail_bytes("\xf0\x9f\x90"), 3U);
    EXPECT_EQ(unfinished_tail_bytes("\xf0\x9f\x90\x99"), 0U);
    EXPECT_EQ(unfinished_tail_bytes("\xe2\x82\xac\xc3"), 1U);
}

}  // namespace
}  // namespace kvasir::generate
