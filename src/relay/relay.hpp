// Relay: a WebSocket bridge on one port. Workers and backbones dial out to it and talk through it.
//
// Used by `kvasir relay`, and inside `kvasir up` beside market and backbone. The rules are
// Switchboard's; here are the sockets: one epoll, whole frames received and passed on from where
// they arrived: short and very long ones without a copy. Connections read and write in turns of
// about `turn_bytes` (a message counts as 4 KiB at least), those first that asked for least
// (TurnQueue): beside any number of connections that want all they can get, one that wants little
// waits for one turn. GET /healthz and /metrics (Prometheus) are answered on the same port.
//
// Thread: one of its own, besides the listener's; every method may be called from any thread, the
// destructor once. Owns: the connections. Limits: RelayOptions; the memory of all connections is
// at most about 2 queue_total_max (usually half of it: a queued frame keeps the buffer that it came
// in) + receive_total_max + 16 KiB for each (TLS: 40 KiB).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "base/result.hpp"
#include "net/tls.hpp"
#include "net/upgrade.hpp"
#include "relay/switchboard.hpp"
#include "relay/token_gate.hpp"

namespace kvasir::relay {

struct RelayOptions {
    // attach_deadline and handshake.deadline together bound how long a stranger holds a connection.
    SwitchboardOptions switchboard;
    GateOptions gate;
    std::shared_ptr<const net::TlsServer> tls;  // null: plain TCP
    bool local_port = false;  // also plain TCP on 127.0.0.1, for a backbone on this machine
    net::HandshakeLimits handshake{milliseconds(5000), 8192, 1024, 512};
    net::HttpLimits http_limits;
    net::HttpHandler http;                  // other paths than /healthz and /metrics; empty: 404
    uint64_t turn_bytes = 16 << 10;         // read or written in one turn
    uint64_t turn_bytes_alone = 128 << 10;  // while there are only a sender and its receiver
    uint64_t receive_total_max = uint64_t{1} << 30;  // of frames that have half arrived
    milliseconds buffer_idle{2000};                  // then receive buffers are given back
};

struct RelayStats {
    SwitchboardCounters counters;
    uint64_t workers = 0, backbones = 0, observers = 0;
    uint64_t connections = 0;     // attached or not
    uint64_t queued_bytes = 0;    // for all receivers
    uint64_t receive_bytes = 0;   // in buffers of half received or held frames, 256 KiB each free
    uint64_t cut_for_memory = 0;  // connections closed because of receive_total_max
    bool draining = false;
};
// Text of /metrics.
std::string prometheus_text(const RelayStats& stats);

class Relay {
public:
    // Raises the process's limit of open files to its hard limit. Errors: kEnvironment (address in
    // use, no permission), kUsage.
    static Result<std::unique_ptr<Relay>> start(const net::Endpoint& listen, RelayOptions options);
    virtual ~Relay() = default;  // closes everything at once
    virtual uint16_t port() const = 0;
    virtual uint16_t local_port() const = 0;  // 0: not asked for

    // Tells all nodes to come again within that time, takes no new ones, then closes. Once.
    virtual void drain(milliseconds within, std::string url) = 0;
    // Drained, and the last connection is closed.
    virtual bool drained() const = 0;
    // Cuts whoever is attached with one of these tokens.
    virtual void revoke(std::vector<uint64_t> serials) = 0;
    virtual RelayStats stats() const = 0;

    // For a backbone in this process: with these a frame of its own needs no wake-up of the relay's
    // thread. event_fd() is readable while something is there that nobody deals with; serve_ready()
    // does some turns of it, without waiting, unless another thread is at it (false). Thread: any.
    virtual int event_fd() const = 0;
    virtual bool serve_ready() = 0;
};

}  // namespace kvasir::relay
