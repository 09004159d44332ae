// The names of crypto::RoleBits in requests, replies and error texts.
//
// Used by the coordinator, the store and whoever enrolls. Thread: pure. Limits: none.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvasir::market {

// "worker", "backbone", "observer": those of the bits that are set.
std::vector<std::string> role_names(uint8_t roles);
// The bit of one name; nullopt: no role is called so.
std::optional<uint8_t> parse_role(std::string_view name);
// Why an invite for `granted` is refused to a node that wants to be `wanted`.
std::string wrong_role_text(uint8_t granted, uint8_t wanted);

}  // namespace kvasir::market
