// A progress line on stderr for long readings: only on a terminal, only when they take a while.
//
// Used by slice, verify, and whoever hashes a model for a market. Thread: one caller at a time.
// Owns: nothing outside itself.
// Limits: redrawn at most five times a second.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace kvasir::apps {

class ProgressLine {
public:
    explicit ProgressLine(std::string what);
    ~ProgressLine();  // wipes the line
    ProgressLine(const ProgressLine&) = delete;
    ProgressLine& operator=(const ProgressLine&) = delete;
    void show(uint64_t bytes_done, uint64_t bytes_total);

private:
    using Clock = std::chrono::steady_clock;
    const std::string what_;
    const bool is_terminal_;
    Clock::time_point next_;
    bool is_shown_ = false;
};

}  // namespace kvasir::apps
