#include "crypto/signed_text.hpp"

#include <algorithm>
#include <utility>

#include "base/encoding.hpp"

namespace kvasir::crypto {

std::string sign_text(const SignedTextKind& kind, const KeyPair& key,
                      std::span<const uint8_t> payload) {
    return std::string(kind.prefix) + encode_base64url(payload) + "." +
           encode_base64url(key.sign(kind.context, payload));
}

Result<std::vector<uint8_t>> open_signed_text(const SignedTextKind& kind, std::string_view text,
                                              const PublicKey& key) {
    const auto malformed = [&kind](const std::string& how) {
        return fail(Errc::kDenied, std::string(kind.what) + ": " + how);
    };
    if (text.size() > kind.bytes_max) {
        return malformed("longer than " + std::to_string(kind.bytes_max) + " bytes");
    }
    if (!text.starts_with(kind.prefix)) {
        return malformed("does not begin with '" + std::string(kind.prefix) + "'");
    }
    text.remove_prefix(kind.prefix.size());
    const size_t dot = text.find('.');
    if (dot == std::string_view::npos) return malformed("has no signature part");
    auto payload = decode_base64url(text.substr(0, dot));
    if (!payload) return malformed("the payload is not base64url");
    const auto signature_bytes = decode_base64url(text.substr(dot + 1));
    if (!signature_bytes) return malformed("the signature is not base64url");
    Signature signature;
    if (signature_bytes->size() != signature.size()) {
        return malformed("the signature does not have 64 bytes");
    }
    std::ranges::copy(*signature_bytes, signature.begin());
    if (!verify(key, kind.context, *payload, signature)) {
        return malformed("not signed by this market, or changed since; " +
                         std::string(kind.advice));
    }
    return std::move(*payload);
}

}  // namespace kvasir::crypto
