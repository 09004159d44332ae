#include "apps/market_pins.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>

namespace kvasir::apps {
namespace {

using ::testing::HasSubstr;

Sha256 pin_of(uint8_t byte) {
    Sha256 pin = {};
    pin.fill(byte);
    return pin;
}

class MarketPinsTest : public ::testing::Test {
protected:
    MarketPinsTest() {
        std::string name = ::testing::TempDir() + "pins-XXXXXX";
        folder_ = ::mkdtemp(name.data());
    }
    ~MarketPinsTest() override { std::filesystem::remove_all(folder_); }

    std::string path() const { return folder_ + "/market.pins"; }
    MarketPins load() const { return MarketPins::load(folder_).value(); }
    void write(const std::string& text) const {
        std::ofstream(path()) << text;
        ::chmod(path().c_str(), 0600);
    }

    std::string folder_;
};

TEST_F(MarketPinsTest, AreKeptByOrigin) {
    MarketPins first = load();
    EXPECT_EQ(first.find("https://a.example"), std::nullopt);
    ASSERT_TRUE(first.keep("https://a.example", pin_of(1)));
    ASSERT_TRUE(first.keep("https://a.example:8443", pin_of(2)));
    ASSERT_TRUE(first.keep("https://[::1]:8443", pin_of(3)));
    for (const MarketPins& pins : {first, load()}) {
        EXPECT_EQ(pins.find("https://A.example:443"), pin_of(1));
        EXPECT_EQ(pins.find("https://a.example:8443"), pin_of(2));
        EXPECT_EQ(pins.find("https://[::1]:8443"), pin_of(3));
        EXPECT_EQ(pins.find("https://b.example"), std::nullopt);
        EXPECT_EQ(pins.find("http://a.example:443"), std::nullopt);
    }
}

TEST_F(MarketPinsTest, ANewOneReplacesTheOldOneAndNoneForgetsIt) {
    ASSERT_TRUE(load().keep("https://a.example", pin_of(1)));
    ASSERT_TRUE(load().keep("https://b.example", pin_of(2)));
    ASSERT_TRUE(load().keep("https://a.example", pin_of(3)));
    EXPECT_EQ(load().find("https://a.example"), pin_of(3));
    ASSERT_TRUE(load().keep("https://a.example", std::nullopt));
    EXPECT_EQ(load().find("https://a.example"), std::nullopt);
    EXPECT_EQ(load().find("https://b.example"), pin_of(2));
}

// Without TLS there is no key to recognise.
TEST_F(MarketPinsTest, AMarketWithoutTlsHasNone) {
    ASSERT_TRUE(load().keep("http://a.example", pin_of(1)));
    EXPECT_EQ(load().find("http://a.example"), std::nullopt);
    EXPECT_FALSE(std::filesystem::exists(path()));
}

TEST_F(MarketPinsTest, OnlyTheOwnerMayUseTheFile) {
    std::ofstream(path() + ".new") << "of a process that was killed";
    ASSERT_TRUE(load().keep("https://a.example", pin_of(1)));
    struct stat info = {};
    ASSERT_EQ(::stat(path().c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0600u);
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_),
                            std::filesystem::directory_iterator()),
              1);
    ::chmod(path().c_str(), 0666);  // anybody may have written into it
    const auto open = MarketPins::load(folder_);
    ASSERT_FALSE(open);
    EXPECT_EQ(open.error().code, Errc::kEnvironment);
    EXPECT_THAT(open.error().detail, HasSubstr("chmod 600"));
}

TEST_F(MarketPinsTest, HoldsSoManyAndForgetsTheOldest) {
    MarketPins pins = load();
    for (int i = 0; i <= 256; ++i)
        ASSERT_TRUE(pins.keep("https://h" + std::to_string(i) + ".example", pin_of(1)));
    EXPECT_EQ(load().find("https://h0.example"), std::nullopt);
    EXPECT_EQ(load().find("https://h1.example"), pin_of(1));
    EXPECT_EQ(load().find("https://h256.example"), pin_of(1));
}

TEST_F(MarketPinsTest, AFileThatIsNotOursIsAnError) {
    const std::string hex(64, 'a');
    write("https://a.example:443 " + hex);  // the last line's end may be missing
    EXPECT_EQ(load().find("https://a.example"), pin_of(0xaa));
    for (const std::string& text :
         {std::string("junk"), std::string("\n"), std::string("https://a.example:443"),
          "https://a.example:443 " + hex.substr(1), "https://a.example:443  " + hex,
          "https://a.example " + hex, "http://a.example:80 " + hex, " " + hex,
          std::string(1 << 20, 'a')}) {
        SCOPED_TRACE(text.substr(0, 100));
        write(text);
        const auto bad = MarketPins::load(folder_);
        ASSERT_FALSE(bad);
        EXPECT_EQ(bad.error().code, Errc::kBadInput);
        EXPECT_THAT(bad.error().detail, HasSubstr("market.pins"));
    }
}

}  // namespace
}  // namespace kvasir::apps
