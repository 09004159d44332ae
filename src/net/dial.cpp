// dial(): resolve, connect, upgrade; everything within one deadline.
//
// A private io_context runs one coroutine on the calling thread; afterwards the socket leaves Asio.
#include <utility>  // before Asio's awaitable header

#include <netdb.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http/empty_body.hpp>
#include <boost/beast/http/message.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/rfc7230.hpp>
#include <boost/beast/http/write.hpp>

#include "base/log.hpp"
#include "net/handshake.hpp"
#include "net/upgrade.hpp"

namespace kvasir::net {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using asio::ip::tcp;
using boost::system::error_code;

constexpr auto kAwait = asio::as_tuple(asio::use_awaitable);
constexpr uint32_t kLookupsMax = 8;  // lookups that may be under way or left behind by a deadline

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
    std::vector<tcp::endpoint> found;
};

std::atomic<uint32_t> lookups_running{0};

std::pair<int, std::vector<tcp::endpoint>> look_up(const std::string& host, uint16_t port) {
    addrinfo hints = {};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* list = nullptr;
    const int error = ::getaddrinfo(host.c_str(), nullptr, &hints, &list);
    std::vector<tcp::endpoint> found;
    for (const addrinfo* entry = error == 0 ? list : nullptr; entry; entry = entry->ai_next) {
        tcp::endpoint endpoint;
        if (entry->ai_addrlen > endpoint.capacity()) continue;
        std::copy_n(reinterpret_cast<const char*>(entry->ai_addr), entry->ai_addrlen,
                    reinterpret_cast<char*>(endpoint.data()));
        endpoint.resize(entry->ai_addrlen);
        endpoint.port(port);
        found.push_back(endpoint);
    }
    if (error == 0) ::freeaddrinfo(list);
    return {error, std::move(found)};
}

