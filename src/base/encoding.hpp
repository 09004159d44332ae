// Text forms of bytes: hex and base64url (RFC 4648 section 5, without padding).
//
// Used by crypto (tokens, invite codes, keys), net and the HTTP edges. Thread: values. Limits:
// none; decoding refuses characters outside the alphabet, impossible lengths and non-zero spare
// bits.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvasir {

std::string encode_hex(std::span<const uint8_t> data);
std::optional<std::vector<uint8_t>> decode_hex(std::string_view text);  // lower case only
std::string encode_base64url(std::span<const uint8_t> data);
std::optional<std::vector<uint8_t>> decode_base64url(std::string_view text);

}  // namespace kvasir
