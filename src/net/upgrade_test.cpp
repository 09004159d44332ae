#include "net/upgrade.hpp"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/check.hpp"
#include "net/handshake.hpp"
#include "net/test_frames.hpp"
#include "net/test_peer.hpp"

namespace kvasir::net {
namespace {

using namespace std::chrono_literals;
using testing::Bytes;
using testing::bytes_of;
using testing::connect_to;
using testing::control;
using testing::frame;
using testing::is_open;
using testing::pattern;

Deadline in(std::chrono::milliseconds time) {
    return Clock::now() + time;
}

// ---- a hub and raw sockets ----

// A listener that keeps the streams it is given.
class Hub {
public:
    explicit Hub(HandshakeLimits handshake = {}, const char* address = "127.0.0.1:0") {
        auto made = Listener::make(
            *parse_listen(address),
            [this](MessageStream stream, std::string peer) {
                const std::lock_guard lock(mu_);
                streams_.push_back(std::move(stream));
                peer_ = std::move(peer);
                ready_.notify_all();
            },
            handshake);
        KVASIR_CHECK(made.has_value());
        listener_ = std::move(*made);
    }
    std::optional<MessageStream> next(std::chrono::milliseconds time = 10s) {
        std::unique_lock lock(mu_);
        if (!ready_.wait_for(lock, time, [this] { return !streams_.empty(); })) return std::nullopt;
        MessageStream stream = std::move(streams_.front());
        streams_.pop_front();
        return stream;
    }
    std::string peer() {
        const std::lock_guard lock(mu_);
        return peer_;
    }
    uint16_t port() const { return listener_->port(); }
    Endpoint endpoint() const { return *parse_url("ws://127.0.0.1:" + std::to_string(port())); }
    void stop() { listener_.reset(); }

private:
    std::mutex mu_;
    std::condition_variable ready_;
    std::deque<MessageStream> streams_;
    std::string peer_;
    std::unique_ptr<Listener> listener_;
};

void send_text(int fd, std::string_view text) {
    (void)!::send(fd, text.data(), text.size(), MSG_NOSIGNAL);
}

// All until the end of the stream (or ten seconds of silence).
std::string read_to_end(int fd) {
    std::string all;
    char buffer[4096];
    while (true) {
        const ssize_t got = ::recv(fd, buffer, sizeof(buffer), 0);
        if (got <= 0) return all;
        all.append(buffer, static_cast<size_t>(got));
    }
}

std::string read_header(int fd) {
    std::string all;
    char c;
    while (!all.ends_with("\r\n\r\n") && ::recv(fd, &c, 1, 0) == 1) all += c;
    return all;
}

const std::string kRequest =
    "GET /kvasir HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Protocol: other, kvasir.1\r\n\r\n";

std::string text_of(const Bytes& bytes) {
    return {bytes.begin(), bytes.end()};
}
Bytes copy(std::span<const uint8_t> view) {
    return {view.begin(), view.end()};
}

TEST(Upgrade, DialAndListenTalk) {
    Hub hub;
    auto client = dial(hub.endpoint());
    ASSERT_TRUE(client) << client.error().detail;
    auto server = hub.next();
    ASSERT_TRUE(server);
    EXPECT_TRUE(hub.peer().starts_with("127.0.0.1:")) << hub.peer();
    ASSERT_TRUE(server->enqueue(bytes_of("server first")));
    EXPECT_EQ(copy(*client->receive(in(10s))), bytes_of("server first"));
    ASSERT_TRUE(client->enqueue(pattern(100000)));
    std::thread flusher([&] { EXPECT_TRUE(client->flush_until(in(10s))); });
    EXPECT_TRUE(copy(*server->receive(in(10s))) == pattern(100000));
    flusher.join();
    client->close();
    EXPECT_EQ(server->receive(in(10s)).error().code, Errc::kClosed);
}

TEST(Upgrade, DualStackAndNames) {
    Hub hub({}, ":0");
    for (const char* host : {"127.0.0.1", "localhost", "[::1]"}) {
        auto client =
            dial(*parse_url("ws://" + std::string(host) + ":" + std::to_string(hub.port())));
        if (!client && std::string(host) == "[::1]") continue;  // a machine without IPv6
        ASSERT_TRUE(client) << host << ": " << client.error().detail;
        EXPECT_TRUE(hub.next()) << host;
    }
}

// S2: [upgrade][role][hello][ping] cut at every pair of positions, all in one segment included.
TEST(Upgrade, FirstFramesWithTheUpgradeAtEveryPairOfCuts) {
    Hub hub;
    const std::string stream = kRequest + text_of(frame(bytes_of("W"), true)) +
                               text_of(frame(pattern(40), true)) +
                               text_of(control(wire::WsOpcode::kPing, "p", true));
    // Every pair near and behind the end of the request, and a grid before it.
    std::vector<size_t> cuts;
    for (size_t i = 1; i <= stream.size(); i += i + 12 < kRequest.size() ? 23 : 1)
        cuts.push_back(i);
    for (size_t a = 0; a < cuts.size(); ++a) {
        for (size_t b = a; b < cuts.size(); b += a % 4 == 0 ? 1 : 7) {
            UniqueFd raw = connect_to(hub.port());
            send_text(raw.get(), std::string_view(stream).substr(0, cuts[a]));
            if (b > a)
                send_text(raw.get(), std::string_view(stream).substr(cuts[a], cuts[b] - cuts[a]));
            send_text(raw.get(), std::string_view(stream).substr(cuts[b]));
            auto server = hub.next();
            ASSERT_TRUE(server) << cuts[a] << ", " << cuts[b];
            auto message = server->receive(in(10s));
            ASSERT_TRUE(message) << cuts[a] << ", " << cuts[b] << ": " << message.error().detail;
            ASSERT_EQ(copy(*message), bytes_of("W"));
            message = server->receive(in(10s));
            ASSERT_TRUE(message) << cuts[a] << ", " << cuts[b];
            ASSERT_EQ(copy(*message), pattern(40));
            ::shutdown(raw.get(), SHUT_WR);
            EXPECT_EQ(server->receive(in(10s)).error().code, Errc::kClosed);
            const std::string answer = read_to_end(raw.get());
            ASSERT_TRUE(answer.starts_with("HTTP/1.1 101 ")) << answer;
            ASSERT_NE(answer.find("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="), std::string::npos);
            ASSERT_NE(answer.find("Sec-WebSocket-Protocol: kvasir.1"), std::string::npos);
            ASSERT_NE(answer.find("\r\n\r\n\x8a\x01p"), std::string::npos)
                << cuts[a] << ", " << cuts[b];
        }
    }
}

// A raw server that answers one connection with what `answer` makes of the request's key.
class RawServer {
public:
    explicit RawServer(std::function<void(int fd, const std::string& accept)> serve) {
        listener_.reset(::socket(AF_INET, SOCK_STREAM, 0));
        sockaddr_in address = {};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t size = sizeof(address);
        auto* plain = reinterpret_cast<sockaddr*>(&address);
        KVASIR_CHECK(::bind(listener_.get(), plain, size) == 0);
        KVASIR_CHECK(::listen(listener_.get(), 8) == 0);
        KVASIR_CHECK(::getsockname(listener_.get(), plain, &size) == 0);
        port_ = ntohs(address.sin_port);
        thread_ = std::thread([this, serve = std::move(serve)] {
            while (true) {
                UniqueFd fd(::accept(listener_.get(), nullptr, nullptr));
                if (!fd) return;
                const std::string request = read_header(fd.get());
                const std::string name = "Sec-WebSocket-Key: ";
                const size_t at = request.find(name);
                if (at == std::string::npos) continue;
                serve(fd.get(), websocket_accept(request.substr(at + name.size(), 24)));
            }
        });
    }
    ~RawServer() {
        ::shutdown(listener_.get(), SHUT_RDWR);
        thread_.join();
    }
    Endpoint endpoint() const { return *parse_url("ws://127.0.0.1:" + std::to_string(port_)); }

private:
    UniqueFd listener_;
    uint16_t port_ = 0;
    std::thread thread_;
};

std::string response(const std::string& accept) {
    return "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
           "Sec-WebSocket-Accept: " +
           accept + "\r\nSec-WebSocket-Protocol: kvasir.1\r\n\r\n";
}

TEST(Upgrade, ServerFirstBytesAtEveryCut) {
    const std::string behind =
        text_of(frame(pattern(200), false)) + text_of(frame(bytes_of("marker"), false));
    std::atomic<size_t> next_cut = 0;
    const size_t length =
        response(websocket_accept("dGhlIHNhbXBsZSBub25jZQ==")).size() + behind.size();
    RawServer server([&](int fd, const std::string& accept) {
        const std::string all = response(accept) + behind;
        const size_t cut = next_cut;
        send_text(fd, std::string_view(all).substr(0, cut));
        send_text(fd, std::string_view(all).substr(cut));
        char byte;
        (void)!::recv(fd, &byte, 1, 0);  // until the client goes
    });
    for (size_t cut = 0; cut <= length; cut += cut + 30 < length - behind.size() ? 13 : 1) {
        next_cut = cut;
        auto client = dial(server.endpoint());
        ASSERT_TRUE(client) << cut << ": " << client.error().detail;
        auto message = client->receive(in(10s));
        ASSERT_TRUE(message) << cut << ": " << message.error().detail;
        ASSERT_TRUE(copy(*message) == pattern(200)) << cut;
        message = client->receive(in(10s));
        ASSERT_TRUE(message) << cut;
        ASSERT_EQ(copy(*message), bytes_of("marker")) << cut;
    }
}

TEST(Upgrade, ServersThatAreNoHubAreRefusedWithAReason) {
    const std::pair<std::string, std::string> cases[] = {
        {"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n", "403"},
        {"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", "200"},
        {"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
         "Upgrade"},
        {"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
         "AAAA\r\n\r\n",
         "Sec-WebSocket-Accept"},
        {"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
         "@\r\n\r\n",
         "kvasir.1"},
        {"SSH-2.0-OpenSSH_9.2\r\n", "not HTTP"},
        {"HTTP/1.1 101 X\r\nX: " + std::string(20000, 'x'), "answer"},
        {"HTTP/1.1 500 \x1b[31mred\r\n\r\n", ""},
        {"", "closed"},
    };
    for (const auto& [text, reason] : cases) {
        RawServer server([&text](int fd, const std::string& accept) {
            std::string answer = text;
            if (const size_t at = answer.find('@'); at != std::string::npos)
                answer.replace(at, 1, accept);
            send_text(fd, answer);
        });
        const auto client = dial(server.endpoint());
        ASSERT_FALSE(client) << text;
        EXPECT_TRUE(client.error().code == Errc::kProtocol || client.error().code == Errc::kIo);
        EXPECT_NE(client.error().detail.find(reason), std::string::npos)
            << text.substr(0, 60) << ": " << client.error().detail;
        EXPECT_EQ(client.error().detail.find('\x1b'), std::string::npos);
        EXPECT_NE(client.error().detail.find("127.0.0.1:"), std::string::npos);
    }
}

TEST(Upgrade, SilentServersAndRefusedPortsEndInTime) {
    HandshakeLimits limits;
    limits.deadline = 150ms;
    std::mutex mu;
    std::condition_variable never;
    bool stop = false;
    RawServer server([&](int, const std::string&) {
        std::unique_lock lock(mu);
        never.wait(lock, [&] { return stop; });
    });
    const auto start = Clock::now();
    const auto silent = dial(server.endpoint(), limits);
    ASSERT_FALSE(silent);
    EXPECT_EQ(silent.error().code, Errc::kTimeout) << silent.error().detail;
    EXPECT_GE(Clock::now() - start, 140ms);
    EXPECT_LT(Clock::now() - start, 3s);
    {
        const std::lock_guard lock(mu);
        stop = true;
    }
    never.notify_all();

    uint16_t port = 0;
    { port = Hub().port(); }
    const auto refused = dial(*parse_url("ws://127.0.0.1:" + std::to_string(port)));
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, Errc::kIo);
    const auto unknown = dial(*parse_url("ws://no-such-host.invalid:1"), limits);
    ASSERT_FALSE(unknown);
    EXPECT_TRUE(unknown.error().code == Errc::kIo || unknown.error().code == Errc::kTimeout);
}

struct PlainCase {
    const char* name;
    std::string request;
    const char* status;  // "": closed without an answer
};

std::string without(const std::string& line) {
    std::string request = kRequest;
    const size_t at = request.find(line);
    KVASIR_CHECK(at != std::string::npos);
    request.erase(at, request.find("\r\n", at) + 2 - at);
    return request;
}

std::string with(const std::string& from, const std::string& to) {
    std::string request = kRequest;
    const size_t at = request.find(from);
    KVASIR_CHECK(at != std::string::npos);
    return request.replace(at, from.size(), to);
}

TEST(Upgrade, WhateverElseArrivesGetsItsAnswer) {
    const PlainCase cases[] = {
        {"health", "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP/1.1 200 "},
        {"health 1.0", "GET /healthz HTTP/1.0\r\n\r\n", "HTTP/1.1 200 "},
        {"browser", "GET / HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP/1.1 426 "},
        {"post", "POST /kvasir HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc",
         "HTTP/1.1 426 "},
        {"path", with("/kvasir", "/other"), "HTTP/1.1 404 "},
        {"version", with("Version: 13", "Version: 8"), "HTTP/1.1 426 "},
        {"no version", without("Sec-WebSocket-Version"), "HTTP/1.1 426 "},
        {"no key", without("Sec-WebSocket-Key"), "HTTP/1.1 400 "},
        {"bad key", with("dGhl", "d hl"), "HTTP/1.1 400 "},
        {"no subprotocol", without("Sec-WebSocket-Protocol"), "HTTP/1.1 400 "},
        {"other subprotocol", with("kvasir.1", "kvasir.2"), "HTTP/1.1 400 "},
        {"body", with("Host: x", "Content-Length: 5"), "HTTP/1.1 400 "},
        {"HTTP/1.0", with("HTTP/1.1", "HTTP/1.0"), "HTTP/1.1 400 "},
        {"post upgrade", with("GET", "PUT"), "HTTP/1.1 400 "},
        {"no connection", without("Connection"), "HTTP/1.1 426 "},
        {"long header", "GET / HTTP/1.1\r\nX: " + std::string(20000, 'x') + "\r\n\r\n",
         "HTTP/1.1 431 "},
        {"long line", "GET /" + std::string(20000, 'x'), "HTTP/1.1 431 "},
        {"tls", std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11), ""},
        {"garbage", std::string("\x00\xff\x82\x80G\r\n\r\n", 9), ""},
        {"websocket at once", text_of(frame(bytes_of("W"), true)), ""},
        {"ssh", "SSH-2.0-x\r\n\r\n", ""},
    };
    Hub hub;
    for (const PlainCase& test : cases) {
        UniqueFd raw = connect_to(hub.port());
        send_text(raw.get(), test.request);
        const std::string answer = read_to_end(raw.get());
        if (*test.status == '\0') {
            EXPECT_EQ(answer, "") << test.name;
        } else {
            EXPECT_TRUE(answer.starts_with(test.status)) << test.name << ": " << answer;
        }
    }
    UniqueFd raw = connect_to(hub.port());
    send_text(raw.get(), "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n");
    EXPECT_TRUE(read_to_end(raw.get()).ends_with("\r\n\r\nok\n"));
    EXPECT_FALSE(hub.next(0ms)) << "a stream was handed over";
    EXPECT_TRUE(dial(hub.endpoint())) << "the hub no longer works";
}

