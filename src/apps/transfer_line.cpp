#include "apps/transfer_line.hpp"

#include <algorithm>
#include <cstdio>
#include <utility>

#include <fmt/core.h>
#include <unistd.h>

#include "apps/console.hpp"
#include "base/units.hpp"

namespace kvasir::apps {
namespace {

using namespace std::chrono_literals;

constexpr auto kRateEvery = 200ms;
constexpr double kRateNewest = 0.3;  // share of the newest sample
constexpr auto kRedraw = 200ms;
constexpr auto kLineEvery = 2s;
constexpr size_t kBarWidth = 20;

}  // namespace

void TransferRate::add(Time now, uint64_t bytes_done) {
    if (!since_ || bytes_done < bytes_) {  // the beginning, or a new transfer
        since_ = now;
        bytes_ = bytes_done;
        rate_ = 0;
        return;
    }
    const Time passed = now - *since_;
    if (passed < kRateEvery) return;
    const double newest =
        static_cast<double>(bytes_done - bytes_) * 1000.0 / static_cast<double>(passed.count());
    rate_ = rate_ == 0 ? newest : kRateNewest * newest + (1 - kRateNewest) * rate_;
    since_ = now;
    bytes_ = bytes_done;
}

std::optional<std::chrono::seconds> TransferRate::left(uint64_t bytes_done,
                                                       uint64_t bytes_total) const {
    if (rate_ < 1 || bytes_done > bytes_total) return std::nullopt;
    const double seconds = static_cast<double>(bytes_total - bytes_done) / rate_;
    if (seconds > 1e6) return std::nullopt;
    return std::chrono::seconds(static_cast<int64_t>(seconds + 0.5));
}

std::string transfer_text(uint64_t bytes_done, uint64_t bytes_total, const TransferRate& rate,
                          bool with_bar) {
    const uint64_t percent = bytes_total == 0 ? 100 : bytes_done * 100 / bytes_total;
    std::string text;
    if (with_bar) {
        const size_t full = std::min<uint64_t>(percent * kBarWidth / 100, kBarWidth);
        text = "[" + std::string(full, '#') + std::string(kBarWidth - full, '.') + "] ";
    }
    text += fmt::format("{} %  {} of {}", percent, format_bytes(static_cast<double>(bytes_done)),
                        format_bytes(static_cast<double>(bytes_total)));
    if (rate.bytes_per_second() > 0)
        text += fmt::format("  {}/s", format_bytes(rate.bytes_per_second()));
    if (const auto left = rate.left(bytes_done, bytes_total)) {
        text += fmt::format("  {}:{:02} left", left->count() / 60, left->count() % 60);
    }
    return text;
}

TransferLine::TransferLine(std::string what)
    : what_(std::move(what)), is_terminal_(::isatty(STDERR_FILENO) == 1) {}

TransferLine::~TransferLine() {
    wipe();
}

void TransferLine::wipe() {
    if (std::exchange(is_shown_, false)) tell("\r\x1b[K");
}

void TransferLine::print(const std::string& text) {
    const std::lock_guard lock(mu_);
    wipe();
    tell("{}\n", terminal_text(text));
}

void TransferLine::show(uint64_t bytes_done, uint64_t bytes_total) {
    const std::lock_guard lock(mu_);
    const auto now = Clock::now();
    rate_.add(std::chrono::duration_cast<TransferRate::Time>(now.time_since_epoch()), bytes_done);
    if (bytes_done < done_) tenth_ = 0;  // a new transfer
    done_ = bytes_done;
    const uint64_t tenth = bytes_total == 0 ? 10 : bytes_done * 10 / bytes_total;
    if (bytes_done >= bytes_total) return wipe();
    if (now < next_) return;
    if (is_terminal_) {
        next_ = now + kRedraw;
        is_shown_ = true;
        tell("\r{} {}\x1b[K", what_, transfer_text(bytes_done, bytes_total, rate_, true));
    } else if (tenth > tenth_) {
        next_ = now + kLineEvery;
        tenth_ = tenth;
        tell("{}: {}\n", what_, transfer_text(bytes_done, bytes_total, rate_, false));
    }
}

}  // namespace kvasir::apps
