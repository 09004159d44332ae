// The agent against a scripted market and relay over real sockets and TLS.
#include "worker/agent.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>

#include <sys/stat.h>

#include "engine/runtime.hpp"
#include "worker/fake_market_testing.hpp"

namespace kvasir::worker {
namespace {

using namespace testing;
using State = FakeMarket::State;

ToyShape shape(uint64_t seed = 1) {
    ToyShape shape;
    shape.layers = 3;
    shape.experts = 6;
    shape.splits = 2;
    shape.seed = seed;
    return shape;
}

class AgentTest : public ::testing::Test {
protected:
    AgentTest() : toy_(folder_, shape()), market_(toy_, segments("0:0-3,1:2-4,2:5", toy_)) {
        KVASIR_CHECK(engine::load_ggml().has_value());
    }
    AgentOptions options() {
        AgentOptions options;
        options.market = market_.url();
        options.invite = crypto::to_string(market_.invite());
        options.budget_bytes = 4'000'000;
        options.cache_folder = folder_ / "cache";
        options.limits.pause_first = 20ms;
        options.limits.pause_max = 200ms;
        options.limits.fetch_pause_first = 20ms;
        options.limits.fetch_pause_max = 200ms;
        options.limits.idle_pause = 200ms;
        options.limits.calls_per_minute_max = 100000;
        options.ranges.pause_first = 10ms;
        options.ranges.attempts_max = 2;
        return options;
    }
    std::vector<std::string> slices() {
        std::vector<std::string> names;
        for (const auto& entry : std::filesystem::directory_iterator(folder_ / "cache")) {
            if (entry.path().string().find(".gguf") != std::string::npos)
                names.push_back(entry.path().string());
        }
        return names;
    }
    uint64_t bytes_leased() {
        return market_.with([&](State& state) {
            uint64_t bytes = 0;
            for (const auto& lease : state.leases) {
                bytes += toy_.model.find_bank(lease.segment.layer)->expert_bytes() *
                         lease.segment.count();
            }
            return bytes;
        });
    }
    bool is_serving() {
        return market_.eventually(
            [](State& state) { return state.attached > 0 && !state.serving.empty(); });
    }

