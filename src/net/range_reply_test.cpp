// The pure rules of the HTTP client: URLs and their origins, hiding secrets, replies to ranges.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include "net/http_url.hpp"
#include "net/range_reply.hpp"

namespace kvasir::net {
namespace {

std::string origin_of(std::string_view text) {
    const auto url = HttpUrl::parse(text);
    return url ? url->origin() : "refused";
}

TEST(HttpUrl, Origins) {
    EXPECT_EQ(origin_of("http://Hub.Example/a"), "http://hub.example:80");
    EXPECT_EQ(origin_of("HTTPS://hub.example/"), "https://hub.example:443");
    EXPECT_EQ(origin_of("https://hub.example:443"), "https://hub.example:443");
    EXPECT_EQ(origin_of("http://hub.example:0080/"), "http://hub.example:80");
    EXPECT_EQ(origin_of("http://[::1]:8080/"), "http://[::1]:8080");
    const std::string hub = origin_of("https://hub.example/");
    for (const char* other :
         {"http://hub.example/", "https://hub.example:444/", "https://hub.example.evil.org/",
          "https://evilhub.example/", "https://a.hub.example/", "https://hub.example./",
          "https://evil.org/hub.example", "https://evil.org/?https://hub.example",
          "https://evil.org#https://hub.example/"}) {
        EXPECT_NE(origin_of(other), hub) << other;
        EXPECT_NE(origin_of(other), "refused") << other;
    }
    for (const char* bad : {"https://hub.example@evil.org/", "https://a:b@hub.example/", "hub/x",
                            "https:////x", "mailto:a@b", "https://hub.example:65536/", "",
                            "https://hub.example:x/", "https://hub\nexample/"}) {
        EXPECT_EQ(origin_of(bad), "refused") << bad;
    }
}

TEST(HttpUrl, ShownWithoutQueryAndFragment) {
    const auto url = HttpUrl::parse("https://hub.example/a%20b?token=secret#part");
    ASSERT_TRUE(url);
    EXPECT_EQ(url->shown(), "https://hub.example/a%20b");
    EXPECT_EQ(url->query(), "token=secret");
    EXPECT_EQ(url->text(), "https://hub.example/a%20b?token=secret");
}

TEST(HttpUrl, Following) {
    const auto base = HttpUrl::parse("https://hub.example/a/b?c=d");
    ASSERT_TRUE(base);
    const std::pair<const char*, const char*> places[] = {
        {"/x", "https://hub.example/x"},
        {"x", "https://hub.example/a/x"},
        {"../x", "https://hub.example/x"},
        {"?e", "https://hub.example/a/b?e"},
        {"//cdn.example/x", "https://cdn.example/x"},
        {"https://user:pw@cdn.example/x#y", "https://cdn.example/x"},
        {"/sp ace", "https://hub.example/sp%20ace"},
    };
    for (const auto& [location, expected] : places) {
        const auto next = base->follow(location);
        ASSERT_TRUE(next) << location;
        EXPECT_EQ(next->text(), expected);
    }
    EXPECT_EQ(base->follow("http://hub.example/").error().code, Errc::kDenied);
    for (const char* bad : {"", "ftp://a/", "file:///x", "https://", "/x\r\nY: z", "data:x"}) {
        const auto next = base->follow(bad);
        ASSERT_FALSE(next) << bad;
        EXPECT_EQ(next.error().code, Errc::kUnsupported) << bad;
    }
}

TEST(Redactor, HidesWhatItKnowsAndWhatLooksLikeAKey) {
    Redactor redactor;
    redactor.add_header_value("Bearer tok-12345");
    redactor.add_query("X-Sig=abc%2Fdef%3D&Expires=170000&a=1");
    const auto clean = [&](std::string_view text) { return redactor.clean(text, 300); };
    EXPECT_EQ(clean("Bearer tok-12345!"), "[hidden]!");
    EXPECT_EQ(clean("Bearer is missing"), "Bearer is missing");
    EXPECT_EQ(clean("got tok-12345tok-12345"), "got [hidden][hidden]");
    EXPECT_EQ(clean("abc/def= abc%2Fdef%3D 170000"), "[hidden] [hidden] [hidden]");
    EXPECT_EQ(clean("SignatureDoesNotMatch: the request has expired"),
              "SignatureDoesNotMatch: the request has expired");
    EXPECT_EQ(clean("key=" + std::string(40, 'f') + "; rest"), "[hidden]; rest");
    EXPECT_EQ(clean("a\x1b[2J\nb"), "a?[2J?b");
    const std::string host = "a-very-long-name-of-a-content-network.example.org";
    EXPECT_EQ(redactor.hide(host + " tok-12345"), host + " [hidden]");
    // What the end of a cut text shows may be the beginning of a secret.
    const std::string words = "a b c d e f g h i j k l m n o p q r s t u v w x y z ";
    EXPECT_EQ(redactor.clean(words + words + "tok-123", 300, true).find("tok"), std::string::npos);
    EXPECT_TRUE(redactor.clean(words + words + "tok-123", 300, true).starts_with(words));
    rc::check("no part of a longer secret survives", [] {
        const auto secret =
            *rc::gen::container<std::string>(*rc::gen::inRange(4, 60), rc::gen::inRange('!', '~'));
        const auto around = *rc::gen::container<std::string>(rc::gen::inRange(' ', '~'));
        Redactor one;
        one.add_header_value(secret);
        RC_ASSERT(one.clean(around + secret + around, 4000).find(secret) == std::string::npos ||
                  std::string("[hidden]").find(secret) != std::string::npos);
    });
}

TEST(RangeReply, ContentRange) {
    const auto range = parse_content_range("bytes 5-9/10");
    ASSERT_TRUE(range);
    EXPECT_EQ(range->first, 5u);
    EXPECT_EQ(range->last, 9u);
    EXPECT_EQ(range->total, 10u);
    EXPECT_FALSE(parse_content_range("Bytes  0-0/*")->total);
    EXPECT_EQ(parse_content_range("bytes 4294967296-751619276799/751619276800")->first, 1ull << 32);
    for (const char* bad :
         {"", "bytes", "bytes ", "bytes 1-2", "bytes 1/2", "bytes -2/3", "bytes 1-/3",
          "bytes 2-1/3", "bytes 1-3/3", "bytes 1-2/", "bytes 1-2/x", "bytes 1-2/3,4-5/6",
          "bytes 1 -2/3", "bytes 0x1-2/3", "bytes */3", "items 1-2/3", "bytes=1-2/3",
          "bytes 1-18446744073709551615/*", "bytes 1-2/18446744073709551616"}) {
        EXPECT_FALSE(parse_content_range(bad)) << bad;
    }
    rc::check("any text is read or refused",
              [](const std::string& text) { parse_content_range("bytes " + text); });
    rc::check("what is written is read", [] {
        const uint64_t first = *rc::gen::inRange<uint64_t>(0, UINT64_MAX / 2);
        const uint64_t bytes = *rc::gen::inRange<uint64_t>(1, UINT64_MAX / 4);
        const auto read = parse_content_range("bytes " + std::to_string(first) + "-" +
                                              std::to_string(first + bytes - 1) + "/" +
                                              std::to_string(first + bytes));
        RC_ASSERT(read && read->first == first && read->last == first + bytes - 1 &&
                  read->total == first + bytes);
    });
}

TEST(RangeReply, RetryAfter) {
    using std::chrono::seconds;
    const std::time_t now = 784111777;  // Sun, 06 Nov 1994 08:49:37 GMT
    EXPECT_EQ(parse_retry_after("120", now), seconds(120));
    EXPECT_EQ(parse_retry_after("0", now), seconds(0));
    EXPECT_EQ(parse_retry_after("Sun, 06 Nov 1994 08:50:37 GMT", now), seconds(60));
    EXPECT_EQ(parse_retry_after("Sunday, 06-Nov-94 08:49:47 GMT", now), seconds(10));
    EXPECT_EQ(parse_retry_after("Sun Nov  6 08:49:38 1994", now), seconds(1));
    EXPECT_EQ(parse_retry_after("Sun, 06 Nov 1994 08:49:00 GMT", now), seconds(0));
    EXPECT_GT(*parse_retry_after("18446744073709551615", now), seconds(1 << 28));
    for (const char* odd : {"", "soon", "-1", "1.5 parsecs"}) {
        EXPECT_FALSE(parse_retry_after(odd, now)) << odd;
    }
}

TEST(RangeReply, ValidatorsAgree) {
    const auto of = [](HeaderList headers) { return Validators::of({206, std::move(headers)}); };
    EXPECT_EQ(of({{"etag", "W/\"AbC\""}}).etag, "abc");
    EXPECT_EQ(of({{"etag", "abc"}}).etag, "abc");
    EXPECT_EQ(of({}).etag, "");
    Validators known = of({});
    EXPECT_TRUE(known.agree(of({{"last-modified", "x"}})));
    EXPECT_FALSE(known.agree(of({{"last-modified", "y"}})));
    EXPECT_TRUE(known.agree(of({{"last-modified", "x"}, {"etag", "\"1\""}})));
    EXPECT_TRUE(known.agree(of({{"last-modified", "y"}, {"etag", "1"}})));  // tags decide
    EXPECT_FALSE(known.agree(of({{"etag", "2"}})));
}

}  // namespace
}  // namespace kvasir::net
