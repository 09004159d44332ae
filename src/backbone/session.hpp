// WorkerSession: one joined worker. Requests go out and answers come in on whichever thread has
// time.
//
// Used by the hub's thread (idle sockets, joins, probes), by lanes (the hot path) and by the
// verifier. The socket has at most one reader at a time: a lane that waits for this worker claims
// it and reads in its own thread, so that no hand-over costs a wake-up; otherwise the hub's epoll
// (one-shot) reads. Answers to somebody else go to their mailbox.
//
// Thread: any; state is guarded by mu_, usable() and open() are atomics. Owns: the stream.
// Limits: kPendingMax outstanding requests; unsolicited answers beyond the cancelled ones close the
// session.
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

#include "backbone/mailbox.hpp"
#include "backbone/report.hpp"
#include "base/ids.hpp"
#include "dispatch/health.hpp"
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
    // Called with mu_ held, on the reading thread: an answer to a request made with the caller's
    // mailbox. The payload is valid during the call only.
    using OnReply = std::function<void(uint64_t cookie, wire::FrameType type,
                                       std::span<const uint8_t> payload, const Error& error)>;

    WorkerSession(uint64_t tag, net::MessageStream stream, wire::Hello hello, int epoll_fd,
                  int hub_event, dispatch::HealthOptions health);

    // Constant after construction.
    uint64_t tag() const { return tag_; }
    const wire::Hello& hello() const { return hello_; }
    const std::string& label() const { return label_; }  // printable name#generation
    const std::vector<HeldBank>& banks() const { return banks_; }
    const HeldBank* bank(LayerKey layer) const;
    int fd() const { return fd_; }

    bool open() const { return open_.load(std::memory_order_acquire); }
    // Open, not draining, healthy: may get new work.
    bool usable() const { return usable_.load(std::memory_order_acquire); }
    uint32_t next_request_id() { return next_id_.fetch_add(1, std::memory_order_relaxed); }

    // Sends one frame and remembers who asked. Errors: kClosed, kBusy, kIo; then nothing is
    // pending.
    Status request(uint32_t request_id, std::span<const std::span<const uint8_t>> pieces,
                   Mailbox* box, uint64_t cookie);
    // Forgets a request; a late answer is dropped.
    void cancel(uint32_t request_id);

    // The reading right. claim() is false while someone else reads (their thread will post to the
    // mailbox). After release() the right stays with the reader, unwatched by the hub, so that the
    // next layer costs no system call; anybody may take it over, and the hub takes it back when it
    // lies idle.
    bool claim(const void* reader);
    void release(const void* reader);
    void give_back(const void* reader);  // for good: the hub watches again
    void give_back_idle();               // hub only, now and then
    void watch();                        // hub only: watch the new session's socket
    // Reads what is there. Answers for `box` go to on_reply, others are posted. Also writes what is
    // pending. Errors: the session is then closed and every asker told.
    Status pump(Mailbox* box, const OnReply& on_reply);
    bool wants_write() const;

    // Tells the worker why (unless it is a plain end) and closes.
    void close(const Error& reason);
    // End-to-end liveness: sends a PING frame. last_heard is the stream's.
    void ping();
    net::Clock::time_point last_heard() const;
    net::Clock::time_point last_ping() const;

    // Health and accounting.
    void on_answer(uint32_t pairs, std::chrono::nanoseconds took, std::chrono::nanoseconds compute);
    void on_failure();
    bool wants_probe() const;
    std::chrono::milliseconds deadline(uint32_t pairs) const;
    void costs(double& request_us, double& pair_us) const;
    // The outcome of one bank's challenge; exact() is true when all so far were.
    void mark_exact(bool exact);
    bool exact() const { return exact_.load(); }
    bool draining() const { return draining_.load(); }
    WorkerReport report() const;
    void reset_report();

private:
    struct Pending {
        Mailbox* box;
        uint64_t cookie;
    };
    Status handle(const wire::FrameView& frame, Mailbox* box, const OnReply& on_reply);
    Status deliver(const wire::FrameView& frame, Mailbox* box, const OnReply& on_reply);
    void close_locked(const Error& reason, Mailbox* box, const OnReply& on_reply);
    void refresh_usable_locked();
    void watch_locked();
    void give_back_locked();
    Status count_control_locked(net::Clock::time_point now);

    // Constant after construction.
    const uint64_t tag_;
    const wire::Hello hello_;
    const std::string label_;
    const std::vector<HeldBank> banks_;
    const int epoll_fd_;
    const int hub_event_;
    int fd_ = -1;

    std::atomic<bool> open_{true};
    std::atomic<bool> usable_{true};
    std::atomic<bool> exact_{false};
    std::atomic<bool> draining_{false};
    std::atomic<uint32_t> next_id_{1};

    mutable std::mutex mu_;
    // Guarded by mu_.
    net::MessageStream stream_;
    dispatch::Health health_;
    const void* reader_ = nullptr;  // null: the hub's epoll watches
    bool reading_ = false;          // the reader is at it now
    net::Clock::time_point idle_since_{};
    std::unordered_map<uint32_t, Pending> pending_;
    std::set<uint32_t> cancelled_;
    net::Clock::time_point last_ping_{};
    bool differed_ = false;  // a challenge gave other bits
    uint32_t control_this_second_ = 0;
    net::Clock::time_point second_start_{};
    uint64_t pairs_ = 0, requests_ = 0, failures_ = 0, late_ = 0;
    uint64_t bytes_in_base_ = 0, bytes_out_base_ = 0;
    std::vector<float> compute_us_;  // the newest kSamples, as a ring
    size_t compute_next_ = 0;
};

}  // namespace kvasir::backbone
