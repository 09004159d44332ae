// The two clocks of a market: durations by the monotonic one, dates of tokens and invites by the
// wall clock. Values, so that tests can move them.
//
// Used by the coordinator. Thread: the functions are called from any thread.
#pragma once

#include <chrono>
#include <functional>

#include "crypto/token.hpp"
#include "market/leases.hpp"

namespace kvasir::coordinator {

using market::TimePoint;

struct Clocks {
    std::function<TimePoint()> steady = [] { return std::chrono::steady_clock::now(); };
    std::function<crypto::WallTime()> wall = [] {
        return std::chrono::floor<std::chrono::seconds>(std::chrono::system_clock::now());
    };
};

inline int64_t seconds_of(crypto::WallTime time) {
    return time.time_since_epoch().count();
}

}  // namespace kvasir::coordinator
