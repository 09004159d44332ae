// Servers: market and relay on one port, as `kvasir market` and `kvasir up` run them.
//
// Used by these two. Thread: start, stop and invites from the main thread, drain() from any. Owns:
// market, relay or listener. Limits: those of the two.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "access/access.hpp"
#include "backbone/uplink.hpp"
#include "base/result.hpp"
#include "coordinator/market.hpp"
#include "relay/relay.hpp"

namespace CLI {
class App;
}

namespace kvasir::apps {

// The first generation that a relay gives out: larger than any of an earlier process.
uint64_t relay_generation_now();

struct ServerFlags {
    std::string listen = "127.0.0.1:8443";
    std::string model_path;
    std::string state_dir;  // database, keys, certificate
    std::string db_path;    // empty: market.db in the state folder
    std::string tls_cert, tls_key;
    bool dev_tls = false;    // self-signed, as without any of the three
    bool plain = false;      // no TLS at all: one machine or a trusted LAN
    std::string public_url;  // as nodes reach it; empty: by join_url()
    std::string relay_url;   // of a relay elsewhere; empty: on the same port
    std::string origin;
    std::string name;
    uint32_t target_replicas = 1;
    uint32_t token_life_s = 3600;
    uint32_t lease_life_s = 60;
    uint32_t per_address_max = 1024;  // connections, of nodes and of HTTP each
};
void add_server_flags(CLI::App& command, ServerFlags& flags);

class Servers {
public:
    // Errors: those of Market::open, Relay::start, TLS; kUsage.
    static Result<std::unique_ptr<Servers>> start(const ServerFlags& flags, bool local_port);
    ~Servers();

    coordinator::Market& market() { return *market_; }
    const std::string& url() const { return url_; }         // as nodes reach it
    std::optional<backbone::RelayHere> relay_here() const;  // if the relay is ours
    uint16_t local_port() const;  // of the relay, plain TCP on this machine
    // What a person pastes on another machine, to start a worker.
    std::string join_line(const crypto::Invite& invite) const;
    std::chrono::seconds token_life() const { return token_life_; }
    // Of a self-signed certificate.
    const std::optional<Sha256>& tls_pin() const { return tls_pin_; }
    // What a backbone of this process, or a program that it starts, shows to the relay: a token
    // made now. `key` is its own.
    access::Credentials backbone_credentials(std::shared_ptr<const crypto::KeyPair> key) const;
    // Tells nodes to come again and waits, at most that long, until they are gone.
    void drain(std::chrono::milliseconds within);

private:
    Servers() = default;
    // Constant after start().
    std::string url_;
    std::chrono::seconds token_life_{0};
    std::optional<Sha256> tls_pin_;
    std::shared_ptr<const crypto::KeyPair> market_key_;
    std::unique_ptr<coordinator::Market> market_;
    std::unique_ptr<relay::Relay> relay_;      // or
    std::unique_ptr<net::Listener> listener_;  // with a relay elsewhere
};

}  // namespace kvasir::apps