TEST(Upgrade, DrippingHandshakesEndAtTheDeadlineAndOthersGoOn) {
    HandshakeLimits limits;
    limits.deadline = 800ms;
    Hub hub(limits);
    const auto start = Clock::now();
    UniqueFd silent = connect_to(hub.port());
    UniqueFd dripping = connect_to(hub.port());
    std::thread drip([fd = dripping.get()] {
        for (size_t i = 0; i < kRequest.size(); ++i) {
            if (::send(fd, &kRequest[i], 1, MSG_NOSIGNAL) != 1) return;
            // tidy: sleep, a peer that drips its bytes is what is tested
            std::this_thread::sleep_for(50ms);
        }
    });
    EXPECT_TRUE(dial(hub.endpoint()));
    EXPECT_TRUE(hub.next());
    EXPECT_EQ(read_to_end(silent.get()), "");
    EXPECT_EQ(read_to_end(dripping.get()), "");
    drip.join();
    EXPECT_LT(Clock::now() - start, 5s);
    EXPECT_FALSE(hub.next(0ms));
}

TEST(Upgrade, ASilentConnectionGivesItsPlaceToOneOfTheSameAddress) {
    HandshakeLimits limits;
    limits.pending_per_address_max = 3;
    limits.deadline = limits.patience = 30s;
    Hub hub(limits);
    const auto start = Clock::now();
    UniqueFd speaking = connect_to(hub.port());  // older than the silent ones
    send_text(speaking.get(), kRequest.substr(0, 20));
    std::vector<UniqueFd> silent;
    for (int i = 0; i < 2; ++i) silent.push_back(connect_to(hub.port()));
    EXPECT_TRUE(dial(hub.endpoint()));
    EXPECT_TRUE(hub.next());
    EXPECT_EQ(read_to_end(silent[0].get()), "");
    EXPECT_TRUE(is_open(silent[1].get()));
    send_text(speaking.get(), kRequest.substr(20));
    EXPECT_TRUE(read_header(speaking.get()).starts_with("HTTP/1.1 101"));
    // Who is in the middle of its request is not sent away, not for one more.
    std::vector<UniqueFd> busy;
    for (int i = 0; i < 2; ++i) {
        busy.push_back(connect_to(hub.port()));
        send_text(busy.back().get(), "GET");
    }
    UniqueFd third = connect_to(hub.port());  // takes the last silent place
    send_text(third.get(), "GET");
    EXPECT_EQ(read_to_end(silent[1].get()), "");
    UniqueFd fourth = connect_to(hub.port());
    EXPECT_EQ(read_to_end(fourth.get()), "");
    EXPECT_LT(Clock::now() - start, 5s);
    for (const UniqueFd& fd : busy) EXPECT_TRUE(is_open(fd.get()));
    EXPECT_TRUE(is_open(third.get()));
}

