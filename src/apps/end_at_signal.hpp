// EndAtSignal: lets a program end well at SIGTERM and SIGINT whatever its main thread is doing, a
// long decode or a read of the terminal: the process ends after a few last words.
//
// Used by `kvasir up`, and by `kvasir market` while it starts. Thread: made and destroyed on the
// main thread; its own waits for the signals. Owns: both signals, blocked in all threads that start
// while it lives; the destructor gives the main thread its old mask back. Limits: one a process.
// The second signal ends the process at once.
#pragma once

#include <signal.h>

#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "base/result.hpp"

namespace kvasir::apps {

class EndAtSignal {
public:
    // Said at the end, on this object's thread; returns the exit code.
    using LastWords = std::function<int(int signal)>;

    // Errors: kEnvironment (no file descriptors).
    static Result<std::unique_ptr<EndAtSignal>> make();
    ~EndAtSignal();  // waits for an end that has begun; a later signal is the main thread's
    EndAtSignal(const EndAtSignal&) = delete;
    EndAtSignal& operator=(const EndAtSignal&) = delete;

    // What the last words use must outlive this object. Before: there are none, and the exit code
    // is 0.
    void say_first(LastWords last_words);

private:
    EndAtSignal() = default;
    void run();

    sigset_t old_mask_{};
    int signals_ = -1;  // readable when one has come
    int over_event_ = -1;
    std::mutex mu_;  // held through the last words
    // Guarded by mu_.
    bool over_ = false;
    LastWords last_words_;
    std::thread thread_;
};

}  // namespace kvasir::apps
