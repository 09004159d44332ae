// The URL that nodes on other machines are told to dial, as far as we can know it.
//
// Used by Servers, run and relay. Thread: any (a pure function). Owns: nothing. Limits: none.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "net/own_address.hpp"
#include "net/upgrade.hpp"

namespace kvasir::apps {

// "0.0.0.0", "::" or nothing.
bool is_any_address(std::string_view host);

struct JoinUrl {
    std::string url;
    std::string hint;  // for a person, who reads it before the URL, if the address is a guess
};
// For a port that listens on `listen` (whose own port may have been 0). Who listens on all
// addresses is reached by one of `own`, or else by a name that a person has to fill in. `scheme` is
// "https"; `flag` that with which a person says another URL, empty: there is none.
JoinUrl join_url(const net::Endpoint& listen, uint16_t port, std::string_view scheme,
                 const net::OwnAddresses& own, std::string_view flag);

}  // namespace kvasir::apps