TEST(Upgrade, ASlowHandshakeGivesItsPlaceOnceItIsBeyondPatience) {
    HandshakeLimits limits;
    limits.pending_per_address_max = 2;
    limits.deadline = 30s;
    limits.patience = 100ms;
    Hub hub(limits);
    std::vector<UniqueFd> slow;
    for (int i = 0; i < 2; ++i) {
        slow.push_back(connect_to(hub.port()));
        send_text(slow.back().get(), "GET");
    }
    const auto start = Clock::now();
    while (!dial(hub.endpoint()) && Clock::now() - start < 5s) {
    }
    EXPECT_TRUE(hub.next());
    EXPECT_LT(Clock::now() - start, 5s);
    EXPECT_EQ(read_to_end(slow[0].get()), "");
    EXPECT_TRUE(is_open(slow[1].get()));
}

// Silent ones from everywhere: whoever has most of them makes room for a good client.
TEST(Upgrade, WhenAllPlacesAreTakenTheOldestSilentConnectionGoes) {
    HandshakeLimits limits;
    limits.pending_max = 5;
    limits.deadline = 30s;
    Hub hub(limits);
    UniqueFd alone = connect_to(hub.port(), "127.0.0.2");
    std::vector<UniqueFd> many;
    for (int i = 0; i < 4; ++i) many.push_back(connect_to(hub.port(), "127.0.0.3"));
    const auto start = Clock::now();
    EXPECT_TRUE(dial(hub.endpoint()));
    EXPECT_TRUE(hub.next());
    EXPECT_LT(Clock::now() - start, 2s);
    EXPECT_EQ(read_to_end(many[0].get()), "");
    for (int i = 1; i < 4; ++i) EXPECT_TRUE(is_open(many[static_cast<size_t>(i)].get()));
    EXPECT_TRUE(is_open(alone.get()));
    // Taken again, and nobody waits: nobody is sent away.
    many.push_back(connect_to(hub.port(), "127.0.0.3"));
    EXPECT_FALSE(hub.next(300ms));
    EXPECT_TRUE(is_open(many[1].get()));
}

