#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "net/handshake.hpp"
#include "net/upgrade.hpp"

namespace kvasir::net {
namespace {

TEST(Endpoint, Urls) {
    const auto url = parse_url("ws://host:80");
    ASSERT_TRUE(url);
    EXPECT_EQ(url->host, "host");
    EXPECT_EQ(url->port, 80);
    EXPECT_EQ(url->path, "/kvasir");
    EXPECT_EQ(parse_url("ws://[::1]:65535/kvasir/x?y=1")->host, "::1");
    EXPECT_EQ(parse_url("ws://[::1]:65535/kvasir/x?y=1")->path, "/kvasir/x?y=1");
    EXPECT_EQ(parse_url("ws://a:1/")->path, "/kvasir");
    for (const auto& [text, tls, port] : {std::tuple("ws://a", false, 80),
                                          {"wss://a", true, 443},
                                          {"http://a", false, 80},
                                          {"https://a/", true, 443},
                                          {"wss://[::1]", true, 443},
                                          {"https://a:8443/kvasir/x", true, 8443}}) {
        const auto endpoint = parse_url(text);
        ASSERT_TRUE(endpoint) << text << ": " << endpoint.error().detail;
        EXPECT_EQ(endpoint->tls, tls) << text;
        EXPECT_EQ(endpoint->port, port) << text;
    }
    for (const char* bad : {"",
                            "ws:/",
                            "ws://",
                            "ftp://a:1",
                            "WS//a:1",
                            "a:1",
                            "wss://",
                            "https://:443",
                            "wss://user@a:1",
                            "wss://user:secret@a",
                            "ws://a?x",
                            "ws://a/#x",
                            "ws://a:",
                            "ws://a:x",
                            "ws://a:0",
                            "ws://a:65536",
                            "ws://a:99999999999",
                            "ws://a:-1",
                            "ws://:1",
                            "ws://a:1:2",
                            "ws://::1:2",
                            "ws://[::1]2",
                            "ws://[]:1",
                            "ws://a b:1",
                            "ws://a\r\nX: y:1",
                            "ws://a:1/x y",
                            "ws://a:1/\r\nX:y",
                            "ws://a: 1",
                            "ws://a:1 "}) {
        const auto result = parse_url(bad);
        ASSERT_FALSE(result) << bad;
        EXPECT_EQ(result.error().code, Errc::kUsage) << bad;
        EXPECT_EQ(result.error().detail.find('\n'), std::string::npos);
    }
}

TEST(Endpoint, ListenAddresses) {
    EXPECT_EQ(parse_listen(":0")->host, "");
    EXPECT_EQ(parse_listen("127.0.0.1:7777")->port, 7777);
    EXPECT_EQ(parse_listen("[::1]:5")->host, "::1");
    for (const char* bad : {"", "7777", "a", "::1:5", "ws://a:1", "a:b", "a:65536"}) {
        EXPECT_EQ(parse_listen(bad).error().code, Errc::kUsage) << bad;
    }
}

TEST(Handshake, AcceptKeyOfTheStandard) {
    EXPECT_EQ(websocket_accept("dGhlIHNhbXBsZSBub25jZQ=="), "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
    const std::string key = make_websocket_key();
    EXPECT_TRUE(valid_websocket_key(key)) << key;
    EXPECT_NE(key, make_websocket_key());
    for (const char* bad : {"", "dGhlIHNhbXBsZSBub25jZQ=", "dGhlIHNhbXBsZSBub25jZQ",
                            "dGhlIHNhbXBsZSBub25jZ===", "dGhlIHNhbXBsZSBub25j Q=="}) {
        EXPECT_FALSE(valid_websocket_key(bad)) << bad;
    }
    EXPECT_TRUE(valid_target("/kvasir"));
    EXPECT_TRUE(valid_target("/kvasir/a"));
    EXPECT_TRUE(valid_target("/kvasir?a"));
    EXPECT_FALSE(valid_target("/kvasirs"));
    EXPECT_FALSE(valid_target("/"));
}

}  // namespace
}  // namespace kvasir::net
