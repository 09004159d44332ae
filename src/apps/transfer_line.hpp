// What a person sees of a download: a bar with rate and time left on a terminal, plain lines
// elsewhere; and lines beside it.
//
// Used by worker. Thread: any. Owns: nothing outside itself. Limits: on a terminal redrawn at most
// five times a second, else a line for every tenth and at most one in two seconds.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

namespace kvasir::apps {

// How fast, and how long still: bytes and times in, a smoothed rate out. What was there at the
// beginning does not count.
class TransferRate {
public:
    using Time = std::chrono::milliseconds;
    void add(Time now, uint64_t bytes_done);
    double bytes_per_second() const { return rate_; }  // 0: not known yet
    std::optional<std::chrono::seconds> left(uint64_t bytes_done, uint64_t bytes_total) const;

private:
    std::optional<Time> since_;
    uint64_t bytes_ = 0;
    double rate_ = 0;
};

// "[####......] 40 %  136.0 MB of 340.0 MB  12.5 MB/s  0:16 left"
std::string transfer_text(uint64_t bytes_done, uint64_t bytes_total, const TransferRate& rate,
                          bool with_bar);

class TransferLine {
public:
    explicit TransferLine(std::string what);
    ~TransferLine();
    TransferLine(const TransferLine&) = delete;
    TransferLine& operator=(const TransferLine&) = delete;

    void show(uint64_t bytes_done, uint64_t bytes_total);
    void print(const std::string& text);  // a line of its own, on stderr

private:
    using Clock = std::chrono::steady_clock;
    void wipe();

    // Constant after construction.
    const std::string what_;
    const bool is_terminal_;
    // Guarded by mu_.
    std::mutex mu_;
    TransferRate rate_;
    Clock::time_point next_;
    uint64_t tenth_ = 0;
    uint64_t done_ = 0;
    bool is_shown_ = false;
};

}  // namespace kvasir::apps
