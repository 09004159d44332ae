// What limits by address count as one address: an IPv4 address, or a /64 of IPv6 (which is what one
// customer gets). Used by the listener and by Relay. Thread: any. Owns: nothing. Limits: none.
#pragma once

#include <string>
#include <string_view>

namespace kvasir::net {

// `host` without port and brackets: "192.0.2.1", "2001:db8::1". What is neither stays as it is.
std::string host_key(std::string_view host);
// `peer` as Listener gives it: "192.0.2.1:443" or "[2001:db8::1]:443".
std::string peer_key(std::string_view peer);

}  // namespace kvasir::net
