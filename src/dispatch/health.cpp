#include "dispatch/health.hpp"

#include <algorithm>

namespace kvasir::dispatch {
namespace {

constexpr double kWeight = 0.1;             // of a new sample
constexpr double kDeadlineFactor = 8;       // over what is expected
constexpr uint32_t kAnswersToForget = 100;  // answers in a row that clear the record

double microseconds_of(std::chrono::nanoseconds t) {
    return static_cast<double>(t.count()) / 1000.0;
}

}  // namespace

void Health::on_answer(uint32_t pairs, std::chrono::nanoseconds took,
                       std::chrono::nanoseconds compute) {
    const double compute_us = std::clamp(microseconds_of(compute), 0.0, microseconds_of(took));
    const double pair_us = compute_us / std::max<uint32_t>(pairs, 1);
    const double request_us = microseconds_of(took) - compute_us;
    if (!measured_) {
        measured_ = true;
        pair_us_ = pair_us;
        request_us_ = request_us;
    }
    pair_us_ += kWeight * (pair_us - pair_us_);
    request_us_ += kWeight * (request_us - request_us_);
    if (++answers_ >= kAnswersToForget) failures_ = 0;
}

void Health::on_failure(TimePoint now) {
    usable_ = false;
    answers_ = 0;
    failures_ = std::min<uint32_t>(failures_ + 1, 16);
    const auto pause = options_.pause_first * (int64_t{1} << (failures_ - 1));
    pause_until_ = now + std::min<milliseconds>(pause, options_.pause_max);
}

void Health::on_pong(TimePoint now) {
    if (!usable_ && now >= pause_until_) usable_ = true;
}

bool Health::wants_probe(TimePoint now) const {
    return !usable_ && now >= pause_until_;
}

milliseconds Health::deadline(uint32_t pairs) const {
    const double expected_us = request_us_ + pair_us_ * pairs;
    const auto wait = milliseconds(static_cast<int64_t>(kDeadlineFactor * expected_us / 1000.0));
    if (pairs <= options_.small_pairs) {
        if (!measured_) return options_.stall_max;
        return std::clamp<milliseconds>(wait, options_.deadline_min, options_.stall_max);
    }
    return options_.stall_max + wait;
}

}  // namespace kvasir::dispatch
