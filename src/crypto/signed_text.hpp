// Signed text: PREFIX + base64url(payload) + "." + base64url(signature of the payload, by one key).
//
// Used for what a market says and others carry: node tokens, revocations. It fits in an HTTP header
// or body, and needs no JSON to be checked. Thread: values. Limits: the caller's.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "crypto/keys.hpp"

namespace kvasir::crypto {

struct SignedTextKind {
    std::string_view prefix;   // the beginning of the text
    std::string_view context;  // of the signature
    std::string_view what;     // for people: "node token"
    std::string_view advice;   // about one that another key signed
    size_t bytes_max = 0;      // of the text
};

std::string sign_text(const SignedTextKind& kind, const KeyPair& key,
                      std::span<const uint8_t> payload);
// The payload. Errors: kDenied (malformed: says which part; signed by another key).
Result<std::vector<uint8_t>> open_signed_text(const SignedTextKind& kind, std::string_view text,
                                              const PublicKey& key);

}  // namespace kvasir::crypto
