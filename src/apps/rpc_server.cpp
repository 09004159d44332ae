#include "apps/rpc_server.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>

namespace kvasir::apps {
namespace {

using SteadyClock = std::chrono::steady_clock;
constexpr std::chrono::seconds kStartTimeout{20};

sockaddr_in loopback(uint16_t port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(port);
    return address;
}

// A port that was free a moment ago: the server cannot choose one itself.
Result<uint16_t> free_port() {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return fail(Errc::kEnvironment, std::string("socket: ") + std::strerror(errno));
    sockaddr_in address = loopback(0);
    socklen_t size = sizeof(address);
    const bool done = bind(fd, reinterpret_cast<const sockaddr*>(&address), size) == 0 &&
                      getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0;
    const int error = errno;
    close(fd);
    if (done) return ntohs(address.sin_port);
    return fail(Errc::kEnvironment, std::string("no free loopback port: ") + std::strerror(error));
}

bool accepts_connections(uint16_t port) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return false;
    const sockaddr_in address = loopback(port);
    const bool done =
        connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
    close(fd);
    return done;
}

}  // namespace

Result<RpcServer> RpcServer::start(const std::string& program, uint32_t threads, int cpu) {
    const auto port = free_port();
    if (!port) return tl::unexpected(port.error());
    ChildOptions options;
    options.program = program;
    options.label = "rpc-server";
    options.arguments = {
        "-H", "127.0.0.1", "-p", std::to_string(*port), "-t", std::to_string(threads)};
    options.cpu = cpu;
    auto process = ChildProcess::start(options);
    if (!process) return tl::unexpected(process.error());
    const auto deadline = SteadyClock::now() + kStartTimeout;
    while (!accepts_connections(*port)) {
        if (const auto ended = process->poll()) {
            process->stop(std::chrono::milliseconds(0));
            return fail(Errc::kClosed, "'" + program + "' ended with " + ended->describe() + ": " +
                                           process->last_words());
        }
        if (SteadyClock::now() > deadline) {
            return fail(Errc::kTimeout, "'" + program + "' does not accept connections on port " +
                                            std::to_string(*port) + " after 20 s");
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return RpcServer(std::move(*process), "127.0.0.1:" + std::to_string(*port));
}

}  // namespace kvasir::apps
