#include "net/connection.hpp"

#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string>
#include <utility>

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "base/log.hpp"
#include "net/address_key.hpp"
#include "net/handshake.hpp"

namespace kvasir::net {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;

constexpr auto kAwait = asio::as_tuple(asio::use_awaitable);
constexpr size_t kReadBytes = 8 << 10;
constexpr auto kLingerMax = std::chrono::seconds(1);  // for a refused client to read its answer
constexpr size_t kLingerBytesMax = 1 << 20;

HttpResponse plain_response(int status, std::string body) {
    HttpResponse response;
    response.status = status;
    response.content_type = "text/plain";
    response.body = std::move(body);
    return response;
}

HttpResponse upgrade_required(std::string body) {
    HttpResponse response = plain_response(426, std::move(body));
    response.headers = {
        {"Upgrade", "websocket"}, {"Connection", "Upgrade"}, {"Sec-WebSocket-Version", "13"}};
    return response;
}

bool wants_upgrade(const RequestParser& request) {
    return request.has_token("Upgrade", "websocket") && request.has_token("Connection", "upgrade");
}

std::string accept_head(const RequestParser& request) {
    ResponseHead head;
    head.status = 101;
    head.headers = {{"Upgrade", "websocket"},
                    {"Connection", "Upgrade"},
                    {"Sec-WebSocket-Accept", websocket_accept(request.header("Sec-WebSocket-Key"))},
                    {"Sec-WebSocket-Protocol", std::string(kSubprotocol)}};
    return format_head(head);
}

// nullopt: a good upgrade request. Otherwise the answer that refuses it.
std::optional<HttpResponse> refusal(const RequestParser& request, bool takes_streams) {
    if (!wants_upgrade(request)) {
        if (request.target() == "/healthz" && request.method() == "GET") {
            return plain_response(200, "ok\n");
        }
        return upgrade_required(
            "This is a Kvasir hub: it speaks WebSocket, subprotocol kvasir.1\n");
    }
    if (!takes_streams) return plain_response(404, "no WebSocket here\n");
    if (request.method() != "GET" || !request.http_1_1()) {
        return plain_response(400, "an upgrade is a GET of HTTP/1.1\n");
    }
    if (!valid_target(request.target())) {
        return plain_response(404, "the path of the hub is /kvasir\n");
    }
    if (request.header("Sec-WebSocket-Version") != "13") {
        return upgrade_required("Sec-WebSocket-Version must be 13\n");
    }
    if (!valid_websocket_key(request.header("Sec-WebSocket-Key"))) {
        return plain_response(400, "Sec-WebSocket-Key is not 16 bytes\n");
    }
    if (!request.has_token("Sec-WebSocket-Protocol", kSubprotocol)) {
        return plain_response(400, "the subprotocol must be kvasir.1\n");
    }
    if (request.has_body()) return plain_response(400, "an upgrade request has no body\n");
    return std::nullopt;
}

}  // namespace

// ---- Home ----

void Home::post(std::function<void()> work) {
    const std::lock_guard lock(mu_);
    if (context_ != nullptr) asio::post(*context_, std::move(work));
}

void Home::close() {
    const std::lock_guard lock(mu_);
    context_ = nullptr;
}

// ---- life ----

Connection::Connection(asio::io_context& context, ConnectionOwner& owner, Transport transport,
                       std::string address, uint16_t port)
    : owner_(owner),
      address_(std::move(address)),
      key_(host_key(address_)),
      port_(port),
      transport_(std::move(transport)),
      descriptor_(context, transport_.fd()),
      deadline_timer_(context),
      reply_timer_(context),
      taken_timer_(context) {}

Connection::~Connection() {
    if (descriptor_.is_open()) (void)descriptor_.release();  // the transport closes it
}

void Connection::stop() {
    stopped_ = true;
    error_code ignored;
    if (descriptor_.is_open()) descriptor_.cancel(ignored);
    deadline_timer_.cancel();
    reply_timer_.cancel();
}

