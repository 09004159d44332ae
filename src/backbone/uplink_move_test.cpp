// A backbone whose relay stops: it finishes what is under way, and goes where the relay says.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "access/held_port_testing.hpp"
#include "backbone/scripted_relay_testing.hpp"
#include "backbone/swarm_testing.hpp"
#include "base/log.hpp"

namespace kvasir::backbone::testing {
namespace {

using Bytes = ScriptedRelay::Bytes;
using wire::FrameType;

constexpr auto kLong = std::chrono::hours(1);

Bytes move_to(const std::string& url, std::chrono::milliseconds within) {
    return wire::encode_move({static_cast<uint32_t>(within.count()), url});
}

Bytes no_answer(const ScriptedRelay::Renewal&) {
    return {};
}

// Attached to the relay at that address.
ToySwarm backbone_of(const std::string& relay,
                     std::chrono::milliseconds alone_first = access::Route::kAloneFirst,
                     std::function<bool()> is_ending = {}) {
    const auto key = std::make_shared<const crypto::KeyPair>(*crypto::KeyPair::generate());
    UplinkOptions options;
    options.endpoint = *net::parse_url(relay);
    options.credentials = [key] { return access::Credentials{key, "token", "backbone"}; };
    options.pause_first = 20ms;
    options.pause_max = 40ms;
    options.alone_first = alone_first;
    options.is_ending = std::move(is_ending);
    return ToySwarm(true, 5000ms, {options});
}

// A relay for a backbone and one worker that takes it for the backbone itself. Thread: its own.
class Bridge {
public:
    Bridge() {
        for (const bool is_backbone : {true, false}) {
            auto listener = net::Listener::make(
                {false, "127.0.0.1", 0, "/kvasir"},
                [this, is_backbone](net::MessageStream stream, const std::string&) {
                    const std::lock_guard lock(mu_);
                    auto& end = is_backbone ? backbone_ : worker_;
                    if (!end) end = std::make_unique<net::MessageStream>(std::move(stream));
                    arrived_.notify_all();
                });
            KVASIR_CHECK(listener.has_value());
            listeners_.push_back(std::move(*listener));
        }
        thread_ = std::thread([this] { run(); });
    }
    ~Bridge() {
        stopping_.store(true);
        thread_.join();
        listeners_.clear();
    }
    Bridge(const Bridge&) = delete;
    Bridge& operator=(const Bridge&) = delete;

    std::string url() const { return "ws://127.0.0.1:" + std::to_string(listeners_[0]->port()); }
    uint16_t worker_port() const { return listeners_[1]->port(); }
    void move() { moves_.store(true); }
    // The backbone has gone, and had said goodbye.
    bool is_left() const { return is_left_.load(); }

private:
    static constexpr uint16_t kHandle = 5;

    void run() {
        while (!stopping_.load()) {
            {
                std::unique_lock lock(mu_);
                const auto both = [this] { return backbone_ && worker_; };
                if (!arrived_.wait_for(lock, 10ms, both)) continue;
            }
            if (!greeted_) greet();
            if (moves_.exchange(false)) (void)backbone_->enqueue(move_to("", 0ms));
            pass(*worker_, *backbone_, kHandle);
            pass(*backbone_, *worker_, 0);
        }
    }
    // A test's relay knows no tokens; the worker's role byte is not for the backbone.
    void greet() {
        greeted_ = true;
        const auto deadline = net::Clock::now() + 10s;
        (void)backbone_->enqueue(wire::encode_nonce({}));
        (void)backbone_->receive(deadline);
        (void)backbone_->receive(deadline);
        (void)backbone_->enqueue(ScriptedRelay::attached(kLong, 0));
        wire::PeerUp up;
        up.handle = kHandle;
        up.node.fill(7);
        (void)backbone_->enqueue(wire::encode_peer_up(up));
        (void)worker_->receive(deadline);
    }
    void pass(net::MessageStream& from, net::MessageStream& to, uint16_t peer) {
        if (from.closed()) return;
        const auto message = from.receive(net::Clock::now() + 2ms);
        if (!message) return;
        Bytes frame(message->begin(), message->end());
        const auto type = wire::decode_frame(frame)->header.type;
        if (peer == 0 && type == FrameType::kGoodbye) is_left_.store(true);
        wire::set_peer(frame, peer);
        if (peer != 0 || type != FrameType::kGoodbye) (void)to.enqueue(frame);
        (void)to.flush_until(net::Clock::now() + 10s);
    }

