#include "net/socket_wait.hpp"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <string>
#include <system_error>

namespace kvasir::net {
namespace {

std::string errno_text(const char* what, int error) {
    return std::string(what) + ": " + std::generic_category().message(error);
}

}  // namespace

Error socket_error(const char* what, int error) {
    const bool gone = error == EPIPE || error == ECONNRESET || error == ECONNABORTED;
    return {gone ? Errc::kClosed : Errc::kIo, errno_text(what, error)};
}

Result<bool> wait_for(int fd, short events, Deadline deadline) {
    while (true) {
        const auto now = Clock::now();
        const auto left = deadline <= now ? Clock::duration::zero() : deadline - now;
        const auto slice = std::min<Clock::duration>(left, std::chrono::hours(1));
        const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(slice);
        timespec timeout = {};
        timeout.tv_sec = seconds.count();
        timeout.tv_nsec =
            std::chrono::duration_cast<std::chrono::nanoseconds>(slice - seconds).count();
        pollfd entry = {fd, events, 0};
        const int ready = ::ppoll(&entry, 1, &timeout, nullptr);
        if (ready > 0) return true;
        if (ready < 0 && errno != EINTR) return fail(Errc::kIo, errno_text("poll", errno));
        if (Clock::now() >= deadline) return false;
    }
}

}  // namespace kvasir::net
