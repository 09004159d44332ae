// Listener: accepts, upgrades, hands over. One thread, one io_context, one coroutine a handshake.
#include <utility>  // before Asio's awaitable header

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ip/v6_only.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http/empty_body.hpp>
#include <boost/beast/http/message.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/rfc7230.hpp>
#include <boost/beast/http/string_body.hpp>
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
constexpr auto kAcceptPause = std::chrono::milliseconds(100);  // after EMFILE and the like
constexpr auto kLingerMax = std::chrono::seconds(1);  // for a refused client to read its answer
constexpr size_t kLingerBytesMax = 64 << 10;

using Request = http::request_parser<http::empty_body>;
using Response = http::response<http::string_body>;

asio::ip::address plain_address(const asio::ip::address& address) {
    if (address.is_v6() && address.to_v6().is_v4_mapped()) {
        return asio::ip::make_address_v4(asio::ip::v4_mapped, address.to_v6());
    }
    return address;
}

std::string show(const asio::ip::address& address, uint16_t port) {
    const std::string text = address.to_string();
    return (address.is_v6() ? "[" + text + "]" : text) + ":" + std::to_string(port);
}

// ---- what a request deserves ----

Response plain_response(http::status status, std::string body) {
    Response response(status, 11);
    response.set(http::field::server, "kvasir/" KVASIR_VERSION);
    response.set(http::field::content_type, "text/plain");
    response.body() = std::move(body);
    response.keep_alive(false);
    response.prepare_payload();
    return response;
}

Response upgrade_required(std::string body) {
    Response response = plain_response(http::status::upgrade_required, std::move(body));
    response.set(http::field::upgrade, "websocket");
    response.set(http::field::connection, "Upgrade, close");
    response.set(http::field::sec_websocket_version, "13");
    return response;
}

// nullopt: a good upgrade request. Otherwise the answer that refuses it.
std::optional<Response> refuse(const Request::value_type& request) {
    const std::string_view target(request.target().data(), request.target().size());
    const bool wants_upgrade =
        http::token_list(request[http::field::upgrade]).exists("websocket") &&
        http::token_list(request[http::field::connection]).exists("upgrade");
    if (!wants_upgrade) {
        if (target == "/healthz" && request.method() == http::verb::get) {
            return plain_response(http::status::ok, "ok\n");
        }
        return upgrade_required(
            "This is a Kvasir hub: it speaks WebSocket, subprotocol kvasir.1\n");
    }
    if (request.method() != http::verb::get || request.version() != 11) {
        return plain_response(http::status::bad_request, "an upgrade is a GET of HTTP/1.1\n");
    }
    if (!valid_target(target)) {
        return plain_response(http::status::not_found, "the path of the hub is /kvasir\n");
    }
    if (request[http::field::sec_websocket_version] != "13") {
        return upgrade_required("Sec-WebSocket-Version must be 13\n");
    }
    const auto key = request[http::field::sec_websocket_key];
    if (!valid_websocket_key({key.data(), key.size()})) {
        return plain_response(http::status::bad_request, "Sec-WebSocket-Key is not 16 bytes\n");
    }
    if (!http::token_list(request[http::field::sec_websocket_protocol])
             .exists(std::string(kSubprotocol))) {
        return plain_response(http::status::bad_request, "the subprotocol must be kvasir.1\n");
    }
    if (request.count(http::field::content_length) != 0 ||
        request.count(http::field::transfer_encoding) != 0) {
        return plain_response(http::status::bad_request, "an upgrade request has no body\n");
    }
    return std::nullopt;
}

Response accept_response(const Request::value_type& request) {
    const auto key = request[http::field::sec_websocket_key];
    Response response(http::status::switching_protocols, 11);
    response.set(http::field::server, "kvasir/" KVASIR_VERSION);
    response.set(http::field::upgrade, "websocket");
    response.set(http::field::connection, "Upgrade");
    response.set(http::field::sec_websocket_accept, websocket_accept({key.data(), key.size()}));
    response.set(http::field::sec_websocket_protocol, std::string(kSubprotocol));
    return response;
}

// ---- the listener ----

class ListenerImpl final : public Listener {
public:
    ListenerImpl(OnStream on_stream, const HandshakeLimits& handshake, MessageLimits limits)
        : on_stream_(std::move(on_stream)), handshake_(handshake), limits_(limits) {}
    ~ListenerImpl() override { stop(); }

