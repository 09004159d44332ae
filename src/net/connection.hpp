// One accepted connection of a Listener: TLS, then HTTP requests, or a WebSocket that is handed on.
//
// Private to net/ (listener.cpp makes them, http_session.cpp answers with them). Asio tells when
// the socket is ready; bytes go through Transport. Thread: the listener's. Owns: the socket until
// it is handed on. Limits: ListenerOptions; kInputBytesMax of input are held between requests.
#pragma once

#include <utility>  // before Asio's awaitable header

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>

#include "net/http_parser.hpp"
#include "net/transport.hpp"
#include "net/upgrade.hpp"

namespace kvasir::net {

// The way to the listener's thread for who may outlive it.
class Home {
public:
    explicit Home(boost::asio::io_context& context) : context_(&context) {}
    // Runs `work` on the listener's thread; drops it when there is none any more.
    void post(std::function<void()> work);
    void close();  // after the listener's thread has ended

private:
    std::mutex mu_;
    boost::asio::io_context* context_;  // guarded by mu_
};

class Connection;

// What connections share: the listener's side of them. Listener's thread only.
class ConnectionOwner {
public:
    virtual ~ConnectionOwner() = default;
    virtual const ListenerOptions& options() const = 0;
    virtual const Listener::OnStream& on_stream() const = 0;
    virtual const std::shared_ptr<Home>& home() const = 0;
    // In all of these `key` is host_key() of the peer's address.
    // A connection's handshake is over: it counts as one of HTTP from now on, unless there are too
    // many (false).
    virtual bool try_begin_http(const std::string& key) = 0;
    virtual void end_http(const std::string& key) = 0;
    // One of HTTP waits for its next request, and may be dropped for another; or no longer.
    virtual void begin_idle(Connection& connection) = 0;
    virtual void end_idle(Connection& connection) = 0;
    // For what has come of a request's body, until its answer is there: false when all together, or
    // those of the same address, have taken their limit. Between try_begin_http and end_http.
    virtual bool take_body_room(const std::string& key, uint64_t bytes) = 0;
    virtual void give_body_room(const std::string& key, uint64_t bytes) = 0;
    virtual void end_handshake(Connection& connection) = 0;
    // At most one line a second.
    virtual void log_refused(const std::string& line) = 0;
};

class ReplySlot;

class Connection : public std::enable_shared_from_this<Connection> {
public:
    Connection(boost::asio::io_context& context, ConnectionOwner& owner, Transport transport,
               std::string address, uint16_t port);
    ~Connection();
    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;

    // All of its life.
    boost::asio::awaitable<void> run();
    // Ends run() soon.
    void stop();
    // stop(), and its place, among the handshakes or those of HTTP, is free at once.
    void drop();
    bool in_handshake() const { return in_handshake_; }
    Clock::time_point idle_since() const { return idle_since_; }
    // Something of the peer has arrived, even if it was not read yet.
    bool has_spoken() const;
    const std::string& key() const { return key_; }  // of limits by address
    Clock::time_point since() const { return since_; }
    // A reply may have come.
    void wake() { reply_timer_.cancel(); }

private:
    // Waiting. A deadline holds until the next one is set.
    void set_deadline(Deadline deadline);
    boost::asio::awaitable<bool> wait(bool write);  // false: deadline passed or stopped
    boost::asio::awaitable<bool> fill();            // more input; false: the end of it

    // Before the first request.
    boost::asio::awaitable<bool> secure();
    boost::asio::awaitable<bool> is_http();
    boost::asio::awaitable<void> serve();

    // A request.
    boost::asio::awaitable<bool> read_head(bool first);
    boost::asio::awaitable<bool> read_body();
    boost::asio::awaitable<bool> feed(bool (RequestParser::*until)() const);
    boost::asio::awaitable<bool> handle();  // true: the next request may come
    std::shared_ptr<ReplySlot> ask_handler(HttpRequest request);
    boost::asio::awaitable<bool> take_reply(std::shared_ptr<ReplySlot> slot);  // to response_
    Result<HttpRequest> make_request();
    boost::asio::awaitable<void> upgrade();
    boost::asio::awaitable<void> refuse_broken();

    // Answers: response_ is what they send. send_*: false when the client is gone or too slow.
    boost::asio::awaitable<bool> send(bool keep_alive);
    boost::asio::awaitable<bool> send_bytes(std::string_view head, std::string_view body,
                                            uint64_t& sent);
    boost::asio::awaitable<bool> send_file(uint64_t& sent);
    boost::asio::awaitable<bool> send_tls_file(uint64_t& sent);
    boost::asio::awaitable<void> refuse();
    boost::asio::awaitable<void> linger();
    std::string response_head(bool keep_alive, bool bodiless) const;
    // What became of answers that want to know: see HttpResponse::on_sent.
    void tell_when_taken(std::function<void(uint64_t)> on_sent, uint64_t body_bytes);
    uint64_t bytes_taken() const;
    void tell_taken();
    void tell_taken_later(std::chrono::milliseconds pause);
    void tell_rest();
    void end_writing();
    std::optional<uint64_t> bytes_waiting() const;
    void leave_handshake();
    void leave_http();
    bool take_body_room();  // for what has come
    void give_body_room();
    void drop_body();
    std::string peer() const;

    // Constant after construction
    ConnectionOwner& owner_;
    const std::string address_;
    const std::string key_;
    const uint16_t port_;
    const Clock::time_point since_ = Clock::now();

    Transport transport_;
    boost::asio::posix::stream_descriptor descriptor_;  // the same socket, as Asio knows it
    boost::asio::steady_timer deadline_timer_;
    boost::asio::steady_timer reply_timer_;
    boost::asio::steady_timer taken_timer_;
    uint64_t deadline_number_ = 0;  // tells a late timer from the current one
    bool expired_ = false;
    bool stopped_ = false;
    bool in_handshake_ = true;
    bool in_http_ = false;
    bool has_spoken_ = false;
    bool is_idle_ = false;
    uint64_t body_room_ = 0;  // taken of the owner's
    Clock::time_point idle_since_ = {};

    std::vector<uint8_t> input_;  // not yet parsed
    Clock::time_point request_start_ = {};
    std::optional<RequestParser> parser_;

    // Answers in the kernel, not yet acknowledged; in the order of their bytes.
    struct Untold {
        std::function<void(uint64_t)> on_sent;
        uint64_t body_bytes = 0;  // handed to the kernel
        uint64_t end = 0;         // of bytes_handed_, behind them
    };
    std::deque<Untold> untold_;
    uint64_t bytes_handed_ = 0;  // to the kernel, or to TLS
    uint64_t end_bytes_ = 0;     // behind the last answer: TLS's goodbye, the stream's end

    // A member because g++ 12 copies aggregates that are parameters of coroutines byte by byte.
    HttpResponse response_;
};

// Where a handler's answer waits for its connection. Thread: any.
class ReplySlot {
public:
    ReplySlot(std::shared_ptr<Home> home, std::weak_ptr<Connection> connection)
        : home_(std::move(home)), connection_(std::move(connection)) {}

    void put(HttpResponse response);
    std::optional<HttpResponse> take();
    // Nobody will take it: the client is gone.
    void abandon();

private:
    const std::shared_ptr<Home> home_;
    const std::weak_ptr<Connection> connection_;
    std::mutex mu_;
    // Guarded by mu_
    bool answered_ = false;
    bool abandoned_ = false;
    std::optional<HttpResponse> response_;
};

}  // namespace kvasir::net
