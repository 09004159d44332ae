// Access: proving to a relay or hub who we are (client), and checking that proof (server).
//
// Used by worker and backbone (attach) and by relay and hub (check). It joins what the floors below
// keep apart: the frames of wire/attach, keys and tokens of crypto, the sockets of net. Thread:
// attach() blocks its caller; check() is pure. Owns: nothing.
#pragma once

#include <memory>
#include <string>

#include "base/result.hpp"
#include "crypto/keys.hpp"
#include "crypto/token.hpp"
#include "net/upgrade.hpp"
#include "wire/attach.hpp"

namespace kvasir::access {

// What a node shows. The token may be replaced while others read: pass a copy.
struct Credentials {
    std::shared_ptr<const crypto::KeyPair> key;
    std::string token;
    std::string name;  // for people
};

struct Attachment {
    net::MessageStream stream;  // PEER_UP frames may be in it already
    wire::Attached attached;
};

struct AttachOptions {
    net::Endpoint endpoint;
    wire::Role role = wire::Role::kWorker;
    std::shared_ptr<const net::TlsClient> tls;  // needed for wss
    net::HandshakeLimits handshake;
    net::MessageLimits messages;
};

// Dials, upgrades, answers the server's NONCE, waits for ATTACHED; all within the handshake's
// deadline. Errors: those of net::dial; what the server says (kDenied, kExpired, kRevoked,
// kMismatch, kVersion, kBusy, ...); kProtocol for a server that asks for no token.
Result<Attachment> attach(const AttachOptions& options, const Credentials& credentials);

// A complete ATTACH frame's content for this nonce.
wire::Attach make_attach(const wire::Nonce& nonce, wire::Role role, const Credentials& credentials);

// Checks an ATTACH against the market's key, or, with a null `nonce`, only the token of a RENEW:
// signature by the market, time, node key, role, and (for an ATTACH) that the node signed this
// nonce. Errors: kVersion, kDenied, kExpired.
Result<crypto::TokenClaims> check(const wire::Attach& attach, wire::Role role,
                                  const wire::Nonce* nonce, const crypto::PublicKey& market,
                                  crypto::WallTime now, std::chrono::seconds leeway);

// The part of check() that needs no market: the node signed this nonce with its key. Errors:
// kDenied.
Status check_signature(const wire::Attach& attach, wire::Role role, const wire::Nonce& nonce);

}  // namespace kvasir::access
