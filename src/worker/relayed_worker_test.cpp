// A worker attached to scripted relays over real sockets: moving, backbones that refuse it, pings.
#include "worker/worker.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <iterator>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <poll.h>

#include "base/log.hpp"
#include "crypto/keys.hpp"
#include "wire/attach.hpp"
#include "worker/worker_testing.hpp"

namespace kvasir::worker {
namespace {

using namespace testing;
using Bytes = std::vector<uint8_t>;
using std::chrono::milliseconds;

constexpr uint16_t kPeer = 5;

Bytes to_peer(Bytes message, uint16_t peer = kPeer) {
    wire::set_peer(message, peer);
    return message;
}

// A relay's side of one connection.
class Node {
public:
    struct Got {
        FrameType type{0};  // 0: the connection is over, or nothing came in time
        uint16_t peer = 0;
    };

    explicit Node(net::MessageStream stream) : stream_(std::move(stream)) {}

    bool attach(milliseconds ping_interval) {
        const auto deadline = net::Clock::now() + 10s;
        if (!stream_.enqueue(wire::encode_nonce({}))) return false;
        const auto role = stream_.receive(deadline);
        if (!role || role->size() != 1 || (*role)[0] != 'W') return false;
        if (next().type != FrameType::kAttach) return false;
        wire::Attached attached;
        attached.message_bytes_max = 64 << 20;
        attached.token_left_ms = 3600000;
        attached.ping_interval_ms = static_cast<uint32_t>(ping_interval.count());
        return send(wire::encode_attached(attached));
    }
    bool send(const Bytes& message) {
        return stream_.enqueue(message) && stream_.flush_until(net::Clock::now() + 10s);
    }
    Got next(milliseconds within = 10s) {
        const auto message = stream_.receive(net::Clock::now() + within);
        if (!message) {
            closed_ |= message.error().code != Errc::kTimeout;
            return {};
        }
        const auto frame = wire::decode_frame(*message);
        if (!frame) return {};
        payload_.assign(frame->payload.begin(), frame->payload.end());
        return {frame->header.type, frame->header.peer};
    }
    // The next frame about that peer that is no PING or PONG.
    bool expect(FrameType type, uint16_t peer = kPeer) {
        auto found = std::ranges::find(skipped_, peer, &Got::peer);
        while (found == skipped_.end()) {
            const Got got = next();
            if (got.type == FrameType::kPing || got.type == FrameType::kPong) continue;
            skipped_.push_back(got);
            if (got.peer == peer || got.type == FrameType{0}) found = std::prev(skipped_.end());
        }
        const FrameType came = found->type;
        skipped_.erase(found);
        EXPECT_EQ(static_cast<int>(came), static_cast<int>(type));
        return came == type;
    }
    bool peer_up(uint16_t peer = kPeer) {
        wire::PeerUp up;
        up.handle = peer;
        up.role = wire::Role::kBackbone;
        return send(wire::encode_peer_up(up)) && expect(FrameType::kHello, peer);
    }
    bool welcome(uint16_t peer = kPeer) { return send(to_peer(wire::encode_welcome({}), peer)); }
    bool refuse(Errc code, uint16_t peer = kPeer) {
        return send(to_peer(wire::encode_error({code, "not with you"}, 0), peer));
    }
    bool program(uint16_t peer = kPeer) {
        const auto code = moe::encode(toy::swiglu());
        return send(to_peer(wire::encode_program({1, kLayer0, code}, 1), peer)) &&
               expect(FrameType::kProgramAck, peer);
    }
    bool compute(uint32_t id, uint16_t peer = kPeer) {
        return send(to_peer(request(id), peer)) && expect(FrameType::kResult, peer);
    }
    bool move(milliseconds within, const std::string& url) {
        return send(wire::encode_move({static_cast<uint32_t>(within.count()), url}));
    }
    const Bytes& payload() const { return payload_; }
    bool closed() const { return closed_; }

private:
    net::MessageStream stream_;
    Bytes payload_;
    std::vector<Got> skipped_;  // of other peers than a test looked at
    bool closed_ = false;
};

class Relay {
public:
    Relay() {
        net::Endpoint here;
        here.host = "127.0.0.1";
        auto listener =
            net::Listener::make(here, [this](net::MessageStream stream, const std::string&) {
                const std::lock_guard lock(mu_);
                streams_.push_back(std::move(stream));
                arrived_.notify_all();
            });
        KVASIR_CHECK(listener.has_value());
        listener_ = std::move(*listener);
    }
    net::Endpoint endpoint() const { return *net::parse_url(url()); }
    std::string url() const { return "ws://127.0.0.1:" + std::to_string(listener_->port()); }
    // The next connection; null when none comes.
    std::unique_ptr<Node> next(milliseconds within = 20s) {
        std::unique_lock lock(mu_);
        if (!arrived_.wait_for(lock, within, [&] { return !streams_.empty(); })) return nullptr;
        auto node = std::make_unique<Node>(std::move(streams_.front()));
        streams_.pop_front();
        return node;
    }
    // The same, attached.
    std::unique_ptr<Node> attached(milliseconds ping_interval = 20s) {
        auto node = next();
        return node && node->attach(ping_interval) ? std::move(node) : nullptr;
    }

private:
    std::mutex mu_;
    std::condition_variable arrived_;
    std::deque<net::MessageStream> streams_;  // Guarded by mu_
    std::unique_ptr<net::Listener> listener_;
};

class Running {
public:
    explicit Running(const Relay& home, const std::function<void(WorkerOptions&)>& edit = {}) {
        const auto key = std::make_shared<const crypto::KeyPair>(*crypto::KeyPair::generate());
        WorkerOptions options;
        options.attach.emplace();
        options.attach->route = std::make_shared<access::Route>(
            access::RelayAddress{home.endpoint(), nullptr}, access::TlsFor());
        options.attach->credentials = [key] { return access::Credentials{key, "token", "test"}; };
        options.name = "test";
        options.pause_first = 20ms;
        options.pause_max = 200ms;
        options.drain_quiet = 100ms;
        if (edit) edit(options);
        (void)toy::cpu();
        auto made = Worker::make(toy_holding(), options);
        KVASIR_CHECK(made.has_value());
        worker_ = std::move(*made);
        thread_ = std::thread([this] {
            result_ = worker_->run();
            done_.store(true);
        });
    }
    ~Running() { (void)end(); }
    bool done() const { return done_.load(); }
    Status end() {
        worker_->stop();
        return join();
    }
    Status join() {
        if (thread_.joinable()) thread_.join();
        return result_;
    }

private:
    std::unique_ptr<Worker> worker_;
    Status result_;
    std::atomic<bool> done_{false};
    std::thread thread_;
};

// ---- moving ----

// What it was asked before it leaves is answered, it says so to its backbone, and it goes to the
// address given.
TEST(RelayedWorker, WorksOnThenGoesWhereARelayThatStopsSays) {
    Relay home, next;
    // The next request must come before a worker that leaves finds it quiet.
    Running worker(home, [](WorkerOptions& options) { options.drain_quiet = 2000ms; });
    auto old = home.attached();
    ASSERT_TRUE(old && old->peer_up() && old->welcome() && old->program());
    ASSERT_TRUE(old->move(1000ms, next.url()));
    const auto told = net::Clock::now();
    uint32_t answered = 0;
    for (bool is_leaving = false; !is_leaving;) {
        ASSERT_TRUE(old->send(to_peer(request(++answered))));
        Node::Got got = old->next();
        if (got.type == FrameType::kDrain) {
            is_leaving = true;
            EXPECT_EQ(got.peer, kPeer);
            got = old->next();
        }
        ASSERT_EQ(static_cast<int>(got.type), static_cast<int>(FrameType::kResult)) << answered;
    }
    EXPECT_LT(net::Clock::now() - told, 10s);
    EXPECT_TRUE(old->expect(FrameType::kGoodbye, 0));
    (void)old->next();
    EXPECT_TRUE(old->closed());
    auto fresh = next.attached();
    ASSERT_TRUE(fresh);
    EXPECT_TRUE(fresh->peer_up() && fresh->welcome() && fresh->program() && fresh->compute(1));
    EXPECT_EQ(home.next(0ms), nullptr) << "nobody asks the relay that stops";
    EXPECT_TRUE(worker.end());
}

// A relay that is cut off in the middle is left at once, and the moment stays what it was.
TEST(RelayedWorker, GoesThereWhenTheRelayIsCutOffBeforeItsMoment) {
    Relay home, next;
    Running worker(home);
    auto old = home.attached();
    ASSERT_TRUE(old && old->move(1000ms, next.url()));
    ASSERT_TRUE(old->send(wire::encode_ping(1)));
    ASSERT_EQ(static_cast<int>(old->next().type), static_cast<int>(FrameType::kPong));
    old.reset();
    EXPECT_TRUE(next.attached());
}

TEST(RelayedWorker, ComesBackWhenThereIsNobody) {
    Relay home;
    std::string nowhere;
    {
        const Relay gone;
        nowhere = gone.url();
    }
    for (const std::string& url : {nowhere, std::string("ws://127.0.0.1:99999"),
                                   std::string("wss://127.0.0.1:1"), std::string("nonsense")}) {
        SCOPED_TRACE(url);
        Running worker(home);
        auto old = home.attached();
        ASSERT_TRUE(old && old->move(1ms, url));
        EXPECT_TRUE(old->expect(FrameType::kGoodbye, 0));
        auto again = home.attached();
        ASSERT_TRUE(again);
        EXPECT_TRUE(again->peer_up() && again->welcome());
        EXPECT_FALSE(worker.done());
        EXPECT_TRUE(worker.end());
    }
}

// What is final from the configured relay is not from where it sent us.
TEST(RelayedWorker, ARefusalWhereItWasSentLeadsBack) {
    Relay home, next;
    Running worker(home);
    auto old = home.attached();
    ASSERT_TRUE(old && old->move(1ms, next.url()));
    auto refusing = next.next();
    ASSERT_TRUE(refusing &&
                refusing->send(wire::encode_error({Errc::kRevoked, "who are you?"}, 0)));
    auto again = home.attached();
    ASSERT_TRUE(again);
    ASSERT_TRUE(again->send(wire::encode_error({Errc::kRevoked, "taken back"}, 0)));
    const Status ended = worker.join();
    ASSERT_FALSE(ended);
    EXPECT_EQ(ended.error().code, Errc::kRevoked);
}

// To the same address: it makes way at once, and nodes come back at moments of their own.
TEST(RelayedWorker, ComesBackToTheSameRelayAtARandomMoment) {
    Relay home;
    constexpr auto kWithin = 400ms;
    std::vector<milliseconds> away;
    // Connections as short as these have a backoff of their own.
    Running worker(home, [](WorkerOptions& options) { options.pause_max = 20ms; });
    auto node = home.next();
    for (int i = 0; i < 8; ++i) {
        ASSERT_TRUE(node && node->attach(20s) && node->move(kWithin, ""));
        ASSERT_TRUE(node->expect(FrameType::kGoodbye, 0));
        const auto left = net::Clock::now();
        node = home.next();
        away.push_back(std::chrono::duration_cast<milliseconds>(net::Clock::now() - left));
    }
    const auto [least, most] = std::ranges::minmax(away);
    EXPECT_LT(least, kWithin);
    EXPECT_GT(most - least, 50ms) << "all after the same pause";
    EXPECT_FALSE(worker.done());
}

// A phone may fall asleep in the very moment in which it says that it is attached.
TEST(RelayedWorker, ASleepThatBeginsWithTheConnectionIsNoticed) {
    static std::atomic<bool> is_first;
    is_first = true;
    Relay home;
    set_log_sink(
        [](LogLevel, std::string_view, std::string_view line) {
            if (!line.starts_with("attached to") || !is_first.exchange(false)) return;
            // Neither waiting for the relay nor computing, like a process that is stopped.
            const auto until = net::Clock::now() + 1500ms;
            ::poll(nullptr, 0, 1500);
            KVASIR_CHECK(net::Clock::now() >= until);
        },
        LogLevel::kInfo);
    {
        Running worker(home, [](WorkerOptions& options) { options.sleep_max = 500ms; });
        auto asleep = home.attached();
        EXPECT_TRUE(asleep);
        auto awake = home.attached();
        EXPECT_TRUE(awake && awake->peer_up() && awake->welcome()) << "it connects anew";
    }
    set_log_sink(nullptr, LogLevel::kInfo);
}

// ---- backbones that do not want it ----

// A backbone that says WELCOME on and on would fill the log.
TEST(RelayedWorker, ASecondWelcomePausesThatBackbone) {
    Relay home;
    Running worker(home);
    auto relay = home.attached();
    ASSERT_TRUE(relay && relay->peer_up() && relay->welcome() && relay->program());
    const auto again = net::Clock::now();
    ASSERT_TRUE(relay->welcome());
    ASSERT_TRUE(relay->expect(FrameType::kHello));
    EXPECT_GE(net::Clock::now() - again, 900ms);
    EXPECT_TRUE(relay->welcome() && relay->program()) << "it may begin anew";
}

// Whatever one says, the others are served, and it is asked again later and later.
TEST(RelayedWorker, ABackbonesErrorOnlyPausesThatBackbone) {
    for (const Errc code : {Errc::kVersion, Errc::kMismatch, Errc::kRevoked}) {
        SCOPED_TRACE(static_cast<int>(code));
        Relay home;
        Running worker(home);
        auto relay = home.attached();
        ASSERT_TRUE(relay && relay->peer_up());  // the only one
        std::vector<std::chrono::duration<double>> pauses;
        for (int i = 0; i < 2; ++i) {
            if (i == 1) {
                ASSERT_TRUE(relay->welcome());  // welcomed and dropped is no better
            }
            const auto refused = net::Clock::now();
            ASSERT_TRUE(relay->refuse(code));
            if (i == 0) {
                ASSERT_TRUE(relay->peer_up(6) && relay->welcome(6) && relay->program(6));
                ASSERT_TRUE(relay->compute(1, 6)) << "the other one is served";
            }
            ASSERT_TRUE(relay->expect(FrameType::kHello));
            pauses.emplace_back(net::Clock::now() - refused);
            if (code != Errc::kVersion) break;  // once is enough for the others
        }
        EXPECT_GE(pauses[0].count(), 0.9);
        if (pauses.size() > 1) {
            EXPECT_GE(pauses[1].count(), 1.8) << "it must back off";
        }
        EXPECT_FALSE(worker.done());
        EXPECT_TRUE(worker.end());
    }
}

TEST(RelayedWorker, AWelcomeOfAnotherVersionOnlyPausesThatBackbone) {
    Relay home;
    Running worker(home);
    auto relay = home.attached();
    ASSERT_TRUE(relay && relay->peer_up());
    wire::Welcome welcome;
    welcome.major = 9;
    ASSERT_TRUE(relay->send(to_peer(wire::encode_welcome(welcome))));
    EXPECT_TRUE(relay->expect(FrameType::kHello));
    EXPECT_FALSE(worker.done());
}

// ---- S4: silence ----

TEST(RelayedWorker, PingsWhenItHearsNothingAndStaysWhileItIsAnswered) {
    Relay home;
    Running worker(home, [](WorkerOptions& options) { options.silence_max = 2500ms; });
    const auto begin = net::Clock::now();
    auto relay = home.attached(1000ms);
    ASSERT_TRUE(relay);
    auto last = begin;
    while (net::Clock::now() - begin < 4s) {
        ASSERT_EQ(static_cast<int>(relay->next().type), static_cast<int>(FrameType::kPing));
        EXPECT_GE(net::Clock::now() - last, 900ms) << "no more often than the relay asked for";
        last = net::Clock::now();
        const auto token = wire::decode_token(relay->payload());
        ASSERT_TRUE(token && relay->send(wire::encode_pong(*token)));
    }
}

// Its pings arrive, and nothing comes back: one direction of the line is dead.
TEST(RelayedWorker, LeavesALineThatIsSilentInOneDirection) {
    Relay home;
    Running worker(home, [](WorkerOptions& options) { options.silence_max = 2500ms; });
    const auto begin = net::Clock::now();
    auto relay = home.attached(1000ms);
    ASSERT_TRUE(relay);
    size_t pings = 0;
    while (relay->next().type == FrameType::kPing) ++pings;
    EXPECT_TRUE(relay->closed());
    EXPECT_GE(net::Clock::now() - begin, 2400ms);
    EXPECT_GE(pings, 1u);
    EXPECT_LE(pings, 3u);
    EXPECT_TRUE(home.attached()) << "it comes again";
}

}  // namespace
}  // namespace kvasir::worker
