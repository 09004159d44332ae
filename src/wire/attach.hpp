// How a node attaches to a relay: the frames before any HELLO.
//
// Used by worker, backbone and relay; knows nothing of experts. A server of this kind speaks first:
//   server: NONCE      32 random bytes, made for this connection
//   node:   role byte, then ATTACH: its token and a signature by the key that the token names, over
//           attach_statement(): so neither a token nor a recorded ATTACH is of use to anybody else
//   server: ATTACHED   or ERROR and close (denied, expired, revoked, mismatch, version, busy)
//   server: PEER_UP for every node that it may talk to, now and later; PEER_DOWN when one is gone
// From then on `peer` in a frame's header is the handle of PEER_UP: of the receiver in what a node
// sends, of the sender in what it gets. Handles belong to one connection and mean nothing on
// another; 0 is the server itself. Frames with peer 0 that a node may send: PING, PONG, RENEW,
// DRAIN, GOODBYE. An ERROR from the server with a peer handle and a request_id tells that this
// frame was not delivered (kBusy: the receiver's queue is full; kClosed: it is gone).
//
// Thread: values. Limits: the constants below. docs/protocol.md has the bytes.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "wire/frame.hpp"

namespace kvasir::wire {

constexpr uint32_t kAttachTextMax = 1024;  // token, names, details

using Nonce = std::array<uint8_t, 32>;
using NodeKey = std::array<uint8_t, 32>;  // an Ed25519 public key
constexpr std::string_view kAttachContext = "attach";

struct Attach {
    uint16_t major = kProtocolMajor;  // u16, u16: read first, as in HELLO
    uint16_t minor = kProtocolMinor;
    NodeKey node = {};                       // 32 bytes
    std::string token;                       // text
    std::array<uint8_t, 64> signature = {};  // 64 bytes
    std::string name;                        // text, for people
};
// What ATTACH's signature (crypto::KeyPair::sign, context kAttachContext) covers:
// nonce ‖ u8 role ‖ u16 major ‖ u16 minor ‖ node ‖ u16 token bytes ‖ token
std::vector<uint8_t> attach_statement(const Nonce& nonce, Role role, const Attach& attach);

struct Attached {
    uint16_t major = kProtocolMajor;
    uint16_t minor = kProtocolMinor;
    uint64_t generation = 0;  // of this node's connections, grows
    uint32_t ping_interval_ms = 20000;
    uint64_t message_bytes_max = 0;  // longer frames are refused
    uint64_t token_left_ms = 0;      // until the token expires, by the server's clock
};

struct PeerUp {
    uint16_t handle = 0;  // not 0
    Role role = Role::kWorker;
    NodeKey node = {};
    uint64_t generation = 0;  // of that node's connection
    std::string name;         // untrusted text
};
struct PeerDown {
    uint16_t handle = 0;
    uint16_t code = 0;  // wire code of an Errc
    std::string detail;
};
// The server stops: come again, after a random part of within_ms.
struct Move {
    uint32_t within_ms = 0;
    std::string url;  // where to; empty: the same address
};

std::vector<uint8_t> encode_nonce(const Nonce& nonce);
std::vector<uint8_t> encode_attach(const Attach& message);
std::vector<uint8_t> encode_attached(const Attached& message);
std::vector<uint8_t> encode_peer_up(const PeerUp& message);
std::vector<uint8_t> encode_peer_down(const PeerDown& message);
std::vector<uint8_t> encode_move(const Move& message);
// A newer token of the same node, on the live connection. Answered by ATTACHED or ERROR.
std::vector<uint8_t> encode_renew(std::string_view token, uint32_t request_id);

// Errors: kProtocol naming the field; kLimit (a text); kVersion (ATTACH, ATTACHED of another
// major).
Result<Nonce> decode_nonce(std::span<const uint8_t> payload);
Result<Attach> decode_attach(std::span<const uint8_t> payload);
Result<Attached> decode_attached(std::span<const uint8_t> payload);
Result<PeerUp> decode_peer_up(std::span<const uint8_t> payload);
Result<PeerDown> decode_peer_down(std::span<const uint8_t> payload);
Result<Move> decode_move(std::span<const uint8_t> payload);
Result<std::string> decode_renew(std::span<const uint8_t> payload);

// Writes the peer handle into an encoded frame (its head: at least kFrameHeaderBytes).
void set_peer(std::span<uint8_t> head, uint16_t peer);

}  // namespace kvasir::wire
