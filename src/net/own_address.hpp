// The addresses of this machine that others may reach it by. Used by whoever prints a line to
// paste.
//
// Thread: any. Owns: nothing. Limits: none. No packet is sent.
#pragma once

#include <optional>
#include <string>

namespace kvasir::net {

struct OwnAddresses {
    std::optional<std::string> v4;  // "192.0.2.7"
    std::optional<std::string> v6;  // "2001:db8::7"
};
// Those from which packets to the rest of the world leave: of the default route's device. None: no
// such route. Behind NAT, or with several networks, nodes may need another one.
OwnAddresses own_addresses();

}  // namespace kvasir::net