    ScratchFolder folder_;
    ToyModel toy_;
    FakeMarket market_;
};

class Running {
public:
    explicit Running(AgentOptions options) {
        options.on_line = [this](const std::string& line) {
            const std::lock_guard lock(mu_);
            lines_ += line + "\n";
        };
        auto made = Agent::make(std::move(options));
        if (!made) {
            result_ = tl::unexpected(made.error());
            done_.store(true);
            return;
        }
        agent_ = std::move(*made);
        thread_ = std::thread([this] {
            result_ = agent_->run();
            done_.store(true);
        });
    }
    ~Running() { (void)stop(); }
    Status stop() {
        if (agent_) agent_->stop();
        return join();
    }
    Status join() {
        if (thread_.joinable()) thread_.join();
        return result_;
    }
    bool done() const { return done_.load(); }
    std::string lines() {
        const std::lock_guard lock(mu_);
        return lines_;
    }
    std::string key() const { return crypto::to_hex(agent_->public_key()); }

private:
    std::mutex mu_;
    std::string lines_;
    Status result_;
    std::atomic<bool> done_{false};
    std::unique_ptr<Agent> agent_;
    std::thread thread_;
};

TEST_F(AgentTest, JoinsFetchesProvesServesAndLeaves) {
    Running node(options());
    ASSERT_TRUE(is_serving()) << node.lines();
    const auto held = segments("0:0-3,1:2-4,2:5", toy_);
    ASSERT_EQ(slices().size(), 1u);
    EXPECT_EQ(read_file(slices()[0]), toy_.slice(folder_, held));
    EXPECT_LE(std::filesystem::file_size(slices()[0]), options().budget_bytes);
    market_.with([&](State& state) {
        // The origin's own log.
        EXPECT_EQ(state.bytes_served, toy_.plan(held).bytes_slabs);
        EXPECT_EQ(state.ranges_served, 9u);
        EXPECT_EQ(state.ranges_outside, 0u);
        EXPECT_LT(state.budget_asked, options().budget_bytes);
        EXPECT_EQ(state.node_key, node.key());
    });
    struct stat info = {};
    ASSERT_EQ(::stat((folder_ / "cache/key").c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0600u);
    EXPECT_NE(node.lines().find("serving 8 experts (1.0 MB) of toy"), std::string::npos)
        << node.lines();
    const Status ok = node.stop();
    EXPECT_TRUE(ok) << ok.error().detail;
    EXPECT_EQ(market_.count("DELETE /api/v1/leases"), 1u);
}

// W5: the same node after a restart, clean or not, and nothing is fetched twice.
TEST_F(AgentTest, ARestartKeepsIdentityAndSlice) {
    std::string key;
    uint64_t served = 0;
    for (int i = 0; i < 3; ++i) {
        market_.with([](State& state) { state.serving.clear(), state.attached = 0; });
        Running node(options());
        ASSERT_TRUE(is_serving()) << node.lines();
        if (i == 0) key = node.key();
        EXPECT_EQ(node.key(), key);
        const uint64_t now = market_.with([](State& state) { return state.bytes_served; });
        if (i == 0) served = now;
        EXPECT_EQ(now, served);
        if (i > 0) {
            EXPECT_EQ(market_.with([](State& state) { return state.have; }),
                      segments("0:0-3,1:2-4,2:5", toy_));
        }
    }
    EXPECT_EQ(market_.count("POST /api/v1/nodes"), 1u) << "the invite counts once";
}

TEST_F(AgentTest, ADamagedCacheIsMendedBeforeServing) {
    {
        Running node(options());
        ASSERT_TRUE(is_serving());
    }
    auto bytes = read_file(slices()[0]);
    const auto right = bytes;
    bytes[bytes.size() / 2] ^= 1;
    write_file(slices()[0], bytes);
    const uint64_t before = market_.with([](State& state) {
        state.serving.clear();
        state.attached = 0;
        return state.bytes_served;
    });
    Running node(options());
    ASSERT_TRUE(is_serving());
    EXPECT_EQ(read_file(slices()[0]), right);
    const uint64_t slab = toy_.plan(segments("0:0", toy_)).bytes_slabs / 2;
    EXPECT_LE(market_.with([](State& state) { return state.bytes_served; }) - before, slab);
}

TEST_F(AgentTest, AnotherMarketsKeyIsRefusedBeforeAnythingIsSaid) {
    market_.with([](State& state) { state.shown_key = FakeMarket::key_of(2); });
    Running node(options());
    const Status ended = node.join();
    ASSERT_FALSE(ended);
    EXPECT_EQ(ended.error().code, Errc::kDenied);
    EXPECT_NE(ended.error().detail.find("another key"), std::string::npos);
    EXPECT_EQ(node.lines(), "") << "the caller says it, and nothing is to be released";
    EXPECT_EQ(market_.count("POST /api/v1/nodes"), 0u);
}

TEST_F(AgentTest, APageOfAProxyIsNotQuoted) {
    market_.with([](State& state) { state.is_behind_a_broken_proxy = true; });
    Running node(options());
    ASSERT_TRUE(market_.eventually([](State& state) { return state.calls.size() >= 2; }));
    EXPECT_NE(node.lines().find("the market says to /api/v1/market: HTTP 502;"), std::string::npos)
        << node.lines();
    EXPECT_EQ(node.lines().find("nginx"), std::string::npos) << node.lines();
    EXPECT_TRUE(node.stop());
}

TEST_F(AgentTest, AnOutlineThatTheMarketDidNotSignIsRefused) {
    market_.with([](State& state) { state.outline_key = FakeMarket::key_of(2); });
    Running node(options());
    const Status ended = node.join();
    ASSERT_FALSE(ended);
    EXPECT_EQ(ended.error().code, Errc::kDenied);
    EXPECT_TRUE(slices().empty());
}

TEST_F(AgentTest, AnotherCertificateIsRefused) {
    auto invite = market_.invite();
    (*invite.tls_pin)[0] ^= 1;
    AgentOptions wrong = options();
    wrong.invite = crypto::to_string(invite);
    Running node(wrong);
    const Status ended = node.join();
    ASSERT_FALSE(ended);
    EXPECT_EQ(ended.error().code, Errc::kDenied);
    market_.with([](State& state) { EXPECT_TRUE(state.calls.empty()); });
}

// L4: "revoked" stops retries.
TEST_F(AgentTest, ARevokedNodeEndsWithTheReason) {
    Running node(options());
    ASSERT_TRUE(is_serving());
    market_.with([](State& state) { state.is_revoked = true; });
    const Status ended = node.join();
    ASSERT_FALSE(ended);
    EXPECT_EQ(ended.error().code, Errc::kRevoked);
    EXPECT_NE(ended.error().detail.find("revoked"), std::string::npos) << ended.error().detail;
}

TEST_F(AgentTest, OutlivesARestartOfTheMarket) {
    Running node(options());
    ASSERT_TRUE(is_serving());
    market_.close();
    const uint64_t served = market_.with([](State& state) {
        state.leases.clear();  // its book is empty afterwards
        state.serving.clear();
        state.attached = 0;
        state.id_next = 100;
        return state.bytes_served;
    });
    market_.reopen();
    ASSERT_TRUE(market_.eventually([](State& state) {
        return state.attached > 0 && !state.serving.empty() && state.serving[0] >= 100;
    })) << node.lines();
    EXPECT_EQ(market_.with([](State& state) { return state.bytes_served; }), served);
    EXPECT_FALSE(node.done());
    EXPECT_TRUE(node.stop());
}

// H3: the market has another model now: the old plan is void, no slice mixes the two.
TEST_F(AgentTest, AnotherModelReplacesTheSlice) {
    const ToyModel other(folder_, shape(2), "other.gguf");
    Running node(options());
    ASSERT_TRUE(is_serving());
    market_.close();
    market_.with([&](State& state) {
        state.toy = &other;
        state.leases.clear();
        state.serving.clear();
        state.attached = 0;
        state.id_next = 100;
    });
    market_.reopen();
    ASSERT_TRUE(market_.eventually([](State& state) {
        return state.attached > 0 && !state.serving.empty() && state.serving[0] >= 100;
    })) << node.lines();
    const auto held = segments("0:0-3,1:2-4,2:5", other);
    const auto want = other.slice(folder_, held);
    const auto old = toy_.slice(folder_, held);
    int found = 0;
    for (const std::string& path : slices()) {
        const auto bytes = read_file(path);
        EXPECT_TRUE(bytes == want || bytes == old);
        found += bytes == want;
    }
    EXPECT_EQ(found, 1);
    EXPECT_TRUE(node.stop());
}

TEST_F(AgentTest, FewerLeasesMeanASmallerSliceCopiedFromTheLargerOne) {
    Running node(options());
    ASSERT_TRUE(is_serving());
    const auto fewer = segments("0:0-1,1:2-4", toy_);
    const uint64_t served = market_.with([&](State& state) {
        state.offer = fewer;
        state.leases.erase(state.leases.begin());  // 0:0-3
        state.attached = 0;
        return state.bytes_served;
    });
    ASSERT_TRUE(market_.eventually([](State& state) { return state.attached > 0; }))
        << node.lines();
    EXPECT_EQ(market_.with([](State& state) { return state.bytes_served; }), served);
    EXPECT_NE(node.lines().find("serving 5 experts"), std::string::npos) << node.lines();
    EXPECT_TRUE(node.stop());
}

// With room for one slice and no more, the old one goes before the new one comes.
TEST_F(AgentTest, TheQuotaHoldsWhenTheLeasesChange) {
    for (const uint64_t cache_max : {uint64_t{1'700'000}, uint64_t{4'000'000}}) {
        SCOPED_TRACE(cache_max);
        AgentOptions small = options();
        small.cache_folder = folder_ / ("cache" + std::to_string(cache_max));
        small.budget_bytes = 1'500'000;
        small.cache_bytes_max = cache_max;
        market_.with([&](State& state) {
            state.offer = segments("0:0-3,1:2-4,2:5", toy_);
            state.leases.clear();
            state.serving.clear();
            state.attached = 0;
            state.is_known = false;
        });
        Running node(small);
        ASSERT_TRUE(is_serving()) << node.lines();
        const auto next = segments("0:4-5,1:0-1,2:0-3", toy_);
        market_.with([&](State& state) {
            state.offer = next;
            state.leases.clear();
            state.attached = 0;
        });
        ASSERT_TRUE(market_.eventually([](State& state) { return state.attached > 0; }))
            << node.lines();
        std::vector<std::string> found;
        uint64_t bytes = 0;
        for (const auto& entry : std::filesystem::directory_iterator(small.cache_folder)) {
            struct stat info = {};
            if (entry.path().extension() != ".gguf") continue;
            ASSERT_EQ(::stat(entry.path().c_str(), &info), 0);
            bytes += static_cast<uint64_t>(info.st_blocks) * 512;
            found.push_back(entry.path());
        }
        EXPECT_LE(bytes, cache_max);
        EXPECT_EQ(found.size(), cache_max < 2'000'000 ? 1u : 2u);
        const auto want = toy_.slice(folder_, next);
        EXPECT_TRUE(std::ranges::any_of(
            found, [&](const std::string& path) { return read_file(path) == want; }));
        EXPECT_TRUE(node.stop());
    }
}

TEST_F(AgentTest, AQuotaBelowTheBudgetIsRefused) {
    AgentOptions wrong = options();
    wrong.cache_bytes_max = wrong.budget_bytes - 1;
    const auto made = Agent::make(std::move(wrong));
    ASSERT_FALSE(made);
    EXPECT_EQ(made.error().code, Errc::kUsage);
    EXPECT_NE(made.error().detail.find("--cache-max"), std::string::npos) << made.error().detail;
}

// H1: an origin that is broken: nothing is served, the reason is said once, and little is pulled.
TEST_F(AgentTest, WrongBytesAreNeverServed) {
    market_.with([](State& state) { state.spoils_bytes = true; });
    Running node(options());
    ASSERT_TRUE(market_.eventually(
        [](State& state) { return std::ranges::count(state.calls, "POST /api/v1/leases") >= 4; }));
    EXPECT_EQ(market_.count("POST /api/v1/leases/prove"), 0u);
    EXPECT_NE(node.lines().find("are not those of the model"), std::string::npos) << node.lines();
    market_.with([](State& state) { state.spoils_bytes = false; });
    EXPECT_TRUE(is_serving()) << node.lines();
    EXPECT_TRUE(node.stop());
}

TEST_F(AgentTest, ABudgetForNoExpertEndsWithWhatOneNeeds) {
    AgentOptions small = options();
    small.budget_bytes = 20000;
    Running node(small);
    const Status ended = node.join();
    ASSERT_FALSE(ended);
    EXPECT_EQ(ended.error().code, Errc::kUsage);
    EXPECT_NE(ended.error().detail.find("one expert"), std::string::npos);
}

TEST_F(AgentTest, TwoWorkersDoNotShareACacheFolder) {
    Running node(options());
    ASSERT_TRUE(is_serving());
    Running second(options());
    const Status ended = second.join();
    ASSERT_FALSE(ended);
    EXPECT_EQ(ended.error().code, Errc::kUsage);
    EXPECT_TRUE(node.stop());
}

TEST_F(AgentTest, StopWhileTheMarketIsGoneIsQuick) {
    Running node(options());
    ASSERT_TRUE(is_serving());
    market_.close();
    const auto before = std::chrono::steady_clock::now();
    EXPECT_TRUE(node.stop());
    EXPECT_LT(std::chrono::steady_clock::now() - before, 15s);
}

}  // namespace
}  // namespace kvasir::worker
