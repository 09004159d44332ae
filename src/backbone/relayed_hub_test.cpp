// A hub whose workers come through a relay: who may join, what the others are told, what is logged.
#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>
#include <string>
#include <vector>

#include "backbone/link.hpp"
#include "backbone/swarm_testing.hpp"
#include "base/bytes.hpp"
#include "base/check.hpp"
#include "base/log_testing.hpp"
#include "net/upgrade.hpp"
#include "wire/attach.hpp"

namespace kvasir::backbone::testing {
namespace {

using Bytes = std::vector<uint8_t>;
using wire::FrameType;

// The relay's end of a backbone's one connection; speaks for all the workers behind it.
class RelayedSwarm {
public:
    RelayedSwarm() : listener_(listen()), swarm_(true, 150ms, {options(listener_->port())}) {
        std::unique_lock lock(mu_);
        KVASIR_CHECK(arrived_.wait_for(lock, 20s, [this] { return stream_ != nullptr; }));
        lock.unlock();
        say(wire::encode_nonce({}));
        KVASIR_CHECK(stream_->receive(in_time()).has_value());  // the role
        KVASIR_CHECK(next().type == FrameType::kAttach);
        wire::Attached attached;
        attached.generation = 1;
        attached.message_bytes_max = 64 << 20;
        attached.token_left_ms = 3600000;
        say(wire::encode_attached(attached));
    }

    ToySwarm& swarm() { return swarm_; }
    void say(const Bytes& message) {
        KVASIR_CHECK(stream_->enqueue(message).has_value());
        KVASIR_CHECK(stream_->flush_until(in_time()).has_value());
    }
    void introduce(uint16_t peer) {
        wire::PeerUp up;
        up.handle = peer;
        up.role = wire::Role::kWorker;
        up.node[0] = static_cast<uint8_t>(peer);
        up.node[1] = static_cast<uint8_t>(peer >> 8);
        up.name = "worker " + std::to_string(peer);
        say(wire::encode_peer_up(up));
    }
    // One that holds what it says; `edit` makes something else of it.
    void hello(uint16_t peer, const std::function<void(wire::Hello&)>& edit = {}) {
        wire::Hello hello;
        hello.model_id = manifest_->model_id;
        hello.segments = {{{kLayer0, 0, 2}, manifest_->segment_digest({kLayer0, 0, 2})}};
        hello.rows_max = hello.pairs_max = 64;
        if (edit) edit(hello);
        auto message = wire::encode_hello(hello);
        wire::set_peer(message, peer);
        say(message);
    }
    struct Told {
        FrameType type{0};
        uint16_t peer = 0;
        uint32_t request_id = 0;
        wire::ErrorMessage error;
    };
    // The next frame from the backbone, whatever it is.
    Told next() {
        const auto message = stream_->receive(in_time());
        if (!message) return {};
        const auto frame = wire::decode_frame(*message);
        KVASIR_CHECK(frame.has_value());
        Told told{frame->header.type, frame->header.peer, frame->header.request_id, {}};
        if (told.type == FrameType::kError) told.error = *wire::decode_error(frame->payload);
        return told;
    }
    // The next frame that is no PROGRAM.
    Told answer() {
        for (;;) {
            const Told told = next();
            if (told.type != FrameType::kProgram) return told;
        }
    }
    size_t connected() {
        size_t count = 0;
        for (const auto& worker : swarm_.backbone().report().workers)
            count += worker.connected ? 1 : 0;
        return count;
    }

private:
    static net::Deadline in_time() { return net::Clock::now() + 20s; }
    std::unique_ptr<net::Listener> listen() {
        auto listener = net::Listener::make(
            {false, "127.0.0.1", 0, "/kvasir"},
            [this](net::MessageStream stream, const std::string&) {
                const std::lock_guard lock(mu_);
                if (stream_) return;
                stream_ = std::make_unique<net::MessageStream>(std::move(stream));
                arrived_.notify_all();
            });
        KVASIR_CHECK(listener.has_value());
        return std::move(*listener);
    }
    static UplinkOptions options(uint16_t port) {
        UplinkOptions options;
        options.endpoint.host = "127.0.0.1";
        options.endpoint.port = port;
        const auto key =
            std::make_shared<const crypto::KeyPair>(std::move(*crypto::KeyPair::generate()));
        options.credentials = [key] { return access::Credentials{key, "token", "backbone"}; };
        return options;
    }

