// What a worker does about frames that were lost: the reason of an end that came when it was
// sending, and a HELLO that nobody answers.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <future>
#include <string>

#include "worker/relayed_testing.hpp"

namespace kvasir::worker {
namespace {

using namespace testing;

// Answers nothing before the relay has closed; a test that fails does not wait for ever.
class AnswersLate {
public:
    void operator()(WorkerOptions& options) const {
        options.before_answer = [until_closed = until_closed_] {
            (void)until_closed.wait_for(20s);
        };
    }
    void relay_has_closed() { closed_.set_value(); }

private:
    std::promise<void> closed_;
    std::shared_future<void> until_closed_ = closed_.get_future().share();
};

// The relay closes with a reason while the worker still answers what came before it.
TEST(LostFrames, TheReasonIsReadAfterASendThatFailed) {
    Relay relay;
    AnswersLate late;
    Running worker(relay, std::ref(late));
    auto node = relay.attached();
    ASSERT_TRUE(node && node->peer_up() && node->welcome());
    for (uint64_t i = 0; i < 100; ++i) ASSERT_TRUE(node->send(to_peer(wire::encode_ping(i))));
    ASSERT_TRUE(node->send(wire::encode_error({Errc::kRevoked, "the token was taken back"}, 0)));
    ASSERT_TRUE(node->has_arrived());
    node.reset();
    late.relay_has_closed();
    const Status result = worker.join();
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, Errc::kRevoked);
    EXPECT_NE(result.error().detail.find("the relay says: the token was taken back"),
              std::string::npos)
        << result.error().detail;
}

// Whoever fails to send has not lost what had arrived: where to go, above all.
TEST(LostFrames, AMoveIsReadAfterASendThatFailed) {
    Relay relay, next;
    AnswersLate late;
    Running worker(relay, std::ref(late));
    auto node = relay.attached();
    ASSERT_TRUE(node && node->peer_up());
    for (uint64_t i = 0; i < 100; ++i) ASSERT_TRUE(node->send(to_peer(wire::encode_ping(i))));
    ASSERT_TRUE(node->move(1ms, next.url()));
    ASSERT_TRUE(node->has_arrived());
    node.reset();
    late.relay_has_closed();
    EXPECT_TRUE(next.attached());
}

// The HELLO or its WELCOME may be lost on the way; a worker that waits for ever is a ghost.
TEST(LostFrames, AHelloThatNobodyAnswersIsSaidAgain) {
    Relay relay;
    Running worker(relay, [](WorkerOptions& options) { options.welcome_max = 50ms; });
    auto node = relay.attached();
    ASSERT_TRUE(node && node->say_peer_up());
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(node->expect(FrameType::kHello));
    // Welcomed, it says it no more. A HELLO may have crossed the WELCOME.
    ASSERT_TRUE(node->welcome() && node->send(to_peer(wire::encode_ping(1))));
    while (true) {
        const auto type = node->next().type;
        if (type == FrameType::kPong) break;
        ASSERT_EQ(static_cast<int>(type), static_cast<int>(FrameType::kHello));
    }
    EXPECT_EQ(node->next(300ms).type, FrameType{0});
    EXPECT_FALSE(node->closed());
}

}  // namespace
}  // namespace kvasir::worker
