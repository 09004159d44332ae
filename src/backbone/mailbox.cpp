#include "backbone/mailbox.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <utility>

namespace kvasir::backbone {

void notify(int event_fd) {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(event_fd, &one, sizeof(one));
}

int poll_timeout(net::Deadline deadline) {
    using std::chrono::ceil;
    const auto left = ceil<std::chrono::milliseconds>(deadline - net::Clock::now()).count();
    if (left <= 0) return 0;
    return left > 60000 ? 60000 : static_cast<int>(left);
}

Mailbox::Mailbox() : event_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

void Mailbox::post(Reply reply) {
    {
        const std::lock_guard lock(mu_);
        replies_.push_back(std::move(reply));
    }
    notify(event_.get());
}

void Mailbox::take(std::vector<Reply>& out) {
    out.clear();
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(event_.get(), &count, sizeof(count));
    const std::lock_guard lock(mu_);
    out.swap(replies_);
}

bool Mailbox::wait(net::Deadline deadline) {
    pollfd entry{event_.get(), POLLIN, 0};
    for (;;) {
        if (::poll(&entry, 1, poll_timeout(deadline)) > 0) return true;
        if (net::Clock::now() >= deadline) return false;
    }
}

}  // namespace kvasir::backbone
