// Uplink: keeps the backbone attached to a relay, so that workers behind NAT can reach it.
//
// Used by Backbone, one per relay. Dials out, attaches, hands the connection to the hub, and comes
// again when it ends: with exponential backoff and jitter, or where and when a stopping relay asked
// for (access/route.hpp). While the connection lives its token is renewed in time, so that only a
// relay or a line that stops ends it.
//
// Thread: its own, blocked in dial or in credentials(), or asleep. Owns: nothing that outlives it;
// the hub has the connection.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "access/access.hpp"
#include "access/route.hpp"
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
    access::TlsFor tls_for;  // called on the uplink's thread
    // Called on the uplink's thread, which it may block: for every attempt to attach, and again
    // when three quarters of what the relay said the token is good for are over. The same token
    // again: there is no newer one yet.
    std::function<access::Credentials()> credentials;
    std::chrono::milliseconds pause_first{200};  // between attempts to attach, or to renew
    std::chrono::milliseconds pause_max{15000};
    std::chrono::milliseconds answer_max{10000};  // of the relay, to a newer token
    // Whether the program ends: when the connection is over then, that is as it should be, and it
    // is not made again. Called on the uplink's thread. Empty: never.
    std::function<bool()> is_ending;
    // Without a worker, at a relay that a MOVE led to.
    std::chrono::milliseconds alone_first = access::Route::kAloneFirst;
};

// What becomes of a connection that was handed over. Called on the hub's thread; must not block.
struct RelayEvents {
    // Once, when it is over.
    std::function<void()> on_end;
    // The relay stops. Returns when the connection is to be left, with nothing under way.
    std::function<net::Deadline(const wire::Move& move)> on_move;
    // Whether any worker is there: at first, and when that changes. Returns the same.
    std::function<net::Deadline(bool has_company)> on_company;
    // The answer to a newer token: for how long it is good, or why it was refused.
    std::function<void(Result<std::chrono::milliseconds> left)> on_renewed;
};

// For how long the token shown is good, as the relay says; no more than a year.
std::chrono::milliseconds token_left(const wire::Attached& attached);

class Uplink {
public:
    // Shows a newer token on that connection, without waiting; the answer comes as an event.
    using ShowToken = std::function<void(std::string token)>;
    // Takes a connection.
    using Adopt = std::function<ShowToken(net::MessageStream stream, std::string address,
                                          RelayEvents events)>;

    Uplink(UplinkOptions options, Adopt adopt);
    ~Uplink();  // joins; the connection handed over lives on

    // Why it does not try any more: the token was taken back. Thread: any.
    std::optional<Error> ended() const;

private:
    // Shared with the events of a connection: it may outlive the uplink.
    struct State {
        explicit State(access::Route from_home) : route(std::move(from_home)) {}

        std::mutex mu;
        std::condition_variable changed;
        // Guarded by mu.
        bool stopping = false;
        std::optional<Error> ended;
        bool attached = false;
        access::Route route;
        std::optional<Result<std::chrono::milliseconds>> renewed;  // the relay's answer

        bool over() const { return stopping || !attached; }
    };

    void run();
    Result<access::Attachment> attach(const access::Credentials& credentials);
    void serve(access::Attachment attachment, std::string token);
    void keep_fresh(const ShowToken& show, std::string token, std::chrono::milliseconds left);
    Result<std::chrono::milliseconds> renew(const ShowToken& show, std::string& token);
    RelayEvents events() const;
    bool pause(std::chrono::milliseconds time);  // false when stopping
    std::chrono::milliseconds jittered(std::chrono::milliseconds time);

    const UplinkOptions options_;
    const Adopt adopt_;
    const std::shared_ptr<State> state_;
    // The thread's.
    std::string address_;  // dialed last
    std::mt19937 random_{std::random_device{}()};
    std::thread thread_;
};

}  // namespace kvasir::backbone
