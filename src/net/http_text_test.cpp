#include "net/http_text.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "net/http.hpp"

namespace kvasir::net {
namespace {

TEST(HttpText, Ranges) {
    struct {
        const char* header;
        uint64_t size, offset, bytes;
    } const good[] = {
        {"bytes=0-0", 10, 0, 1},
        {"bytes=0-9", 10, 0, 10},
        {"bytes=0-10", 10, 0, 10},
        {"bytes=9-", 10, 9, 1},
        {"bytes=0-", 10, 0, 10},
        {"bytes=-1", 10, 9, 1},
        {"bytes=-10", 10, 0, 10},
        {"bytes=-11", 10, 0, 10},
        {" bytes = 2 - 3 ", 10, 2, 2},
        {"Bytes=2-3", 10, 2, 2},
        {"bytes=5-18446744073709551615", 10, 5, 5},
        {"bytes=5-99999999999999999999999", 10, 5, 5},
        {"bytes=-99999999999999999999999", 10, 0, 10},
        {"bytes=4294967296-4294967297", uint64_t{1} << 40, uint64_t{1} << 32, 2},
        {"bytes=0-", std::numeric_limits<uint64_t>::max(), 0, std::numeric_limits<uint64_t>::max()},
    };
    for (const auto& test : good) {
        const auto range = parse_range(test.header, test.size);
        ASSERT_TRUE(range && *range) << test.header;
        EXPECT_EQ((*range)->offset, test.offset) << test.header;
        EXPECT_EQ((*range)->bytes, test.bytes) << test.header;
    }
    for (const char* whole : {"", "  ", "items=0-5", "bytess=0-1", "=0-1"}) {
        const auto range = parse_range(whole, 10);
        ASSERT_TRUE(range) << whole;
        EXPECT_FALSE(*range) << whole;
    }
    struct {
        const char* header;
        uint64_t size;
        Errc code;
    } const bad[] = {
        {"bytes=10-", 10, Errc::kLimit},
        {"bytes=10-11", 10, Errc::kLimit},
        {"bytes=0-0", 0, Errc::kLimit},
        {"bytes=-0", 10, Errc::kLimit},
        {"bytes=-5", 0, Errc::kLimit},
        {"bytes=99999999999999999999999-", 10, Errc::kLimit},
        {"bytes=0-1,3-4", 10, Errc::kUnsupported},
        {"bytes=0-1,", 10, Errc::kUnsupported},
        {"bytes", 10, Errc::kBadInput},
        {"bytes=", 10, Errc::kBadInput},
        {"bytes=-", 10, Errc::kBadInput},
        {"bytes=5", 10, Errc::kBadInput},
        {"bytes=5-2", 10, Errc::kBadInput},
        {"bytes=a-b", 10, Errc::kBadInput},
        {"bytes=1-2-3", 10, Errc::kBadInput},
        {"bytes=+1-2", 10, Errc::kBadInput},
        {"bytes=0x1-2", 10, Errc::kBadInput},
        {"bytes=--1", 10, Errc::kBadInput},
        {"bytes 0-5", 10, Errc::kBadInput},
    };
    for (const auto& test : bad) {
        const auto range = parse_range(test.header, test.size);
        ASSERT_FALSE(range) << test.header;
        EXPECT_EQ(range.error().code, test.code) << test.header;
    }
}

TEST(HttpText, Targets) {
    const auto target = parse_target("/v1/a%20b/c+d?x=1&y=a%26b+c&x=2&empty&=v&&z=%00#frag");
    ASSERT_TRUE(target) << target.error().detail;
    EXPECT_EQ(target->path, "/v1/a b/c+d");
    EXPECT_EQ(target->query.at("x"), "1");
    EXPECT_EQ(target->query.at("y"), "a&b c");
    EXPECT_EQ(target->query.at("empty"), "");
    EXPECT_EQ(target->query.at(""), "v");
    EXPECT_EQ(target->query.at("z"), std::string(1, '\0'));
    EXPECT_EQ(parse_target("/")->path, "/");
    EXPECT_EQ(parse_target("/?a=b")->path, "/");
    EXPECT_EQ(parse_target("/a/")->path, "/a");
    EXPECT_EQ(parse_target("/..a/...")->path, "/..a/...");
    EXPECT_EQ(parse_target("/%C3%A4")->path, "/\xc3\xa4");
    for (const char* bad : {"",      "*",      "a",         "http://x/", "//",          "//a",
                            "/a//b", "/a//",   "/.",        "/..",       "/../",        "/a/../b",
                            "/a/..", "/a/./b", "/%2e%2e/a", "/%2E%2e",   "/a%2f..%2fb", "/a%2f%2fb",
                            "/%2f",  "/a%00b", "/a%0ab",    "/a%7f",     "/%",          "/%4",
                            "/%4g",  "/%%41",  "/a?x=%",    "/a?%zz=1",  "?a",          "#"}) {
        const auto result = parse_target(bad);
        ASSERT_FALSE(result) << bad << " gave " << result->path;
        EXPECT_EQ(result.error().code, Errc::kBadInput) << bad;
    }
}

TEST(HttpText, BearerTokens) {
    for (const char* header : {"Bearer abc.DEF-1_2~+/==", "bearer abc.DEF-1_2~+/==",
                               "BEARER   abc.DEF-1_2~+/== ", " Bearer abc.DEF-1_2~+/=="}) {
        EXPECT_EQ(parse_bearer(header), "abc.DEF-1_2~+/==") << header;
    }
    for (const char* header : {"", "Bearer", "Bearer ", "Basic abc", "Bearerabc", "Bearer a b",
                               "Bearer a,b", "Bearer \"a\"", "Bearer a\tb", "Bearer \xff"}) {
        EXPECT_EQ(parse_bearer(header), "") << header;
    }
    HttpRequest request;
    EXPECT_EQ(request.bearer(), "");
    request.headers["authorization"] = "Bearer x";
    EXPECT_EQ(request.bearer(), "x");
}

TEST(HttpText, ErrorsAsAnswers) {
    const HttpResponse answer = error_response({Errc::kBusy, "a \"quoted\"\n\xff\xfe text"});
    EXPECT_EQ(answer.status, 503);
    EXPECT_EQ(answer.content_type, "application/json");
    EXPECT_EQ(answer.body,
              "{\"error\":{\"code\":\"busy\",\"message\":\"a \\\"quoted\\\"\\n\xef\xbf\xbd"
              "\xef\xbf\xbd text\",\"retryable\":true}}\n");
    EXPECT_EQ(error_response({Errc::kNotFound, ""}).status, 404);
}

}  // namespace
}  // namespace kvasir::net
