#include "apps/join_url.hpp"

#include <optional>

namespace kvasir::apps {

JoinUrl join_url(const net::Endpoint& listen, uint16_t port, bool plain,
                 const net::OwnAddresses& own) {
    const std::string scheme = plain ? "http://" : "https://";
    std::optional<std::string> host = listen.host;
    const bool any = listen.host.empty() || listen.host == "0.0.0.0" || listen.host == "::";
    if (any) host = listen.host == "::" ? own.v6 : own.v4;
    if (listen.host.empty() && !host) host = own.v6;  // ":PORT" listens on both kinds
    if (!host) {
        return {scheme + "THIS-MACHINE:" + std::to_string(port),
                "write this machine's name or address for THIS-MACHINE below, or give "
                "--public-url " +
                    scheme + "NAME:PORT"};
    }
    const std::string shown = host->find(':') != std::string::npos ? "[" + *host + "]" : *host;
    return {scheme + shown + ":" + std::to_string(port),
            any ? *host + " is this machine's address towards the internet; if nodes reach it by " +
                      "another one, give --public-url " + scheme + "NAME:PORT"
                : ""};
}

}  // namespace kvasir::apps
