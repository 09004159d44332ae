// Nodes for tests and benchmarks of a real relay: they attach, and say what they are told to.
//
// Used by the tests of relay and bench/relay_bench.cpp. Thread: one at a time per node. Owns: the
// connection and the key. Limits: errors that a test does not ask for abort.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "crypto/token.hpp"
#include "net/upgrade.hpp"
#include "relay/own_frames.hpp"
#include "relay/relay.hpp"
#include "wire/attach.hpp"

namespace kvasir::relay::testing {

using Bytes = std::vector<uint8_t>;
using wire::FrameType;
using wire::Role;

inline net::Deadline in(milliseconds time) {
    return net::Clock::now() + time;
}

template <class T>
T must(Result<T> result, const char* what) {
    if (result) return std::move(*result);
    std::fprintf(stderr, "%s: %s\n", what, result.error().detail.c_str());
    std::abort();
}
inline void must(const Status& status, const char* what) {
    if (status) return;
    std::fprintf(stderr, "%s: %s\n", what, status.error().detail.c_str());
    std::abort();
}

struct Frame {
    wire::FrameHeader header;
    Bytes payload;
};

struct Target {
    net::Endpoint endpoint;
    std::shared_ptr<const net::TlsClient> tls;
};

inline Target target_of(const Relay& relay, std::shared_ptr<const net::TlsClient> tls = nullptr) {
    Target target;
    target.endpoint.tls = tls != nullptr;
    target.endpoint.host = "127.0.0.1";
    target.endpoint.port = relay.port();
    target.tls = std::move(tls);
    return target;
}

class Node {
public:
    explicit Node(net::MessageStream connection) : stream(std::move(connection)) {}

    static Node connect(const Target& target) {
        return Node(must(net::dial(target.endpoint, {}, {}, target.tls), "dial"));
    }
    // Dials and attaches; what the relay refuses is an error.
    static Result<Node> try_attach(const Target& target, Role role, const crypto::KeyPair& key,
                                   const std::string& token = {},
                                   const std::string& name = "node") {
        auto dialed = net::dial(target.endpoint, {}, {}, target.tls);
        if (!dialed) return tl::unexpected(dialed.error());
        Node node(std::move(*dialed));
        const auto nonce = node.read_nonce();
        if (!nonce) return tl::unexpected(nonce.error());
        if (auto ok = node.introduce(role, key, token, *nonce, name); !ok) {
            return tl::unexpected(ok.error());
        }
        return node;
    }
    static Node attach(const Target& target, Role role, const std::string& token = {}) {
        const auto key = must(crypto::KeyPair::generate(), "key");
        return must(try_attach(target, role, key, token), "attach");
    }

    Result<wire::Nonce> read_nonce() {
        auto frame = next();
        if (!frame) return tl::unexpected(frame.error());
        if (frame->header.type == FrameType::kError) return tl::unexpected(error_of(*frame));
        return wire::decode_nonce(frame->payload);
    }
    static Bytes make_attach(Role role, const crypto::KeyPair& key, const std::string& token,
                             const wire::Nonce& nonce, const std::string& name = "node") {
        wire::Attach message;
        message.node = key.public_key().bytes;
        message.token = token;
        message.name = name;
        message.signature =
            key.sign(wire::kAttachContext, wire::attach_statement(nonce, role, message));
        return wire::encode_attach(message);
    }
    Status introduce(Role role, const crypto::KeyPair& key, const std::string& token,
                     const wire::Nonce& nonce, const std::string& name) {
        say({static_cast<uint8_t>(role)});
        say(make_attach(role, key, token, nonce, name));
        const auto frame = next();
        if (!frame) return tl::unexpected(frame.error());
        if (frame->header.type == FrameType::kError) return tl::unexpected(error_of(*frame));
        attached = must(wire::decode_attached(frame->payload), "ATTACHED");
        return {};
    }

    void say(const Bytes& message) {
        (void)stream.enqueue(message);
        (void)stream.flush_until(in(milliseconds(20000)));
    }
    Result<Frame> next(milliseconds time = milliseconds(20000)) {
        const auto message = stream.receive(in(time));
        if (!message) return tl::unexpected(message.error());
        const auto frame = wire::decode_frame(*message);
        if (!frame) return tl::unexpected(frame.error());
        return Frame{frame->header, {frame->payload.begin(), frame->payload.end()}};
    }
    // The next frame of that type; others are skipped.
    Result<Frame> next(FrameType type) {
        while (true) {
            auto frame = next();
            if (!frame || frame->header.type == type) return frame;
        }
    }
    uint16_t peer() { return must(next_peer(), "PEER_UP").handle; }
    Result<wire::PeerUp> next_peer() {
        const auto frame = next(FrameType::kPeerUp);
        if (!frame) return tl::unexpected(frame.error());
        return wire::decode_peer_up(frame->payload);
    }
    static Error error_of(const Frame& frame) {
        if (frame.header.type != FrameType::kError || frame.payload.size() < 4) {
            return {Errc::kProtocol, "not an error"};
        }
        const auto code = static_cast<uint16_t>(frame.payload[0] | frame.payload[1] << 8);
        return {errc_from_wire(code), std::string(frame.payload.begin() + 4, frame.payload.end())};
    }

    net::MessageStream stream;
    wire::Attached attached;
};

}  // namespace kvasir::relay::testing
