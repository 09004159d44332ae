// Mailbox: answers that another thread read for a lane (or the verifier), with a descriptor to
// poll.
//
// Whoever reads a worker's socket finds answers to other lanes' requests too and posts them here.
//
// Thread: post() from any thread; take() and wait() from the owner. Owns: an eventfd.
// Limits: at most one reply per outstanding request of the owner.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/result.hpp"
#include "net/message_stream.hpp"
#include "wire/frame.hpp"

namespace kvasir::backbone {

struct Reply {
    uint64_t cookie = 0;  // what the asker gave with the request
    wire::FrameType type = wire::FrameType::kError;
    std::vector<uint8_t> payload;  // of the frame, when it is one
    Error error;                   // kError: the worker's, or kClosed when the connection ended
};

class Mailbox {
public:
    Mailbox();
    // No, when the process is out of descriptors; it is then of no use.
    bool works() const { return static_cast<bool>(event_); }
    int fd() const { return event_.get(); }
    void post(Reply reply);
    // Moves what has arrived into `out` (cleared first) and resets the descriptor.
    void take(std::vector<Reply>& out);
    // Waits until something is there or the deadline; false on the deadline.
    bool wait(net::Deadline deadline);

private:
    net::UniqueFd event_;
    std::mutex mu_;
    std::vector<Reply> replies_;  // Guarded by mu_
};

// Wakes `event_fd` (an eventfd); never blocks.
void notify(int event_fd);
// Milliseconds for poll(), rounded up, never negative.
int poll_timeout(net::Deadline deadline);

}  // namespace kvasir::backbone
