// Dialing out and accepting in: TCP + HTTP upgrade to WebSocket, then a MessageStream.
//
// Used by the worker (dial), and by who is dialed (Listener). Whatever arrived behind the upgrade
// request or response is handed on as the stream's leftover, also out of the same TLS record. Who
// speaks TLS to a plain port, or anything else to a TLS port, gets a quick close. Subprotocol
// "kvasir.1" is required both ways; any path under "/kvasir" is accepted. Without a handler GET
// /healthz gets 200 and other plain HTTP 426; garbage gets a close.
//
// Limits: HandshakeLimits; all within the deadline, TLS included.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/result.hpp"
#include "net/http.hpp"
#include "net/message_stream.hpp"
#include "net/tls.hpp"

namespace kvasir::net {

struct Endpoint {
    bool tls = false;  // ws:// or wss://
    std::string host;
    uint16_t port = 0;
    std::string path = "/kvasir";

    bool operator==(const Endpoint&) const = default;
};
// "ws://HOST:PORT[/path]" or "wss://..."; IPv6 in brackets; without a port 80 or 443. "http://" and
// "https://" mean the same. Errors: kUsage naming what is wrong.
Result<Endpoint> parse_url(const std::string& url);
// "HOST:PORT", ":PORT", "[::1]:PORT"; port 0 lets the system choose.
Result<Endpoint> parse_listen(const std::string& address);

struct HandshakeLimits {
    std::chrono::milliseconds deadline{10000};  // for the whole handshake
    uint32_t header_bytes_max = 8192;
    // Of a listener: handshakes under way, in all and of one IP address (a /64 of IPv6). When they
    // are full, a new connection takes the place of the oldest one that has said nothing, or else
    // of the oldest one beyond `patience`. If there is none, it waits in the backlog (full in all)
    // or is closed (of one address).
    uint32_t pending_max = 64;
    uint32_t pending_per_address_max = 32;
    std::chrono::milliseconds patience{1000};
};

// Blocking dial with a deadline. For wss a `tls` is needed. Errors: kIo (resolve, connect),
// kTimeout, kProtocol (no upgrade; says the HTTP status), kDenied (certificate or pin not accepted:
// says why), kUsage (wss without `tls`). Thread: any, reentrant.
Result<MessageStream> dial(const Endpoint& endpoint, const HandshakeLimits& handshake = {},
                           MessageLimits limits = {},
                           std::shared_ptr<const TlsClient> tls = nullptr);

// What a Listener does besides plain WebSocket upgrades.
struct ListenerOptions {
    HandshakeLimits handshake;
    MessageLimits messages;
    std::shared_ptr<const TlsServer> tls;  // null: plain TCP
    HttpHandler http;                      // null: /healthz only
    HttpLimits http_limits;
};

// Accepts connections on its own thread and hands over upgraded streams.
// To the process's hard limit of open files: for servers with thousands of connections.
void raise_descriptor_limit();

class Listener {
public:
    // Called on the listener's thread; must not block.
    using OnStream = std::function<void(MessageStream stream, std::string peer_address)>;

    // Errors: kEnvironment (address in use, no permission), kUsage.
    static Result<std::unique_ptr<Listener>> make(const Endpoint& listen, OnStream on_stream,
                                                  const HandshakeLimits& handshake = {},
                                                  MessageLimits limits = {});
    static Result<std::unique_ptr<Listener>> make(const Endpoint& listen, OnStream on_stream,
                                                  ListenerOptions options);
    virtual ~Listener() = default;      // stops and joins
    virtual uint16_t port() const = 0;  // the real one
};

}  // namespace kvasir::net
