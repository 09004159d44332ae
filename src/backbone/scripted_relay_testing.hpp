// ScriptedRelay: a relay that takes any node, and answers newer tokens as a test wants.
//
// Used by backbone's tests, which do not know the real one. Thread: the listener's and its own;
// everything public from any. Owns: the connections, served one after the other.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "net/upgrade.hpp"
#include "wire/attach.hpp"
#include "wire/messages.hpp"

namespace kvasir::backbone::testing {

class ScriptedRelay {
public:
    using Bytes = std::vector<uint8_t>;
    struct Renewal {
        size_t connection = 0;  // 1: the first
        uint32_t request = 0;
        std::string token;
    };
    // Of a RENEW: the frame to send back; empty: nothing.
    using Answer = std::function<Bytes(const Renewal& renewal)>;

    // Says that a token shown in ATTACH is good for `left`, and `then` (one frame; empty: nothing).
    ScriptedRelay(std::chrono::milliseconds left, Answer answer, Bytes then = {})
        : left_(left), answer_(std::move(answer)), then_(std::move(then)) {
        auto listener = net::Listener::make({false, "127.0.0.1", 0, "/kvasir"},
                                            [this](net::MessageStream stream, const std::string&) {
                                                const std::lock_guard lock(mu_);
                                                waiting_.push_back(std::move(stream));
                                            });
        KVASIR_CHECK(listener.has_value());
        listener_ = std::move(*listener);
        thread_ = std::thread([this] { run(); });
    }
    ~ScriptedRelay() {
        stopping_.store(true);
        thread_.join();
        listener_.reset();
    }
    ScriptedRelay(const ScriptedRelay&) = delete;
    ScriptedRelay& operator=(const ScriptedRelay&) = delete;

    static Bytes attached(std::chrono::milliseconds left, uint32_t request) {
        wire::Attached message;
        message.generation = 1;
        message.message_bytes_max = 64 << 20;
        message.token_left_ms = static_cast<uint64_t>(left.count());
        Bytes bytes = wire::encode_attached(message);
        for (size_t i = 0; i < 4; ++i) bytes[4 + i] = static_cast<uint8_t>(request >> (8 * i));
        return bytes;
    }

    uint16_t port() const { return listener_->port(); }
    std::string url() const { return "ws://127.0.0.1:" + std::to_string(port()); }
    bool said_goodbye() const { return said_goodbye_.load(); }
    // The tokens shown in ATTACH: one a connection.
    std::vector<std::string> attaches() const {
        const std::lock_guard lock(mu_);
        return attaches_;
    }
    std::vector<Renewal> renewals() const {
        const std::lock_guard lock(mu_);
        return renewals_;
    }

private:
    void run() {
        while (!stopping_.load()) {
            std::vector<net::MessageStream> fresh;
            {
                const std::lock_guard lock(mu_);
                fresh.swap(waiting_);
            }
            for (net::MessageStream& stream : fresh) serve(stream);
            if (fresh.empty()) {
                std::this_thread::sleep_for(  // tidy: sleep, polls what the listener's thread does
                    std::chrono::milliseconds(2));
            }
        }
    }

    void serve(net::MessageStream& stream) {
        (void)stream.enqueue(wire::encode_nonce({}));
        bool role_seen = false;
        while (!stopping_.load() && !stream.closed()) {
            auto message = stream.receive(net::Clock::now() + std::chrono::milliseconds(5));
            if (!message && message.error().code == Errc::kTimeout) continue;
            if (!message) return;
            if (!std::exchange(role_seen, true)) continue;
            auto frame = wire::decode_frame(*message);
            KVASIR_CHECK(frame.has_value());
            if (const Bytes reply = on_frame(*frame); !reply.empty()) (void)stream.enqueue(reply);
            if (frame->header.type == wire::FrameType::kAttach && !then_.empty())
                (void)stream.enqueue(then_);
            said_goodbye_ = said_goodbye_ || frame->header.type == wire::FrameType::kGoodbye;
        }
    }

    Bytes on_frame(const wire::FrameView& frame) {
        switch (frame.header.type) {
            case wire::FrameType::kAttach: {
                const std::lock_guard lock(mu_);
                attaches_.push_back(wire::decode_attach(frame.payload)->token);
                return attached(left_, 0);
            }
            case wire::FrameType::kRenew: {
                Renewal renewal;
                renewal.request = frame.header.request_id;
                renewal.token = *wire::decode_renew(frame.payload);
                {
                    const std::lock_guard lock(mu_);
                    renewal.connection = attaches_.size();
                    renewals_.push_back(renewal);
                }
                return answer_(renewal);
            }
            default:
                return {};
        }
    }

    const std::chrono::milliseconds left_;
    const Answer answer_;
    const Bytes then_;
    std::atomic<bool> said_goodbye_{false};
    std::atomic<bool> stopping_{false};
    mutable std::mutex mu_;
    // Guarded by mu_.
    std::vector<net::MessageStream> waiting_;
    std::vector<std::string> attaches_;
    std::vector<Renewal> renewals_;

    std::unique_ptr<net::Listener> listener_;
    std::thread thread_;
};

}  // namespace kvasir::backbone::testing
