// Link: one socket of the backbone, and the workers that speak over it.
//
// Used by the hub's thread (idle sockets, joins, probes), by lanes (the hot path) and by the
// verifier, mostly through WorkerSession. A link to a worker itself has one session; a link to a
// relay has one for every worker behind it, told apart by the peer handle of each frame. The socket
// has at most one reader at a time: a lane that waits for a worker claims the link and reads in its
// own thread, so that no hand-over costs a wake-up; otherwise the hub's epoll (one-shot) reads.
// Answers to somebody else go to their mailbox, frames that belong to no session to the hub.
//
// Thread: any; state is guarded by mu_, which also guards the state of its sessions. Owns: the
// stream. Limits: kControlBytesMax of frames that wait for the hub.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "backbone/mailbox.hpp"
#include "base/result.hpp"
#include "net/message_stream.hpp"
#include "wire/frame.hpp"

namespace kvasir::backbone {

constexpr uint64_t kControlBytesMax = uint64_t{16} << 20;
// HELLOs of one peer without a session: so many in a row, then one a second; those that wait for
// the hub have together no more bytes than the longest may have. One that is not kept is counted,
// and its peer told, once a second at most.
constexpr uint32_t kHelloBurst = 8;
constexpr uint64_t kHelloBytesMax = uint64_t{256} << 10;

class WorkerSession;

// Called with the link's mutex held, on the reading thread: an answer to a request made with the
// caller's mailbox. The payload is valid during the call only.
using OnReply = std::function<void(uint64_t cookie, wire::FrameType type,
                                   std::span<const uint8_t> payload, const Error& error)>;

class Link {
public:
    enum class Kind : uint8_t {
        kDirect,  // a worker that dialed us: peer 0 is the worker
        kRelay,   // a relay that we dialed: peers come and go
    };

    Link(uint64_t tag, Kind kind, net::MessageStream stream, std::string address, int epoll_fd,
         int hub_event);

    // Constant after construction.
    uint64_t tag() const { return tag_; }
    Kind kind() const { return kind_; }
    const std::string& address() const { return address_; }
    int fd() const { return fd_; }

    bool open() const { return open_.load(std::memory_order_acquire); }

    // The reading right. claim() is false while someone else reads (their thread will post to the
    // mailbox). After release() the right stays with the reader, unwatched by the hub, so that the
    // next layer costs no system call; anybody may take it over, and the hub takes it back when it
    // lies idle.
    bool claim(const void* reader);
    void release(const void* reader);
    void give_back(const void* reader);  // for good: the hub watches again
    void give_back_idle();               // hub only, now and then
    void watch();                        // hub only: watch the new link's socket
    // Reads what is there. Answers for `box` go to on_reply, others are posted. Also writes what is
    // pending. Errors: the link is then closed and every asker told.
    Status pump(Mailbox* box, const OnReply& on_reply);
    bool wants_write() const;
    net::Clock::time_point last_heard() const;
    bool has_pending() const;  // requests that nobody has answered or given up

    // Hub only. A session gets the frames of its peer from now on; one per peer. It ends at once
    // where the link is closed.
    void add(std::shared_ptr<WorkerSession> session);
    // Frames of no session, whole messages in the order they came; of a link that is closed because
    // a write failed, the relay's own that had arrived are among them.
    std::vector<std::vector<uint8_t>> take_control();
    uint64_t hellos_refused() const;  // that were not kept for the hub
    // Sends a frame as it is, its peer included. Errors: kClosed, kBusy, kIo (the link is then
    // closed).
    Status send(std::span<const uint8_t> message);
    void close(const Error& reason);  // every session ends too

private:
    friend class WorkerSession;

    Status handle(std::span<const uint8_t> message, Mailbox* box, const OnReply& on_reply);
    Status keep_hello(uint16_t peer, std::span<const uint8_t> message);
    Status keep_for_hub(std::span<const uint8_t> message);
    Status enqueue_locked(std::span<const std::span<const uint8_t>> pieces, uint16_t peer);
    uint64_t wire_bytes(uint64_t message_bytes, bool outgoing) const;
    void close_locked(const Error& reason, Mailbox* box, const OnReply& on_reply);
    void keep_rest();
    void asked_locked();
    void watch_locked();
    void give_back_locked();

    // Constant after construction.
    const uint64_t tag_;
    const Kind kind_;
    const std::string address_;
    const int epoll_fd_;
    const int hub_event_;
    int fd_ = -1;

    std::atomic<bool> open_{true};

    mutable std::mutex mu_;
    // Guarded by mu_.
    net::MessageStream stream_;
    const void* reader_ = nullptr;  // null: the hub's epoll watches
    bool reading_ = false;          // the reader is at it now
    net::Clock::time_point idle_since_{};
    std::map<uint16_t, std::shared_ptr<WorkerSession>> sessions_;  // by peer
    std::vector<std::vector<uint8_t>> control_;
    uint64_t control_bytes_ = 0;
    struct Hellos {
        double left = kHelloBurst;
        net::Clock::time_point at{};
        net::Clock::time_point told{};
        uint64_t bytes = 0;  // of control_, in that round
        uint64_t round = 0;
    };
    std::map<uint16_t, Hellos> hellos_;  // of peers without a session
    uint64_t hello_bytes_ = 0;           // of control_
    uint64_t hello_round_ = 0;           // ends when the hub takes them
    uint64_t hellos_refused_ = 0;
    uint64_t pending_ = 0;  // requests under way, over all sessions
};

}  // namespace kvasir::backbone
