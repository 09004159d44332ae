// What has broken other bridges: S1, lengths at the edges; S2, bytes that come together; S5,
// hostile and slow peers. Against a real relay. S4, minutes of silence, is in switchboard_test.cpp,
// in virtual time.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <random>
#include <thread>

#include "base/check.hpp"
#include "net/test_frames.hpp"
#include "relay/relay_testing.hpp"

namespace kvasir::relay {
namespace {

using namespace std::chrono_literals;
using namespace testing;
using net::testing::frame;
using wire::WsOpcode;

std::unique_ptr<Relay> start(RelayOptions options = {}) {
    return must(Relay::start(must(net::parse_listen("127.0.0.1:0"), "listen"), std::move(options)),
                "relay");
}

// A client made of bytes.
class RawClient {
public:
    explicit RawClient(uint16_t port) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
        sockaddr_in address = {};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        address.sin_port = htons(port);
        const int on = 1;
        ::setsockopt(fd_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
        timeval timeout = {20, 0};
        ::setsockopt(fd_.get(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
        KVASIR_CHECK(::connect(fd_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) ==
                     0);
    }
    static Bytes upgrade() {
        return net::testing::bytes_of(
            "GET /kvasir HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
            "Sec-WebSocket-Protocol: kvasir.1\r\n\r\n");
    }
    void send(std::span<const uint8_t> bytes) {
        while (!bytes.empty()) {
            const ssize_t sent = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
            if (sent <= 0) return;
            bytes = bytes.subspan(static_cast<size_t>(sent));
        }
    }
    // False when the connection ended or nothing came.
    bool more() {
        uint8_t buffer[16384];
        const ssize_t got = ::recv(fd_.get(), buffer, sizeof(buffer), 0);
        if (got <= 0) return false;
        in_.insert(in_.end(), buffer, buffer + got);
        return true;
    }
    // The next Kvasir frame; nullopt at the end (a close frame, or the socket's).
    std::optional<Frame> next() {
        while (true) {
            if (!upgraded_) {
                static const std::string kEnd = "\r\n\r\n";
                const auto end = std::search(in_.begin(), in_.end(), kEnd.begin(), kEnd.end());
                if (end != in_.end()) {
                    in_.erase(in_.begin(), end + 4);
                    upgraded_ = true;
                    continue;
                }
            } else if (const auto header = wire::decode_ws_header(in_, false); !header) {
                return std::nullopt;
            } else if (*header &&
                       in_.size() >= (*header)->header_bytes + (*header)->payload_bytes) {
                const auto begin = in_.begin() + (*header)->header_bytes;
                const Bytes payload(begin,
                                    begin + static_cast<ptrdiff_t>((*header)->payload_bytes));
                in_.erase(in_.begin(), begin + static_cast<ptrdiff_t>((*header)->payload_bytes));
                if ((*header)->opcode == WsOpcode::kClose) return std::nullopt;
                if ((*header)->opcode != WsOpcode::kBinary) continue;
                const auto decoded = wire::decode_frame(payload);
                if (!decoded) return std::nullopt;
                return Frame{decoded->header, {decoded->payload.begin(), decoded->payload.end()}};
            }
            if (!more()) return std::nullopt;
        }
    }
    wire::Nonce nonce() {
        const auto got = next();
        KVASIR_CHECK(got && got->header.type == FrameType::kNonce);
        return *wire::decode_nonce(got->payload);
    }

private:
    net::UniqueFd fd_;
    Bytes in_;
    bool upgraded_ = false;
};

void append(Bytes& to, const Bytes& more) {
    to.insert(to.end(), more.begin(), more.end());
}

const Bytes kPing = make_frame(FrameType::kPing, 0, 77, Bytes(8, 9));

// Attached, and answers: the last frame that arrives is the PONG.
bool reaches_pong(RawClient& client) {
    while (auto got = client.next()) {
        if (got->header.type == FrameType::kPong) return got->header.request_id == 77;
    }
    return false;
}

const crypto::KeyPair& some_key() {
    static const crypto::KeyPair key = must(crypto::KeyPair::generate(), "key");
    return key;
}

RelayOptions patient() {
    RelayOptions options;
    options.switchboard.attach_burst = 1000000;
    options.switchboard.connections_per_address_max = 100000;
    return options;
}

// ---- S2: bytes that arrive together ----

TEST(Together, RoleAttachAndPingCutAnywhere) {
    const auto relay = start(patient());
    size_t total = 1000000;
    for (size_t cut = 0; cut <= total; ++cut) {
        RawClient client(relay->port());
        client.send(RawClient::upgrade());
        const auto nonce = client.nonce();
        Bytes all = frame({'W'}, true);
        append(all, frame(Node::make_attach(Role::kWorker, some_key(), "", nonce), true));
        append(all, frame(kPing, true));
        total = all.size();
        const size_t at = std::min(cut, total);
        const size_t second = std::min(total, at + 1 + cut * 7 % 40);
        client.send(std::span(all).first(at));
        client.send(std::span(all).subspan(at, second - at));
        client.send(std::span(all).subspan(second));
        ASSERT_TRUE(reaches_pong(client)) << cut;
    }
}

TEST(Together, TheRoleWithTheUpgradeCutAnywhere) {
    const auto relay = start(patient());
    Bytes start_bytes = RawClient::upgrade();
    append(start_bytes, frame({'B'}, true));
    for (size_t cut = 0; cut <= start_bytes.size(); cut += cut + 20 < start_bytes.size() ? 5 : 1) {
        RawClient client(relay->port());
        client.send(std::span(start_bytes).first(cut));
        client.send(std::span(start_bytes).subspan(cut));
        const auto nonce = client.nonce();
        client.send(frame(Node::make_attach(Role::kBackbone, some_key(), "", nonce), true));
        client.send(frame(kPing, true));
        ASSERT_TRUE(reaches_pong(client)) << cut;
    }
}

TEST(Together, WhatIsNoNodeIsClosedAndTheOthersLive) {
    const auto relay = start(patient());
    Node healthy = Node::attach(target_of(*relay), Role::kWorker);
    const Bytes up = RawClient::upgrade();
    const auto after_upgrade = [&](Bytes more) {
        Bytes all = up;
        append(all, more);
        return all;
    };
    const Bytes role = frame({'W'}, true);
    Bytes two_roles = role;
    append(two_roles, role);
    Bytes fragmented = frame({'W'}, true, WsOpcode::kBinary, false);
    append(fragmented, frame({'W'}, true, WsOpcode::kContinuation, true));
    const std::vector<Bytes> cases = {
        net::testing::bytes_of("GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"),
        {0x16, 0x03, 0x01, 0x02, 0x00, 0x01, 0x00, 0x01, 0xfc, 0x03, 0x03, '\r', '\n', '\r', '\n'},
        Bytes(20000, 'A'),
        Bytes(9000, 0xff),
        after_upgrade(two_roles),
        after_upgrade(fragmented),
        after_upgrade(frame({}, true)),
        after_upgrade(frame({0}, true)),
        after_upgrade(frame({0xff}, true)),
        after_upgrade(frame({'G'}, true)),
        after_upgrade(frame({'W', 0}, true)),
        after_upgrade(frame({'W'}, false)),                  // no mask
        after_upgrade(frame({'W'}, true, WsOpcode::kText)),  // text
        after_upgrade(frame(Bytes(5000, 'W'), true)),        // long before it attached
        after_upgrade(Bytes(300, 0xc1)),                     // reserved bits: compressed
        after_upgrade(net::testing::control(WsOpcode::kClose, "", true)),
    };
    for (size_t i = 0; i < cases.size(); ++i) {
        RawClient client(relay->port());
        client.send(cases[i]);
        while (client.more()) {  // until it is closed; its deadline is the relay's
        }
        healthy.say(kPing);
        EXPECT_TRUE(healthy.next(FrameType::kPong)) << i;
    }
    EXPECT_EQ(relay->stats().workers, 1u);
    EXPECT_EQ(relay->stats().connections, 1u);
}

// ---- S1: lengths ----

// A header that claims `bytes`, in the form with that many length bytes.
Bytes claim(uint64_t bytes, int form) {
    Bytes out = {0x82, static_cast<uint8_t>(0x80 | (form == 0 ? bytes : form == 2 ? 126 : 127))};
    for (int i = form - 1; i >= 0; --i) out.push_back(static_cast<uint8_t>(bytes >> (8 * i)));
    append(out, {1, 2, 3, 4});
    return out;
}

TEST(Lengths, ClaimsOverTheCapAndWrongFormsAreClosedBeforeTheBody) {
    RelayOptions options = patient();
    options.switchboard.message_bytes_max = 1 << 20;
    const auto relay = start(options);
    const std::vector<Bytes> cases = {
        claim((1 << 20) + 1, 8),
        claim(uint64_t{1} << 31, 8),
        claim(uint64_t{1} << 32, 8),
        claim((uint64_t{1} << 32) + 126, 8),
        claim(uint64_t{1} << 63, 8),
        claim(UINT64_MAX, 8),
        claim(125, 2),
        claim(65535, 8),
        claim(5, 8),
    };
    for (const Bytes& bytes : cases) {
        RawClient client(relay->port());
        client.send(RawClient::upgrade());
        const auto nonce = client.nonce();
        client.send(frame({'W'}, true));
        client.send(frame(Node::make_attach(Role::kWorker, some_key(), "", nonce), true));
        client.send(frame(kPing, true));
        ASSERT_TRUE(reaches_pong(client));
        client.send(bytes);
        EXPECT_FALSE(client.next());
    }
    EXPECT_LT(relay->stats().receive_bytes, 1u << 20);
}

TEST(Lengths, EveryFormInAnyPiecesKeepsInStep) {
    const auto relay = start(patient());
    Node backbone = Node::attach(target_of(*relay), Role::kBackbone);
    RawClient worker(relay->port());
    worker.send(RawClient::upgrade());
    const auto nonce = worker.nonce();
    worker.send(frame({'W'}, true));
    worker.send(frame(Node::make_attach(Role::kWorker, some_key(), "", nonce), true));
    const uint16_t to_worker = backbone.peer();
    uint16_t to_backbone = 0;
    while (to_backbone == 0) {
        const auto got = worker.next();
        ASSERT_TRUE(got);
        if (got->header.type == FrameType::kPeerUp) {
            to_backbone = wire::decode_peer_up(got->payload)->handle;
        }
    }
    std::mt19937 random(5);
    uint32_t id = 0;
    for (const size_t size : {16u, 125u, 126u, 127u, 128u, 16383u, 16385u, 32767u, 32768u, 65535u,
                              65536u, 65537u, 1048577u}) {
        for (int way = 0; way < 3; ++way) {
            const Bytes payload = net::testing::pattern(size - 16, ++id);
            const Bytes bytes =
                frame(make_frame(FrameType::kResult, to_backbone, id, payload), true);
            const size_t head_end = std::min<size_t>(bytes.size(), 14 + 16);
            if (way == 0) {
                worker.send(bytes);
            } else if (way == 1) {  // header byte by byte
                for (size_t i = 0; i < head_end; ++i) worker.send(std::span(bytes).subspan(i, 1));
                worker.send(std::span(bytes).subspan(head_end));
            } else {
                for (size_t at = 0; at < bytes.size();) {
                    const size_t step = std::min<size_t>(bytes.size() - at, 1 + random() % 30000);
                    worker.send(std::span(bytes).subspan(at, step));
                    at += step;
                }
            }
            const auto got = backbone.next(FrameType::kResult);
            ASSERT_TRUE(got) << size;
            EXPECT_EQ(got->header.peer, to_worker);
            EXPECT_EQ(got->header.request_id, id);
            ASSERT_EQ(got->payload, payload) << size;
        }
    }
}

// ---- S5: hostile and slow peers beside a healthy pair ----

// 0 under sanitizers, which keep what was freed.
uint64_t resident_bytes() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return 0;
#endif
    std::ifstream file("/proc/self/statm");
    uint64_t pages = 0, resident = 0;
    file >> pages >> resident;
    return resident * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

// A pair that exchanges frames as work does, and how long one exchange takes.
class HealthyPair {
public:
    explicit HealthyPair(const Target& target)
        : backbone_(Node::attach(target, Role::kBackbone)),
          worker_(Node::attach(target, Role::kWorker)),
          to_worker_(backbone_.peer()),
          to_backbone_(worker_.peer()) {
        echo_ = std::thread([this] {
            while (const auto got = worker_.next(FrameType::kCompute)) {
                worker_.say(make_frame(FrameType::kResult, to_backbone_, got->header.request_id,
                                       got->payload));
            }
        });
    }
    ~HealthyPair() {
        backbone_.say(make_frame(FrameType::kGoodbye, 0, 0));
        // The echo ends with its connection.
        ::shutdown(worker_.stream.fd(), SHUT_RDWR);
        echo_.join();
    }
    // The median of `count` exchanges of 4 KB; aborts the test run if one goes wrong.
    std::chrono::nanoseconds median(int count) {
        std::vector<std::chrono::nanoseconds> times;
        const Bytes payload(4096, 5);
        for (int i = 0; i < count; ++i) {
            const auto begin = net::Clock::now();
            const auto id = static_cast<uint32_t>(++last_id_);
            backbone_.say(make_frame(FrameType::kCompute, to_worker_, id, payload));
            Result<Frame> got = fail(Errc::kTimeout, "nothing");
            do {
                got = backbone_.next();
            } while (got && got->header.type != FrameType::kResult);
            KVASIR_CHECK(got.has_value() && got->header.request_id == id);
            times.push_back(net::Clock::now() - begin);
        }
        std::nth_element(times.begin(), times.begin() + count / 2, times.end());
        return times[static_cast<size_t>(count) / 2];
    }

private:
    Node backbone_, worker_;
    uint16_t to_worker_, to_backbone_;
    std::thread echo_;
    int last_id_ = 0;
};

// This thread, and those that it starts, on the processor where it is now.
class OneCpu {
public:
    OneCpu() {
        CPU_ZERO(&before_);
        KVASIR_CHECK(::sched_getaffinity(0, sizeof(before_), &before_) == 0);
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(::sched_getcpu(), &one);
        KVASIR_CHECK(::sched_setaffinity(0, sizeof(one), &one) == 0);
    }
    ~OneCpu() { (void)::sched_setaffinity(0, sizeof(before_), &before_); }
    OneCpu(const OneCpu&) = delete;
    OneCpu& operator=(const OneCpu&) = delete;

private:
    cpu_set_t before_;
};

// The latency of a pair with hostile neighbours stays within twice that of one without. Both are
// measured in turn, and the best round of each counts: what else the machine does is unfair to
// both, and not in every round.
// All on one processor: where the scheduler puts the threads of a pair makes more than twice.
class Latency {
public:
    // `cpu` is older than the relay of `beside_hostile`.
    Latency(const OneCpu&, const Target& beside_hostile)
        : quiet_relay_(start(patient())),
          quiet_(target_of(*quiet_relay_)),
          beside_(beside_hostile) {}
    // Within twice, after at most so many rounds of 50 exchanges.
    ::testing::AssertionResult within_twice(int rounds = 200) {
        auto quiet = std::chrono::nanoseconds::max(), beside = quiet;
        for (int i = 0; i < rounds; ++i) {
            quiet = std::min(quiet, quiet_.median(50));
            beside = std::min(beside, beside_.median(50));
            if (i >= 4 && beside <= 2 * quiet) return ::testing::AssertionSuccess();
        }
        return ::testing::AssertionFailure()
               << beside.count() << " ns beside hostile peers, " << quiet.count() << " ns without";
    }

private:
    const std::unique_ptr<Relay> quiet_relay_;
    HealthyPair quiet_, beside_;
};

TEST(Hostile, AReaderThatStopsIsBoundedAndHarmsNobodyElse) {
    const OneCpu cpu;
    RelayOptions options = patient();
    options.switchboard.queue_bytes_max = 4 << 20;
    const auto relay = start(options);
    const uint64_t before = resident_bytes();
    Latency latency(cpu, target_of(*relay));
    EXPECT_TRUE(latency.within_twice());
    Node backbone = Node::attach(target_of(*relay), Role::kBackbone);
    std::vector<Node> workers;
    std::vector<uint16_t> handles;
    // Pairs with everybody: nobody reads, all workers write as fast as they can.
    for (int i = 0; i < 4; ++i) {
        workers.push_back(Node::attach(target_of(*relay), Role::kWorker));
        for (bool found = false; !found;) {
            const auto up = must(workers.back().next_peer(), "peer");
            found = up.generation == backbone.attached.generation;
            if (found) handles.push_back(up.handle);
        }
    }
    const Bytes body(1 << 20, 1);
    for (int round = 0; round < 40; ++round) {
        for (size_t i = 0; i < workers.size(); ++i) {
            (void)workers[i].stream.enqueue(make_frame(FrameType::kResult, handles[i], 1, body));
        }
    }
    EXPECT_TRUE(latency.within_twice());
    const RelayStats stats = relay->stats();
    EXPECT_GT(stats.counters.held, 0u);
    EXPECT_LE(stats.queued_bytes, 5u << 20);
    EXPECT_LE(stats.receive_bytes, 16u << 20);
    // The workers' own unsent frames are most of it: 4 x 40 MiB.
    EXPECT_LT(resident_bytes() - before, uint64_t{256} << 20);
}

TEST(Hostile, HalfFramesOfManyAreBounded) {
    const OneCpu cpu;
    RelayOptions options = patient();
    options.receive_total_max = 32 << 20;
    const auto relay = start(options);
    Latency latency(cpu, target_of(*relay));
    const uint64_t before = resident_bytes();
    std::vector<std::unique_ptr<RawClient>> clients;
    const Bytes head = claim(40 << 20, 8);
    const Bytes body(8 << 20, 0);
    for (int i = 0; i < 12; ++i) {
        const auto key = must(crypto::KeyPair::generate(), "key");
        clients.push_back(std::make_unique<RawClient>(relay->port()));
        clients.back()->send(RawClient::upgrade());
        const auto nonce = clients.back()->nonce();
        clients.back()->send(frame({'W'}, true));
        clients.back()->send(frame(Node::make_attach(Role::kWorker, key, "", nonce), true));
        clients.back()->send(head);
        clients.back()->send(body);
        if (i % 4 == 3) {
            EXPECT_TRUE(latency.within_twice()) << i;
        }
    }
    const RelayStats stats = relay->stats();
    EXPECT_GT(stats.cut_for_memory, 0u);
    EXPECT_LT(stats.receive_bytes, 48u << 20);
    EXPECT_LT(resident_bytes() - before, uint64_t{256} << 20);
}

TEST(Hostile, FloodsOfSmallThingsEndTheFlooder) {
    const OneCpu cpu;
    const auto relay = start(patient());
    Latency latency(cpu, target_of(*relay));
    const auto attach = [&](RawClient& client) {
        const auto key = must(crypto::KeyPair::generate(), "key");
        client.send(RawClient::upgrade());
        const auto nonce = client.nonce();
        client.send(frame({'W'}, true));
        client.send(frame(Node::make_attach(Role::kWorker, key, "", nonce), true));
    };
    const std::vector<Bytes> pieces = {
        net::testing::control(WsOpcode::kPing, "x", true),  // pings
        frame({}, true, WsOpcode::kContinuation, false),    // fragments of nothing
    };
    for (size_t i = 0; i < pieces.size(); ++i) {
        RawClient client(relay->port());
        attach(client);
        Bytes flood = i == 1 ? frame({}, true, WsOpcode::kBinary, false) : Bytes();
        for (int n = 0; n < 70000; ++n) append(flood, pieces[i]);
        client.send(flood);
        while (client.next()) {
        }
        EXPECT_TRUE(latency.within_twice()) << i;
    }
    EXPECT_EQ(relay->stats().workers, 1u);
}

TEST(Hostile, HalfAnAttachNeverAttaches) {
    RelayOptions options = patient();
    options.switchboard.attach_deadline = 200ms;
    const auto relay = start(options);
    RawClient slow(relay->port());
    slow.send(RawClient::upgrade());
    const auto nonce = slow.nonce();
    slow.send(frame({'W'}, true));
    const Bytes bytes = frame(Node::make_attach(Role::kWorker, some_key(), "", nonce), true);
    slow.send(std::span(bytes).first(bytes.size() - 1));  // all but the last
    const auto error = slow.next();
    ASSERT_TRUE(error);
    EXPECT_EQ(Node::error_of(*error).code, Errc::kTimeout);
    EXPECT_FALSE(slow.next());
}

}  // namespace
}  // namespace kvasir::relay