// All good and all at once, as after a restart of the hub: they wait for places, none is dropped.
TEST(Upgrade, ACrowdOfGoodClientsIsServedWhole) {
    HandshakeLimits limits;
    limits.pending_max = 2;
    limits.pending_per_address_max = 1000;
    Hub hub(limits);
    std::atomic<int> joined{0};
    std::vector<std::thread> clients;
    for (int i = 0; i < 60; ++i) {
        clients.emplace_back([&] {
            if (dial(hub.endpoint())) ++joined;
        });
    }
    for (std::thread& client : clients) client.join();
    EXPECT_EQ(joined, 60);
}

TEST(Upgrade, ListenerStopsWithHandshakesUnderWay) {
    Hub hub;
    std::vector<UniqueFd> raws;
    for (int i = 0; i < 20; ++i) {
        raws.push_back(connect_to(hub.port()));
        send_text(raws.back().get(), "GET /kv");
    }
    auto client = dial(hub.endpoint());
    ASSERT_TRUE(client);
    auto server = hub.next();
    ASSERT_TRUE(server);
    const auto start = Clock::now();
    hub.stop();
    EXPECT_LT(Clock::now() - start, 3s);
    for (UniqueFd& raw : raws) EXPECT_EQ(read_to_end(raw.get()), "");
    // A stream that was handed over lives on.
    ASSERT_TRUE(client->enqueue(bytes_of("x")));
    EXPECT_TRUE(server->receive(in(10s)));
}

