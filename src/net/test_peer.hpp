// The other end of a connection in tests, without our MessageStream: raw bytes, plain or over TLS.
//
// Used by the tests of net and backbone. Thread: one at a time per object. Limits: kPatience a
// call.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "net/message_stream.hpp"
#include "net/self_signed.hpp"
#include "net/socket_wait.hpp"
#include "net/tls.hpp"
#include "net/transport.hpp"

namespace kvasir::net::testing {

constexpr auto kPatience = std::chrono::seconds(20);

// A folder that goes away with it.
class TestFolder {
public:
    TestFolder() {
        std::string name = (std::filesystem::temp_directory_path() / "kvasir-net-XXXXXX").string();
        KVASIR_CHECK(::mkdtemp(name.data()) != nullptr);
        path_ = name;
    }
    ~TestFolder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    TestFolder(const TestFolder&) = delete;
    TestFolder& operator=(const TestFolder&) = delete;
    const std::string& path() const { return path_; }

private:
    std::string path_;
};

// One server identity for all tests of a process, and a client that believes it.
struct TestTls {
    std::shared_ptr<const TlsServer> server;
    std::shared_ptr<const TlsClient> client;

    static const TestTls& get() {
        static const TestTls tls = [] {
            const TestFolder folder;
            TestTls made;
            made.server = TlsServer::self_signed(folder.path()).value();
            made.client = TlsClient::make({made.server->pin(), ""}).value();
            return made;
        }();
        return tls;
    }
};

enum class Over { kPair, kTcp, kTls };

using FdPair = std::pair<UniqueFd, UniqueFd>;

inline FdPair socket_pair() {
    int fds[2];
    KVASIR_CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
    return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

// `from`: an address of this machine's 127.0.0.0/8, if another client is meant.
inline UniqueFd connect_to(uint16_t port, const char* from = nullptr) {
    UniqueFd fd(::socket(AF_INET, SOCK_STREAM, 0));
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    if (from != nullptr) {
        KVASIR_CHECK(::inet_pton(AF_INET, from, &address.sin_addr) == 1);
        KVASIR_CHECK(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    }
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(port);
    KVASIR_CHECK(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    timeval timeout = {20, 0};
    ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
    const int on = 1;
    ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    return fd;
}

// Nothing has come for it so far, and it is open.
inline bool is_open(int fd) {
    char byte;
    return ::recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN;
}

inline FdPair tcp_pair() {
    UniqueFd listener(::socket(AF_INET, SOCK_STREAM, 0));
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* plain = reinterpret_cast<sockaddr*>(&address);
    KVASIR_CHECK(::bind(listener.get(), plain, size) == 0);
    KVASIR_CHECK(::listen(listener.get(), 1) == 0);
    KVASIR_CHECK(::getsockname(listener.get(), plain, &size) == 0);
    UniqueFd client = connect_to(ntohs(address.sin_port));
    timeval never = {};
    ::setsockopt(client.get(), SOL_SOCKET, SO_RCVTIMEO, &never, sizeof(never));
    UniqueFd server(::accept(listener.get(), nullptr, nullptr));
    KVASIR_CHECK(server.get() >= 0);
    return {std::move(client), std::move(server)};
}

// Two ends, the client's first; over TLS with the handshake behind them.
inline std::pair<Transport, Transport> transport_pair(Over over) {
    FdPair fds = over == Over::kPair ? socket_pair() : tcp_pair();
    if (over != Over::kTls)
        return {Transport(std::move(fds.first)), Transport(std::move(fds.second))};
    const TestTls& tls = TestTls::get();
    auto client = Transport::make_tls(std::move(fds.first), tls.client->context(), Side::kClient,
                                      "localhost");
    auto server = Transport::make_tls(std::move(fds.second), tls.server->context(), Side::kServer);
    KVASIR_CHECK(client && server);
    bool client_done = false;
    bool server_done = false;
    while (!client_done || !server_done) {
        client_done = client->handshake().value();
        server_done = server->handshake().value();
    }
    return {std::move(*client), std::move(*server)};
}

// Sends and receives bytes as they are told, waiting for them.
class RawPeer {
public:
    explicit RawPeer(Transport transport) : transport_(std::move(transport)) {}
    // A client of a listener on this machine. Over TLS the handshake is done when it returns.
    RawPeer(uint16_t port, bool tls, const char* from = nullptr) {
        UniqueFd fd = connect_to(port, from);
        if (!tls) {
            transport_.emplace(std::move(fd));
            return;
        }
        transport_ = Transport::make_tls(std::move(fd), TestTls::get().client->context(),
                                         Side::kClient, "localhost")
                         .value();
        while (true) {
            const auto done = transport_->handshake();
            if (done && *done) return;
            if (done && wait(POLLIN)) continue;
            reset();
            return;
        }
    }

    bool open() const { return transport_.has_value(); }
    int fd() const { return transport_->fd(); }
    Transport& transport() { return *transport_; }
    void reset() { transport_.reset(); }

    // In pieces of at most `piece`; over TLS each is a record of its own. Gives up when the other
    // side has gone.
    void write(std::span<const uint8_t> bytes, size_t piece = ~size_t{0}) {
        while (!bytes.empty()) {
            const auto part = bytes.first(std::min(piece, bytes.size()));
            const iovec vector = {const_cast<uint8_t*>(part.data()), part.size()};
            const auto sent = transport_->write({&vector, 1});
            if (!sent) return;
            bytes = bytes.subspan(*sent);
            if (*sent == 0 && !wait(POLLOUT)) return;
        }
        while (transport_->wants_write() && transport_->flush() && transport_->wants_write()) {
            if (!wait(POLLOUT)) return;
        }
    }
    void write(std::string_view text) {
        write({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
    }

    // Up to `count` bytes; fewer only at the end of the stream (or of the patience).
    std::vector<uint8_t> read(size_t count) {
        std::vector<uint8_t> all;
        std::vector<uint8_t> room(std::min<size_t>(count, 65536));
        while (all.size() < count) {
            const size_t wanted = std::min(room.size(), count - all.size());
            const auto got = transport_->read(std::span(room).first(wanted), false);
            if (!got || got->end) break;
            all.insert(all.end(), room.begin(), room.begin() + static_cast<long>(got->bytes));
            if (got->bytes == 0 && !wait(POLLIN)) break;
        }
        return all;
    }
    std::vector<uint8_t> read_to_end() { return read(~size_t{0}); }
    std::string read_text_to_end() {
        const auto all = read_to_end();
        return {all.begin(), all.end()};
    }
    std::string read_header() {
        std::string all;
        while (!all.ends_with("\r\n\r\n")) {
            const auto byte = read(1);
            if (byte.empty()) break;
            all += static_cast<char>(byte[0]);
        }
        return all;
    }

private:
    bool wait(short events) {
        return wait_for(transport_->fd(), events, Clock::now() + kPatience).value_or(false);
    }

    std::optional<Transport> transport_;
};

}  // namespace kvasir::net::testing
