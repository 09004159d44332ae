#include "crypto/keys.hpp"

#include <algorithm>

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/rand.h>

#include "base/check.hpp"
#include "base/encoding.hpp"
#include "crypto/hash.hpp"

namespace kvasir::crypto {
namespace {

struct FreeKey {
    void operator()(EVP_PKEY* made) const { EVP_PKEY_free(made); }
};
struct FreeContext {
    void operator()(EVP_MD_CTX* made) const { EVP_MD_CTX_free(made); }
};
using KeyHandle = std::unique_ptr<EVP_PKEY, FreeKey>;
using ContextHandle = std::unique_ptr<EVP_MD_CTX, FreeContext>;

constexpr std::string_view kDomain("kvasir-sig-1\0", 13);

std::span<const uint8_t> bytes_of(std::string_view text) {
    return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

Sha256 statement_digest(std::string_view context, std::span<const uint8_t> message) {
    KVASIR_CHECK(context.size() <= 255);
    const auto context_bytes = static_cast<uint8_t>(context.size());
    Hasher hasher;
    hasher.update(bytes_of(kDomain));
    hasher.update({&context_bytes, 1});
    hasher.update(bytes_of(context));
    hasher.update(message);
    return hasher.finish();
}

// The points whose order divides 8 (their y; the sign of x is the top bit, masked here), and the
// two longer spellings of 0 and 1. Under such a "key" there are signatures that fit many messages,
// so it says nothing about who signed. OpenSSL does not look for them.
constexpr std::string_view kWeakKeys[] = {
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0100000000000000000000000000000000000000000000000000000000000000",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
};

bool is_weak(const PublicKey& key) {
    std::array<uint8_t, 32> y = key.bytes;
    y[31] &= 0x7f;
    const std::string hex = encode_hex(y);
    return std::ranges::any_of(kWeakKeys, [&](std::string_view weak) { return weak == hex; });
}

}  // namespace

struct KeyPair::Impl {
    KeyHandle key;  // OpenSSL wipes the secret when it frees it
    PublicKey public_key;
};

KeyPair::KeyPair(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
KeyPair::KeyPair(KeyPair&&) noexcept = default;
KeyPair& KeyPair::operator=(KeyPair&&) noexcept = default;
KeyPair::~KeyPair() = default;

Result<KeyPair> KeyPair::generate() {
    std::array<uint8_t, 32> seed;
    if (RAND_priv_bytes(seed.data(), static_cast<int>(seed.size())) != 1) {
        return fail(Errc::kEnvironment, "making a key: the system gives no random bytes");
    }
    auto pair = from_seed(seed);
    OPENSSL_cleanse(seed.data(), seed.size());
    return pair;
}

Result<KeyPair> KeyPair::from_seed(std::span<const uint8_t, 32> seed) {
    auto impl = std::make_unique<Impl>();
    impl->key.reset(
        EVP_PKEY_new_raw_private_key(EVP_PKEY_ED25519, nullptr, seed.data(), seed.size()));
    size_t bytes = impl->public_key.bytes.size();
    if (!impl->key ||
        EVP_PKEY_get_raw_public_key(impl->key.get(), impl->public_key.bytes.data(), &bytes) != 1 ||
        bytes != impl->public_key.bytes.size()) {
        return fail(Errc::kEnvironment, "this OpenSSL does not offer Ed25519 (a FIPS-only setup?)");
    }
    return KeyPair(std::move(impl));
}

const PublicKey& KeyPair::public_key() const {
    return impl_->public_key;
}

// Signing 32 bytes fails only when a few hundred bytes cannot be allocated.
Signature KeyPair::sign(std::string_view context, std::span<const uint8_t> message) const {
    const Sha256 digest = statement_digest(context, message);
    const ContextHandle signing(EVP_MD_CTX_new());
    Signature signature = {};
    size_t bytes = signature.size();
    KVASIR_CHECK(signing != nullptr);
    KVASIR_CHECK(EVP_DigestSignInit(signing.get(), nullptr, nullptr, nullptr, impl_->key.get()) ==
                 1);
    KVASIR_CHECK(
        EVP_DigestSign(signing.get(), signature.data(), &bytes, digest.data(), digest.size()) == 1);
    KVASIR_CHECK(bytes == signature.size());
    return signature;
}

bool verify(const PublicKey& key, std::string_view context, std::span<const uint8_t> message,
            const Signature& signature) {
    if (is_weak(key)) return false;
    const Sha256 digest = statement_digest(context, message);
    const KeyHandle handle(
        EVP_PKEY_new_raw_public_key(EVP_PKEY_ED25519, nullptr, key.bytes.data(), key.bytes.size()));
    const ContextHandle verifying(EVP_MD_CTX_new());
    return handle && verifying &&
           EVP_DigestVerifyInit(verifying.get(), nullptr, nullptr, nullptr, handle.get()) == 1 &&
           EVP_DigestVerify(verifying.get(), signature.data(), signature.size(), digest.data(),
                            digest.size()) == 1;
}

std::string to_hex(const PublicKey& key) {
    return encode_hex(key.bytes);
}

Result<PublicKey> parse_public_key(std::string_view hex) {
    PublicKey key;
    const auto data = decode_hex(hex);
    if (!data || data->size() != key.bytes.size()) {
        return fail(Errc::kBadInput, "a public key is 64 lower-case hex digits; this is not");
    }
    std::ranges::copy(*data, key.bytes.begin());
    if (is_weak(key)) return fail(Errc::kBadInput, "this public key is a known weak one");
    return key;
}

}  // namespace kvasir::crypto
