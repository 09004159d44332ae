#include "net/handshake.hpp"

#include <openssl/evp.h>
#include <openssl/rand.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>

#include "base/check.hpp"

namespace kvasir::net {
namespace {

constexpr std::string_view kGuid = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
constexpr size_t kKeyBytes = 16;
constexpr size_t kKeyChars = 24;  // base64 of 16 bytes: 22 digits and "=="

std::string base64(std::span<const uint8_t> data) {
    std::string text(4 * ((data.size() + 2) / 3) + 1, '\0');  // EVP_EncodeBlock ends it with a NUL
    const int size = EVP_EncodeBlock(reinterpret_cast<unsigned char*>(text.data()), data.data(),
                                     static_cast<int>(data.size()));
    text.resize(static_cast<size_t>(size));
    return text;
}

bool is_base64_digit(char c) {
    return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '+' ||
           c == '/';
}

}  // namespace

std::string make_websocket_key() {
    std::array<uint8_t, kKeyBytes> bytes = {};
    KVASIR_CHECK(RAND_bytes(bytes.data(), static_cast<int>(bytes.size())) == 1);
    return base64(bytes);
}

std::string websocket_accept(std::string_view key) {
    std::string text(key);
    text += kGuid;
    std::array<uint8_t, EVP_MAX_MD_SIZE> digest;
    unsigned int size = 0;
    KVASIR_CHECK(EVP_Digest(text.data(), text.size(), digest.data(), &size, EVP_sha1(), nullptr) ==
                 1);
    return base64(std::span(digest).first(size));
}

bool valid_websocket_key(std::string_view key) {
    return key.size() == kKeyChars && key.ends_with("==") &&
           std::all_of(key.begin(), key.end() - 2, is_base64_digit);
}

bool valid_target(std::string_view target) {
    if (!target.starts_with(kPathPrefix)) return false;
    target.remove_prefix(kPathPrefix.size());
    return target.empty() || target.front() == '/' || target.front() == '?';
}

}  // namespace kvasir::net
