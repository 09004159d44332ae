#include "apps/end_at_signal.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace kvasir::apps {

Result<std::unique_ptr<EndAtSignal>> EndAtSignal::make() {
    std::unique_ptr<EndAtSignal> made(new EndAtSignal);
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    ::pthread_sigmask(SIG_BLOCK, &signals, &made->old_mask_);
    made->signals_ = ::signalfd(-1, &signals, SFD_CLOEXEC);
    made->over_event_ = ::eventfd(0, EFD_CLOEXEC);
    if (made->signals_ < 0 || made->over_event_ < 0)
        return fail(Errc::kEnvironment, "too many open files (ulimit -n)");
    made->thread_ = std::thread([end = made.get()] { end->run(); });
    return made;
}

EndAtSignal::~EndAtSignal() {
    {
        const std::lock_guard lock(mu_);
        over_ = true;
    }
    if (thread_.joinable()) {
        const uint64_t one = 1;
        [[maybe_unused]] const ssize_t told = ::write(over_event_, &one, sizeof(one));
        thread_.join();
    }
    if (signals_ >= 0) ::close(signals_);
    if (over_event_ >= 0) ::close(over_event_);
    ::pthread_sigmask(SIG_SETMASK, &old_mask_, nullptr);
}

void EndAtSignal::say_first(LastWords last_words) {
    const std::lock_guard lock(mu_);
    last_words_ = std::move(last_words);
}

void EndAtSignal::run() {
    pollfd ready[2] = {{signals_, POLLIN, 0}, {over_event_, POLLIN, 0}};
    while (::poll(ready, 2, -1) < 0 && errno == EINTR) {
    }
    const std::lock_guard lock(mu_);
    if (over_) return;  // a signal that has come stays pending, for the main thread
    signalfd_siginfo info = {};
    if (::read(signals_, &info, sizeof(info)) != static_cast<ssize_t>(sizeof(info))) return;
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    ::pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);  // the second one ends at once
    const int code = last_words_ ? last_words_(static_cast<int>(info.ssi_signo)) : 0;
    // Destructors would have to wait for the main thread.
    ::_exit(code);
}

}  // namespace kvasir::apps
