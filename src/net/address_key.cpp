#include "net/address_key.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>

namespace kvasir::net {

std::string host_key(std::string_view host) {
    in6_addr address = {};
    const std::string text(host.substr(0, host.find('%')));  // without its scope
    if (::inet_pton(AF_INET6, text.c_str(), &address) != 1) return std::string(host);
    for (size_t i = 8; i < 16; ++i) address.s6_addr[i] = 0;
    char out[INET6_ADDRSTRLEN] = {};
    ::inet_ntop(AF_INET6, &address, out, sizeof(out));
    return std::string(out) + "/64";
}

std::string peer_key(std::string_view peer) {
    if (peer.starts_with('[')) return host_key(peer.substr(1, peer.find(']') - 1));
    return host_key(peer.substr(0, peer.rfind(':')));
}

}  // namespace kvasir::net
