// What a worker does about frames that were lost: the reason of an end that came when it was
// sending, and a HELLO that nobody answers.
#include <gtest/gtest.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

#include "worker/worker_testing.hpp"

namespace kvasir::worker {
namespace {

using namespace testing;

net::Deadline in_time() {
    return net::Clock::now() + 20s;
}

// A relay that says what a test wants; its connections come one after the other.
class Relay {
public:
    Relay() {
        net::Endpoint at;
        at.host = "127.0.0.1";
        auto listener =
            net::Listener::make(at, [this](net::MessageStream stream, const std::string&) {
                const std::lock_guard lock(mu_);
                streams_.push_back(std::move(stream));
                arrived_.notify_all();
            });
        KVASIR_CHECK(listener.has_value());
        listener_ = std::move(*listener);
    }
    uint16_t port() const { return listener_->port(); }
    // The next worker, attached.
    std::unique_ptr<net::MessageStream> attach() {
        std::unique_lock lock(mu_);
        if (!arrived_.wait_for(lock, 20s, [&] { return !streams_.empty(); })) return nullptr;
        auto stream = std::make_unique<net::MessageStream>(std::move(streams_.front()));
        streams_.pop_front();
        lock.unlock();
        wire::Attached attached;
        attached.message_bytes_max = 64 << 20;
        attached.token_left_ms = 3600000;
        if (!stream->enqueue(wire::encode_nonce({})) || !stream->receive(in_time()) ||
            !stream->receive(in_time()) || !stream->enqueue(wire::encode_attached(attached))) {
            return nullptr;
        }
        return stream;
    }

private:
    std::mutex mu_;
    std::condition_variable arrived_;
    std::deque<net::MessageStream> streams_;  // Guarded by mu_
    std::unique_ptr<net::Listener> listener_;
};

class Running {
public:
    Running(uint16_t port, std::chrono::milliseconds welcome_max,
            std::function<void()> before_answer = {}) {
        WorkerOptions options;
        options.attach.emplace();
        net::Endpoint endpoint;
        endpoint.host = "127.0.0.1";
        endpoint.port = port;
        options.attach->route = std::make_shared<access::Route>(
            access::RelayAddress{endpoint, nullptr}, access::TlsFor());
        const auto key =
            std::make_shared<const crypto::KeyPair>(std::move(*crypto::KeyPair::generate()));
        options.attach->credentials = [key] { return access::Credentials{key, "token", "w"}; };
        options.pause_first = 20ms;
        options.pause_max = 200ms;
        options.welcome_max = welcome_max;
        options.before_answer = std::move(before_answer);
        (void)toy::cpu();
        auto made = Worker::make(toy_holding(), options);
        KVASIR_CHECK(made.has_value());
        worker_ = std::move(*made);
        thread_ = std::thread([this] { result_ = worker_->run(); });
    }
    ~Running() {
        worker_->stop();
        if (thread_.joinable()) thread_.join();
    }
    Status join() {
        thread_.join();
        return result_;
    }

private:
    std::unique_ptr<Worker> worker_;
    Status result_;
    std::thread thread_;
};

std::vector<uint8_t> from_peer(std::vector<uint8_t> frame, uint16_t peer) {
    wire::set_peer(frame, peer);
    return frame;
}

wire::FrameHeader next_frame(net::MessageStream& stream) {
    const auto message = stream.receive(in_time());
    if (!message) return {};
    const auto frame = wire::decode_frame(*message);
    return frame ? frame->header : wire::FrameHeader{};
}

// When all of it is at the worker.
void send_all_and_close(std::unique_ptr<net::MessageStream> stream) {
    ASSERT_TRUE(stream->flush_until(in_time()));
    for (int under_way = 1; under_way != 0;)
        ASSERT_EQ(::ioctl(stream->fd(), SIOCOUTQ, &under_way), 0);
}

std::vector<uint8_t> backbone_at(uint16_t peer) {
    wire::PeerUp up;
    up.handle = peer;
    up.role = wire::Role::kBackbone;
    return wire::encode_peer_up(up);
}

// The relay closes with a reason while the worker still answers what came before it.
TEST(LostFrames, TheReasonIsReadAfterASendThatFailed) {
    Relay relay;
    std::promise<void> closed;
    const auto until_closed = closed.get_future().share();
    Running worker(relay.port(), 30s, [until_closed] { until_closed.wait(); });
    auto stream = relay.attach();
    ASSERT_TRUE(stream);
    ASSERT_TRUE(stream->enqueue(backbone_at(3)));
    ASSERT_EQ(next_frame(*stream).type, FrameType::kHello);
    ASSERT_TRUE(stream->enqueue(from_peer(wire::encode_welcome({}), 3)));
    for (uint64_t i = 0; i < 100; ++i)
        ASSERT_TRUE(stream->enqueue(from_peer(wire::encode_ping(i), 3)));
    ASSERT_TRUE(
        stream->enqueue(wire::encode_error({Errc::kRevoked, "the token was taken back"}, 0)));
    send_all_and_close(std::move(stream));
    closed.set_value();
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
    std::promise<void> closed;
    const auto until_closed = closed.get_future().share();
    Running worker(relay.port(), 30s, [until_closed] { until_closed.wait(); });
    auto stream = relay.attach();
    ASSERT_TRUE(stream);
    ASSERT_TRUE(stream->enqueue(backbone_at(3)));
    ASSERT_EQ(next_frame(*stream).type, FrameType::kHello);
    for (uint64_t i = 0; i < 100; ++i)
        ASSERT_TRUE(stream->enqueue(from_peer(wire::encode_ping(i), 3)));
    ASSERT_TRUE(
        stream->enqueue(wire::encode_move({1, "ws://127.0.0.1:" + std::to_string(next.port())})));
    send_all_and_close(std::move(stream));
    closed.set_value();
    EXPECT_TRUE(next.attach());
}

// The HELLO or its WELCOME may be lost on the way; a worker that waits for ever is a ghost.
TEST(LostFrames, AHelloThatNobodyAnswersIsSaidAgain) {
    Relay relay;
    Running worker(relay.port(), 50ms);
    auto stream = relay.attach();
    ASSERT_TRUE(stream);
    ASSERT_TRUE(stream->enqueue(backbone_at(3)));
    for (int i = 0; i < 3; ++i) {
        const auto hello = next_frame(*stream);
        ASSERT_EQ(hello.type, FrameType::kHello);
        EXPECT_EQ(hello.peer, 3);
    }
    // Welcomed, it says it no more. A HELLO may have crossed the WELCOME.
    ASSERT_TRUE(stream->enqueue(from_peer(wire::encode_welcome({}), 3)));
    ASSERT_TRUE(stream->enqueue(from_peer(wire::encode_ping(1), 3)));
    while (true) {
        const auto type = next_frame(*stream).type;
        if (type == FrameType::kPong) break;
        ASSERT_EQ(type, FrameType::kHello);
    }
    const auto more = stream->receive(net::Clock::now() + 300ms);
    EXPECT_FALSE(more);
    EXPECT_EQ(more.error().code, Errc::kTimeout);
}

}  // namespace
}  // namespace kvasir::worker
