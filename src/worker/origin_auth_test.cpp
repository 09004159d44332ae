#include "worker/origin_auth.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

namespace kvasir::worker {
namespace {

const std::string kMarket = "https://market.example:8443";
const std::string kSecret = "Bearer hf_0123456789";

class OriginAuth : public ::testing::Test {
protected:
    void TearDown() override {
        for (const std::string& path : files_) ::unlink(path.c_str());
    }
    std::string file(const std::string& text, mode_t mode = 0600) {
        files_.push_back(::testing::TempDir() + "/kvasir-auth-" + std::to_string(::getpid()) + "-" +
                         std::to_string(files_.size()));
        std::ofstream(files_.back()) << text;
        ::chmod(files_.back().c_str(), mode);
        return files_.back();
    }
    static void expect(const std::vector<std::string>& flags, Errc code, const char* says) {
        const auto out = load_origin_auth(flags, kMarket);
        ASSERT_FALSE(out) << flags[0];
        EXPECT_EQ(out.error().code, code) << out.error().detail;
        EXPECT_NE(out.error().detail.find(says), std::string::npos) << out.error().detail;
        EXPECT_NE(out.error().detail.find(kOriginAuthFlag), std::string::npos);
        EXPECT_EQ(out.error().detail.find("hf_"), std::string::npos) << out.error().detail;
    }
    std::vector<std::string> files_;
};

TEST_F(OriginAuth, TheFirstLineIsTheHeader) {
    for (const char* end : {"", "\n", "\r\n", "\nsecond line\n"}) {
        const auto out = load_origin_auth({"https://hub.example=" + file(kSecret + end),
                                           "http://127.0.0.1:81=" + file("Basic YTpi")},
                                          kMarket);
        ASSERT_TRUE(out) << out.error().detail;
        EXPECT_EQ(out->flag, kOriginAuthFlag);
        ASSERT_EQ(out->origins.size(), 2u);
        EXPECT_EQ(out->origins[0].origin, "https://hub.example");
        EXPECT_EQ(out->origins[0].headers, (net::HeaderList{{"Authorization", kSecret}}));
        EXPECT_EQ(out->origins[1].headers, (net::HeaderList{{"Authorization", "Basic YTpi"}}));
    }
    const auto none = load_origin_auth({}, kMarket);
    ASSERT_TRUE(none);
    EXPECT_TRUE(none->origins.empty());
    EXPECT_EQ(none->flag, kOriginAuthFlag);
}

TEST_F(OriginAuth, FilesThatOthersMayUseOrThatAreNoHeader) {
    for (const mode_t mode : {0640u, 0604u, 0620u, 0601u}) {
        expect({"https://hub.example=" + file(kSecret, mode)}, Errc::kEnvironment, "chmod 600");
    }
    expect({"https://hub.example=/"}, Errc::kEnvironment, "chmod 600");
    expect({"https://hub.example=/no/such/file"}, Errc::kEnvironment, "/no/such/file");
    for (const std::string& text :
         std::vector<std::string>{"", "\n" + kSecret, "Bearer hf_\x01", "hf_\xc3\xa9",
                                  "Bearer hf_" + std::string(9000, 'a')}) {
        expect({"https://hub.example=" + file(text)}, Errc::kBadInput, "first line");
    }
    EXPECT_TRUE(load_origin_auth({"https://hub.example=" + file(std::string(8192, 'a'))}, kMarket));
    expect({"https://hub.example=" + file(std::string(8193, 'a'))}, Errc::kBadInput, "first line");
}

TEST_F(OriginAuth, Origins) {
    const std::string path = "=" + file(kSecret);
    for (const char* text : {"https://hub.example", "https://hub.example=", "=x"}) {
        expect({text}, Errc::kUsage, "ORIGIN=FILE");
    }
    expect({"hub.example" + path}, Errc::kUsage, "not a URL");
    expect({"https://hub.example/model" + path}, Errc::kUsage, "not for a path");
    expect({"http://hub.example" + path}, Errc::kUsage, "only https");
    expect({"https://hub.example" + path, "https://HUB.example:443/" + path}, Errc::kUsage,
           "given twice");
    expect({"https://Market.example:8443" + path}, Errc::kUsage, "is the market");
    // Another port of the market's machine is somebody else.
    EXPECT_TRUE(load_origin_auth({"https://market.example" + path}, kMarket));
}

}  // namespace
}  // namespace kvasir::worker
