// A worker against a scripted hub over real sockets: coming back, being refused, draining.
#include "worker/worker.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <fstream>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "worker/worker_testing.hpp"

namespace kvasir::worker {
namespace {

using namespace testing;

// Accepts workers and hands their streams to the test.
class Hub {
public:
    explicit Hub(uint16_t port = 0) {
        net::Endpoint at;
        at.host = "127.0.0.1";
        at.port = port;
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
    // The next worker's stream; null after `timeout`.
    std::unique_ptr<net::MessageStream> next(std::chrono::milliseconds timeout = 10s) {
        std::unique_lock lock(mu_);
        if (!arrived_.wait_for(lock, timeout, [&] { return !streams_.empty(); })) return nullptr;
        auto stream = std::make_unique<net::MessageStream>(std::move(streams_.front()));
        streams_.pop_front();
        return stream;
    }
    // The next worker, having said its hello and been welcomed.
    std::unique_ptr<net::MessageStream> welcome() {
        auto stream = next();
        if (!stream || !hello(*stream)) return nullptr;
        EXPECT_TRUE(stream->enqueue(wire::encode_welcome({})));
        return stream;
    }
    static bool hello(net::MessageStream& stream) {
        auto role = stream.receive(net::Clock::now() + 5s);
        if (!role || role->size() != 1 || (*role)[0] != 'W') return false;
        auto message = stream.receive(net::Clock::now() + 5s);
        if (!message) return false;
        auto frame = wire::decode_frame(*message);
        return frame && frame->header.type == FrameType::kHello &&
               wire::decode_hello(frame->payload).has_value();
    }

private:
    std::mutex mu_;
    std::condition_variable arrived_;
    std::deque<net::MessageStream> streams_;  // Guarded by mu_
    std::unique_ptr<net::Listener> listener_;
};

class Running {
public:
    explicit Running(uint16_t port, const Holding& holding = toy_holding(),
                     std::function<void(const std::string&)> on_line = {}) {
        WorkerOptions options;
        options.connect = "ws://127.0.0.1:" + std::to_string(port);
        options.name = "test";
        options.pause_first = 20ms;
        options.pause_max = 200ms;
        options.drain_quiet = 100ms;
        options.on_line = std::move(on_line);
        (void)toy::cpu();
        auto made = Worker::make(holding, options);
        KVASIR_CHECK(made.has_value());
        worker_ = std::move(*made);
        thread_ = std::thread([this] {
            result_ = worker_->run();
            done_.store(true);
        });
    }
    ~Running() { (void)end(); }
    void stop() { worker_->stop(); }
    bool done() const { return done_.load(); }
    Status join() {
        if (thread_.joinable()) thread_.join();
        return result_;
    }
    Status end() {
        stop();
        return join();
    }

private:
    std::unique_ptr<Worker> worker_;
    Status result_;
    std::atomic<bool> done_{false};
    std::thread thread_;
};

// W1: a worker outlives its backbone.
TEST(Worker, ComesBackAfterTheHubRestarts) {
    auto hub = std::make_unique<Hub>();
    const uint16_t port = hub->port();
    Running worker(port);
    auto first = hub->welcome();
    ASSERT_TRUE(first);
    first.reset();
    hub.reset();
    hub = std::make_unique<Hub>(port);
    auto second = hub->welcome();
    ASSERT_TRUE(second);
    // It starts from nothing: programs of the first connection are gone.
    ASSERT_TRUE(second->enqueue(request(7)));
    EXPECT_EQ(receive_type(*second), FrameType::kError);
    ASSERT_TRUE(second->enqueue(wire::encode_program({1, kLayer0, moe::encode(toy::swiglu())}, 1)));
    EXPECT_EQ(receive_type(*second), FrameType::kProgramAck);
    ASSERT_TRUE(second->enqueue(request(8)));
    EXPECT_EQ(receive_type(*second), FrameType::kResult);
}

// What a person sees: joined, once that it waits, however often it tries; joined again.
TEST(Worker, TellsOnceThatItWaits) {
    std::mutex mu;
    std::vector<std::string> lines;
    const auto count = [&](const std::string& text) {
        const std::lock_guard lock(mu);
        return std::count_if(lines.begin(), lines.end(), [&](const std::string& line) {
            return line.find(text) != std::string::npos;
        });
    };
    auto hub = std::make_unique<Hub>();
    const uint16_t port = hub->port();
    Running worker(port, toy_holding(), [&](const std::string& line) {
        const std::lock_guard lock(mu);
        lines.push_back(line);
    });
    for (int drop = 0; drop < 3; ++drop) {
        auto stream = hub->next();
        ASSERT_TRUE(stream);  // dropped before WELCOME
    }
    EXPECT_EQ(count("trying again until the backbone answers"), 1);
    EXPECT_EQ(count("joined"), 0);
    auto joined = hub->welcome();
    ASSERT_TRUE(joined);
    ASSERT_TRUE(joined->enqueue(request(7)));  // answered: WELCOME has been read
    EXPECT_EQ(receive_type(*joined), FrameType::kError);
    EXPECT_EQ(count("joined ws://127.0.0.1:"), 1);
}

// A hub that accepts and drops at once is not called in a loop: pauses grow although every join
// succeeds.
TEST(Worker, DroppedAtOnceAgainAndAgainBacksOff) {
    Hub hub;
    Running worker(hub.port());
    int joins = 0;
    const auto end = net::Clock::now() + 1500ms;
    while (net::Clock::now() < end) {
        auto stream = hub.next(50ms);
        if (!stream || !Hub::hello(*stream)) continue;
        (void)stream->enqueue(wire::encode_welcome({}));
        ++joins;
    }
    EXPECT_GE(joins, 2);
    EXPECT_LE(joins, 20);
}

TEST(Worker, ARefusalThatNoRetryMendsEndsIt) {
    for (const Errc code : {Errc::kVersion, Errc::kMismatch}) {
        for (const bool before_welcome : {true, false}) {
            Hub hub;
            Running worker(hub.port());
            auto stream = hub.next();
            ASSERT_TRUE(stream && Hub::hello(*stream));
            if (!before_welcome) {
                ASSERT_TRUE(stream->enqueue(wire::encode_welcome({})));
            }
            ASSERT_TRUE(stream->enqueue(wire::encode_error({code, "model aaaa, not bbbb"}, 0)));
            const Status result = worker.join();
            ASSERT_FALSE(result);
            EXPECT_EQ(result.error().code, code);
            EXPECT_NE(result.error().detail.find("model aaaa, not bbbb"), std::string::npos)
                << result.error().detail;
        }
    }
}

// Its rows would be numbers of other weights, and nobody could tell.
TEST(Worker, AFileThatIsWrittenToWhileServedEndsIt) {
    const ToyHolding own;
    Hub hub;
    Running worker(hub.port(), *own.holding);
    auto stream = hub.welcome();
    ASSERT_TRUE(stream);
    ASSERT_TRUE(stream->enqueue(wire::encode_program({1, kLayer0, moe::encode(toy::swiglu())}, 1)));
    EXPECT_EQ(receive_type(*stream), FrameType::kProgramAck);
    ASSERT_TRUE(stream->enqueue(request(7)));
    EXPECT_EQ(receive_type(*stream), FrameType::kResult);
    {
        std::fstream file(own.path(), std::ios::in | std::ios::out | std::ios::binary);
        file.seekp(-1, std::ios::end);
        file.put('x');
    }
    ASSERT_TRUE(stream->enqueue(request(8)));
    EXPECT_EQ(receive_type(*stream), FrameType::kError);
    const Status result = worker.join();
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, Errc::kBadInput);
    EXPECT_NE(result.error().detail.find("toy.gguf"), std::string::npos) << result.error().detail;
    EXPECT_NE(result.error().detail.find("written to"), std::string::npos);
}

TEST(Worker, OtherRefusalsAreTriedAgain) {
    Hub hub;
    Running worker(hub.port());
    for (int i = 0; i < 3; ++i) {
        auto stream = hub.next();
        ASSERT_TRUE(stream && Hub::hello(*stream));
        ASSERT_TRUE(stream->enqueue(wire::encode_error({Errc::kBusy, "full"}, 0)));
    }
    EXPECT_FALSE(worker.done());
    EXPECT_TRUE(worker.end());
}

TEST(Worker, AnotherMajorVersionInTheWelcomeEndsIt) {
    Hub hub;
    Running worker(hub.port());
    auto stream = hub.next();
    ASSERT_TRUE(stream && Hub::hello(*stream));
    wire::Welcome welcome;
    welcome.major = 9;
    ASSERT_TRUE(stream->enqueue(wire::encode_welcome(welcome)));
    const Status result = worker.join();
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, Errc::kVersion);
}

// stop(): DRAIN, what is in flight is answered, GOODBYE.
TEST(Worker, DrainsOnStop) {
    Hub hub;
    Running worker(hub.port());
    auto stream = hub.welcome();
    ASSERT_TRUE(stream);
    ASSERT_TRUE(stream->enqueue(wire::encode_program({1, kLayer0, moe::encode(toy::swiglu())}, 1)));
    EXPECT_EQ(receive_type(*stream), FrameType::kProgramAck);
    for (uint32_t id = 1; id <= 5; ++id) ASSERT_TRUE(stream->enqueue(request(id)));
    worker.stop();
    int results = 0;
    bool drained = false;
    FrameType last{0};
    for (FrameType type = receive_type(*stream); type != FrameType{0};
         type = receive_type(*stream)) {
        results += type == FrameType::kResult;
        drained |= type == FrameType::kDrain;
        last = type;
    }
    EXPECT_EQ(results, 5);
    EXPECT_TRUE(drained);
    EXPECT_EQ(last, FrameType::kGoodbye);
    EXPECT_TRUE(worker.join());
}

// A hub that never stops asking must not keep a worker from draining.
TEST(Worker, DrainsUnderLoad) {
    Hub hub;
    Running worker(hub.port());
    auto stream = hub.welcome();
    ASSERT_TRUE(stream);
    ASSERT_TRUE(stream->enqueue(wire::encode_program({1, kLayer0, moe::encode(toy::swiglu())}, 1)));
    EXPECT_EQ(receive_type(*stream), FrameType::kProgramAck);
    for (uint32_t id = 1; id <= 64; ++id) ASSERT_TRUE(stream->enqueue(request(id)));
    worker.stop();
    bool drained = false;
    uint32_t id = 100;
    const auto end = net::Clock::now() + 5s;
    while (!drained && net::Clock::now() < end) {
        (void)stream->enqueue(request(id++));
        drained = receive_type(*stream) == FrameType::kDrain;
    }
    EXPECT_TRUE(drained);
    EXPECT_TRUE(worker.join());
}

TEST(Worker, WrongOptionsAreNamed) {
    (void)toy::cpu();
    WorkerOptions options;
    for (const char* url : {"ftp://127.0.0.1:1", "127.0.0.1", "wss://127.0.0.1:1"}) {
        options.connect = url;
        EXPECT_EQ(Worker::make(toy_holding(), options).error().code, Errc::kUsage) << url;
    }
    options.connect = "ws://127.0.0.1:1";
    options.device = "nothing";
    EXPECT_EQ(Worker::make(toy_holding(), options).error().code, Errc::kUsage);
}

}  // namespace
}  // namespace kvasir::worker