    Status bind(const Endpoint& listen);
    Status start();
    uint16_t port() const override { return port_; }

private:
    asio::awaitable<void> accept_loop();
    asio::awaitable<void> session(tcp::socket socket, tcp::endpoint peer);
    asio::awaitable<void> handshake(beast::tcp_stream& stream, std::string peer);
    asio::awaitable<void> answer(beast::tcp_stream& stream, Response response);
    asio::awaitable<void> pause(Clock::time_point until);
    void open_session(tcp::socket socket);
    void session_done(const asio::ip::address& address, std::exception_ptr exception);
    error_code open(const tcp::endpoint& endpoint, bool dual_stack);
    void stop();

    // Constant after start()
    OnStream on_stream_;
    const HandshakeLimits handshake_;
    const MessageLimits limits_;
    uint16_t port_ = 0;

    // Listener thread only
    asio::io_context context_{1};
    tcp::acceptor acceptor_{context_};
    asio::steady_timer wake_{context_};  // ends pause()
    std::set<beast::tcp_stream*> streams_;
    std::map<asio::ip::address, uint32_t> pending_by_address_;
    uint32_t pending_ = 0;
    bool stopping_ = false;

    std::thread thread_;
};

error_code ListenerImpl::open(const tcp::endpoint& endpoint, bool dual_stack) {
    error_code ec;
    acceptor_.close(ec);
    acceptor_.open(endpoint.protocol(), ec);
    if (!ec) acceptor_.set_option(tcp::acceptor::reuse_address(true), ec);
    if (!ec && endpoint.address().is_v6()) {
        acceptor_.set_option(asio::ip::v6_only(!dual_stack), ec);
    }
    if (!ec) acceptor_.bind(endpoint, ec);
    if (!ec) acceptor_.listen(asio::socket_base::max_listen_connections, ec);
    return ec;
}

Status ListenerImpl::bind(const Endpoint& listen) {
    error_code ec;
    if (listen.host.empty()) {
        ec = open({asio::ip::address_v6::any(), listen.port}, true);
        if (ec == asio::error::address_family_not_supported ||
            ec == asio::error::no_protocol_option ||
            ec == error_code(EADDRNOTAVAIL, boost::system::system_category())) {
            ec = open({asio::ip::address_v4::any(), listen.port}, false);
        }
    } else {
        const std::string host = listen.host == "localhost" ? "127.0.0.1" : listen.host;
        const auto address = asio::ip::make_address(host, ec);
        if (ec) {
            return fail(Errc::kUsage, "cannot listen on \"" + printable(listen.host) +
                                          "\": give an IP address of this machine, or only :PORT");
        }
        ec = open({address, listen.port}, false);
    }
    if (ec) {
        return fail(Errc::kEnvironment, "cannot listen on " + printable(listen.host) + ":" +
                                            std::to_string(listen.port) + ": " + ec.message());
    }
    port_ = acceptor_.local_endpoint(ec).port();
    return {};
}

Status ListenerImpl::start() {
    asio::co_spawn(context_, accept_loop(), [](std::exception_ptr exception) {
        if (exception) log(LogLevel::kError, "net", "the accept loop ended with an exception");
    });
    thread_ = std::thread([this] { context_.run(); });
    return {};
}

void ListenerImpl::stop() {
    if (!thread_.joinable()) return;
    asio::post(context_, [this] {
        stopping_ = true;
        error_code ignored;
        acceptor_.close(ignored);
        wake_.cancel();
        for (beast::tcp_stream* stream : streams_) stream->close();
    });
    thread_.join();  // run() returns when the last coroutine has ended
}

asio::awaitable<void> ListenerImpl::pause(Clock::time_point until) {
    wake_.expires_at(until);
    co_await wake_.async_wait(kAwait);
}

asio::awaitable<void> ListenerImpl::accept_loop() {
    while (!stopping_) {
        if (pending_ >= handshake_.pending_max) {  // the rest waits in the backlog
            co_await pause(Clock::time_point::max());
            continue;
        }
        auto [ec, socket] = co_await acceptor_.async_accept(kAwait);
        if (stopping_) break;
        if (!ec) {
            open_session(std::move(socket));
        } else if (ec != asio::error::connection_aborted && ec != asio::error::interrupted) {
            log(LogLevel::kWarn, "net", "accept: " + ec.message());
            co_await pause(Clock::now() + kAcceptPause);  // out of descriptors: do not spin
        }
    }
}

