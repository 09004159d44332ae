// SHA-256 over OpenSSL's EVP, one-shot and streaming.
//
// Used by manifest, slice, build fingerprint, and `logits_sha256`. Thread: one Hasher per thread.
// Owns: its EVP context. Limits: none; a Hasher that was moved from may only be destroyed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "base/ids.hpp"

namespace kvasir::crypto {

Sha256 sha256(std::span<const uint8_t> data);
// Inverse of to_hex(): exactly 64 lower-case hex digits, else nullopt.
std::optional<Sha256> parse_hex(std::string_view text);

class Hasher {
public:
    Hasher();
    Hasher(Hasher&&) noexcept;
    Hasher& operator=(Hasher&&) noexcept;
    ~Hasher();
    void update(std::span<const uint8_t> data);
    Sha256 finish();  // then reset: may be used again

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace kvasir::crypto
