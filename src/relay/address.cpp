#include "relay/address.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>

namespace kvasir::relay {

std::string address_key(std::string_view peer) {
    if (!peer.starts_with('[')) return std::string(peer.substr(0, peer.rfind(':')));
    const std::string host(peer.substr(1, peer.find(']') - 1));
    in6_addr address = {};
    if (::inet_pton(AF_INET6, host.substr(0, host.find('%')).c_str(), &address) != 1) return host;
    for (size_t i = 8; i < 16; ++i) address.s6_addr[i] = 0;
    char text[INET6_ADDRSTRLEN] = {};
    ::inet_ntop(AF_INET6, &address, text, sizeof(text));
    return std::string(text) + "/64";
}

}  // namespace kvasir::relay
