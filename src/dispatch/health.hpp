// Health of one worker as its backbone sees it: fail down fast, recover slowly. Pure.
//
// Used by the backbone's sessions. A worker is usable until a request fails (deadline, bad answer);
// then it is suspect and gets no work until probes have been answered and a growing pause has
// passed. Latency is learned from answers and sets deadlines and the planner's costs.
//
// Thread: the owner serialises. Time: `now` goes in, nothing is read from a clock.
#pragma once

#include <chrono>
#include <cstdint>

namespace kvasir::dispatch {

using TimePoint = std::chrono::steady_clock::time_point;
using std::chrono::milliseconds;

struct HealthOptions {
    milliseconds stall_max{400};     // longest wait for a small request
    milliseconds deadline_min{150};  // shortest: below this the scheduler's noise decides
    milliseconds pause_first{200};   // after the first failure; doubles with each
    milliseconds pause_max{10000};
    uint32_t small_pairs = 64;  // requests of at most this many pairs obey stall_max
};

class Health {
public:
    explicit Health(HealthOptions options = {}) : options_(options) {}

    // An answer to a request of `pairs` pairs arrived after `took`; the worker itself computed for
    // `compute`.
    void on_answer(uint32_t pairs, std::chrono::nanoseconds took, std::chrono::nanoseconds compute);
    // A request failed or its deadline passed.
    void on_failure(TimePoint now);
    // The worker answered an end-to-end ping.
    void on_pong(TimePoint now);

    bool usable() const { return usable_; }
    // Should a probe be sent now? (suspect, and the pause is over)
    bool wants_probe(TimePoint now) const;

    // How long to wait for a request of `pairs` pairs.
    milliseconds deadline(uint32_t pairs) const;
    double request_us() const { return request_us_; }
    double pair_us() const { return pair_us_; }

private:
    // Constant after construction.
    HealthOptions options_;
    // State.
    bool usable_ = true;
    bool measured_ = false;
    uint32_t failures_ = 0;  // since the last full recovery
    uint32_t answers_ = 0;   // since the last failure
    TimePoint pause_until_{};
    double request_us_ = 200;  // exponentially weighted: round trip without compute
    double pair_us_ = 2000;    // compute per pair
};

}  // namespace kvasir::dispatch
