#include "net/address_key.hpp"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/check.hpp"
#include "net/test_peer.hpp"
#include "net/upgrade.hpp"

namespace kvasir::net {
namespace {

using namespace std::chrono_literals;
using testing::is_open;

sockaddr_in6 address_of(const char* text, uint16_t port = 0) {
    sockaddr_in6 address = {};
    address.sin6_family = AF_INET6;
    address.sin6_port = htons(port);
    KVASIR_CHECK(::inet_pton(AF_INET6, text, &address.sin6_addr) == 1);
    return address;
}

// The loopback device of a network that has only that, with these addresses.
bool set_up_loopback(const std::vector<const char*>& addresses) {
    const UniqueFd fd(::socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    ifreq device = {};
    device.ifr_name[0] = 'l';
    device.ifr_name[1] = 'o';
    device.ifr_flags = IFF_UP | IFF_RUNNING;
    if (!fd || ::ioctl(fd.get(), SIOCSIFFLAGS, &device) != 0) return false;
    if (::ioctl(fd.get(), SIOCGIFINDEX, &device) != 0) return false;
    struct {  // in6_ifreq; the kernel's header of it does not go with libc's
        in6_addr address;
        uint32_t prefix_bits;
        int device;
    } added = {{}, 128, device.ifr_ifindex};
    for (const char* text : addresses) {
        added.address = address_of(text).sin6_addr;
        if (::ioctl(fd.get(), SIOCSIFADDR, &added) != 0) return false;
    }
    return true;
}

// Runs it where this machine has these addresses; false when that is not allowed.
bool run_with_addresses(const std::vector<const char*>& addresses,
                        const std::function<void()>& test) {
    bool is_allowed = false;
    std::thread([&] {  // with a network of its own, which threads that it starts have too
        is_allowed = ::unshare(CLONE_NEWNET) == 0 && set_up_loopback(addresses);
        if (is_allowed) test();
    })
        .join();
    return is_allowed;
}

UniqueFd connect_from(const char* text, uint16_t port) {
    UniqueFd fd(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const sockaddr_in6 from = address_of(text);
    const sockaddr_in6 to = address_of(text, port);
    const auto* plain = reinterpret_cast<const sockaddr*>(&from);
    const auto end = Clock::now() + 20s;  // the kernel makes a new address usable a little later
    while (::bind(fd.get(), plain, sizeof(from)) != 0) {
        KVASIR_CHECK(errno == EADDRNOTAVAIL && Clock::now() < end);
        std::this_thread::yield();
    }
    plain = reinterpret_cast<const sockaddr*>(&to);
    KVASIR_CHECK(::connect(fd.get(), plain, sizeof(to)) == 0);
    const timeval timeout = {20, 0};
    ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
    return fd;
}

bool is_closed_in_time(const UniqueFd& fd) {
    char byte;
    return ::recv(fd.get(), &byte, 1, 0) == 0;
}

TEST(AddressKey, A64OfIpv6IsOneClient) {
    EXPECT_EQ(host_key("192.0.2.7"), "192.0.2.7");
    EXPECT_EQ(host_key("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::/64");
    EXPECT_EQ(host_key("2001:db8:1:2:ffff::1"), "2001:db8:1:2::/64");
    EXPECT_NE(host_key("2001:db8:1:3::1"), "2001:db8:1:2::/64");
    EXPECT_EQ(host_key("fe80::1%eth0"), "fe80::/64");
    EXPECT_EQ(host_key("nonsense"), "nonsense");
}

// Who has a /64 has 2^64 addresses, but no more handshakes at once than others.
TEST(AddressKey, HandshakesOfA64AreThoseOfOneClient) {
    const std::vector<const char*> addresses = {"fd00:0:0:9::1", "fd00:0:0:1::1", "fd00:0:0:1::2",
                                                "fd00:0:0:1::3", "fd00:0:0:1:8000::4"};
    const auto test = [&addresses] {
        HandshakeLimits limits;
        limits.pending_per_address_max = 3;
        limits.deadline = limits.patience = 120s;
        const auto listener = Listener::make(
            *parse_listen("[::]:0"), [](MessageStream, const std::string&) {}, limits);
        ASSERT_TRUE(listener) << listener.error().detail;
        std::vector<UniqueFd> silent;
        for (const char* address : addresses) {
            silent.push_back(connect_from(address, (*listener)->port()));
        }
        EXPECT_TRUE(is_closed_in_time(silent[1])) << "the oldest of the four of that /64";
        for (const size_t i : {0, 2, 3, 4}) EXPECT_TRUE(is_open(silent[i].get())) << addresses[i];
    };
    if (!run_with_addresses(addresses, test)) {
        GTEST_SKIP() << "this machine allows no network of one's own (root), or has no IPv6";
    }
}

}  // namespace
}  // namespace kvasir::net
