// WorkerSession: one joined worker. Requests go out and answers come in on whichever thread has
// time.
//
// Used by the hub's thread (joins, probes), by lanes (the hot path) and by the verifier. It speaks
// over a Link, which may be its own socket or shared with the other workers behind a relay.
//
// Thread: any; state is guarded by the link's mutex, usable() and open() are atomics. Owns: a share
// of the link. Limits: kPendingMax outstanding requests; unsolicited answers beyond the cancelled
// ones end the session.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "backbone/link.hpp"
#include "backbone/mailbox.hpp"
#include "backbone/report.hpp"
#include "base/ids.hpp"
#include "dispatch/health.hpp"
#include "dispatch/planner.hpp"
#include "net/message_stream.hpp"
#include "wire/messages.hpp"

namespace kvasir::backbone {

constexpr size_t kPendingMax = 4096;

// The experts of one bank that a worker holds.
struct HeldBank {
    LayerKey layer;
    std::vector<uint32_t> globals;         // sorted; position = the worker's local id
    std::vector<int32_t> local_of_global;  // -1: not held
};
std::vector<HeldBank> held_banks(const wire::Hello& hello);

class WorkerSession {
public:
    // `peer`: its handle on the link.
    WorkerSession(uint64_t tag, std::shared_ptr<Link> link, uint16_t peer, wire::Hello hello,
                  int hub_event, dispatch::HealthOptions health);

    // Constant after construction.
    uint64_t tag() const { return tag_; }
    const wire::Hello& hello() const { return hello_; }
    const std::string& label() const { return label_; }  // printable name#generation
    const std::vector<HeldBank>& banks() const { return banks_; }
    const HeldBank* bank(LayerKey layer) const;
    const std::shared_ptr<Link>& link() const { return link_; }
    uint16_t peer() const { return peer_; }

    bool open() const { return open_.load(std::memory_order_acquire); }
    // Open, not draining, healthy: may get new work.
    bool usable() const { return usable_.load(std::memory_order_acquire); }
    uint32_t next_request_id() { return next_id_.fetch_add(1, std::memory_order_relaxed); }

    // Sends one frame and remembers who asked; `pairs` of work go with it. Errors: kClosed, kBusy,
    // kIo; then nothing is pending.
    Status request(uint32_t request_id, std::span<const std::span<const uint8_t>> pieces,
                   uint32_t pairs, Mailbox* box, uint64_t cookie);
    // Forgets a request; a late answer is dropped.
    void cancel(uint32_t request_id);

    // Tells the worker why (unless it is a plain end) and ends; its own socket is closed.
    void close(const Error& reason);
    // Sends one frame that asks nothing.
    Status send(std::span<const uint8_t> message);
    // What is under way may end; the worker is as one that drains.
    void stop_new_work();
    // End-to-end liveness: sends a PING frame.
    void ping();
    net::Clock::time_point last_heard() const;
    net::Clock::time_point last_ping() const;

    // Health and accounting.
    void on_answer(uint32_t pairs, std::chrono::nanoseconds took, std::chrono::nanoseconds compute);
    void on_failure();
    bool wants_probe() const;
    std::chrono::milliseconds deadline(uint32_t pairs) const;
    dispatch::HolderCost costs() const;
    // The outcome of one bank's challenge; exact() is true when all so far were.
    void mark_exact(bool exact);
    // What the worker says computes its banks, for the report.
    void computes_with(std::string text);
    bool exact() const { return exact_.load(); }
    bool draining() const { return draining_.load(); }
    WorkerReport report() const;
    void reset_report();

private:
    friend class Link;

    struct Pending {
        Mailbox* box;
        uint64_t cookie;
        uint32_t pairs;
    };
    Status handle(const wire::FrameView& frame, Mailbox* box, const OnReply& on_reply);
    Status deliver(const wire::FrameView& frame, Mailbox* box, const OnReply& on_reply);
    void end_locked(const Error& reason, Mailbox* box, const OnReply& on_reply);
    Status enqueue_locked(std::span<const std::span<const uint8_t>> pieces);
    Status enqueue_locked(std::span<const uint8_t> message);
    void refresh_usable_locked();
    Status count_control_locked(net::Clock::time_point now);

    // Constant after construction.
    const uint64_t tag_;
    const wire::Hello hello_;
    const std::string label_;
    const std::vector<HeldBank> banks_;
    const std::shared_ptr<Link> link_;
    const uint16_t peer_;
    const int hub_event_;

    std::atomic<bool> open_{true};
    std::atomic<bool> usable_{true};
    std::atomic<bool> exact_{false};
    std::atomic<bool> draining_{false};
    std::atomic<uint32_t> next_id_{1};

    // Guarded by link_->mu_.
    dispatch::Health health_;
    net::Clock::time_point last_heard_ = net::Clock::now();
    std::unordered_map<uint32_t, Pending> pending_;
    uint64_t pairs_pending_ = 0;
    std::set<uint32_t> cancelled_;
    net::Clock::time_point last_ping_{};
    bool differed_ = false;  // a challenge gave other bits
    uint32_t control_this_second_ = 0;
    net::Clock::time_point second_start_{};
    std::string computes_;
    uint64_t pairs_ = 0, requests_ = 0, failures_ = 0, late_ = 0;
    uint64_t bytes_in_ = 0, bytes_out_ = 0;  // on the wire, WebSocket headers included
    std::vector<float> compute_us_;          // the newest kSamples, as a ring
    size_t compute_next_ = 0;
};

}  // namespace kvasir::backbone
