#include "relay/relay.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <random>
#include <thread>

#include "base/check.hpp"
#include "base/log_testing.hpp"
#include "net/address_key.hpp"
#include "net/test_frames.hpp"
#include "relay/relay_testing.hpp"

namespace kvasir::relay {
namespace {

using namespace std::chrono_literals;
using namespace testing;
using ::testing::HasSubstr;

std::unique_ptr<Relay> start(RelayOptions options = {}) {
    return must(Relay::start(must(net::parse_listen("127.0.0.1:0"), "listen"), std::move(options)),
                "relay");
}

// Until `condition` holds; false after twenty seconds.
bool eventually(const std::function<bool()>& condition) {
    const auto end = in(20s);
    while (!condition()) {
        if (net::Clock::now() > end) return false;
        std::this_thread::yield();
    }
    return true;
}

Bytes pattern(size_t bytes, uint32_t seed) {
    Bytes out(bytes);
    for (size_t i = 0; i < bytes; ++i)
        out[i] = static_cast<uint8_t>(((i + seed) * 2654435761u) >> 13);
    return out;
}

std::string http_get(uint16_t port, const std::string& path) {
    net::UniqueFd fd(::socket(AF_INET, SOCK_STREAM, 0));
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(port);
    KVASIR_CHECK(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    const std::string text = "GET " + path + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    KVASIR_CHECK(::send(fd.get(), text.data(), text.size(), 0) == ssize_t(text.size()));
    std::string answer;
    char buffer[4096];
    for (ssize_t got; (got = ::recv(fd.get(), buffer, sizeof(buffer), 0)) > 0;) {
        answer.append(buffer, static_cast<size_t>(got));
    }
    return answer;
}

struct PairOf {
    explicit PairOf(const Target& target)
        : backbone(Node::attach(target, Role::kBackbone)),
          worker(Node::attach(target, Role::kWorker)),
          to_worker(backbone.peer()),
          to_backbone(worker.peer()) {}
    // There and back; false when something was wrong.
    bool exchange(uint32_t id, size_t request_bytes, size_t answer_bytes) {
        const Bytes request = pattern(request_bytes, id);
        backbone.say(make_frame(FrameType::kCompute, to_worker, id, request));
        const auto got = worker.next();
        if (!got || got->header.peer != to_backbone || got->payload != request) return false;
        const Bytes answer = pattern(answer_bytes, id + 1);
        worker.say(make_frame(FrameType::kResult, to_backbone, id, answer));
        const auto back = backbone.next();
        return back && back->header.peer == to_worker && back->header.request_id == id &&
               back->payload == answer;
    }
    Node backbone, worker;
    uint16_t to_worker, to_backbone;
};

RelayOptions open_relay() {
    return {};  // no market key: any key is its own identity
}

// ---- the whole way ----

TEST(Relay, PassesFramesOfEverySize) {
    RelayOptions options = open_relay();
    options.switchboard.message_bytes_max = 3 << 20;
    const auto relay = start(options);
    PairOf pair(target_of(*relay));
    uint32_t id = 0;
    for (const size_t bytes : {0u, 1u, 109u, 110u, 111u, 112u, 32767u, 32768u, 65519u, 65520u,
                               65521u, 65536u, 65537u, 1048577u, (3u << 20) - 16}) {
        EXPECT_TRUE(pair.exchange(++id, bytes, bytes)) << bytes;
    }
    // One byte over the cap ends that connection, and only that.
    pair.worker.say(make_frame(FrameType::kResult, pair.to_backbone, 1, Bytes((3 << 20) - 15)));
    const auto down = pair.backbone.next(FrameType::kPeerDown);
    ASSERT_TRUE(down);
    EXPECT_EQ(wire::decode_peer_down(down->payload)->handle, pair.to_worker);
    const RelayStats stats = relay->stats();
    EXPECT_EQ(stats.counters.frames_forwarded, 2u * 15);
    EXPECT_EQ(stats.workers, 0u);
    EXPECT_EQ(stats.backbones, 1u);
}

// Serves a relay beside its own thread, as a backbone in the same process does.
class Server {
public:
    explicit Server(Relay& relay)
        : thread_([this, &relay] {
              while (!stopping_.load()) {
                  pollfd entry{relay.event_fd(), POLLIN, 0};
                  if (::poll(&entry, 1, 20) > 0 && relay.serve_ready()) ++rounds_;
              }
          }) {}
    ~Server() {
        stopping_.store(true);
        thread_.join();
    }
    uint64_t rounds() const { return rounds_.load(); }

private:
    std::atomic<bool> stopping_{false};
    std::atomic<uint64_t> rounds_{0};
    std::thread thread_;
};

TEST(Relay, AnotherThreadMayServe) {
    RelayOptions options = open_relay();
    options.turn_bytes = 64 << 10;  // long frames take several rounds
    const auto relay = start(options);
    const Server server(*relay);
    PairOf pair(target_of(*relay));
    uint32_t id = 0;
    while (id < 1000 || (server.rounds() < 100 && id < 100000)) {
        ++id;
        ASSERT_TRUE(pair.exchange(id, id % 50 == 0 ? 300000 : 348, 4132)) << id;
    }
    EXPECT_GE(server.rounds(), 100u);
    const RelayStats stats = relay->stats();
    EXPECT_EQ(stats.counters.frames_forwarded, 2u * id);
    EXPECT_EQ(stats.queued_bytes, 0u);
}

// A timer that another thread's round starts is kept by the relay's own, which sleeps for longer.
TEST(Relay, TimersOfAnotherThreadsRoundsRun) {
    RelayOptions options = open_relay();
    options.switchboard.attach_deadline = milliseconds(50);
    const auto relay = start(options);
    const Server server(*relay);
    for (int i = 0; i < 20; ++i) {
        Node silent = Node::connect(target_of(*relay));
        ASSERT_TRUE(silent.read_nonce());
        const auto told = silent.next(milliseconds(5000));
        ASSERT_TRUE(told) << told.error().detail;
        EXPECT_EQ(told->header.type, FrameType::kError);
    }
    EXPECT_GT(server.rounds(), 0u);
}

TEST(Relay, HealthAndMetrics) {
    const auto relay = start(open_relay());
    PairOf pair(target_of(*relay));
    ASSERT_TRUE(pair.exchange(1, 1000, 2000));
    EXPECT_THAT(http_get(relay->port(), "/healthz"), HasSubstr("200 OK"));
    const std::string metrics = http_get(relay->port(), "/metrics");
    EXPECT_THAT(metrics, HasSubstr("text/plain; version=0.0.4"));
    EXPECT_THAT(metrics, HasSubstr("kvasir_relay_nodes{role=\"worker\"} 1"));
    EXPECT_THAT(metrics, HasSubstr("kvasir_relay_frames_total 2"));
    EXPECT_THAT(metrics, HasSubstr("kvasir_relay_bytes_total 3032"));
    EXPECT_THAT(metrics, HasSubstr("# TYPE kvasir_relay_told_total counter"));
    EXPECT_THAT(http_get(relay->port(), "/else"), HasSubstr("404"));
    relay->drain(10s, {});
    EXPECT_THAT(http_get(relay->port(), "/healthz"), HasSubstr("503"));
}

TEST(Relay, OverTls) {
    const auto folder = ::testing::TempDir() + "relay_tls_" + std::to_string(::getpid());
    RelayOptions options = open_relay();
    options.tls = must(net::TlsServer::self_signed(folder), "certificate");
    const auto pin = options.tls->pin();
    const auto relay = start(options);
    net::ClientTrust trust;
    trust.pin = pin;
    PairOf pair(target_of(*relay, must(net::TlsClient::make(trust), "trust")));
    EXPECT_TRUE(pair.exchange(1, 4000, 4000));
    EXPECT_TRUE(pair.exchange(2, 3000000, 1));
    EXPECT_TRUE(pair.exchange(3, 1, 3000000));
}

TEST(Relay, AReconnectingNodeIsAnotherHandle) {
    const auto relay = start(open_relay());
    const Target target = target_of(*relay);
    Node backbone = Node::attach(target, Role::kBackbone);
    const auto key = must(crypto::KeyPair::generate(), "key");
    std::optional<Node> before;
    uint16_t last = 0;
    for (int i = 0; i < 5; ++i) {
        Node worker = must(Node::try_attach(target, Role::kWorker, key), "attach");
        if (before) {
            const auto error = before->next(FrameType::kError);
            ASSERT_TRUE(error);
            EXPECT_THAT(Node::error_of(*error).detail, HasSubstr("newer connection"));
            const auto down = backbone.next();
            ASSERT_TRUE(down);
            EXPECT_EQ(down->header.type, FrameType::kPeerDown);
        }
        const uint16_t handle = backbone.peer();
        EXPECT_NE(handle, last);
        last = handle;
        backbone.say(make_frame(FrameType::kPing, handle, 0, Bytes(8, 1)));
        EXPECT_TRUE(worker.next(FrameType::kPing));
        before = std::move(worker);
    }
    EXPECT_EQ(relay->stats().counters.replaced, 4u);
}

// ---- L4: tokens ----

class LiveTokens : public ::testing::Test {
protected:
    LiveTokens() {
        RelayOptions options;
        options.gate.market = market_.public_key();
        options.gate.is_revoked = [this](uint64_t serial, const crypto::PublicKey&) {
            std::unique_lock lock(mu_);
            if (serial == block_at_) {
                is_blocked_ = true;
                changed_.notify_all();
                changed_.wait(lock, [&] { return block_at_ != serial; });
            }
            return serial == revoked_.load();
        };
        relay_ = start(std::move(options));
    }
    std::string token(const crypto::KeyPair& signer, const crypto::KeyPair& node, seconds left,
                      uint8_t roles = crypto::kRoleWorker, uint64_t serial = 1) {
        crypto::TokenClaims claims;
        claims.roles = roles;
        claims.node = node.public_key();
        claims.serial = serial;
        const auto now = std::chrono::floor<seconds>(std::chrono::system_clock::now());
        claims.issued = now - 1h;
        claims.expires = now + left;
        return crypto::issue_token(signer, claims);
    }
    Errc refused(const crypto::KeyPair& node, const std::string& text, Role role = Role::kWorker) {
        const auto attached = Node::try_attach(target_of(*relay_), role, node, text);
        return attached ? Errc::kCount_ : attached.error().code;
    }

    const crypto::KeyPair market_ = must(crypto::KeyPair::generate(), "key");
    const crypto::KeyPair node_ = must(crypto::KeyPair::generate(), "key");
    std::atomic<uint64_t> revoked_{0};
    std::mutex mu_;
    std::condition_variable changed_;
    // Guarded by mu_
    uint64_t block_at_ = 0;  // the serial at whose check the relay's thread waits
    bool is_blocked_ = false;
    std::unique_ptr<Relay> relay_;
};

TEST_F(LiveTokens, OnlyGoodOnesAttach) {
    const kvasir::testing::LogCapture log;
    const auto other = must(crypto::KeyPair::generate(), "key");
    EXPECT_EQ(refused(node_, token(market_, node_, 1h)), Errc::kCount_);
    EXPECT_EQ(refused(node_, ""), Errc::kDenied);
    EXPECT_EQ(refused(node_, "kvt1.nonsense"), Errc::kDenied);
    EXPECT_EQ(refused(node_, token(other, node_, 1h)), Errc::kDenied);    // another market
    EXPECT_EQ(refused(node_, token(market_, other, 1h)), Errc::kDenied);  // another node's
    EXPECT_EQ(refused(node_, token(market_, node_, -1s)), Errc::kExpired);
    EXPECT_EQ(refused(node_, token(market_, node_, 1h), Role::kBackbone), Errc::kDenied);
    EXPECT_EQ(refused(node_, token(market_, node_, 1h, crypto::kRoleBackbone), Role::kBackbone),
              Errc::kCount_);
    revoked_ = 7;
    EXPECT_EQ(refused(node_, token(market_, node_, 1h, crypto::kRoleWorker, 7)), Errc::kRevoked);
    // The operator sees the same.
    ASSERT_TRUE(eventually([&] { return relay_->stats().connections == 0; }));
    const SwitchboardCounters counters = relay_->stats().counters;
    EXPECT_EQ(counters.attached, 2u);
    EXPECT_EQ(counters.refused, 7u);
    EXPECT_EQ(log.with("event=attached").size(), 2u);
    EXPECT_EQ(log.with("attached=no").size(), 7u);
    EXPECT_EQ(log.with("attached=no code=denied").size(), 5u);
    EXPECT_EQ(log.with("attached=no code=expired").size(), 1u);
    EXPECT_EQ(log.with("attached=no code=revoked").size(), 1u);
    EXPECT_TRUE(log.with("kvt1.").empty()) << log.with("kvt1.").front();
}

TEST_F(LiveTokens, ASignatureCountsForItsConnectionRoleAndKeyOnly) {
    const auto good = token(market_, node_, 1h, crypto::kRoleWorker | crypto::kRoleBackbone);
    const auto other = must(crypto::KeyPair::generate(), "key");
    const auto try_with = [&](auto make) {
        Node node = Node::connect(target_of(*relay_));
        const auto nonce = must(node.read_nonce(), "nonce");
        node.say({'W'});
        node.say(make(nonce));
        const auto answer = node.next();
        return answer && answer->header.type == FrameType::kAttached ? Errc::kCount_
                                                                     : Node::error_of(*answer).code;
    };
    wire::Nonce seen = {};
    EXPECT_EQ(try_with([&](const wire::Nonce& nonce) {
                  seen = nonce;
                  return Node::make_attach(Role::kWorker, node_, good, nonce);
              }),
              Errc::kCount_);
    // Recorded and played again on another connection.
    EXPECT_EQ(try_with([&](const wire::Nonce& nonce) {
                  EXPECT_NE(nonce, seen);
                  return Node::make_attach(Role::kWorker, node_, good, seen);
              }),
              Errc::kDenied);
    EXPECT_EQ(try_with([&](const wire::Nonce& nonce) {
                  return Node::make_attach(Role::kBackbone, node_, good, nonce);
              }),
              Errc::kDenied);
    // A stolen token, signed by the thief's key in the name of its owner.
    EXPECT_EQ(try_with([&](const wire::Nonce& nonce) {
                  wire::Attach attach;
                  attach.node = node_.public_key().bytes;
                  attach.token = good;
                  attach.signature = other.sign(
                      wire::kAttachContext, wire::attach_statement(nonce, Role::kWorker, attach));
                  return wire::encode_attach(attach);
              }),
              Errc::kDenied);
}

TEST_F(LiveTokens, RevokedRenewedAndExpiredOnALiveConnection) {
    const Target target = target_of(*relay_);
    Node node = must(Node::try_attach(target, Role::kWorker, node_,
                                      token(market_, node_, 100s, crypto::kRoleWorker, 5)),
                     "attach");
    EXPECT_LE(node.attached.token_left_ms, 100000u);
    node.say(wire::encode_renew(token(market_, node_, 1000s, crypto::kRoleWorker, 6), 9));
    const auto renewed = node.next(FrameType::kAttached);
    ASSERT_TRUE(renewed);
    EXPECT_EQ(renewed->header.request_id, 9u);
    EXPECT_GT(wire::decode_attached(renewed->payload)->token_left_ms, 900000u);
    relay_->revoke({5});  // no longer its serial
    node.say(make_frame(FrameType::kPing, 0, 1, Bytes(8, 1)));
    EXPECT_TRUE(node.next(FrameType::kPong));
    relay_->revoke({9, 6});
    const auto error = node.next(FrameType::kError);
    ASSERT_TRUE(error);
    EXPECT_EQ(Node::error_of(*error).code, Errc::kRevoked);
    EXPECT_FALSE(node.next());

    Node brief =
        must(Node::try_attach(target, Role::kWorker, node_, token(market_, node_, 2s)), "attach");
    const auto expired = brief.next(FrameType::kError);
    ASSERT_TRUE(expired);
    EXPECT_EQ(Node::error_of(*expired).code, Errc::kExpired);
}

// Many small messages of one do not make the others wait, though they are few bytes.
TEST_F(LiveTokens, ATurnHasAFewMessagesOnly) {
    constexpr uint32_t kMany = 2000;
    const auto attach = [&](const crypto::KeyPair& key, uint8_t roles, Role role) {
        return must(
            Node::try_attach(target_of(*relay_), role, key, token(market_, key, 1h, roles, 100)),
            "attach");
    };
    std::vector<crypto::KeyPair> keys;
    for (int i = 0; i < 4; ++i) keys.push_back(must(crypto::KeyPair::generate(), "key"));
    Node backbone = attach(keys[0], crypto::kRoleBackbone, Role::kBackbone);
    Node many = attach(keys[1], crypto::kRoleWorker, Role::kWorker);
    const uint16_t from_many = many.peer();
    (void)backbone.peer();
    Node one = attach(keys[2], crypto::kRoleWorker, Role::kWorker);
    const uint16_t from_one = one.peer();
    (void)backbone.peer();

    // In one piece, 22 bytes each: the kernel does not keep thousands of small packets.
    Bytes bytes;
    for (uint32_t id = 1; id <= kMany; ++id) {
        const Bytes frame =
            net::testing::frame(make_frame(FrameType::kResult, from_many, id), true);
        bytes.insert(bytes.end(), frame.begin(), frame.end());
    }

    // The relay's thread stands still, at a token that it checks, while both have their say.
    {
        const std::lock_guard lock(mu_);
        block_at_ = 50;
    }
    std::thread knocking(
        [&] { (void)refused(keys[3], token(market_, keys[3], 1h, crypto::kRoleWorker, 50)); });
    {
        std::unique_lock lock(mu_);
        EXPECT_TRUE(changed_.wait_for(lock, 20s, [&] { return is_blocked_; }));
    }
    EXPECT_EQ(::send(many.stream.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
    one.say(make_frame(FrameType::kResult, from_one, kMany + 1));
    {
        const std::lock_guard lock(mu_);
        block_at_ = 0;
    }
    changed_.notify_all();
    knocking.join();

    uint32_t before = 0;
    for (;; ++before) {
        const auto got = backbone.next(FrameType::kResult);
        ASSERT_TRUE(got) << got.error().detail;
        if (got->header.request_id == kMany + 1) break;
    }
    EXPECT_LE(before, 64u) << "that is two long turns, as before it is known that others are there";
    for (uint32_t id = before + 1; id <= kMany; ++id) {
        const auto got = backbone.next(FrameType::kResult);
        ASSERT_TRUE(got) << got.error().detail;
        ASSERT_EQ(got->header.request_id, id);
    }
}

// ---- backpressure over real sockets ----

TEST(Relay, AFullWorkerIsBusyAndAFullBackboneSlowsItsWorkers) {
    RelayOptions options = open_relay();
    options.switchboard.queue_bytes_max = 1 << 20;
    const auto relay = start(options);
    PairOf pair(target_of(*relay));
    const Bytes frame = make_frame(FrameType::kCompute, pair.to_worker, 1, Bytes(1 << 20));
    // The worker reads nothing: some frames sit in the kernel, one in the queue, the rest is told.
    std::optional<Frame> told;
    for (int i = 0; i < 100 && !told; ++i) {
        pair.backbone.say(frame);
        if (auto answer = pair.backbone.next(20ms)) told = *answer;
    }
    ASSERT_TRUE(told);
    EXPECT_EQ(Node::error_of(*told).code, Errc::kBusy);
    EXPECT_EQ(told->header.peer, pair.to_worker);
    // The other way: the worker's writes stop being taken, and nothing is lost.
    while (pair.worker.next(200ms)) {
    }
    constexpr uint32_t kFrames = 64;
    std::thread writer([&] {
        for (uint32_t i = 1; i <= kFrames; ++i) {
            pair.worker.say(make_frame(FrameType::kResult, pair.to_backbone, i, Bytes(1 << 20)));
        }
    });
    EXPECT_TRUE(eventually([&] { return relay->stats().counters.held > 0; }));
    EXPECT_LE(relay->stats().queued_bytes, 2u << 20);
    for (uint32_t i = 1; i <= kFrames; ++i) {
        const auto got = pair.backbone.next(FrameType::kResult);
        if (!got) ADD_FAILURE() << got.error().detail;
        if (!got) break;
        EXPECT_EQ(got->header.request_id, i);
    }
    writer.join();
    EXPECT_EQ(relay->stats().queued_bytes, 0u);
}

// A frame that waits in its own buffer is counted once: for its receiver, when it is let through.
TEST(Relay, AHeldFrameIsNotCountedOnceItIsQueued) {
    RelayOptions options = open_relay();
    options.switchboard.queue_bytes_max = 1 << 20;
    options.buffer_idle = 1h;
    const auto relay = start(options);
    PairOf pair(target_of(*relay));
    uint32_t sent = 0;
    while (relay->stats().counters.held == 0) {  // nothing comes behind the one that is held
        const Bytes frame =
            make_frame(FrameType::kResult, pair.to_backbone, ++sent, Bytes(3 << 20));
        pair.worker.say(frame);
        ASSERT_TRUE(eventually([&] {
            const SwitchboardCounters now = relay->stats().counters;
            return now.frames_forwarded == sent || now.held != 0;
        }));
    }
    EXPECT_GT(relay->stats().receive_bytes, 2u << 20);
    for (uint32_t i = 1; i <= sent; ++i) {
        const auto got = pair.backbone.next(FrameType::kResult);
        ASSERT_TRUE(got) << got.error().detail;
    }
    EXPECT_LE(relay->stats().receive_bytes, 1u << 20) << "at most an empty buffer for the next";
}

// Two send to one more than its share of the relay, so that it always has bytes to be written: what
// it says itself is read all the same.
TEST(Relay, WhoIsFloodedIsReadToo) {
    const auto relay = start(open_relay());
    const Target target = target_of(*relay);
    Node backbone = Node::attach(target, Role::kBackbone);
    Node idle = Node::attach(target, Role::kWorker);
    const uint16_t to_idle = backbone.peer();
    std::atomic<bool> stopping{false}, heard{false};
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i) {
        threads.emplace_back([&] {
            Node source = Node::attach(target, Role::kWorker);
            const Bytes frame = make_frame(FrameType::kResult, source.peer(), 1, Bytes(256 << 10));
            while (!stopping.load()) source.say(frame);
        });
    }
    threads.emplace_back([&] { heard.store(idle.next(FrameType::kCompute).has_value()); });
    auto end = net::Clock::now() + 20s;
    for (uint32_t frames = 0; net::Clock::now() < end && !heard.load(); ++frames) {
        if (frames == 200) {
            EXPECT_TRUE(backbone.stream.enqueue(make_frame(FrameType::kCompute, to_idle, 1)));
            end = net::Clock::now() + 10s;
        }
        const auto got = backbone.stream.receive(in(20000ms));
        if (!got) ADD_FAILURE() << got.error().detail;
        if (!got) break;
    }
    EXPECT_TRUE(heard.load());
    stopping.store(true);
    backbone.stream.close();
    for (std::thread& thread : threads) thread.join();
}

TEST(Relay, MemoryOfIdleConnectionsIsGivenBack) {
    RelayOptions options = open_relay();
    options.buffer_idle = 1ms;
    const auto relay = start(options);
    PairOf pair(target_of(*relay));
    ASSERT_TRUE(pair.exchange(1, 8 << 20, 8 << 20));
    EXPECT_TRUE(eventually([&] { return relay->stats().receive_bytes == 0; }));
    EXPECT_TRUE(pair.exchange(2, 100, 100));
}

// ---- moving ----

TEST(Relay, AThousandNodesMoveToAnotherRelay) {
    auto old_relay = start(open_relay());
    const auto new_relay = start(open_relay());
    constexpr int kNodes = 1000;
    constexpr auto kWindow = 1500ms;
    std::vector<crypto::KeyPair> keys;
    std::vector<Node> nodes;
    for (int i = 0; i < kNodes; ++i) {
        keys.push_back(must(crypto::KeyPair::generate(), "key"));
        nodes.push_back(
            must(Node::try_attach(target_of(*old_relay), Role::kWorker, keys.back()), "attach"));
    }
    const std::string url = "ws://127.0.0.1:" + std::to_string(new_relay->port());
    old_relay->drain(kWindow, url);
    const auto start_time = net::Clock::now();
    std::mt19937 random(1);
    std::vector<std::pair<int64_t, int>> when;
    for (int i = 0; i < kNodes; ++i) {
        const auto frame = nodes[i].next(FrameType::kMove);
        ASSERT_TRUE(frame) << frame.error().detail;
        const auto move = *wire::decode_move(frame->payload);
        EXPECT_EQ(move.url, url);
        ASSERT_EQ(move.within_ms, 1500u);
        when.emplace_back(random() % move.within_ms, i);
    }
    std::sort(when.begin(), when.end());
    for (const auto& [after, i] : when) {
        while (net::Clock::now() < start_time + milliseconds(after)) std::this_thread::yield();
        auto moved = Node::try_attach(target_of(*new_relay), Role::kWorker, keys[i]);
        ASSERT_TRUE(moved) << moved.error().detail;
        nodes[i].say(make_frame(FrameType::kGoodbye, 0, 0));
        nodes[i] = std::move(*moved);
    }
    EXPECT_EQ(new_relay->stats().workers, uint64_t{kNodes});
    EXPECT_EQ(new_relay->stats().counters.refused, 0u);
    EXPECT_TRUE(eventually([&] { return old_relay->drained(); }));
    old_relay.reset();
}

TEST(Relay, DrainClosesWhoStays) {
    RelayOptions options = open_relay();
    options.switchboard.drain_grace = 100ms;
    const auto relay = start(options);
    PairOf pair(target_of(*relay));
    relay->drain(200ms, {});
    EXPECT_TRUE(pair.backbone.next(FrameType::kMove));
    EXPECT_TRUE(pair.worker.next(FrameType::kMove));
    EXPECT_TRUE(pair.exchange(1, 10, 10));  // still at work
    const auto end = pair.backbone.next(FrameType::kError);
    ASSERT_TRUE(end);
    EXPECT_EQ(Node::error_of(*end).code, Errc::kClosed);
    EXPECT_TRUE(eventually([&] { return relay->drained(); }));
}

TEST(Relay, NobodyIsTakenWhileItDrains) {
    const auto relay = start(open_relay());
    Node stays = Node::attach(target_of(*relay), Role::kWorker);
    relay->drain(10s, {});
    ASSERT_TRUE(stays.next(FrameType::kMove));
    const auto key = must(crypto::KeyPair::generate(), "key");
    const auto late = Node::try_attach(target_of(*relay), Role::kWorker, key);
    ASSERT_FALSE(late);
    EXPECT_EQ(late.error().code, Errc::kBusy);
}

TEST(Address, OneOfIPv4OrA64OfIPv6) {
    EXPECT_EQ(net::peer_key("192.0.2.7:1234"), "192.0.2.7");
    EXPECT_EQ(net::peer_key("[2001:db8:1:2:3:4:5:6]:1"), "2001:db8:1:2::/64");
    EXPECT_EQ(net::peer_key("[2001:db8:1:2:ffff::1]:9"), "2001:db8:1:2::/64");
    EXPECT_NE(net::peer_key("[2001:db8:1:3::1]:9"), "2001:db8:1:2::/64");
    EXPECT_EQ(net::peer_key("[fe80::1%eth0]:9"), "fe80::/64");
    EXPECT_EQ(net::peer_key("[nonsense]:9"), "nonsense");
    EXPECT_EQ(net::peer_key(""), "");
}

}  // namespace
}  // namespace kvasir::relay
