#include "apps/revocation_poll.hpp"

#include <gtest/gtest.h>

#include <condition_variable>
#include <future>
#include <mutex>
#include <numeric>

#include "net/upgrade.hpp"

namespace kvasir::apps {
namespace {

using namespace std::chrono_literals;

crypto::KeyPair key_of(uint8_t fill) {
    std::array<uint8_t, 32> seed;
    seed.fill(fill);
    return crypto::KeyPair::from_seed(seed).value();
}

crypto::WallTime at(int64_t count) {
    return crypto::WallTime(std::chrono::seconds(count));
}

TEST(RevokedSerials, NoListTakesARevocationBack) {
    RevokedSerials revoked;
    EXPECT_FALSE(revoked.contains(3));
    EXPECT_EQ(revoked.take({3, 5}), (std::vector<uint64_t>{3, 5}));
    EXPECT_EQ(revoked.take({5, 9}), std::vector<uint64_t>{9});
    EXPECT_TRUE(revoked.take({5, 9}).empty());
    EXPECT_EQ(revoked.take({4}), std::vector<uint64_t>{4});
    EXPECT_TRUE(revoked.take({}).empty());
    for (const uint64_t serial : {3, 4, 5, 9}) EXPECT_TRUE(revoked.contains(serial)) << serial;
    EXPECT_FALSE(revoked.contains(6));
}

TEST(RevokedSerials, AreBounded) {
    RevokedSerials revoked;
    std::vector<uint64_t> many(RevokedSerials::kSerialsMax);
    std::iota(many.begin(), many.end(), 100);
    EXPECT_EQ(revoked.take(many).size(), many.size());
    EXPECT_EQ(revoked.take({7}), std::vector<uint64_t>{7});
    EXPECT_TRUE(revoked.contains(7));
    EXPECT_FALSE(revoked.contains(100));
}

// A market that says what the test wants.
class RevocationPollOf : public ::testing::Test {
protected:
    RevocationPollOf() {
        net::ListenerOptions options;
        options.http = [this](const net::HttpRequest& request, const net::Respond& respond) {
            EXPECT_EQ(request.path, "/api/v1/revocations");
            net::HttpResponse response;
            const std::lock_guard lock(mu_);
            ++asked_;
            asked_more_.notify_all();
            response.status = status_;
            response.body = body_;
            respond(std::move(response));
        };
        auto listener = net::Listener::make(
            {.host = "127.0.0.1"}, [](net::MessageStream, const std::string&) {},
            std::move(options));
        EXPECT_TRUE(listener);
        listener_ = std::move(*listener);
    }
    void say(int status, std::string body) {
        const std::lock_guard lock(mu_);
        status_ = status;
        body_ = std::move(body);
    }
    std::string list(int64_t issued, std::vector<uint64_t> serials, uint8_t signer = 1) {
        return crypto::issue_revocations(key_of(signer), {at(issued), std::move(serials)});
    }
    std::unique_ptr<RevocationPoll> poll() {
        RevocationPollOptions options;
        options.market_url = "http://127.0.0.1:" + std::to_string(listener_->port());
        options.market_key = key_of(1).public_key();
        options.every = 20ms;
        auto made = RevocationPoll::make(std::move(options));
        EXPECT_TRUE(made);
        return std::move(*made);
    }
    // Until the market was asked that many more times.
    void wait_for_asks(int count) {
        std::unique_lock lock(mu_);
        EXPECT_TRUE(asked_more_.wait_for(
            lock, 20s, [this, until = asked_ + count] { return asked_ >= until; }));
    }

    std::mutex mu_;
    int status_ = 200;  // guarded by mu_
    std::string body_;  // guarded by mu_
    int asked_ = 0;     // guarded by mu_
    std::condition_variable asked_more_;
    std::unique_ptr<net::Listener> listener_;
};

TEST_F(RevocationPollOf, AMarketIsAskedAtOnceAndAgain) {
    say(200, list(10, {4}));
    const auto asking = poll();
    EXPECT_TRUE(asking->revoked()->contains(4));  // before anybody could attach
    std::promise<uint64_t> cut;
    asking->start([&cut](const std::vector<uint64_t>& serials) {
        EXPECT_EQ(serials.size(), 1u);
        cut.set_value(serials.front());
    });
    say(200, list(11, {4, 6}));
    EXPECT_EQ(cut.get_future().get(), 6u);  // once, and not 4 again
    EXPECT_TRUE(asking->revoked()->contains(6));
    wait_for_asks(3);
}

TEST_F(RevocationPollOf, NothingButAListOfThatMarketCounts) {
    say(503, "");
    const auto asking = poll();
    EXPECT_FALSE(asking->revoked()->contains(4));
    std::promise<uint64_t> first, second;
    asking->start([&](const std::vector<uint64_t>& serials) {
        (serials.front() == 4 ? first : second).set_value(serials.front());
    });
    say(200, list(10, {4}));
    EXPECT_EQ(first.get_future().get(), 4u);
    for (const std::string& text : {std::string("kvr1.nonsense"), list(20, {}, 2), list(9, {}),
                                    std::string(crypto::kRevocationsBytesMax + 1, 'x')}) {
        say(200, text);
        wait_for_asks(2);
        EXPECT_TRUE(asking->revoked()->contains(4)) << text.substr(0, 80);
    }
    say(404, list(30, {7}));
    wait_for_asks(2);
    EXPECT_FALSE(asking->revoked()->contains(7));
    say(200, list(30, {7}));
    EXPECT_EQ(second.get_future().get(), 7u);
    EXPECT_TRUE(asking->revoked()->contains(7));
}

TEST_F(RevocationPollOf, AMarketThatIsAwayHoldsNothingUp) {
    RevocationPollOptions options;
    options.market_url = "http://127.0.0.1:" + std::to_string(listener_->port());
    listener_.reset();
    options.market_key = key_of(1).public_key();
    options.timeout = 2000ms;
    const auto begin = std::chrono::steady_clock::now();
    auto asking = RevocationPoll::make(options);
    ASSERT_TRUE(asking);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 20s);
    EXPECT_FALSE((*asking)->revoked()->contains(4));
    (*asking)->start([](const std::vector<uint64_t>&) {});
    options.market_url = "nowhere";
    EXPECT_EQ(RevocationPoll::make(options).error().code, Errc::kUsage);
}

}  // namespace
}  // namespace kvasir::apps
