#include "base/encoding.hpp"

namespace kvasir {
namespace {

constexpr std::string_view kHexDigits = "0123456789abcdef";
constexpr std::string_view kBase64Digits =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

// The value of a digit, -1 for a character that is none.
int hex_value(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    return -1;
}

int base64_value(char c) {
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    if (c == '-') return 62;
    if (c == '_') return 63;
    return -1;
}

}  // namespace

std::string encode_hex(std::span<const uint8_t> data) {
    std::string text;
    text.reserve(data.size() * 2);
    for (const uint8_t byte : data) {
        text.push_back(kHexDigits[byte >> 4]);
        text.push_back(kHexDigits[byte & 15]);
    }
    return text;
}

std::optional<std::vector<uint8_t>> decode_hex(std::string_view text) {
    if (text.size() % 2 != 0) return std::nullopt;
    std::vector<uint8_t> data;
    data.reserve(text.size() / 2);
    for (size_t i = 0; i < text.size(); i += 2) {
        const int high = hex_value(text[i]);
        const int low = hex_value(text[i + 1]);
        if (high < 0 || low < 0) return std::nullopt;
        data.push_back(static_cast<uint8_t>(high << 4 | low));
    }
    return data;
}

std::string encode_base64url(std::span<const uint8_t> data) {
    std::string text;
    text.reserve((data.size() * 4 + 2) / 3);
    uint32_t bits = 0;  // the lowest `held` of them are not written yet
    int held = 0;
    for (const uint8_t byte : data) {
        bits = (bits << 8 | byte) & 0xffff;
        for (held += 8; held >= 6; held -= 6) {
            text.push_back(kBase64Digits[bits >> (held - 6) & 63]);
        }
    }
    if (held > 0) text.push_back(kBase64Digits[bits << (6 - held) & 63]);
    return text;
}

std::optional<std::vector<uint8_t>> decode_base64url(std::string_view text) {
    if (text.size() % 4 == 1) return std::nullopt;  // six bits are no byte
    std::vector<uint8_t> data;
    data.reserve(text.size() / 4 * 3 + 2);
    uint32_t bits = 0;
    int held = 0;
    for (const char c : text) {
        const int value = base64_value(c);
        if (value < 0) return std::nullopt;
        bits = (bits << 6 | static_cast<uint32_t>(value)) & 0xffff;
        held += 6;
        if (held < 8) continue;
        held -= 8;
        data.push_back(static_cast<uint8_t>(bits >> held));
    }
    // One text for the same bytes: what is left over must be zero.
    if ((bits & ((1u << held) - 1)) != 0) return std::nullopt;
    return data;
}

}  // namespace kvasir