    std::mutex mu_;
    std::condition_variable arrived_;
    std::unique_ptr<net::MessageStream> stream_;  // Guarded by mu_ until it is there
    std::unique_ptr<net::Listener> listener_;
    ToySwarm swarm_;
    Result<moe::Manifest> manifest_ =
        moe::load_or_compute_manifest(toy::Toy(swarm_.path()).model, swarm_.cache());
};

TEST(RelayedHub, ARefusedHelloIsToldByItsHandleAndMayBeSaidAgain) {
    const kvasir::testing::LogCapture log;
    RelayedSwarm relayed;
    relayed.introduce(1);
    relayed.introduce(2);
    for (int again = 0; again < 3; ++again) {
        relayed.hello(1, [](wire::Hello& hello) { hello.model_id.fill(0xab); });
        const auto told = relayed.answer();
        ASSERT_EQ(told.type, FrameType::kError);
        EXPECT_EQ(told.peer, 1);
        EXPECT_EQ(told.request_id, 0u);
        EXPECT_EQ(told.error.code, Errc::kMismatch);
        EXPECT_NE(told.error.detail.find("abababab"), std::string::npos) << told.error.detail;
    }
    // The others, and the refused one itself once it has what fits, are welcome.
    for (const uint16_t peer : {uint16_t{2}, uint16_t{1}}) {
        relayed.hello(peer);
        const auto told = relayed.answer();
        EXPECT_EQ(told.type, FrameType::kWelcome) << told.error.detail;
        EXPECT_EQ(told.peer, peer);
    }
    EXPECT_TRUE(eventually([&] { return relayed.connected() == 2; }));
    const auto lines = log.with("refused a worker behind");
    ASSERT_EQ(lines.size(), 3u);
    EXPECT_NE(lines[0].find("abababab"), std::string::npos) << lines[0];
}

// What strangers can cause without end must not fill a disk.
TEST(RelayedHub, RefusalsFillNoLog) {
    const kvasir::testing::LogCapture log;
    RelayedSwarm relayed;
    constexpr uint16_t kPeers = 500;
    for (uint16_t peer = 1; peer <= kPeers; ++peer) relayed.introduce(peer);
    const auto begin = net::Clock::now();
    for (uint16_t peer = 1; peer <= kPeers; ++peer) {
        relayed.hello(peer, [](wire::Hello& hello) { hello.segments.clear(); });
        ASSERT_EQ(relayed.answer().error.code, Errc::kMismatch) << peer;
    }
    const auto seconds = std::chrono::ceil<std::chrono::seconds>(net::Clock::now() - begin).count();
    EXPECT_LE(log.with("refused a worker behind").size(), 10u * static_cast<size_t>(seconds + 1));
    EXPECT_EQ(relayed.connected(), 0u);
}

TEST(RelayedHub, HellosThatFindNoRoomAreCountedInTheLog) {
    const kvasir::testing::LogCapture log;
    RelayedSwarm relayed;
    relayed.introduce(1);
    ByteWriter out;
    wire::append_header(out, {FrameType::kHello, 0, 1, 0, kHelloBytesMax});
    Bytes large = out.take();
    large.resize(large.size() + kHelloBytesMax);
    relayed.say(large);
    const auto told = relayed.answer();
    EXPECT_EQ(told.peer, 1);
    EXPECT_EQ(told.error.code, Errc::kLimit);
    EXPECT_TRUE(eventually([&] { return log.with("1 HELLOs were not taken").size() == 1; }));
    relayed.hello(1);
    EXPECT_EQ(relayed.answer().type, FrameType::kWelcome);
}

}  // namespace
}  // namespace kvasir::backbone::testing
