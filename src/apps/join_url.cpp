#include "apps/join_url.hpp"

#include <optional>

namespace kvasir::apps {

bool is_any_address(std::string_view host) {
    return host.empty() || host == "0.0.0.0" || host == "::";
}

JoinUrl join_url(const net::Endpoint& listen, uint16_t port, std::string_view scheme,
                 const net::OwnAddresses& own, std::string_view flag) {
    const std::string start = std::string(scheme) + "://";
    const std::string end = ":" + std::to_string(port);
    const std::string named = std::string(flag) + " " + start + "NAME:PORT";
    std::optional<std::string> host = listen.host;
    const bool any = is_any_address(listen.host);
    if (any) host = listen.host == "::" ? own.v6 : own.v4;
    if (listen.host.empty() && !host) host = own.v6;  // ":PORT" listens on both kinds
    if (!host) {
        return {start + "THIS-MACHINE" + end,
                "write this machine's name or address for THIS-MACHINE below" +
                    (flag.empty() ? "" : ", or give " + named)};
    }
    const std::string shown = host->find(':') != std::string::npos ? "[" + *host + "]" : *host;
    if (!any) return {start + shown + end, ""};
    return {start + shown + end,
            *host + " is this machine's address towards the internet; if nodes reach it by " +
                "another one, " +
                (flag.empty() ? "that goes into the URL below" : "give " + named)};
}

}  // namespace kvasir::apps
