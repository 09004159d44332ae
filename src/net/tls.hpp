// TLS for every connection of ours: who we are, and whom we believe.
//
// Used by dial, Listener, HttpServer (server and client contexts) and the libcurl client
// (ClientTrust). Only TLS 1.2 and 1.3, no renegotiation, no compression, buffers released while
// idle (10,000 idle connections are expected). The OpenSSL objects stay inside net. Thread:
// contexts are immutable and shared. Owns: certificate and key.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"

struct ssl_ctx_st;

namespace kvasir::net {

class TlsServer {
public:
    // PEM files; the certificate file may hold the chain. Errors: kEnvironment (missing,
    // unreadable), kBadInput (not PEM, key and certificate do not belong together, expired).
    static Result<std::shared_ptr<const TlsServer>> load(const std::string& certificate_path,
                                                         const std::string& key_path);
    // A self-signed certificate in `folder` (dev-cert.pem, dev-key.pem with mode 0600), made when
    // it is not there, expires within 30 days or does not name one of `hosts` (names or addresses;
    // what is neither is passed over). It also names this machine's own. The key is kept, and with
    // it the pin.
    static Result<std::shared_ptr<const TlsServer>> self_signed(
        const std::string& folder, const std::vector<std::string>& hosts = {});
    virtual ~TlsServer() = default;
    virtual ssl_ctx_st* context() const = 0;  // net only
    // SHA-256 of the certificate's SubjectPublicKeyInfo: what a client may pin.
    virtual Sha256 pin() const = 0;
};

// What a client accepts as the server of a TLS connection. With a pin, the key decides alone
// (neither name, issuer nor dates are looked at); else a chain to a trusted root, and the host's
// name. An HttpClient, which redirects may lead elsewhere, is told whose key the pin is.
struct ClientTrust {
    std::optional<Sha256> pin;
    std::string ca_file = {};  // PEM; empty: the system's roots
    // HttpClient: the pin is for the origin (scheme, host, port) of this URL, and other origins are
    // judged by their certificates. Empty: the pin is for every server.
    std::string pin_url = {};
    // To a person who is told that nobody known here vouches for the server.
    std::string advice = "give the pin or the CA's file";
    // HttpClient: to one who is told that the server's key is not the pinned one.
    std::string pin_advice = "check the address, ask for a new invite code";
};

class TlsClient {
public:
    // Errors: kEnvironment (ca_file missing), kBadInput (no certificate in it).
    static Result<std::shared_ptr<const TlsClient>> make(const ClientTrust& trust);
    virtual ~TlsClient() = default;
    virtual ssl_ctx_st* context() const = 0;  // net only
    virtual const ClientTrust& trust() const = 0;
};

}  // namespace kvasir::net
