// dial(): resolve, connect, TLS, upgrade; everything within one deadline, on the calling thread.
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "base/log.hpp"
#include "net/handshake.hpp"
#include "net/http_parser.hpp"
#include "net/socket_wait.hpp"
#include "net/transport.hpp"
#include "net/upgrade.hpp"

namespace kvasir::net {
namespace {

constexpr uint32_t kLookupsMax = 8;  // lookups that may be under way or left behind by a deadline

struct Address {
    sockaddr_storage storage = {};
    socklen_t size = 0;
};

std::string authority(const Endpoint& endpoint) {
    const bool v6 = endpoint.host.find(':') != std::string::npos;
    return (v6 ? "[" + endpoint.host + "]" : endpoint.host) + ":" + std::to_string(endpoint.port);
}

std::string show(const Endpoint& endpoint) {
    return printable(authority(endpoint));
}

// ---- name lookup ----

struct Lookup {
    std::mutex mu;
    std::condition_variable ready;
    // Guarded by mu
    bool done = false;
    int error = 0;
    std::vector<Address> found;
};

std::atomic<uint32_t> lookups_running{0};

// `flags`: those of getaddrinfo().
std::pair<int, std::vector<Address>> look_up(const std::string& host, uint16_t port, int flags) {
    addrinfo hints = {};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags | AI_NUMERICSERV;
    addrinfo* list = nullptr;
    const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
    std::vector<Address> found;
    for (const addrinfo* entry = error == 0 ? list : nullptr; entry; entry = entry->ai_next) {
        Address address;
        if (entry->ai_addrlen > sizeof(address.storage)) continue;
        std::memcpy(&address.storage, entry->ai_addr, entry->ai_addrlen);
        address.size = entry->ai_addrlen;
        found.push_back(address);
    }
    if (error == 0) ::freeaddrinfo(list);
    return {error, std::move(found)};
}

// getaddrinfo() cannot be cancelled, so it runs in a thread of its own that a deadline may leave
// behind; kLookupsMax bounds how many there can be.
Result<std::vector<Address>> resolve(const Endpoint& endpoint, Deadline deadline) {
    auto literal = look_up(endpoint.host, endpoint.port, AI_NUMERICHOST);
    if (!literal.second.empty()) return std::move(literal.second);
    if (lookups_running.fetch_add(1) >= kLookupsMax) {
        lookups_running.fetch_sub(1);
        return fail(Errc::kTimeout, show(endpoint) + ": name lookups hang, is the DNS server up?");
    }
    auto lookup = std::make_shared<Lookup>();
    try {
        std::thread([lookup, host = endpoint.host, port = endpoint.port] {
            auto result = look_up(host, port, 0);
            {
                const std::lock_guard lock(lookup->mu);
                lookup->error = result.first;
                lookup->found = std::move(result.second);
                lookup->done = true;
            }
            lookups_running.fetch_sub(1);
            lookup->ready.notify_one();
            // tidy: detached, getaddrinfo() cannot be cancelled; kLookupsMax bounds the threads
        }).detach();
    } catch (const std::system_error& error) {
        lookups_running.fetch_sub(1);
        return fail(Errc::kIo, std::string("no thread for a name lookup: ") + error.what());
    }
    std::unique_lock lock(lookup->mu);
    const auto is_done = [&lookup] { return lookup->done; };
    if (!lookup->ready.wait_until(lock, deadline, is_done)) {
        return fail(Errc::kTimeout, show(endpoint) + ": the name lookup took too long");
    }
    if (lookup->found.empty()) {
        const char* why = lookup->error == 0 ? "no address" : ::gai_strerror(lookup->error);
        return fail(Errc::kIo, show(endpoint) + ": cannot resolve the name: " + why);
    }
    return std::move(lookup->found);
}

// ---- connect ----

Error step_error(const Endpoint& endpoint, const char* step, const Error& error) {
    if (error.code == Errc::kClosed) {
        return {Errc::kIo, show(endpoint) + ": closed by the other side (" + step + ")"};
    }
    return {error.code, show(endpoint) + ": " + step + ": " + error.detail};
}

// Waits for the socket; a passed deadline is an error, also if a peer drips bytes into it.
Status wait_step(const Endpoint& endpoint, const char* step, int fd, short events,
                 Deadline deadline) {
    auto ready = Clock::now() < deadline ? wait_for(fd, events, deadline) : Result<bool>(false);
    if (!ready) return tl::unexpected(step_error(endpoint, step, ready.error()));
    if (*ready) return {};
    return fail(Errc::kTimeout, show(endpoint) + ": no answer in time (" + step + ")");
}

Result<UniqueFd> connect_one(const Endpoint& endpoint, const Address& address, Deadline deadline) {
    const auto failed = [&endpoint](int error) {
        return fail(Errc::kIo,
                    show(endpoint) + ": connect: " + std::generic_category().message(error));
    };
    UniqueFd fd(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd) return failed(errno);
    const int on = 1;
    (void)::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    const auto* plain = reinterpret_cast<const sockaddr*>(&address.storage);
    if (::connect(fd.get(), plain, address.size) == 0) return fd;
    if (errno != EINPROGRESS && errno != EINTR) return failed(errno);
    auto ready = wait_step(endpoint, "connect", fd.get(), POLLOUT, deadline);
    if (!ready) return tl::unexpected(std::move(ready.error()));
    int error = 0;
    socklen_t size = sizeof(error);
    if (::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
    if (error != 0) return failed(error);
    return fd;
}

// Tries every address; each gets its share of the time that is left.
Result<UniqueFd> connect(const Endpoint& endpoint, const std::vector<Address>& addresses,
                         Deadline deadline) {
    Error last{Errc::kIo, show(endpoint) + ": no address"};
    for (size_t i = 0; i < addresses.size(); ++i) {
        const auto now = Clock::now();
        const auto left = std::max(deadline - now, Clock::duration::zero());
        const auto share = left / static_cast<int64_t>(addresses.size() - i);
        auto fd = connect_one(endpoint, addresses[i], now + share);
        if (fd) return fd;
        last = std::move(fd.error());
    }
    return tl::unexpected(last);
}

Result<Transport> secure(const Endpoint& endpoint, UniqueFd fd, const TlsClient& tls,
                         Deadline deadline) {
    auto transport =
        Transport::make_tls(std::move(fd), tls.context(), Side::kClient, endpoint.host);
    while (transport) {
        auto done = transport->handshake();
        if (!done && done.error().code == Errc::kClosed) {
            return tl::unexpected(step_error(endpoint, "TLS handshake", done.error()));
        }
        if (!done) {
            const std::string advice =
                transport->is_peer_unknown() ? "; " + tls.trust().advice : std::string();
            return fail(done.error().code, show(endpoint) + ": " + done.error().detail + advice);
        }
        if (*done) break;
        const short events = transport->wants_write() ? POLLIN | POLLOUT : POLLIN;
        auto ready = wait_step(endpoint, "TLS handshake", transport->fd(), events, deadline);
        if (!ready) return tl::unexpected(std::move(ready.error()));
    }
    return transport;
}

// ---- upgrade ----

Status check_response(const Endpoint& endpoint, const ResponseParser& response,
                      const std::string& key) {
    const auto refuse = [&endpoint](const std::string& what) {
        return fail(Errc::kProtocol, show(endpoint) + ": no upgrade to WebSocket: " + what);
    };
    if (response.status() != 101) {
        return refuse("HTTP status " + std::to_string(response.status()) + " " +
                      printable(response.reason()));
    }
    if (!response.has_token("Upgrade", "websocket")) return refuse("the Upgrade header is missing");
    if (!response.has_token("Connection", "upgrade")) {
        return refuse("the Connection header is missing");
    }
    if (response.header("Sec-WebSocket-Accept") != websocket_accept(key)) {
        return refuse("Sec-WebSocket-Accept does not match");
    }
    if (response.header("Sec-WebSocket-Protocol") != kSubprotocol) {
        return refuse("the subprotocol kvasir.1 was not agreed; is that a Kvasir hub?");
    }
    if (!response.header("Sec-WebSocket-Extensions").empty()) {
        return refuse("it wants an extension that was not offered");
    }
    return {};
}

std::string make_request(const Endpoint& endpoint, const std::string& key) {
    return format_get(endpoint.path, {{"Host", authority(endpoint)},
                                      {"Upgrade", "websocket"},
                                      {"Connection", "Upgrade"},
                                      {"Sec-WebSocket-Key", key},
                                      {"Sec-WebSocket-Version", "13"},
                                      {"Sec-WebSocket-Protocol", std::string(kSubprotocol)},
                                      {"User-Agent", "kvasir/" KVASIR_VERSION}});
}

Status send_request(const Endpoint& endpoint, Transport& transport, std::string request,
                    Deadline deadline) {
    constexpr const char* kStep = "upgrade request";
    size_t sent = 0;
    while (sent < request.size() || transport.wants_write()) {
        const iovec rest = {request.data() + sent, request.size() - sent};
        auto count = transport.write({&rest, 1});
        if (!count) return tl::unexpected(step_error(endpoint, kStep, count.error()));
        sent += *count;
        if (*count != 0) continue;
        auto ready = wait_step(endpoint, kStep, transport.fd(), POLLOUT, deadline);
        if (!ready) return ready;
    }
    return {};
}

// Reads until the head is whole; what came behind it is left in `input`.
Status read_response(const Endpoint& endpoint, Transport& transport, ResponseParser& parser,
                     std::vector<uint8_t>& input, Deadline deadline) {
    constexpr const char* kStep = "upgrade response";
    std::array<uint8_t, 4096> piece;
    while (!parser.head_done()) {
        const auto got = transport.read(piece, false);
        if (!got) return tl::unexpected(step_error(endpoint, kStep, got.error()));
        if (got->end) return tl::unexpected(step_error(endpoint, kStep, {Errc::kClosed, ""}));
        if (got->bytes == 0 || Clock::now() >= deadline) {
            auto ready = wait_step(endpoint, kStep, transport.fd(), POLLIN, deadline);
            if (!ready) return ready;
        }
        input.insert(input.end(), piece.begin(), piece.begin() + static_cast<long>(got->bytes));
        const auto used = parser.feed(input);
        if (!used) {
            return fail(Errc::kProtocol,
                        show(endpoint) + ": the answer is not HTTP: " + used.error().detail);
        }
        input.erase(input.begin(), input.begin() + static_cast<long>(*used));
    }
    return {};
}

Result<MessageStream> dial_until(const Endpoint& endpoint, const HandshakeLimits& handshake,
                                 MessageLimits limits, const TlsClient* tls, Deadline deadline) {
    auto addresses = resolve(endpoint, deadline);
    if (!addresses) return tl::unexpected(std::move(addresses.error()));
    auto fd = connect(endpoint, *addresses, deadline);
    if (!fd) return tl::unexpected(std::move(fd.error()));
    auto transport = endpoint.tls ? secure(endpoint, std::move(*fd), *tls, deadline)
                                  : Result<Transport>(Transport(std::move(*fd)));
    if (!transport) return tl::unexpected(std::move(transport.error()));

    const std::string key = make_websocket_key();
    auto sent = send_request(endpoint, *transport, make_request(endpoint, key), deadline);
    if (!sent) return tl::unexpected(std::move(sent.error()));
    ResponseParser parser(handshake.header_bytes_max);
    std::vector<uint8_t> input;
    auto read = read_response(endpoint, *transport, parser, input, deadline);
    if (!read) return tl::unexpected(std::move(read.error()));
    auto checked = check_response(endpoint, parser, key);
    if (!checked) return tl::unexpected(std::move(checked.error()));
    transport->take_buffered(input);
    return MessageStream(std::move(*transport), Side::kClient, std::move(input), limits);
}

}  // namespace

Result<MessageStream> dial(const Endpoint& endpoint, const HandshakeLimits& handshake,
                           MessageLimits limits, std::shared_ptr<const TlsClient> tls) {
    if (endpoint.tls && !tls) {
        return fail(Errc::kUsage, show(endpoint) + ": TLS needs a pin or a certificate authority");
    }
    const Deadline deadline = Clock::now() + handshake.deadline;
    try {
        return dial_until(endpoint, handshake, limits, tls.get(), deadline);
    } catch (const std::exception& exception) {
        return fail(Errc::kIo, show(endpoint) + ": " + exception.what());
    }
}

}  // namespace kvasir::net
