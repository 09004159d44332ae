// LogBudget: how many lines of one kind a second of log may have. What strangers can cause without
// end (refused connections) must not fill a disk.
//
// Used where a log line answers a peer's doing. Thread: the owner serialises. Time goes in, nothing
// is read from a clock.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

namespace kvasir {

class LogBudget {
public:
    explicit LogBudget(uint32_t lines_per_second) : lines_per_second_(lines_per_second) {}

    // May a line be written now? Otherwise it is counted.
    bool take(std::chrono::steady_clock::time_point now) {
        if (now - second_start_ >= std::chrono::seconds(1)) {
            second_start_ = now;
            lines_ = 0;
        }
        if (lines_ < lines_per_second_) {
            ++lines_;
            return true;
        }
        ++left_out_;
        return false;
    }
    // To be added to a line that is written: how many were not since the last call; often empty.
    std::string left_out() {
        const uint64_t count = std::exchange(left_out_, 0);
        return count == 0 ? "" : " (and " + std::to_string(count) + " more like it before)";
    }

private:
    const uint32_t lines_per_second_;
    std::chrono::steady_clock::time_point second_start_{};
    uint32_t lines_ = 0;
    uint64_t left_out_ = 0;
};

}  // namespace kvasir
