#include "apps/progress.hpp"

#include <unistd.h>

#include <utility>

#include "apps/console.hpp"

namespace kvasir::apps {
namespace {

constexpr auto kFirst = std::chrono::milliseconds(500);
constexpr auto kBetween = std::chrono::milliseconds(200);

}  // namespace

ProgressLine::ProgressLine(std::string what)
    : what_(std::move(what)),
      is_terminal_(::isatty(STDERR_FILENO) == 1),
      next_(Clock::now() + kFirst) {}

ProgressLine::~ProgressLine() {
    if (is_shown_) tell("\r\x1b[K");
}

void ProgressLine::show(uint64_t bytes_done, uint64_t bytes_total) {
    const auto now = Clock::now();
    if (!is_terminal_ || now < next_ || bytes_total == 0) return;
    next_ = now + kBetween;
    is_shown_ = true;
    tell("\r{}: {:.1f} of {:.1f} GB ({} %)\x1b[K", what_, static_cast<double>(bytes_done) / 1e9,
         static_cast<double>(bytes_total) / 1e9, bytes_done * 100 / bytes_total);
}

}  // namespace kvasir::apps
