// Uplink: keeps the backbone attached to a relay, so that workers behind NAT can reach it.
//
// Used by Backbone, one per relay. Dials out, attaches, hands the connection to the hub, and comes
// again when it ends: with exponential backoff and jitter, or after the time that a stopping relay
// asked for.
//
// Thread: its own, blocked in dial or asleep. Owns: nothing that outlives it; the hub has the
// connection.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "access/access.hpp"
#include "base/result.hpp"
#include "net/message_stream.hpp"
#include "net/upgrade.hpp"

namespace kvasir::backbone {

// A relay in this process: lanes do its work for their own frames, so that its thread need not wake
// up for each. See relay/relay.hpp.
struct RelayHere {
    int event_fd = -1;  // readable while it has something to do
    std::function<bool()> serve_ready;
};

struct UplinkOptions {
    net::Endpoint endpoint;
    std::optional<RelayHere> here;  // it is in this process, and outlives the backbone
    std::shared_ptr<const net::TlsClient> tls;
    std::function<access::Credentials()> credentials;  // fresh ones for every attempt
    std::chrono::milliseconds pause_first{200};
    std::chrono::milliseconds pause_max{15000};
};

class Uplink {
public:
    // Takes a connection; calls the function once when it is over, from any thread.
    using Adopt = std::function<void(net::MessageStream stream, std::string address,
                                     std::function<void(std::chrono::milliseconds)> on_end)>;

    Uplink(UplinkOptions options, Adopt adopt);
    ~Uplink();  // joins; the connection handed over lives on

private:
    // Shared with the function that a connection calls at its end: it may outlive the uplink.
    struct State {
        std::mutex mu;
        std::condition_variable changed;
        // Guarded by mu.
        bool stopping = false;
        bool attached = false;
        std::chrono::milliseconds pause{0};  // asked for by the relay
    };

    void run();
    bool pause(std::chrono::milliseconds time);  // false when stopping

    const UplinkOptions options_;
    const Adopt adopt_;
    const std::shared_ptr<State> state_ = std::make_shared<State>();
    std::thread thread_;
};

}  // namespace kvasir::backbone