void Connection::drop() {
    stop();
    leave_handshake();
    leave_http();
}

bool Connection::has_spoken() const {
    int bytes = 0;
    return has_spoken_ || (::ioctl(transport_.fd(), FIONREAD, &bytes) == 0 && bytes > 0);
}

std::string Connection::peer() const {
    const bool v6 = address_.find(':') != std::string::npos;
    return (v6 ? "[" + address_ + "]" : address_) + ":" + std::to_string(port_);
}

void Connection::leave_handshake() {
    if (!std::exchange(in_handshake_, false)) return;
    owner_.end_handshake(*this);
}

// A length that is only announced takes nobody's room: only bytes that have come do.
bool Connection::take_body_room() {
    const uint64_t bytes = parser_->body_bytes();
    if (bytes <= body_room_) return true;
    if (!owner_.take_body_room(key_, bytes - body_room_)) return false;
    body_room_ = bytes;
    return true;
}

void Connection::give_body_room() {
    const uint64_t bytes = std::exchange(body_room_, 0);
    if (bytes != 0) owner_.give_body_room(key_, bytes);
}

// Before an answer is sent: the client may take its time with that.
void Connection::drop_body() {
    (void)parser_->take_body();
    give_body_room();
}

void Connection::leave_http() {
    give_body_room();
    if (!std::exchange(in_http_, false)) return;
    if (std::exchange(is_idle_, false)) owner_.end_idle(*this);
    owner_.end_http(key_);
}

asio::awaitable<void> Connection::run() {
    struct Leave {
        Connection& connection;
        ~Leave() {
            connection.tell_rest();
            connection.leave_handshake();
            connection.leave_http();
        }
    };
    const Leave leave{*this};
    set_deadline(Clock::now() + owner_.options().handshake.deadline);
    const bool secured = co_await secure();
    if (!secured) co_return;
    const bool http = co_await is_http();
    if (http) {
        co_await serve();
    }
    end_writing();
}

// ---- waiting ----

void Connection::set_deadline(Deadline deadline) {
    expired_ = false;
    const uint64_t number = ++deadline_number_;
    if (deadline == Deadline::max()) {
        deadline_timer_.cancel();
        return;
    }
    deadline_timer_.expires_at(deadline);
    deadline_timer_.async_wait([weak = weak_from_this(), number](error_code ec) {
        const auto self = ec ? nullptr : weak.lock();
        if (!self || self->deadline_number_ != number) return;
        self->expired_ = true;
        if (self->descriptor_.is_open()) self->descriptor_.cancel(ec);
    });
}

asio::awaitable<bool> Connection::wait(bool write) {
    if (stopped_ || expired_) co_return false;
    const auto type =
        write ? asio::posix::descriptor_base::wait_write : asio::posix::descriptor_base::wait_read;
    const auto [ec] = co_await descriptor_.async_wait(type, kAwait);
    co_return !ec && !stopped_ && !expired_;
}

asio::awaitable<bool> Connection::fill() {
    while (!stopped_ && !expired_) {
        const size_t size = input_.size();
        input_.resize(size + kReadBytes);
        const auto got = transport_.read(std::span(input_).subspan(size), false);
        input_.resize(size + (got ? got->bytes : 0));
        if (!got) log(LogLevel::kDebug, "net", peer() + ": " + got.error().detail);
        if (!got || got->end) co_return false;
        if (got->bytes != 0) {
            has_spoken_ = true;
            co_return true;
        }
        if (size == 0) input_ = {};  // an idle connection holds nothing
        if (!co_await wait(false)) co_return false;
    }
    co_return false;
}

// ---- before the first request ----

asio::awaitable<bool> Connection::secure() {
    while (transport_.tls()) {
        has_spoken_ = has_spoken();
        const auto done = transport_.handshake();
        if (!done) {
            owner_.log_refused(peer() + ": " + done.error().detail);
            co_await linger();
            co_return false;
        }
        if (*done && !transport_.wants_write()) break;
        if (!co_await wait(transport_.wants_write())) co_return false;
    }
    co_return true;
}

