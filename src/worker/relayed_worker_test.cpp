// A worker attached to a scripted relay: backbones that do not want it, pings, a sleep.
#include <gtest/gtest.h>

#include <poll.h>

#include <atomic>
#include <chrono>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/log.hpp"
#include "base/log_testing.hpp"
#include "worker/relayed_testing.hpp"

namespace kvasir::worker {
namespace {

using namespace testing;

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

// Thousands that find a backbone full must not come back in the same moment.
TEST(RelayedWorker, PausesOfRefusedWorkersDiffer) {
    const kvasir::testing::LogCapture log;
    Relay home;
    Running worker(home);
    auto relay = home.attached();
    ASSERT_TRUE(relay);
    constexpr uint16_t kPeers = 20;
    for (uint16_t peer = 1; peer <= kPeers; ++peer) ASSERT_TRUE(relay->peer_up(peer));
    for (uint16_t peer = 1; peer <= kPeers; ++peer) ASSERT_TRUE(relay->refuse(Errc::kBusy, peer));
    ASSERT_TRUE(relay->is_heard());
    std::set<int> pauses;
    const std::string before = "HELLO again in ";
    for (const std::string& line : log.with(before))
        pauses.insert(std::stoi(line.substr(line.find(before) + before.size())));
    EXPECT_GE(pauses.size(), 5u);
    EXPECT_GE(*pauses.begin(), 1000);
    EXPECT_LT(*pauses.rbegin(), 3000) << "1.5 s, or twice that for one that was asked again";
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
    constexpr auto kPing = 1000ms;
    constexpr auto kSilence = 4000ms;
    Running worker(home, [=](WorkerOptions& options) { options.silence_max = kSilence; });
    const auto begin = net::Clock::now();
    auto relay = home.attached(kPing);
    ASSERT_TRUE(relay);
    for (int pings = 1; net::Clock::now() - begin < kSilence + kPing; ++pings) {
        ASSERT_EQ(static_cast<int>(relay->next().type), static_cast<int>(FrameType::kPing));
        EXPECT_LE(pings, (net::Clock::now() - begin) / kPing + 1)
            << "no more often than the relay asked for";
        const auto token = wire::decode_token(relay->payload());
        ASSERT_TRUE(token && relay->send(wire::encode_pong(*token)));
    }
}

// A relay that wants few pings must not be taken for a dead one.
TEST(RelayedWorker, PingsBeforeItTakesARelayForDead) {
    Relay home;
    Running worker(home, [](WorkerOptions& options) { options.silence_max = 4000ms; });
    auto relay = home.attached(60s);
    ASSERT_TRUE(relay);
    EXPECT_EQ(static_cast<int>(relay->next(20s).type), static_cast<int>(FrameType::kPing));
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
            ::poll(nullptr, 0, 1500);  // tidy: sleep, the process itself must stand still
            KVASIR_CHECK(net::Clock::now() >= until);
        },
        LogLevel::kInfo);
    {
        Running worker(home, [](WorkerOptions& options) { options.sleep_max = 500ms; });
        auto asleep = home.attached();
        EXPECT_TRUE(asleep);
        // A busy machine may look like one more sleep: any connection after the first will do.
        const auto deadline = net::Clock::now() + 20s;
        bool is_awake = false;
        while (!is_awake && net::Clock::now() < deadline) {
            auto again = home.attached();
            is_awake = again && again->say_peer_up() && again->next().type == FrameType::kHello;
        }
        EXPECT_TRUE(is_awake) << "it connects anew";
    }
    set_log_sink(nullptr, LogLevel::kInfo);
}

}  // namespace
}  // namespace kvasir::worker
