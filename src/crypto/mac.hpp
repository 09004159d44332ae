// Keyed hashes, comparison without a clue in its time, and random bytes.
//
// Used by the coordinator (stateless challenges, nonces, the operator's secret). Thread: pure, any.
#pragma once

#include <cstdint>
#include <span>

#include "base/ids.hpp"

namespace kvasir::crypto {

// HMAC-SHA-256 (RFC 2104).
Sha256 hmac_sha256(std::span<const uint8_t> key, std::span<const uint8_t> message);
// The time taken depends on the sizes only; unequal sizes are unequal.
bool equal_constant_time(std::span<const uint8_t> a, std::span<const uint8_t> b);
// From the system's generator; its failure is not something anybody could act on (aborts).
void fill_random(std::span<uint8_t> out);

}  // namespace kvasir::crypto
