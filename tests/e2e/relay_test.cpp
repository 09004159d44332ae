// `kvasir relay` as a program: what it prints, what it refuses, how it stops.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <arpa/inet.h>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "net/own_address.hpp"
#include "run_program.hpp"

namespace kvasir::e2e {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

std::vector<std::string> relay(std::vector<std::string> flags) {
    flags.insert(flags.begin(), {KVASIR_PROGRAM, "relay"});
    return flags;
}

// The port in "ws://127.0.0.1:PORT".
int port_of(const Program& program) {
    const std::string url = program.word_after("listening on ");
    return std::atoi(url.substr(url.rfind(':') + 1).c_str());
}

int connect_to(int port) {
    const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    EXPECT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    return fd;
}

std::string get(int port, const std::string& path) {
    const int fd = connect_to(port);
    const std::string text = "GET " + path + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    EXPECT_EQ(::send(fd, text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
    std::string answer;
    char buffer[4096];
    for (ssize_t got; (got = ::recv(fd, buffer, sizeof(buffer), 0)) > 0;) {
        answer.append(buffer, static_cast<size_t>(got));
    }
    ::close(fd);
    return answer;
}

TEST(Relay, ListensAnswersAndStopsAtSigterm) {
    Program program(relay({"--listen", "127.0.0.1:0", "--open"}));
    ASSERT_TRUE(program.wait_for("listening on ws://127.0.0.1:"));
    const int port = port_of(program);
    EXPECT_THAT(get(port, "/healthz"), HasSubstr("200 OK"));
    EXPECT_THAT(get(port, "/metrics"), HasSubstr("kvasir_relay_connections 0"));
    program.signal(SIGTERM);
    const Outcome outcome = program.wait(30);  // nobody is there to wait for
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
}

// Not that of the socket, which nobody elsewhere can dial.
TEST(Relay, SaysAnAddressThatOthersDial) {
    Program program(relay({"--listen", ":0", "--open"}));
    ASSERT_TRUE(program.wait_for("listening on ws://"));
    const auto own = net::own_addresses();
    const std::string host = own.v4 ? *own.v4 : own.v6 ? "[" + *own.v6 + "]" : "THIS-MACHINE";
    EXPECT_THAT(program.word_after("listening on "), StartsWith("ws://" + host + ":"));
    EXPECT_THAT(get(port_of(program), "/healthz"), HasSubstr("200 OK"));
}

TEST(Relay, SigtermTellsNodesToMoveAndWaitsTheSecondEndsAtOnce) {
    Program program(relay({"--listen", "127.0.0.1:0", "--open", "--drain-s", "3600"}));
    ASSERT_TRUE(program.wait_for("listening on "));
    Program node({KVASIR_RELAY_NODE, std::to_string(port_of(program))});
    ASSERT_TRUE(node.wait_for("attached"));
    program.signal(SIGTERM);
    ASSERT_TRUE(node.wait_for("move 3600000"));
    EXPECT_THAT(get(port_of(program), "/healthz"), HasSubstr("503"));  // still there
    EXPECT_TRUE(program.running());
    EXPECT_TRUE(node.running());
    program.signal(SIGTERM);
    EXPECT_EQ(program.wait(10).exit_code, 0);
    EXPECT_TRUE(node.wait_for("closed"));
}

TEST(Relay, DrainEndsWhenItsTimeIsOver) {
    Program program(relay({"--listen", "127.0.0.1:0", "--open", "--drain-s", "0"}));
    ASSERT_TRUE(program.wait_for("listening on "));
    Program node({KVASIR_RELAY_NODE, std::to_string(port_of(program))});
    ASSERT_TRUE(node.wait_for("attached"));
    program.signal(SIGTERM);
    EXPECT_TRUE(node.wait_for("move 0"));
    EXPECT_EQ(program.wait(30).exit_code, 0);  // five seconds of grace
    EXPECT_TRUE(node.wait_for("closed"));
}

TEST(Relay, DevTlsKeepsItsPin) {
    const auto folder =
        std::filesystem::temp_directory_path() / ("kvasir_relay_tls_" + std::to_string(::getpid()));
    std::string pins[2];
    for (std::string& pin : pins) {
        Program program(relay({"--listen", "127.0.0.1:0", "--open", "--dev-tls", folder.string()}));
        ASSERT_TRUE(program.wait_for("listening on wss://127.0.0.1:"));
        pin = program.word_after(" pin ");
        EXPECT_EQ(pin.size(), 64u);
    }
    EXPECT_EQ(pins[0], pins[1]);
    std::filesystem::remove_all(folder);
}

TEST(Relay, WhatPeopleDoWrong) {
    const auto file =
        std::filesystem::temp_directory_path() / ("kvasir_relay_key_" + std::to_string(::getpid()));
    std::ofstream(file) << "not a key\n";
    struct Case {
        std::vector<std::string> flags;
        int exit_code;
        std::string says;
    };
    const Case cases[] = {
        {{"--listen", "127.0.0.1:0"}, 2, "--market-key"},
        {{"--listen", "nonsense", "--open"}, 2, "nonsense"},
        {{"--listen", "127.0.0.1:0", "--market-key", "/nowhere"}, 2, "/nowhere"},
        {{"--listen", "127.0.0.1:0", "--market-key", file.string()}, 3, "first line"},
        {{"--listen", "127.0.0.1:0", "--open", "--tls-cert", "/nowhere", "--tls-key", "/nowhere"},
         4,
         "/nowhere"},
        {{"--listen", "127.0.0.1:0", "--open", "--tls-cert", "x"}, 2, "--tls-key"},
        {{"--listen", "127.0.0.1:0", "--open", "--silence-s", "5"}, 2, "--silence-s"},
        {{"--listen", "127.0.0.1:0", "--open", "--move-url", "elsewhere:1"}, 2, "--move-url"},
        {{"--listen", "127.0.0.1:0", "--open", "--dev-tls", file.string() + "_tls", "--move-url",
          "ws://elsewhere:1"},
         2,
         "wss://"},
    };
    for (const Case& one : cases) {
        const Outcome outcome = run_program(relay(one.flags));
        EXPECT_EQ(outcome.exit_code, one.exit_code) << one.says << ": " << outcome.err;
        EXPECT_THAT(outcome.err, HasSubstr(one.says));
    }
    std::filesystem::remove(file);
}

}  // namespace
}  // namespace kvasir::e2e
