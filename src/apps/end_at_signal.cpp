#include "apps/end_at_signal.hpp"

#include <pthread.h>
#include <unistd.h>
#include <csignal>

#include <utility>

namespace kvasir::apps {
namespace {

sigset_t end_signals() {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    return signals;
}

}  // namespace

EndAtSignal::EndAtSignal() {
    const sigset_t signals = end_signals();
    ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
    thread_ = std::thread([this] { run(); });
}

EndAtSignal::~EndAtSignal() {
    over_.store(true);
    ::pthread_kill(thread_.native_handle(), SIGTERM);
    thread_.join();
}

void EndAtSignal::say_first(std::function<void()> last_words) {
    const std::lock_guard lock(mu_);
    last_words_ = std::move(last_words);
}

void EndAtSignal::run() {
    const sigset_t signals = end_signals();
    while (::sigwaitinfo(&signals, nullptr) <= 0) {
    }
    if (over_.load()) return;
    ::pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);  // the second one ends at once
    const std::lock_guard lock(mu_);
    if (last_words_) last_words_();
    // Destructors would have to wait for the main thread.
    ::_exit(0);
}

}  // namespace kvasir::apps