// The first byte tells: what is no letter is no method, and a client that speaks TLS to a plain
// port shall not wait for the deadline.
asio::awaitable<bool> Connection::is_http() {
    if (!co_await fill()) {
        log(LogLevel::kDebug, "net", peer() + ": no HTTP request");
        co_return false;
    }
    const uint8_t first = input_.front();
    if ((first >= 'A' && first <= 'Z') || first == '\r' || first == '\n') co_return true;
    const bool tls = first == 0x16;
    owner_.log_refused(peer() +
                       (tls ? ": speaks TLS, this port is plain" : ": does not speak HTTP"));
    co_await linger();
    co_return false;
}

asio::awaitable<void> Connection::serve() {
    bool first = true;
    while (true) {
        if (!co_await read_head(std::exchange(first, false))) co_return;
        const ListenerOptions& options = owner_.options();
        if (!options.http || wants_upgrade(*parser_)) {
            co_await upgrade();
            co_return;
        }
        if (in_handshake_) {
            if (!owner_.try_begin_http(key_)) {
                response_ =
                    error_response({Errc::kBusy, "too many connections; try again in a moment"});
                co_await refuse();
                co_return;
            }
            in_http_ = true;
            leave_handshake();
        }
        set_deadline(request_start_ + options.http_limits.request_deadline);
        if (!co_await read_body()) co_return;
        const bool goes_on = co_await handle();
        if (!goes_on) {
            if (!stopped_ && !expired_) {
                co_await linger();
            }
            co_return;
        }
        // The others' turn: a client that pipelines would never let them have it.
        co_await asio::post(co_await asio::this_coro::executor, asio::use_awaitable);
    }
}

// ---- the upgrade ----

asio::awaitable<void> Connection::upgrade() {
    auto refused = refusal(*parser_, owner_.on_stream() != nullptr);
    if (refused) {
        log(LogLevel::kDebug, "net", peer() + ": HTTP " + std::to_string(refused->status));
        response_ = std::move(*refused);
        co_await refuse();
        co_return;
    }
    const std::string text = accept_head(*parser_);
    uint64_t sent = 0;
    if (!co_await send_bytes(text, {}, sent)) co_return;
    if (stopped_) co_return;
    (void)descriptor_.release();
    transport_.take_buffered(input_);
    tell_rest();
    leave_handshake();
    owner_.on_stream()(MessageStream(std::move(transport_), Side::kServer, std::move(input_),
                                     owner_.options().messages),
                       peer());
}

// ---- endings ----

asio::awaitable<void> Connection::refuse_broken() {
    int status = parser_->refusal_status();
    if (status == 0 && parser_->head_done()) status = 400;
    if (status == 0) {
        owner_.log_refused(peer() + ": does not speak HTTP");
        co_await linger();
        co_return;
    }
    const char* what =
        status == 431 ? "the request header is too long\n" : "the request is malformed\n";
    response_ = status == 413 ? error_response({Errc::kLimit, "the request body is too long"})
                              : plain_response(status, what);
    co_await refuse();
}

// Sends the answer and gives the client a moment to read it.
asio::awaitable<void> Connection::refuse() {
    drop_body();
    const bool sent = co_await send(false);
    if (sent) {
        co_await linger();
    }
}

// Closing a socket with unread bytes resets it, and what was sent may be lost: read them first.
asio::awaitable<void> Connection::linger() {
    end_writing();
    set_deadline(Clock::now() + kLingerMax);
    for (size_t total = 0; total < kLingerBytesMax;) {
        static thread_local std::array<char, 16384> sink;
        const ssize_t got = ::recv(transport_.fd(), sink.data(), sink.size(), MSG_DONTWAIT);
        if (got > 0) {
            total += static_cast<size_t>(got);
        } else if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
            co_return;
        } else if (!co_await wait(false)) {
            co_return;
        }
    }
}

}  // namespace kvasir::net
