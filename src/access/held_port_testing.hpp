// HeldPort: a port of this machine where nobody listens, and that nobody else is given.
//
// Used by *_test.cpp only. A program that sets SO_REUSEADDR, as all listeners here do, may listen
// at it when a test wants that. Thread: any. Owns: a socket that is bound, and no more.
// Limits: failures of its own abort with KVASIR_CHECK.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <string>

#include "base/check.hpp"

namespace kvasir::access::testing {

class HeldPort {
public:
    HeldPort() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
        const int yes = 1;
        KVASIR_CHECK(socket_ >= 0);
        KVASIR_CHECK(::setsockopt(socket_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes)) == 0);
        sockaddr_in here{};
        here.sin_family = AF_INET;
        here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t size = sizeof(here);
        auto* const address = reinterpret_cast<sockaddr*>(&here);
        KVASIR_CHECK(::bind(socket_, address, size) == 0);
        KVASIR_CHECK(::getsockname(socket_, address, &size) == 0);
        port_ = ntohs(here.sin_port);
    }
    ~HeldPort() { ::close(socket_); }
    HeldPort(const HeldPort&) = delete;
    HeldPort& operator=(const HeldPort&) = delete;

    std::string host_port() const { return "127.0.0.1:" + std::to_string(port_); }
    std::string url() const { return "ws://" + host_port(); }

private:
    int socket_;
    uint16_t port_ = 0;
};

}  // namespace kvasir::access::testing