    std::mutex mu_;
    std::condition_variable arrived_;
    std::unique_ptr<net::MessageStream> backbone_, worker_;  // Guarded by mu_ until both are there
    std::atomic<bool> stopping_{false}, moves_{false}, is_left_{false};
    bool greeted_ = false;
    std::vector<std::unique_ptr<net::Listener>> listeners_;
    std::thread thread_;
};

TEST(UplinkMove, GoesWhereTheRelaySays) {
    ScriptedRelay next(kLong, no_answer);
    ScriptedRelay home(kLong, no_answer, move_to(next.url(), 500ms));
    const ToySwarm backbone = backbone_of(home.url());
    ASSERT_TRUE(eventually([&] { return next.attaches().size() == 1; }));
    EXPECT_TRUE(eventually([&] { return home.said_goodbye(); }));
    EXPECT_EQ(home.attaches().size(), 1u);
    EXPECT_FALSE(next.said_goodbye());
}

// The answer is late, the relay stops while it is awaited, and not a pair is asked twice.
TEST(UplinkMove, FinishesWhatIsUnderWay) {
    Bridge relay;
    ToySwarm swarm = backbone_of(relay.url());
    FakeOptions options;
    options.model = swarm.path();
    options.cache_dir = swarm.cache();
    options.segments = {{kLayer0, 0, 8}, {kLayer1, 0, 8}};
    options.port = relay.worker_port();
    FakeWorker worker(std::move(options));
    ASSERT_TRUE(swarm.covered());
    auto lane = swarm.backbone().open_lane();
    worker.set_mood(Mood::kLate);
    const uint64_t before = worker.computes();
    // More than a small request has: its deadline is longer than the worker is late.
    std::vector<uint32_t> many;
    for (int i = 0; i < 10; ++i)
        std::ranges::copy(ToySwarm::all_experts(), std::back_inserter(many));
    ToySwarm::Outcome outcome;
    std::thread asker([&] { outcome = swarm.check(*lane, kLayer0, many, kToyUsed, 1); });
    EXPECT_TRUE(eventually([&] { return worker.computes() > before; }));
    relay.move();
    asker.join();
    EXPECT_TRUE(outcome.computed && outcome.same_bits);
    EXPECT_GT(outcome.remote_pairs, 0u);
    EXPECT_EQ(swarm.backbone().report().retries, 0u);
    EXPECT_TRUE(eventually([&] { return relay.is_left(); }));
    // Nobody is asked for anything new.
    const auto after = swarm.check(*lane, kLayer1, ToySwarm::all_experts(), kToyUsed, 2);
    EXPECT_TRUE(after.computed && after.same_bits);
    EXPECT_EQ(after.remote_pairs, 0u);
}

// No longer there, or no address at all: the configured one is dialed again.
TEST(UplinkMove, ComesBackWhenThereIsNobody) {
    const access::testing::HeldPort nowhere;
    for (const std::string& url : {nowhere.url(), std::string("nonsense")}) {
        SCOPED_TRACE(url);
        ScriptedRelay home(kLong, no_answer, move_to(url, 1ms));
        const ToySwarm backbone = backbone_of(home.url());
        EXPECT_TRUE(eventually([&] { return home.attaches().size() >= 3; }));
    }
}

// Its workers have gone home since.
TEST(UplinkMove, ComesHomeFromWhereNobodyIs) {
    ScriptedRelay next(kLong, no_answer);
    ScriptedRelay home(kLong, no_answer, move_to(next.url(), 1ms));
    const ToySwarm backbone = backbone_of(home.url(), 100ms);
    EXPECT_TRUE(eventually([&] { return home.attaches().size() >= 2; }));
    EXPECT_TRUE(eventually([&] { return next.said_goodbye(); }));
}

std::atomic<int> told_of_next_try{0};

// A relay that stops because the whole program does is nothing to tell, or to come back to.
TEST(UplinkMove, WhoEndsDoesNotComeBack) {
    set_log_sink(
        [](LogLevel, std::string_view, std::string_view line) {
            if (line.find("next try") != line.npos) ++told_of_next_try;
        },
        LogLevel::kDebug);
    std::atomic<int> asked{0};
    {
        ScriptedRelay home(kLong, no_answer, move_to("", 1ms));
        const ToySwarm backbone = backbone_of(home.url(), access::Route::kAloneFirst, [&asked] {
            ++asked;
            return true;
        });
        EXPECT_TRUE(eventually([&] { return asked.load() > 0; }));
        const auto end = net::Clock::now() + 300ms;  // it would come within 100
        eventually([&] { return net::Clock::now() >= end; });
        EXPECT_EQ(home.attaches().size(), 1u);
    }
    set_log_sink(nullptr, LogLevel::kError);
    EXPECT_EQ(asked.load(), 1);
    EXPECT_EQ(told_of_next_try.load(), 0);
}

// To the same address: it makes way at once, and comes back at moments that differ.
TEST(UplinkMove, ComesBackToTheSameRelayAtARandomMoment) {
    ScriptedRelay home(kLong, no_answer, move_to("", 400ms));
    const ToySwarm backbone = backbone_of(home.url());
    std::vector<net::Clock::time_point> came;
    ASSERT_TRUE(eventually([&] {
        if (home.attaches().size() > came.size()) came.push_back(net::Clock::now());
        return came.size() == 9;
    }));
    std::vector<std::chrono::nanoseconds> pauses;
    for (size_t i = 1; i < came.size(); ++i) pauses.push_back(came[i] - came[i - 1]);
    const auto [least, most] = std::ranges::minmax(pauses);
    EXPECT_GT(most - least, 50ms) << "all after the same pause";
}

}  // namespace
}  // namespace kvasir::backbone::testing
