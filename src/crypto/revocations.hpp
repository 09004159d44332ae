// Revocations: which node tokens a market took back before their time, signed, so that anybody may
// carry the list to a relay.
//
// Signed text (crypto/signed_text.hpp), "kvr1.", context "revocations". Payload, little-endian:
//   u8 version = 1 | i64 issued (seconds since 1970, the market's clock) | u32 count | count x u64
//   serial, ascending
// Tokens that expired more than an hour ago are not in it: they open nothing any more, even where a
// relay's clock is behind.
// Used by the market (issue) and a relay elsewhere (open). Thread: values. Limits: kRevokedMax.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "crypto/keys.hpp"
#include "crypto/token.hpp"

namespace kvasir::crypto {

constexpr size_t kRevokedMax = 50000;
constexpr size_t kRevocationsBytesMax = 540000;  // of the text

struct Revocations {
    WallTime issued;
    std::vector<uint64_t> serials;  // ascending, at most kRevokedMax
};

std::string issue_revocations(const KeyPair& market, const Revocations& list);
// Errors: kDenied (malformed: says which part; signed by another key).
Result<Revocations> open_revocations(std::string_view text, const PublicKey& market);

}  // namespace kvasir::crypto
