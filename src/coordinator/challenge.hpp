// Challenges without memory: what a node signs to show that it has its key, now.
//
// Used by the coordinator. A challenge is u64 milliseconds of the server's monotonic clock | 16
// random bytes | 32 HMAC-SHA-256 of both under a key made at start: so it is valid for kValid,
// whatever the clocks of node and server say, and not beyond the server's run. Nothing is kept, so
// asking for many costs nothing.
// Thread: immutable, any. Owns: the key.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

#include "base/result.hpp"
#include "market/leases.hpp"

namespace kvasir::coordinator {

class Challenges {
public:
    static constexpr std::chrono::seconds kValid{60};
    static constexpr size_t kBytes = 56;

    Challenges();
    std::vector<uint8_t> make(market::TimePoint now) const;
    // Errors: kDenied (not made by this server since it started), kExpired.
    Status check(std::span<const uint8_t> challenge, market::TimePoint now) const;

private:
    std::array<uint8_t, 32> key_ = {};
};

}  // namespace kvasir::coordinator