// getaddrinfo() cannot be cancelled, so it runs in a thread of its own that a deadline may leave
// behind; kLookupsMax bounds how many there can be.
Result<std::vector<tcp::endpoint>> resolve(const Endpoint& endpoint, Deadline deadline) {
    error_code ec;
    if (const auto address = asio::ip::make_address(endpoint.host, ec); !ec) {
        return std::vector<tcp::endpoint>{{address, endpoint.port}};
    }
    if (lookups_running.fetch_add(1) >= kLookupsMax) {
        lookups_running.fetch_sub(1);
        return fail(Errc::kTimeout, show(endpoint) + ": name lookups hang, is the DNS server up?");
    }
    auto lookup = std::make_shared<Lookup>();
    try {
        std::thread([lookup, host = endpoint.host, port = endpoint.port] {
            auto result = look_up(host, port);
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

// ---- connect and upgrade ----

Error network_error(const Endpoint& endpoint, const char* step, const error_code& ec) {
    if (ec == beast::error::timeout) {
        return {Errc::kTimeout, show(endpoint) + ": no answer in time (" + step + ")"};
    }
    if (ec == http::error::end_of_stream || ec == http::error::partial_message ||
        ec == asio::error::eof) {
        return {Errc::kIo, show(endpoint) + ": closed by the other side (" + step + ")"};
    }
    if (ec.category() == error_code(http::error::bad_version).category()) {
        return {Errc::kProtocol, show(endpoint) + ": the answer is not HTTP: " + ec.message()};
    }
    return {Errc::kIo, show(endpoint) + ": " + step + ": " + ec.message()};
}

using Response = http::response_parser<http::empty_body>;

Status check_response(const Endpoint& endpoint, const Response& parser, const std::string& key) {
    const auto& response = parser.get();
    const auto refuse = [&endpoint](const std::string& what) {
        return fail(Errc::kProtocol, show(endpoint) + ": no upgrade to WebSocket: " + what);
    };
    if (response.result() != http::status::switching_protocols) {
        return refuse(
            "HTTP status " + std::to_string(response.result_int()) + " " +
            printable(std::string_view(response.reason().data(), response.reason().size())));
    }
    if (!http::token_list(response[http::field::upgrade]).exists("websocket")) {
        return refuse("the Upgrade header is missing");
    }
    if (!http::token_list(response[http::field::connection]).exists("upgrade")) {
        return refuse("the Connection header is missing");
    }
    if (response[http::field::sec_websocket_accept] != websocket_accept(key)) {
        return refuse("Sec-WebSocket-Accept does not match");
    }
    if (std::string_view(response[http::field::sec_websocket_protocol]) != kSubprotocol) {
        return refuse("the subprotocol kvasir.1 was not agreed; is that a Kvasir hub?");
    }
    if (!response[http::field::sec_websocket_extensions].empty()) {
        return refuse("it wants an extension that was not offered");
    }
    return {};
}

http::request<http::empty_body> make_request(const Endpoint& endpoint, const std::string& key) {
    http::request<http::empty_body> request(http::verb::get, endpoint.path, 11);
    request.set(http::field::host, authority(endpoint));
    request.set(http::field::upgrade, "websocket");
    request.set(http::field::connection, "Upgrade");
    request.set(http::field::sec_websocket_key, key);
    request.set(http::field::sec_websocket_version, "13");
    request.set(http::field::sec_websocket_protocol, std::string(kSubprotocol));
    request.set(http::field::user_agent, "kvasir/" KVASIR_VERSION);
    return request;
}

// Tries every address; each gets its share of the time that is left.
asio::awaitable<Status> connect(beast::tcp_stream& stream, const Endpoint& endpoint,
                                const std::vector<tcp::endpoint>& addresses, Deadline deadline) {
    Error last{Errc::kIo, show(endpoint) + ": no address"};
    for (size_t i = 0; i < addresses.size(); ++i) {
        const auto left = deadline - Clock::now();
        const auto share = left / static_cast<int64_t>(addresses.size() - i);
        stream.expires_after(std::max<Clock::duration>(share, std::chrono::milliseconds(1)));
        const auto [ec] = co_await stream.async_connect(addresses[i], kAwait);
        if (!ec) co_return Status();
        last = network_error(endpoint, "connect", ec);
        error_code ignored;
        stream.socket().close(ignored);
    }
    co_return tl::unexpected(last);
}

struct Dialed {
    UniqueFd fd;
    std::vector<uint8_t> leftover;
};

asio::awaitable<Result<Dialed>> upgrade(Endpoint endpoint, std::vector<tcp::endpoint> addresses,
                                        uint32_t header_bytes_max, Deadline deadline) {
    beast::tcp_stream stream(co_await asio::this_coro::executor);
    auto connected = co_await connect(stream, endpoint, addresses, deadline);
    if (!connected) co_return tl::unexpected(std::move(connected.error()));

    stream.expires_after(
        std::max<Clock::duration>(deadline - Clock::now(), std::chrono::milliseconds(1)));
    const std::string key = make_websocket_key();
    const auto request = make_request(endpoint, key);
    const auto [write_ec, written] = co_await http::async_write(stream, request, kAwait);
    if (write_ec) co_return tl::unexpected(network_error(endpoint, "upgrade request", write_ec));

    beast::flat_buffer buffer;
    Response parser;
    parser.header_limit(header_bytes_max);
    const auto [read_ec, got] = co_await http::async_read_header(stream, buffer, parser, kAwait);
    if (read_ec) co_return tl::unexpected(network_error(endpoint, "upgrade response", read_ec));
    auto checked = check_response(endpoint, parser, key);
    if (!checked) co_return tl::unexpected(std::move(checked.error()));

    Dialed dialed;
    const auto* data = static_cast<const uint8_t*>(buffer.cdata().data());
    dialed.leftover.assign(data, data + buffer.size());
    stream.expires_never();
    error_code ec;
    dialed.fd.reset(stream.release_socket().release(ec));
    if (ec) co_return tl::unexpected(network_error(endpoint, "release", ec));
    co_return dialed;
}

}  // namespace

Result<MessageStream> dial(const Endpoint& endpoint, const HandshakeLimits& handshake,
                           MessageLimits limits) {
    if (endpoint.tls) {
        return fail(Errc::kUnsupported, show(endpoint) + ": TLS is not supported yet");
    }
    const Deadline deadline = Clock::now() + handshake.deadline;
    try {
        auto addresses = resolve(endpoint, deadline);
        if (!addresses) return tl::unexpected(std::move(addresses.error()));
        Result<Dialed> result = fail(Errc::kIo, show(endpoint) + ": the dial did not finish");
        std::exception_ptr thrown;
        asio::io_context context(1);
        asio::co_spawn(
            context, upgrade(endpoint, std::move(*addresses), handshake.header_bytes_max, deadline),
            [&result, &thrown](std::exception_ptr exception, Result<Dialed> value) {
                thrown = exception;
                result = std::move(value);
            });
        context.run();
        if (thrown) std::rethrow_exception(thrown);
        if (!result) return tl::unexpected(std::move(result.error()));
        return MessageStream(std::move(result->fd), Side::kClient, std::move(result->leftover),
                             limits);
    } catch (const std::exception& exception) {
        return fail(Errc::kIo, show(endpoint) + ": " + exception.what());
    }
}

}  // namespace kvasir::net
