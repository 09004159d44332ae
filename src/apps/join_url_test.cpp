#include "apps/join_url.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvasir::apps {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(JoinUrl, WhatListensEverywhereIsReachedByTheMachinesOwnAddress) {
    const net::OwnAddresses none;
    const net::OwnAddresses both = {"192.0.2.7", "2001:db8::7"};
    const net::OwnAddresses only_v6 = {std::nullopt, "2001:db8::7"};
    const struct {
        const char* listen;
        const net::OwnAddresses& own;
        const char* host;
        bool is_guess;
    } cases[] = {
        {"127.0.0.1:1", both, "127.0.0.1", false}, {"[::1]:1", both, "[::1]", false},
        {"0.0.0.0:1", both, "192.0.2.7", true},    {"0.0.0.0:1", only_v6, "THIS-MACHINE", true},
        {"[::]:1", both, "[2001:db8::7]", true},   {"[::]:1", none, "THIS-MACHINE", true},
        {":1", both, "192.0.2.7", true},           {":1", only_v6, "[2001:db8::7]", true},
        {":1", none, "THIS-MACHINE", true},
    };
    for (const auto& test : cases) {
        SCOPED_TRACE(test.listen);
        const auto listen = *net::parse_listen(test.listen);
        const JoinUrl tls = join_url(listen, 8443, "https", test.own, "--public-url");
        EXPECT_EQ(tls.url, "https://" + std::string(test.host) + ":8443");
        const JoinUrl hub = join_url(listen, 80, "ws", test.own, "");
        EXPECT_EQ(hub.url, "ws://" + std::string(test.host) + ":80");
        if (test.is_guess) {
            EXPECT_THAT(tls.hint, HasSubstr("--public-url https://NAME:PORT"));
            EXPECT_THAT(hub.hint, AllOf(HasSubstr("below"), Not(HasSubstr("NAME:PORT"))));
        } else {
            EXPECT_EQ(tls.hint, "");
            EXPECT_EQ(hub.hint, "");
        }
    }
}

}  // namespace
}  // namespace kvasir::apps
