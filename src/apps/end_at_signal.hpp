// EndAtSignal: lets a program end well at SIGTERM and SIGINT whatever its main thread is doing, a
// long decode or a read of the terminal: the process ends with 0 after a few last words.
//
// Used by `kvasir up`. Thread: made and destroyed on the main thread; its own waits for the
// signals. Owns: both signals, blocked in all threads that start while it lives. Limits: one a
// process. The second signal ends the process at once.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>

namespace kvasir::apps {

class EndAtSignal {
public:
    EndAtSignal();
    ~EndAtSignal();  // the signals stay blocked
    EndAtSignal(const EndAtSignal&) = delete;
    EndAtSignal& operator=(const EndAtSignal&) = delete;

    // From now on `last_words` are said before the end, on this object's thread: what they use must
    // outlive this object, whose destructor waits for an end that has begun.
    void say_first(std::function<void()> last_words);

private:
    void run();

    std::atomic<bool> over_{false};
    std::mutex mu_;
    std::function<void()> last_words_;  // Guarded by mu_
    std::thread thread_;
};

}  // namespace kvasir::apps
