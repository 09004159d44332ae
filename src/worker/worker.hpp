// Worker: dials out to a backbone, answers, comes back after a broken connection, drains on
// request.
//
// Used by `kvasir worker`. With --connect it says HELLO to one hub; attached to a relay, to every
// backbone that the relay names, and it goes where a relay that stops says (access/route.hpp). One
// thread reads, computes and writes: between two requests there is nothing to overlap. Thread:
// run() on one thread; stop() from any thread or a signal handler. Owns: the connection.
//
// Limits: reconnects with exponential backoff and jitter, at most one attempt per pause.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>

#include "access/access.hpp"
#include "access/route.hpp"
#include "base/result.hpp"
#include "engine/expert_engine.hpp"
#include "net/upgrade.hpp"
#include "worker/service.hpp"
#include "worker/throttle.hpp"

namespace kvasir::worker {

// A relay. Thread: the route is the worker's while it runs, and credentials() is called there.
struct AttachTarget {
    std::shared_ptr<access::Route> route;              // outlives a worker that is made anew
    std::function<access::Credentials()> credentials;  // fresh ones for every attempt
};

struct WorkerOptions {
    std::string connect;                        // ws://HOST:PORT or wss:// of a hub, or
    std::optional<AttachTarget> attach;         // a relay
    std::shared_ptr<const net::TlsClient> tls;  // for a wss:// in `connect`
    std::string name;                           // shown to people; empty: the host's name
    uint32_t threads = 1;
    std::string device;  // ggml device; empty: CPU
    engine::ComputeWith compute_with = engine::ComputeWith::kKernels;
    std::chrono::milliseconds pause_first{100};
    std::chrono::milliseconds pause_max{15000};
    std::chrono::milliseconds silence_max{60000};  // nothing heard: the backbone is gone
    // And up to half as long again; then HELLO again (behind a relay).
    std::chrono::milliseconds welcome_max{30000};
    std::chrono::milliseconds drain_quiet{300};  // no request for this long ends a drain
    std::chrono::milliseconds drain_max{5000};
    // With `connect`: what people should see: it waits for the backbone, it has joined. Thread:
    // that of run().
    std::function<void(const std::string&)> on_line;
    // Called between computing an answer and sending it; may pause (a limited processor).
    std::function<void()> before_answer;
    // Longer stops of the process (SIGSTOP, a phone asleep) end the connection: what is in it is
    // stale, and the token and leases may be. 0: they are not looked for.
    std::chrono::milliseconds sleep_max{0};
};

class Worker {
public:
    // Errors: kUsage (url, device), kEnvironment.
    static Result<std::unique_ptr<Worker>> make(const Holding& holding,
                                                const WorkerOptions& options);
    ~Worker();

    // Serves until stop(). Returns ok after a clean drain. Errors that no retry can mend: of a hub
    // kVersion, kMismatch (it runs another model); of the configured relay these, kDenied, kExpired
    // and kRevoked. What a backbone behind a relay says ends nothing.
    Status run();
    void stop() noexcept;  // async-signal-safe
    // Shows a newer token on the live connection. Thread: any.
    void renew(std::string token);
    // Is a connection up, and has a backbone welcomed us? Thread: any.
    bool serving() const { return serving_.load(); }
    // Work done so far, challenges included. Thread: that of run(), or after it.
    uint64_t pairs_done() const { return service_.pairs_done(); }
    uint64_t requests_done() const { return service_.requests_done(); }

private:
    Worker(const Holding& holding, WorkerOptions options, net::Endpoint endpoint,
           ExpertService service);
    // A backbone behind a relay.
    struct Peer {
        wire::PeerUp info;
        bool said_hello = false;
        std::optional<net::Clock::time_point> welcomed;
        net::Deadline hello_again{};  // after a refusal
        net::Deadline welcome_by{};   // once it was said; max() when welcomed
        net::Deadline hello_at() const { return said_hello ? welcome_by : hello_again; }
        std::chrono::milliseconds pause{0};
    };

    Result<net::MessageStream> join();
    void say_waiting(const std::string& why);
    void look_for_reason(net::MessageStream& stream, Error& error) const;
    Result<net::MessageStream> join_hub();
    Result<net::MessageStream> attach();
    wire::Hello hello() const;
    Status on_welcome(const wire::FrameView& frame);
    Status serve(net::MessageStream& stream);
    void pause_peer(Peer& peer, const Error& reason);
    net::Deadline leave_at() const;  // max(): stay. See Route::leave_at.
    bool has_to_leave() const;
    void tell_company();
    void limit_ping_interval();
    std::chrono::milliseconds with_jitter(std::chrono::milliseconds time);
    Status wait(net::MessageStream& stream, net::Deadline until);
    void watch_from_now();
    Status check_awake(std::chrono::nanoseconds waited);
    Answer compute(std::span<const uint8_t> message, Speaker speaker);
    Status say_hello(net::MessageStream& stream);
    Status drain(net::MessageStream& stream);
    Status answer(net::MessageStream& stream, std::span<const uint8_t> message);
    Status answer_peer(net::MessageStream& stream, const wire::FrameView& frame,
                       std::span<const uint8_t> message);
    Status on_server_frame(net::MessageStream& stream, const wire::FrameView& frame,
                           std::span<const uint8_t> message);
    Status on_move(const wire::FrameView& frame) const;
    Status send(net::MessageStream& stream, std::span<const uint8_t> head,
                std::span<const uint8_t> body = {});
    bool pause(std::chrono::milliseconds time);  // false when stop() came

    const Holding& holding_;
    const WorkerOptions options_;
    const net::Endpoint endpoint_;
    ExpertService service_;
    wire::NodeId node_ = {};
    std::chrono::milliseconds ping_interval_{20000};
    std::map<uint16_t, Peer> peers_;  // of the connection under way
    bool draining_ = false;           // likewise: it is about to be left
    std::mt19937 random_{std::random_device{}()};
    std::atomic<bool> stopping_{false};
    std::atomic<bool> serving_{false};
    bool told_waiting_ = false;  // that the backbone does not answer
    SleepWatch watch_;
    net::UniqueFd wake_;
    std::mutex mu_;
    std::string token_;  // Guarded by mu_: to be shown
};

}  // namespace kvasir::worker
