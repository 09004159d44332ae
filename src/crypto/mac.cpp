#include "crypto/mac.hpp"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include "base/check.hpp"

namespace kvasir::crypto {

Sha256 hmac_sha256(std::span<const uint8_t> key, std::span<const uint8_t> message) {
    Sha256 out = {};
    unsigned bytes = 0;
    KVASIR_CHECK(HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), message.data(),
                      message.size(), out.data(), &bytes) != nullptr);
    KVASIR_CHECK(bytes == out.size());
    return out;
}

bool equal_constant_time(std::span<const uint8_t> a, std::span<const uint8_t> b) {
    return a.size() == b.size() && (a.empty() || CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0);
}

void fill_random(std::span<uint8_t> out) {
    KVASIR_CHECK(RAND_bytes(out.data(), static_cast<int>(out.size())) == 1);
}

}  // namespace kvasir::crypto