TEST(Upgrade, AddressesThatCannotBeListenedOn) {
    Hub hub;
    const auto ignore = [](MessageStream, std::string) {};
    const auto taken =
        Listener::make(*parse_listen("127.0.0.1:" + std::to_string(hub.port())), ignore);
    ASSERT_FALSE(taken);
    EXPECT_EQ(taken.error().code, Errc::kEnvironment);
    EXPECT_NE(taken.error().detail.find(std::to_string(hub.port())), std::string::npos);
    EXPECT_NE(taken.error().detail.find("choose another port"), std::string::npos);
    EXPECT_EQ(Listener::make(*parse_listen("no.such.host:1"), ignore).error().code, Errc::kUsage);
    EXPECT_EQ(Listener::make(*parse_listen("203.0.113.1:1"), ignore).error().code,
              Errc::kEnvironment);
    const uint16_t port = hub.port();
    auto client = dial(hub.endpoint());  // leaves a socket in TIME_WAIT behind
    hub.stop();
    client->close();
    EXPECT_TRUE(Listener::make(*parse_listen("127.0.0.1:" + std::to_string(port)), ignore));
}

// Out of descriptors: the listener neither spins nor dies, and serves again when there are some.
TEST(Upgrade, NoDescriptorsLeftDoesNotSpin) {
    Hub hub;
    UniqueFd waiting = connect_to(hub.port());
    rlimit before = {};
    ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
    UniqueFd extra(::socket(AF_INET, SOCK_STREAM, 0));
    // tidy: sleep, the connection above must have been accepted, which nobody can see from here
    std::this_thread::sleep_for(20ms);
    rlimit none = before;
    none.rlim_cur = 3;
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(hub.port());
    ASSERT_EQ(::connect(extra.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    const auto cpu = [] {
        timespec time = {};
        ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
        return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
    };
    const auto cpu_before = cpu();
    // tidy: sleep, only time shows that the listener does not spin
    std::this_thread::sleep_for(500ms);
    const auto cpu_used = cpu() - cpu_before;
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
    EXPECT_LT(cpu_used, 100ms);
    send_text(extra.get(), kRequest);
    EXPECT_TRUE(read_header(extra.get()).starts_with("HTTP/1.1 101"));
    EXPECT_TRUE(hub.next());
}

}  // namespace
}  // namespace kvasir::net
