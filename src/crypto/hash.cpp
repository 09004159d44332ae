#include "crypto/hash.hpp"

#include <openssl/evp.h>

#include "base/check.hpp"

namespace kvasir::crypto {

struct Hasher::Impl {
    struct Free {
        void operator()(EVP_MD_CTX* made) const { EVP_MD_CTX_free(made); }
    };
    std::unique_ptr<EVP_MD_CTX, Free> context{EVP_MD_CTX_new()};

    // SHA-256 is in every OpenSSL provider set; its absence or a failed allocation of a few hundred
    // bytes is not an error anybody could act on.
    void restart() { KVASIR_CHECK(EVP_DigestInit_ex(context.get(), EVP_sha256(), nullptr) == 1); }
};

Hasher::Hasher() : impl_(std::make_unique<Impl>()) {
    KVASIR_CHECK(impl_->context != nullptr);
    impl_->restart();
}
Hasher::Hasher(Hasher&&) noexcept = default;
Hasher& Hasher::operator=(Hasher&&) noexcept = default;
Hasher::~Hasher() = default;

void Hasher::update(std::span<const uint8_t> data) {
    if (data.empty()) return;
    KVASIR_CHECK(EVP_DigestUpdate(impl_->context.get(), data.data(), data.size()) == 1);
}

Sha256 Hasher::finish() {
    Sha256 digest = {};
    unsigned bytes = 0;
    KVASIR_CHECK(EVP_DigestFinal_ex(impl_->context.get(), digest.data(), &bytes) == 1);
    KVASIR_CHECK(bytes == digest.size());
    impl_->restart();
    return digest;
}

Sha256 sha256(std::span<const uint8_t> data) {
    Hasher hasher;
    hasher.update(data);
    return hasher.finish();
}

namespace {

int nibble(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    return -1;
}

}  // namespace

std::optional<Sha256> parse_hex(std::string_view text) {
    Sha256 digest = {};
    if (text.size() != 2 * digest.size()) return std::nullopt;
    for (size_t i = 0; i < digest.size(); ++i) {
        const int high = nibble(text[2 * i]);
        const int low = nibble(text[2 * i + 1]);
        if (high < 0 || low < 0) return std::nullopt;
        digest[i] = static_cast<uint8_t>(high << 4 | low);
    }
    return digest;
}

}  // namespace kvasir::crypto