void ListenerImpl::open_session(tcp::socket socket) {
    error_code ec;
    const tcp::endpoint peer = socket.remote_endpoint(ec);
    if (ec) return;  // gone already
    const auto address = plain_address(peer.address());
    uint32_t& same_address = pending_by_address_[address];
    if (same_address >= handshake_.pending_per_address_max) {
        log(LogLevel::kWarn, "net",
            "too many handshakes at once from " + address.to_string() + ", one was closed");
        return;
    }
    ++same_address;
    ++pending_;
    asio::co_spawn(
        context_, session(std::move(socket), tcp::endpoint(address, peer.port())),
        [this, address](std::exception_ptr exception) { session_done(address, exception); });
}

void ListenerImpl::session_done(const asio::ip::address& address, std::exception_ptr exception) {
    if (exception) log(LogLevel::kError, "net", "a handshake ended with an exception");
    --pending_;
    const auto entry = pending_by_address_.find(address);
    if (--entry->second == 0) pending_by_address_.erase(entry);
    wake_.cancel();
}

asio::awaitable<void> ListenerImpl::session(tcp::socket socket, tcp::endpoint peer) {
    beast::tcp_stream stream(std::move(socket));
    struct Registration {
        std::set<beast::tcp_stream*>& set;
        beast::tcp_stream* stream;
        ~Registration() { set.erase(stream); }
    };
    streams_.insert(&stream);
    const Registration registration{streams_, &stream};
    if (stopping_) co_return;
    co_await handshake(stream, show(peer.address(), peer.port()));
}

asio::awaitable<void> ListenerImpl::handshake(beast::tcp_stream& stream, std::string peer) {
    stream.expires_after(handshake_.deadline);  // for all of it: set once
    beast::flat_buffer buffer;
    Request parser;
    parser.header_limit(handshake_.header_bytes_max);
    const auto [read_ec, got] = co_await http::async_read_header(stream, buffer, parser, kAwait);
    if (read_ec == http::error::header_limit) {
        co_await answer(stream, plain_response(http::status::request_header_fields_too_large,
                                               "the request header is too long\n"));
        co_return;
    }
    if (read_ec) {
        log(LogLevel::kDebug, "net", peer + ": no HTTP request: " + read_ec.message());
        co_return;
    }
    if (auto refusal = refuse(parser.get())) {
        log(LogLevel::kDebug, "net", peer + ": HTTP " + std::to_string(refusal->result_int()));
        co_await answer(stream, std::move(*refusal));
        co_return;
    }
    const Response response = accept_response(parser.get());
    const auto [write_ec, written] = co_await http::async_write(stream, response, kAwait);
    if (write_ec || stopping_) co_return;

    const auto* data = static_cast<const uint8_t*>(buffer.cdata().data());
    std::vector<uint8_t> leftover(data, data + buffer.size());
    stream.expires_never();
    error_code ec;
    UniqueFd fd(stream.socket().release(ec));
    if (ec) {
        log(LogLevel::kError, "net", peer + ": cannot take the socket over: " + ec.message());
        co_return;
    }
    on_stream_(MessageStream(std::move(fd), Side::kServer, std::move(leftover), limits_),
               std::move(peer));
}

// Sends a plain response and gives the client a moment to read it: closing a socket with unread
// bytes resets it.
asio::awaitable<void> ListenerImpl::answer(beast::tcp_stream& stream, Response response) {
    const auto [write_ec, written] = co_await http::async_write(stream, response, kAwait);
    if (write_ec) co_return;
    error_code ignored;
    stream.socket().shutdown(tcp::socket::shutdown_send, ignored);
    stream.expires_after(kLingerMax);
    std::vector<char> sink(4096);
    for (size_t total = 0; total < kLingerBytesMax;) {
        const auto [ec, got] = co_await stream.async_read_some(asio::buffer(sink), kAwait);
        if (ec) co_return;
        total += got;
    }
}

}  // namespace

Result<std::unique_ptr<Listener>> Listener::make(const Endpoint& listen, OnStream on_stream,
                                                 const HandshakeLimits& handshake,
                                                 MessageLimits limits) {
    if (listen.tls) return fail(Errc::kUnsupported, "listening with TLS is not supported yet");
    try {
        auto listener = std::make_unique<ListenerImpl>(std::move(on_stream), handshake, limits);
        if (auto status = listener->bind(listen); !status) {
            return tl::unexpected(std::move(status.error()));
        }
        if (auto status = listener->start(); !status) {
            return tl::unexpected(std::move(status.error()));
        }
        return std::unique_ptr<Listener>(std::move(listener));
    } catch (const std::exception& exception) {
        return fail(Errc::kEnvironment, std::string("cannot listen: ") + exception.what());
    }
}

}  // namespace kvasir::net
