// Scripted relays over real sockets, and a worker that is attached to them.
//
// Used by worker's tests, which do not know the real relay. Thread: a relay's listener and the
// worker have their own; everything else is the test's. Owns: the connections. Limits: failures
// of its own abort with KVASIR_CHECK.
#pragma once

#include <gtest/gtest.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "crypto/keys.hpp"
#include "wire/attach.hpp"
#include "worker/worker_testing.hpp"

namespace kvasir::worker::testing {

using Bytes = std::vector<uint8_t>;
using std::chrono::milliseconds;

constexpr uint16_t kPeer = 5;

inline Bytes to_peer(Bytes message, uint16_t peer = kPeer) {
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
    bool say_peer_up(uint16_t peer = kPeer) {
        wire::PeerUp up;
        up.handle = peer;
        up.role = wire::Role::kBackbone;
        return send(wire::encode_peer_up(up));
    }
    bool peer_up(uint16_t peer = kPeer) {
        return say_peer_up(peer) && expect(FrameType::kHello, peer);
    }
    bool peer_down(uint16_t peer = kPeer) {
        return send(wire::encode_peer_down({peer, errc_info(Errc::kClosed).wire_code, "gone"}));
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
    // All that came before this has been looked at.
    bool is_heard() {
        if (!send(wire::encode_ping(1))) return false;
        Got got = next();
        while (got.type != FrameType::kPong && got.type != FrameType{0}) got = next();
        return got.type == FrameType::kPong;
    }
    // All that was sent is at the worker, which may not have read it.
    bool has_arrived() const {
        int under_way = 1;
        while (under_way != 0)
            if (::ioctl(stream_.fd(), SIOCOUTQ, &under_way) != 0) return false;
        return true;
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
    explicit Running(const Relay& home, const std::function<void(WorkerOptions&)>& edit = {},
                     milliseconds alone_first = access::Route::kAloneFirst) {
        const auto key = std::make_shared<const crypto::KeyPair>(*crypto::KeyPair::generate());
        WorkerOptions options;
        options.attach.emplace();
        options.attach->route =
            std::make_shared<access::Route>(access::RelayAddress{home.endpoint(), nullptr},
                                            access::TlsFor(), std::random_device{}(), alone_first);
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

}  // namespace kvasir::worker::testing
