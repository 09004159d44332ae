// Node tokens: what a market lets one key do, for how long. Invite codes: how a node gets its
// first.
//
// A token is text, "kvt1." + base64url(payload) + "." + base64url(signature by the market's key,
// context "node-token"), so that it fits in an HTTP header. It names the node's public key: a relay
// also asks for a signature by that key, so a stolen token alone attaches nothing. Payload,
// little-endian:
//   u8 version = 1 | u8 roles | u16 name bytes | name | 32 node key | u64 serial | i64 issued | i64
//   expires (seconds since 1970, the market's clock) | 32 model id (zero: any)
// An invite code is what a person pastes: "kvi1-" + base64url of
//   u8 flags (1: pin present) | 16 secret | 32 market key | [32 SHA-256 of the TLS key] | 4
//   checksum
// where pin is the SHA-256 of the server certificate's SubjectPublicKeyInfo, and checksum the first
// bytes of the SHA-256 of all before.
//
// Used by market, relay, backbone, worker. Thread: values. Limits: kTokenBytesMax, names
// kNameBytesMax.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "crypto/keys.hpp"

namespace kvasir::crypto {

constexpr size_t kTokenBytesMax = 1024;
constexpr size_t kNameBytesMax = 64;

using WallTime = std::chrono::sys_seconds;
// Year 9999: later times are no times, and all arithmetic on earlier ones stays in 64 bits.
constexpr int64_t kSecondsMax = 253402300799;

// How far the clock of whoever made a token may be ahead of the clock of who checks it, market and
// relay alike. Further, and one of the two clocks is wrong enough to be said.
constexpr std::chrono::seconds kClockLeeway{300};

enum RoleBits : uint8_t { kRoleWorker = 1, kRoleBackbone = 2, kRoleObserver = 4 };

struct TokenClaims {
    uint8_t roles = kRoleWorker;
    std::string name;  // for people; untrusted text
    PublicKey node;
    uint64_t serial = 0;  // unique within a market: what is revoked
    WallTime issued;
    WallTime expires;
    Sha256 model_id = {};  // zero: any model
};

std::string issue_token(const KeyPair& market, const TokenClaims& claims);
// Checks form and signature, not time. Errors: kDenied (malformed: says which part; wrong
// signature).
Result<TokenClaims> open_token(std::string_view text, const PublicKey& market);
// Errors: kExpired (says since when), kDenied (issued in the future by more than the leeway: the
// verifier's clock is wrong, says by how much).
Status check_time(const TokenClaims& claims, WallTime now, std::chrono::seconds leeway);

struct Invite {
    std::array<uint8_t, 16> secret = {};
    PublicKey market;
    std::optional<Sha256> tls_pin;
};
std::string to_string(const Invite& invite);
// Errors: kUsage: not an invite code, cut off, or a letter is wrong (checksum).
Result<Invite> parse_invite(std::string_view text);

}  // namespace kvasir::crypto
