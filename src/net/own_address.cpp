#include "net/own_address.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "net/message_stream.hpp"

namespace kvasir::net {
namespace {

constexpr uint16_t kDiscardPort = 9;
constexpr int kPreferPublic = 2;  // IPV6_PREFER_SRC_PUBLIC, of a header that libc's excludes

// Connecting a UDP socket chooses a route and with it our address, and sends nothing.
template <class Address>
bool choose_route(Address& address) {
    auto* plain = reinterpret_cast<sockaddr*>(&address);
    socklen_t size = sizeof(address);
    const UniqueFd fd(::socket(plain->sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    // Not an address that privacy extensions change every day. Where that is not known, any.
    const int choice = kPreferPublic;
    if (fd && plain->sa_family == AF_INET6) {
        ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_ADDR_PREFERENCES, &choice, sizeof(choice));
    }
    return fd && ::connect(fd.get(), plain, size) == 0 &&
           ::getsockname(fd.get(), plain, &size) == 0;
}

// The other ends are addresses of documentation (RFC 5737, RFC 3849): nobody has them.
std::optional<std::string> own_v4() {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(kDiscardPort);
    ::inet_pton(AF_INET, "203.0.113.1", &address.sin_addr);
    if (!choose_route(address)) return std::nullopt;
    const uint32_t bits = ntohl(address.sin_addr.s_addr);
    constexpr uint32_t kLinkLocal = 0xa9fe;  // 169.254.0.0/16
    if (bits == INADDR_ANY || bits >> 24 == IN_LOOPBACKNET || bits >> 16 == kLinkLocal) {
        return std::nullopt;
    }
    char text[INET_ADDRSTRLEN] = {};
    return ::inet_ntop(AF_INET, &address.sin_addr, text, sizeof(text));
}

std::optional<std::string> own_v6() {
    sockaddr_in6 address = {};
    address.sin6_family = AF_INET6;
    address.sin6_port = htons(kDiscardPort);
    ::inet_pton(AF_INET6, "2001:db8::1", &address.sin6_addr);
    if (!choose_route(address)) return std::nullopt;
    const in6_addr& own = address.sin6_addr;
    if (IN6_IS_ADDR_UNSPECIFIED(&own) || IN6_IS_ADDR_LOOPBACK(&own) ||
        IN6_IS_ADDR_LINKLOCAL(&own)) {
        return std::nullopt;
    }
    char text[INET6_ADDRSTRLEN] = {};
    return ::inet_ntop(AF_INET6, &own, text, sizeof(text));
}

}  // namespace

OwnAddresses own_addresses() {
    return {own_v4(), own_v6()};
}

}  // namespace kvasir::net
