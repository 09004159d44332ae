// Ed25519 keys: who a node is, and what it (or a market) signed.
//
// Used by the worker, relay, market and backbone. Every signature has a context, a short constant
// text that says what kind of statement it is, so that a signature of one kind never counts as one
// of another: what is signed is SHA-256("kvasir-sig-1\0" ‖ u8 context bytes ‖ context ‖ message).
// Thread: values; KeyPair is immutable after making. Owns: the secret, wiped on destruction.
// Limits: a context has at most 255 bytes.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/result.hpp"

namespace kvasir::crypto {

struct PublicKey {
    std::array<uint8_t, 32> bytes = {};
    auto operator<=>(const PublicKey&) const = default;
};
using Signature = std::array<uint8_t, 64>;

class KeyPair {
public:
    static Result<KeyPair> generate();
    static Result<KeyPair> from_seed(std::span<const uint8_t, 32> seed);
    KeyPair(KeyPair&&) noexcept;
    KeyPair& operator=(KeyPair&&) noexcept;
    ~KeyPair();
    const PublicKey& public_key() const;
    Signature sign(std::string_view context, std::span<const uint8_t> message) const;

private:
    struct Impl;
    explicit KeyPair(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

// False for a wrong signature and for bytes that are no key.
bool verify(const PublicKey& key, std::string_view context, std::span<const uint8_t> message,
            const Signature& signature);

// The key in the file at `path`; makes one (mode 0600, temporary name and link, so that two
// processes starting at once end with the same key) when there is none. File: one line
// "kvasir-key-1 <64 hex of the seed>". Errors: kEnvironment (no permission, readable by others:
// says chmod 600), kBadInput (malformed), kNoSpace.
Result<KeyPair> load_or_make_key(const std::string& path);

std::string to_hex(const PublicKey& key);
Result<PublicKey> parse_public_key(std::string_view hex);

}  // namespace kvasir::crypto
