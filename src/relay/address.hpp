// What limits by address count as one address: an IPv4 address, or a /64 of IPv6 (which is what one
// customer gets). Used by Relay. Thread: any.
#pragma once

#include <string>
#include <string_view>

namespace kvasir::relay {

// `peer` as Listener gives it: "192.0.2.1:443" or "[2001:db8::1]:443". What is neither stays as it
// is.
std::string address_key(std::string_view peer);

}  // namespace kvasir::relay
