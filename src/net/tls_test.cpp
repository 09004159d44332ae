#include "net/tls.hpp"

#include <gtest/gtest.h>
#include <openssl/ssl.h>
#include <sys/stat.h>

#include <condition_variable>
#include <deque>
#include <fstream>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "net/test_frames.hpp"
#include "net/test_peer.hpp"
#include "net/upgrade.hpp"

namespace kvasir::net {
namespace {

using namespace std::chrono_literals;
using testing::Bytes;
using testing::bytes_of;
using testing::control;
using testing::frame;
using testing::pattern;
using testing::RawPeer;
using testing::TestFolder;
using testing::TestTls;
using testing::transport_pair;

Deadline in(std::chrono::milliseconds time) {
    return Clock::now() + time;
}

Bytes copy(std::span<const uint8_t> view) {
    return {view.begin(), view.end()};
}

std::string text_of(const Bytes& bytes) {
    return {bytes.begin(), bytes.end()};
}

// A listener over TLS that keeps the streams it is given.
class TlsHub {
public:
    explicit TlsHub(std::shared_ptr<const TlsServer> tls = TestTls::get().server,
                    HandshakeLimits handshake = {}) {
        ListenerOptions options;
        options.handshake = handshake;
        options.tls = std::move(tls);
        listener_ = Listener::make(
                        *parse_listen("127.0.0.1:0"),
                        [this](MessageStream stream, const std::string&) {
                            const std::lock_guard lock(mu_);
                            streams_.push_back(std::move(stream));
                            ready_.notify_all();
                        },
                        std::move(options))
                        .value();
    }
    std::optional<MessageStream> next(std::chrono::milliseconds time = 10s) {
        std::unique_lock lock(mu_);
        if (!ready_.wait_for(lock, time, [this] { return !streams_.empty(); })) return std::nullopt;
        MessageStream stream = std::move(streams_.front());
        streams_.pop_front();
        return stream;
    }
    uint16_t port() const { return listener_->port(); }
    Endpoint endpoint(const std::string& host = "127.0.0.1") const {
        return *parse_url("wss://" + host + ":" + std::to_string(port()));
    }

private:
    std::mutex mu_;
    std::condition_variable ready_;
    std::deque<MessageStream> streams_;
    std::unique_ptr<Listener> listener_;
};

const std::string kRequest =
    "GET /kvasir HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Protocol: kvasir.1\r\n\r\n";

// ---- identities ----

TEST(Tls, SelfSignedIsMadeOnceAndItsKeyStays) {
    const TestFolder folder;
    const std::string inner = folder.path() + "/made/here";
    const auto first = TlsServer::self_signed(inner);
    ASSERT_TRUE(first) << first.error().detail;
    struct stat info = {};
    ASSERT_EQ(::stat((inner + "/dev-key.pem").c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0600u);
    const auto read = [&inner](const char* name) {
        std::ifstream file(inner + name);
        return std::string(std::istreambuf_iterator<char>(file), {});
    };
    const std::string certificate = read("/dev-cert.pem");
    const auto again = TlsServer::self_signed(inner);
    ASSERT_TRUE(again);
    EXPECT_EQ((*again)->pin(), (*first)->pin());
    EXPECT_EQ(read("/dev-cert.pem"), certificate) << "it was made anew although it is good";

    // About to expire, or gone: a new certificate of the same key.
    const CertificateFiles files{inner + "/dev-cert.pem", inner + "/dev-key.pem"};
    ASSERT_TRUE(write_certificate(files, {"DNS:localhost", -700, 20}));
    const std::string old = read("/dev-cert.pem");
    const auto renewed = TlsServer::self_signed(inner);
    ASSERT_TRUE(renewed);
    EXPECT_EQ((*renewed)->pin(), (*first)->pin());
    EXPECT_NE(read("/dev-cert.pem"), old);
    const TestFolder other;
    EXPECT_NE(TlsServer::self_signed(other.path()).value()->pin(), (*first)->pin());
    std::ofstream(inner + "/dev-key.pem") << "no key";
    EXPECT_EQ(TlsServer::self_signed(inner).error().code, Errc::kBadInput);
}

// Whether a client of that trust takes the server for `host`.
bool handshake(const TlsServer& server, const TlsClient& client, const std::string& host) {
    auto fds = testing::socket_pair();
    auto dialed =
        Transport::make_tls(std::move(fds.first), client.context(), Side::kClient, host).value();
    auto taken =
        Transport::make_tls(std::move(fds.second), server.context(), Side::kServer).value();
    for (bool is_done = false; !is_done;) {
        const auto left = dialed.handshake();
        const auto right = taken.handshake();
        if (!left || !right) return false;
        is_done = *left && *right;
    }
    return true;
}

TEST(Tls, SelfSignedNamesWhereItIsReached) {
    const TestFolder folder;
    const std::vector<std::string> hosts = {"relay.example", "192.0.2.7", "2001:db8::7", "no name,",
                                            "fe80::1%eth0"};
    const auto first = TlsServer::self_signed(folder.path());
    ASSERT_TRUE(first) << first.error().detail;
    const auto certificate = [&folder] {
        std::ifstream file(folder.path() + "/dev-cert.pem");
        return std::string(std::istreambuf_iterator<char>(file), {});
    };
    const auto is_trusted_as = [&](const std::shared_ptr<const TlsServer>& server,
                                   const std::string& host) {
        ClientTrust trust;
        trust.ca_file = folder.path() + "/dev-cert.pem";
        const auto client = TlsClient::make(trust).value();
        return handshake(*server, *client, host);
    };
    EXPECT_TRUE(is_trusted_as(*first, "localhost"));
    for (size_t i = 0; i < 3; ++i) EXPECT_FALSE(is_trusted_as(*first, hosts[i])) << hosts[i];
    const auto named = TlsServer::self_signed(folder.path(), hosts);
    ASSERT_TRUE(named) << named.error().detail;
    EXPECT_EQ((*named)->pin(), (*first)->pin());
    for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(is_trusted_as(*named, hosts[i])) << hosts[i];
    EXPECT_TRUE(is_trusted_as(*named, "localhost"));
    EXPECT_FALSE(is_trusted_as(*named, "other.example"));
    const std::string kept = certificate();
    ASSERT_TRUE(TlsServer::self_signed(folder.path(), hosts));
    ASSERT_TRUE(TlsServer::self_signed(folder.path(), {"relay.example"}));
    EXPECT_EQ(certificate(), kept) << "it named them already";
}

TEST(Tls, FilesThatDoNotServeAreNamed) {
    const TestFolder folder;
    const CertificateFiles good{folder.path() + "/c.pem", folder.path() + "/k.pem"};
    const CertificateFiles other{folder.path() + "/c2.pem", folder.path() + "/k2.pem"};
    ASSERT_TRUE(write_certificate(good, {}));
    ASSERT_TRUE(write_certificate(other, {}));
    EXPECT_TRUE(TlsServer::load(good.certificate_path, good.key_path));
    const std::string junk = folder.path() + "/junk.pem";
    std::ofstream(junk) << "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    const std::string expired = folder.path() + "/expired.pem";
    ASSERT_TRUE(write_certificate({expired, good.key_path}, {"DNS:localhost", -10, -1}));
    struct {
        std::string certificate, key, named;
        Errc code;
    } const cases[] = {
        {folder.path() + "/none.pem", good.key_path, "none.pem", Errc::kEnvironment},
        {good.certificate_path, folder.path() + "/none.pem", "none.pem", Errc::kEnvironment},
        {junk, good.key_path, "junk.pem", Errc::kBadInput},
        {good.certificate_path, junk, "junk.pem", Errc::kBadInput},
        {good.certificate_path, other.key_path, "k2.pem", Errc::kBadInput},
        {expired, good.key_path, "expired", Errc::kBadInput},
    };
    for (const auto& test : cases) {
        const auto loaded = TlsServer::load(test.certificate, test.key);
        ASSERT_FALSE(loaded) << test.named;
        EXPECT_EQ(loaded.error().code, test.code) << loaded.error().detail;
        EXPECT_NE(loaded.error().detail.find(test.named), std::string::npos)
            << loaded.error().detail;
    }
    EXPECT_EQ(TlsClient::make({std::nullopt, folder.path() + "/none.pem"}).error().code,
              Errc::kEnvironment);
    EXPECT_EQ(TlsClient::make({std::nullopt, junk}).error().code, Errc::kBadInput);
    EXPECT_TRUE(TlsClient::make({std::nullopt, good.certificate_path}));
    EXPECT_TRUE(TlsClient::make({}));
}

// ---- whom a client believes ----

struct Identity {
    TestFolder folder;
    CertificateFiles files{folder.path() + "/c.pem", folder.path() + "/k.pem"};
    explicit Identity(const CertificateRecipe& recipe) {
        KVASIR_CHECK(write_certificate(files, recipe).has_value());
    }
    std::shared_ptr<const TlsServer> server() const {
        return TlsServer::load(files.certificate_path, files.key_path).value();
    }
};

Result<MessageStream> dial_as(const TlsHub& hub, const ClientTrust& trust,
                              const std::string& host = "127.0.0.1") {
    return dial(hub.endpoint(host), {}, {}, TlsClient::make(trust).value());
}

TEST(Tls, PinOrAuthorityDecides) {
    const Identity identity({"DNS:localhost,IP:127.0.0.1", -1, 100});
    const Identity other({});
    const auto server = identity.server();
    const TlsHub hub(server);
    EXPECT_TRUE(dial_as(hub, {server->pin(), ""}));
    EXPECT_TRUE(dial_as(hub, {server->pin(), ""}, "localhost"));
    EXPECT_TRUE(dial_as(hub, {std::nullopt, identity.files.certificate_path}));
    EXPECT_TRUE(dial_as(hub, {std::nullopt, identity.files.certificate_path}, "localhost"));

    const auto denied = [&](const ClientTrust& trust, const std::string& why) {
        const auto result = dial_as(hub, trust);
        ASSERT_FALSE(result) << why;
        EXPECT_EQ(result.error().code, Errc::kDenied) << result.error().detail;
        EXPECT_NE(result.error().detail.find(why), std::string::npos) << result.error().detail;
        EXPECT_NE(result.error().detail.find("127.0.0.1:"), std::string::npos);
    };
    denied({other.server()->pin(), ""}, "pinned");
    denied({other.server()->pin(), identity.files.certificate_path}, "pinned");
    denied({std::nullopt, other.files.certificate_path}, "issuer is unknown");
    denied({}, "issuer is unknown");
    ClientTrust stranger;
    stranger.advice = "ask the host";
    denied(stranger, "; ask the host");
    EXPECT_EQ(dial(hub.endpoint()).error().code, Errc::kUsage);
}

TEST(Tls, NamesAndDatesAreCheckedUnlessThereIsAPin) {
    const Identity named({"DNS:somewhere.example,IP:10.0.0.1", -1, 100});
    const auto named_server = named.server();
    const TlsHub elsewhere(named_server);
    for (const char* host : {"127.0.0.1", "localhost"}) {
        const auto result = dial_as(elsewhere, {std::nullopt, named.files.certificate_path}, host);
        ASSERT_FALSE(result);
        EXPECT_EQ(result.error().code, Errc::kDenied);
        EXPECT_NE(result.error().detail.find("another host name"), std::string::npos)
            << result.error().detail;
    }
    EXPECT_TRUE(dial_as(elsewhere, {named_server->pin(), ""}));

    // A server does not load a certificate that has expired, so this one expires afterwards: the
    // file is written again and given to OpenSSL past the check.
    const Identity late({"IP:127.0.0.1", -1, 100});
    const auto late_server = late.server();
    ASSERT_TRUE(write_certificate(late.files, {"IP:127.0.0.1", -10, -1}));
    ASSERT_EQ(SSL_CTX_use_certificate_file(late_server->context(),
                                           late.files.certificate_path.c_str(), SSL_FILETYPE_PEM),
              1);
    const TlsHub expired(late_server);
    const auto result = dial_as(expired, {std::nullopt, late.files.certificate_path});
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, Errc::kDenied);
    EXPECT_NE(result.error().detail.find("expired"), std::string::npos) << result.error().detail;
    EXPECT_TRUE(dial_as(expired, {late_server->pin(), ""}));
}

TEST(Tls, OldVersionsAreRefused) {
    const TlsHub hub;
    const auto client = TlsClient::make({TestTls::get().server->pin(), ""}).value();
    SSL_CTX_set_security_level(client->context(), 0);
    SSL_CTX_set_min_proto_version(client->context(), TLS1_1_VERSION);
    SSL_CTX_set_max_proto_version(client->context(), TLS1_1_VERSION);
    EXPECT_FALSE(dial(hub.endpoint(), {}, {}, client));
    const auto twelve = TlsClient::make({TestTls::get().server->pin(), ""}).value();
    SSL_CTX_set_max_proto_version(twelve->context(), TLS1_2_VERSION);
    EXPECT_TRUE(dial(hub.endpoint(), {}, {}, twelve));
}

// ---- streams over TLS ----

TEST(Tls, DialAndListenTalk) {
    TlsHub hub;
    auto client = dial(hub.endpoint(), {}, {}, TestTls::get().client);
    ASSERT_TRUE(client) << client.error().detail;
    auto server = hub.next();
    ASSERT_TRUE(server);
    ASSERT_TRUE(server->enqueue(bytes_of("server first")));
    EXPECT_EQ(copy(*client->receive(in(10s))), bytes_of("server first"));
    ASSERT_TRUE(client->enqueue(pattern(1 << 20)));
    std::thread flusher([&] { EXPECT_TRUE(client->flush_until(in(10s))); });
    EXPECT_TRUE(copy(*server->receive(in(10s))) == pattern(1 << 20));
    flusher.join();
    client->close();
    EXPECT_EQ(server->receive(in(10s)).error().code, Errc::kClosed);
}

// S2 over TLS: each part between two cuts is a record of its own; "all in one" is among them.
TEST(Tls, FirstFramesWithTheUpgradeAtEveryPairOfCuts) {
    TlsHub hub;
    const std::string stream = kRequest + text_of(frame(bytes_of("W"), true)) +
                               text_of(frame(pattern(40), true)) +
                               text_of(control(wire::WsOpcode::kPing, "p", true));
    std::vector<size_t> cuts;
    for (size_t i = 0; i <= stream.size(); i += i + 8 < kRequest.size() ? 79 : 3) cuts.push_back(i);
    cuts.push_back(kRequest.size());
    cuts.push_back(stream.size());
    for (const size_t a : cuts) {
        for (const size_t b : cuts) {
            if (b < a) continue;
            RawPeer raw(hub.port(), true);
            ASSERT_TRUE(raw.open());
            raw.write(std::string_view(stream).substr(0, a));
            raw.write(std::string_view(stream).substr(a, b - a));
            raw.write(std::string_view(stream).substr(b));
            auto server = hub.next();
            ASSERT_TRUE(server) << a << ", " << b;
            // As an owner that polls: nothing may be left where poll() does not see it.
            std::vector<Bytes> got;
            while (got.size() < 2) {
                auto message = server->try_receive();
                ASSERT_TRUE(message) << a << ", " << b << ": " << message.error().detail;
                if (*message) {
                    got.push_back(copy(**message));
                } else {
                    ASSERT_TRUE(*wait_for(server->fd(), POLLIN, in(10s))) << a << ", " << b;
                }
            }
            ASSERT_EQ(got[0], bytes_of("W")) << a << ", " << b;
            ASSERT_EQ(got[1], pattern(40)) << a << ", " << b;
            raw.transport().shut_down_write();
            EXPECT_EQ(server->receive(in(10s)).error().code, Errc::kClosed);
            const std::string answer = raw.read_text_to_end();
            ASSERT_TRUE(answer.starts_with("HTTP/1.1 101 ")) << answer;
            ASSERT_NE(answer.find("\r\n\r\n\x8a\x01p"), std::string::npos) << a << ", " << b;
        }
    }
}

// Several messages in one record, more than a read takes: poll() shows nothing for what TLS already
// holds, may_have_more() must.
TEST(Tls, WhatTlsHoldsIsNotForgotten) {
    auto [a, b] = transport_pair(testing::Over::kTls);
    MessageLimits limits;
    limits.receive_bytes_per_call = 1000;  // reads that end in the middle of a record
    MessageStream server(std::move(b), Side::kServer, {}, limits);
    RawPeer raw(std::move(a));
    Bytes many;
    for (uint32_t i = 0; i < 50; ++i) {
        const Bytes one = frame(pattern(300, i), true);
        many.insert(many.end(), one.begin(), one.end());
    }
    raw.write(many);
    uint32_t count = 0;
    while (count < 50) {
        auto message = server.try_receive();
        ASSERT_TRUE(message) << message.error().detail;
        if (*message) {
            ASSERT_TRUE(copy(**message) == pattern(300, count)) << count;
            ++count;
        } else if (!server.may_have_more()) {
            ASSERT_TRUE(*wait_for(server.fd(), POLLIN, in(10s))) << count;
        }
    }
}

// Key updates, asked for by the peer in the middle of traffic both ways, and session tickets,
// carry no data: readiness must not be confused by them, and what they make us write must leave.
TEST(Tls, KeyUpdatesAndTicketsAreInvisible) {
    const auto server_tls = [] {
        const TestFolder folder;
        return TlsServer::self_signed(folder.path()).value();
    }();
    SSL_CTX_clear_options(server_tls->context(), SSL_OP_NO_TICKET);
    SSL_CTX_set_num_tickets(server_tls->context(), 4);
    const TlsHub unused(server_tls);
    TlsHub hub(server_tls);
    const auto trust = TlsClient::make({server_tls->pin(), ""}).value();
    auto client = dial(hub.endpoint(), {}, {}, trust);
    ASSERT_TRUE(client) << client.error().detail;
    auto server = hub.next();
    ASSERT_TRUE(server);
    EXPECT_EQ(client->receive(in(80ms)).error().code, Errc::kTimeout);  // tickets are no message
    EXPECT_FALSE(client->closed());

    auto [a, b] = transport_pair(testing::Over::kTls);
    MessageStream stream(std::move(b), Side::kServer, {});
    RawPeer raw(std::move(a));
    for (uint32_t i = 0; i < 200; ++i) {
        ASSERT_TRUE(raw.transport().request_key_update());
        raw.write(frame(pattern(i * 97, i), true));
        auto message = stream.receive(in(10s));
        ASSERT_TRUE(message) << i << ": " << message.error().detail;
        ASSERT_TRUE(copy(*message) == pattern(i * 97, i));
        ASSERT_TRUE(stream.enqueue(pattern(i * 50)));
        ASSERT_TRUE(stream.flush_until(in(10s)));
        const Bytes expected = frame(pattern(i * 50), false);
        ASSERT_TRUE(raw.read(expected.size()) == expected) << i;
    }
}

// A record that was changed on its way: an error, never data.
TEST(Tls, ChangedRecordsEndTheStream) {
    auto [a, b] = transport_pair(testing::Over::kTls);
    MessageStream server(std::move(b), Side::kServer, {});
    RawPeer raw(std::move(a));
    raw.write(frame(bytes_of("good"), true));
    const uint8_t forged[] = {23, 3,  3,  0,  20, 1,  2,  3,  4,  5,  6,  7, 8,
                              9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20};
    ASSERT_EQ(::send(raw.fd(), forged, sizeof(forged), MSG_NOSIGNAL),
              static_cast<ssize_t>(sizeof(forged)));
    EXPECT_EQ(copy(*server.receive(in(10s))), bytes_of("good"));
    const auto bad = server.receive(in(10s));
    ASSERT_FALSE(bad);
    EXPECT_EQ(bad.error().code, Errc::kProtocol) << bad.error().detail;
    EXPECT_TRUE(server.closed());
}

// A peer that sends a record byte by byte must not hold receive() beyond its deadline.
TEST(Tls, DeadlineHoldsWithinARecord) {
    auto [a, b] = transport_pair(testing::Over::kTls);
    MessageStream server(std::move(b), Side::kServer, {});
    const int fd = a.fd();
    std::atomic<bool> stop = false;
    std::thread peer([fd, &stop] {
        const uint8_t header[] = {23, 3, 3, 0x40, 0};
        (void)!::send(fd, header, sizeof(header), MSG_NOSIGNAL);
        for (int i = 0; i < 10000 && !stop; ++i) {
            (void)!::send(fd, "x", 1, MSG_NOSIGNAL);
            // tidy: sleep, a peer that drips its bytes is what is tested
            std::this_thread::sleep_for(1ms);
        }
    });
    const auto start = Clock::now();
    EXPECT_EQ(server.receive(in(200ms)).error().code, Errc::kTimeout);
    EXPECT_LT(Clock::now() - start, 3s);
    EXPECT_FALSE(server.closed());
    stop = true;
    peer.join();
}

// ---- the listener ----

TEST(Tls, StalledHandshakesDoNotBlockOthersAndEnd) {
    HandshakeLimits limits;
    limits.deadline = 1s;
    limits.pending_per_address_max = 6;
    TlsHub hub(TestTls::get().server, limits);
    const auto start = Clock::now();
    std::vector<UniqueFd> stalled;
    for (int i = 0; i < 5; ++i) {
        stalled.push_back(testing::connect_to(hub.port()));
        (void)!::send(stalled.back().get(), "\x16\x03\x01\x02", 4, MSG_NOSIGNAL);
    }
    EXPECT_TRUE(dial(hub.endpoint(), {}, {}, TestTls::get().client));
    EXPECT_LT(Clock::now() - start, 900ms) << "waited for the stalled ones";
    // Silent behind the handshake, or dripping the request: the same deadline.
    RawPeer silent(hub.port(), true);
    ASSERT_TRUE(silent.open());
    silent.write("GET /kv");
    // The sixth and seventh of one address: one place is left, at most.
    std::vector<UniqueFd> over;
    for (int i = 0; i < 3; ++i) over.push_back(testing::connect_to(hub.port()));
    char byte;
    for (UniqueFd& fd : stalled) EXPECT_LE(::recv(fd.get(), &byte, 1, 0), 0);
    EXPECT_EQ(silent.read_text_to_end(), "");
    EXPECT_LT(Clock::now() - start, 8s);
    EXPECT_TRUE(hub.next());
    EXPECT_FALSE(hub.next(0ms));
}

TEST(Tls, TheWrongLanguageGetsAQuickClose) {
    TlsHub hub;
    for (const char* text : {"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "SSH-2.0-x\r\n",
                             "\x82\x80 a websocket frame without anything before it"}) {
        RawPeer raw(hub.port(), false);
        raw.write(std::string_view(text));
        const auto start = Clock::now();
        EXPECT_LE(raw.read_to_end().size(), 7u) << text;  // at most an alert
        EXPECT_LT(Clock::now() - start, 5s) << text;
    }
    const auto plain = dial(*parse_url("ws://127.0.0.1:" + std::to_string(hub.port())));
    ASSERT_FALSE(plain);

    auto made = Listener::make(*parse_listen("127.0.0.1:0"), [](MessageStream, std::string) {});
    ASSERT_TRUE(made);
    const auto start = Clock::now();
    const auto tls = dial(*parse_url("wss://127.0.0.1:" + std::to_string((*made)->port())), {}, {},
                          TestTls::get().client);
    ASSERT_FALSE(tls);
    EXPECT_TRUE(tls.error().code == Errc::kIo || tls.error().code == Errc::kProtocol)
        << tls.error().detail;
    EXPECT_LT(Clock::now() - start, 5s);
    EXPECT_TRUE(dial(hub.endpoint(), {}, {}, TestTls::get().client)) << "it no longer works";
}

TEST(Tls, DialEndsInTimeWhateverTheServerDoes) {
    testing::FdPair unused = testing::tcp_pair();
    UniqueFd listener(::socket(AF_INET, SOCK_STREAM, 0));
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* plain = reinterpret_cast<sockaddr*>(&address);
    ASSERT_EQ(::bind(listener.get(), plain, size), 0);
    ASSERT_EQ(::listen(listener.get(), 8), 0);
    ASSERT_EQ(::getsockname(listener.get(), plain, &size), 0);
    HandshakeLimits limits;
    limits.deadline = 200ms;
    const auto start = Clock::now();
    const auto result =
        dial(*parse_url("wss://127.0.0.1:" + std::to_string(ntohs(address.sin_port))), limits, {},
             TestTls::get().client);
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, Errc::kTimeout) << result.error().detail;
    EXPECT_LT(Clock::now() - start, 3s);
}

// New keys for ever, and never a byte of data: what a peer can have us do in one call is bounded.
TEST(Tls, HandshakeMessagesWithoutDataEndTheConnection) {
    auto [a, b] = transport_pair(testing::Over::kTls);
    MessageStream stream(std::move(b), Side::kServer, {});
    const auto update = [&a = a] {
        ASSERT_TRUE(a.request_key_update());
        ASSERT_TRUE(a.handshake());  // sends it, without data
    };
    for (int i = 0; i < 10; ++i) update();
    const auto some = stream.try_receive();
    ASSERT_TRUE(some) << some.error().detail;
    for (int i = 0; i < 40; ++i) update();
    const auto end = stream.receive(in(10s));
    ASSERT_FALSE(end);
    EXPECT_EQ(end.error().code, Errc::kProtocol);
    EXPECT_NE(end.error().detail.find("handshake messages"), std::string::npos)
        << end.error().detail;
}

// One byte a record costs the reader hundreds of times its bytes: its turn ends sooner.
TEST(Tls, ShortRecordsUseUpATurn) {
    constexpr size_t kBytes = 2000;
    auto [a, b] = transport_pair(testing::Over::kTls);
    MessageStream stream(std::move(b), Side::kServer, {});
    stream.set_bytes_per_call(16 << 10);
    RawPeer raw(std::move(a));
    const Bytes message = frame(pattern(kBytes), true);
    for (const uint8_t byte : message) raw.write(Bytes{byte});
    uint32_t turns = 0;
    uint64_t bytes_in = 0;
    const auto end = Clock::now() + 10s;
    while (Clock::now() < end) {
        const auto got = stream.try_receive();
        ASSERT_TRUE(got) << got.error().detail;
        const uint64_t now_in = stream.counters().bytes_in;
        EXPECT_LE(now_in - bytes_in, 64u);
        if (now_in != bytes_in) ++turns;
        bytes_in = now_in;
        if (!*got) continue;
        EXPECT_EQ(copy(**got), pattern(kBytes));
        EXPECT_GE(turns, kBytes / 64);
        EXPECT_GE(stream.counters().effort_in, kBytes * 512);
        return;
    }
    FAIL() << "no message";
}

// S5 over TLS: no mask, fragments without end.
TEST(Tls, HostilePeersAreClosed) {
    TlsHub hub;
    RawPeer unmasked(hub.port(), true);
    unmasked.write(kRequest + text_of(frame(bytes_of("W"), false)));
    auto server = hub.next();
    ASSERT_TRUE(server);
    EXPECT_EQ(server->receive(in(10s)).error().code, Errc::kProtocol);
    const std::string answer = unmasked.read_text_to_end();
    EXPECT_TRUE(answer.ends_with("\x88\x02\x03\xea")) << answer.size();

    RawPeer endless(hub.port(), true);
    endless.write(kRequest);
    server = hub.next();
    ASSERT_TRUE(server);
    MessageLimits limits;
    limits.message_bytes_max = 100000;
    server->set_limits(limits);
    std::thread peer([&endless] {
        endless.write(frame(pattern(999), true, wire::WsOpcode::kBinary, false));
        for (int i = 0; i < 200; ++i) {
            endless.write(frame(pattern(999), true, wire::WsOpcode::kContinuation, false));
        }
    });
    EXPECT_EQ(server->receive(in(10s)).error().code, Errc::kLimit);
    server.reset();
    peer.join();
}

}  // namespace
}  // namespace kvasir::net
