// Listener: accepts, counts, and lets Connections do the rest. One thread, one io_context.
#include <utility>  // before Asio's awaitable header

#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <csignal>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ip/v6_only.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "base/log.hpp"
#include "net/address_key.hpp"
#include "net/connection.hpp"
#include "net/upgrade.hpp"

namespace kvasir::net {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

constexpr auto kAwait = asio::as_tuple(asio::use_awaitable);
constexpr auto kAcceptPause = std::chrono::milliseconds(100);  // after EMFILE and the like
constexpr auto kRefusedLogPause = std::chrono::seconds(1);
// Who sends a first byte does so with the end of TCP's handshake; lost packets are sent again.
constexpr auto kSilenceMax = std::chrono::milliseconds(100);

struct Peer {
    asio::ip::address address;
    uint16_t port = 0;
};

// An IPv4 client of a dual-stack socket is shown as one.
Peer peer_of(const tcp::endpoint& endpoint) {
    const auto address = endpoint.address();
    if (address.is_v6() && address.to_v6().is_v4_mapped()) {
        return {asio::ip::make_address_v4(asio::ip::v4_mapped, address.to_v6()), endpoint.port()};
    }
    return {address, endpoint.port()};
}

class ListenerImpl final : public Listener, public ConnectionOwner {
public:
    ListenerImpl(OnStream on_stream, ListenerOptions options)
        : on_stream_(std::move(on_stream)), options_(std::move(options)) {}
    ~ListenerImpl() override { stop(); }

    Status bind(const Endpoint& listen);
    Status start();
    uint16_t port() const override { return port_; }

private:
    const ListenerOptions& options() const override { return options_; }
    const OnStream& on_stream() const override { return on_stream_; }
    const std::shared_ptr<Home>& home() const override { return home_; }
    bool try_begin_http(const std::string& key) override;
    void end_http(const std::string& key) override;
    void begin_idle(Connection& connection) override;
    void end_idle(Connection& connection) override;
    bool take_body_room(const std::string& key, uint64_t bytes) override;
    void give_body_room(const std::string& key, uint64_t bytes) override;
    void end_handshake(Connection& connection) override;
    void log_refused(const std::string& line) override;

    asio::awaitable<void> accept_loop();
    asio::awaitable<void> pause(Clock::time_point until);
    UniqueFd accept_one(tcp::endpoint& peer);
    bool is_anybody_there();
    void open(UniqueFd fd, const Peer& peer);
    Connection* replaceable(const std::string* key, Clock::duration silence_max) const;
    bool make_room_of(const std::string& key);
    Clock::time_point make_room();
    error_code open(const tcp::endpoint& endpoint, bool dual_stack);
    void stop();

    // Constant after start()
    OnStream on_stream_;
    const ListenerOptions options_;
    uint16_t port_ = 0;

    // Listener thread only
    asio::io_context context_{1};
    std::shared_ptr<Home> home_ = std::make_shared<Home>(context_);
    tcp::acceptor acceptor_{context_};
    asio::steady_timer wake_{context_};  // ends pause()
    std::set<Connection*> connections_;
    std::list<Connection*> pending_;                      // handshakes, the oldest first
    std::map<std::string, uint32_t> pending_by_address_;  // how many of them, by host_key()
    // Of HTTP; the idle ones by idle_since().
    using Idle = std::set<std::pair<Clock::time_point, Connection*>>;
    struct Client {
        uint32_t connections = 0;
        uint64_t body_bytes = 0;
        Idle idle;
    };
    static bool drop_oldest(const Idle& idle);       // false: there is none
    std::map<std::string, Client> http_by_address_;  // by host_key()
    Idle idle_;
    uint32_t http_ = 0;
    uint64_t body_bytes_ = 0;
    Clock::time_point refused_logged_ = {};
    uint64_t refused_unlogged_ = 0;
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
        std::string hint;
        if (ec == asio::error::address_in_use)
            hint = "; stop what listens there, or choose another port";
        else if (ec == asio::error::access_denied)
            hint = "; choose a port from 1024 on, or give this program CAP_NET_BIND_SERVICE";
        return fail(Errc::kEnvironment, "cannot listen on " + printable(listen.host) + ":" +
                                            std::to_string(listen.port) + ": " + ec.message() +
                                            hint);
    }
    port_ = acceptor_.local_endpoint(ec).port();
    return {};
}

Status ListenerImpl::start() {
    error_code ec;
    acceptor_.native_non_blocking(true, ec);
    if (ec) return fail(Errc::kEnvironment, "cannot listen: " + ec.message());
    asio::co_spawn(context_, accept_loop(), [](std::exception_ptr exception) {
        if (exception) log(LogLevel::kError, "net", "the accept loop ended with an exception");
    });
    thread_ = std::thread([this] {
        sigset_t pipe;  // sendfile() raises it when a client has gone
        sigemptyset(&pipe);
        sigaddset(&pipe, SIGPIPE);
        (void)::pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
        context_.run();
    });
    return {};
}

void ListenerImpl::stop() {
    if (!thread_.joinable()) return;
    asio::post(context_, [this] {
        stopping_ = true;
        error_code ignored;
        acceptor_.close(ignored);
        wake_.cancel();
        for (Connection* connection : connections_) connection->stop();
    });
    thread_.join();  // run() returns when the last coroutine has ended
    home_->close();
}

asio::awaitable<void> ListenerImpl::pause(Clock::time_point until) {
    wake_.expires_at(until);
    co_await wake_.async_wait(kAwait);
}

asio::awaitable<void> ListenerImpl::accept_loop() {
    while (!stopping_) {
        if (pending_.size() >= options_.handshake.pending_max) {  // the rest waits in the backlog
            (void)co_await acceptor_.async_wait(tcp::acceptor::wait_read, kAwait);
            if (pending_.size() < options_.handshake.pending_max || stopping_) continue;
            const auto until = make_room();
            if (until > Clock::now()) {
                co_await pause(until);
            }
            continue;
        }
        tcp::endpoint peer;
        UniqueFd fd = accept_one(peer);
        if (fd) {
            open(std::move(fd), peer_of(peer));
            co_await asio::post(context_, asio::use_awaitable);  // the connections' turn
            continue;
        }
        const int error = errno;
        // Without a descriptor left accept4() fails before it looks who is there.
        if (error == EAGAIN || error == EWOULDBLOCK || !is_anybody_there()) {
            (void)co_await acceptor_.async_wait(tcp::acceptor::wait_read, kAwait);
        } else if (error != ECONNABORTED && error != EINTR && error != EPROTO) {
            log_refused("accept: " + std::generic_category().message(error));
            // Out of descriptors: whoever is idle the longest has one.
            (void)drop_oldest(idle_);
            co_await pause(Clock::now() + kAcceptPause);  // do not spin
        }
    }
}

bool ListenerImpl::is_anybody_there() {
    pollfd one = {acceptor_.native_handle(), POLLIN, 0};
    return ::poll(&one, 1, 0) > 0;
}

// Asio's own accept would neither set close-on-exec nor leave the socket to us.
UniqueFd ListenerImpl::accept_one(tcp::endpoint& peer) {
    auto size = static_cast<socklen_t>(peer.capacity());
    UniqueFd fd(
        ::accept4(acceptor_.native_handle(), peer.data(), &size, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd) peer.resize(size);
    return fd;
}

void ListenerImpl::open(UniqueFd fd, const Peer& peer) {
    const std::string address = peer.address.to_string();
    const std::string key = host_key(address);
    if (!make_room_of(key)) return;
    auto transport =
        options_.tls ? Transport::make_tls(std::move(fd), options_.tls->context(), Side::kServer)
                     : Result<Transport>(Transport(std::move(fd)));
    if (!transport) {
        log_refused(transport.error().detail);
        return;
    }
    const auto connection =
        std::make_shared<Connection>(context_, *this, std::move(*transport), address, peer.port);
    ++pending_by_address_[key];
    pending_.push_back(connection.get());
    connections_.insert(connection.get());
    asio::co_spawn(context_, connection->run(), [this, connection](std::exception_ptr exception) {
        if (exception) log(LogLevel::kError, "net", "a connection ended with an exception");
        connections_.erase(connection.get());
    });
}

// Silent for longer than that, or beyond all patience; those who said nothing first. nullptr: none.
Connection* ListenerImpl::replaceable(const std::string* key, Clock::duration silence_max) const {
    Connection* slow = nullptr;
    const auto now = Clock::now();
    for (Connection* connection : pending_) {
        if (key != nullptr && connection->key() != *key) continue;
        const auto age = now - connection->since();
        if (age >= silence_max && !connection->has_spoken()) return connection;
        if (slow == nullptr && age >= options_.handshake.patience) slow = connection;
    }
    return slow;
}

// One more handshake of that address; whoever has all its places loses one of his own.
bool ListenerImpl::make_room_of(const std::string& key) {
    const auto entry = pending_by_address_.find(key);
    if (entry == pending_by_address_.end() ||
        entry->second < options_.handshake.pending_per_address_max) {
        return true;
    }
    Connection* old = replaceable(&key, Clock::duration::zero());
    log_refused("too many handshakes at once from " + key + ", " +
                (old != nullptr ? "the oldest" : "the newest") + " was closed");
    if (old == nullptr) return false;
    old->drop();
    return true;
}

// One more handshake in all: who has most places gives one. Else when to look again.
Clock::time_point ListenerImpl::make_room() {
    const std::string* most = nullptr;
    uint32_t most_count = 1;
    for (const auto& [key, count] : pending_by_address_) {
        if (count > most_count) most = &key, most_count = count;
    }
    Connection* old = most != nullptr ? replaceable(most, kSilenceMax) : nullptr;
    if (old == nullptr) old = replaceable(nullptr, kSilenceMax);
    if (old == nullptr) return Clock::now() + kSilenceMax;
    log_refused("too many handshakes at once, the oldest was closed");
    old->drop();
    return {};
}

void ListenerImpl::end_handshake(Connection& connection) {
    pending_.remove(&connection);
    const auto entry = pending_by_address_.find(connection.key());
    if (--entry->second == 0) pending_by_address_.erase(entry);
    wake_.cancel();
}

bool ListenerImpl::try_begin_http(const std::string& key) {
    const HttpLimits& limits = options_.http_limits;
    const auto same = http_by_address_.find(key);
    // The address's own first: that frees a place of all, too.
    if (same != http_by_address_.end() &&
        same->second.connections >= limits.connections_per_address_max &&
        !drop_oldest(same->second.idle)) {
        return false;
    }
    if (http_ >= limits.connections_max && !drop_oldest(idle_)) return false;
    ++http_by_address_[key].connections;
    ++http_;
    return true;
}

bool ListenerImpl::drop_oldest(const Idle& idle) {
    if (idle.empty()) return false;
    idle.begin()->second->drop();
    return true;
}

bool ListenerImpl::take_body_room(const std::string& key, uint64_t bytes) {
    const HttpLimits& limits = options_.http_limits;
    Client& client = http_by_address_.at(key);
    if (body_bytes_ + bytes > limits.bodies_bytes_max ||
        client.body_bytes + bytes > limits.bodies_bytes_per_address_max) {
        return false;
    }
    body_bytes_ += bytes;
    client.body_bytes += bytes;
    return true;
}

void ListenerImpl::give_body_room(const std::string& key, uint64_t bytes) {
    body_bytes_ -= bytes;
    http_by_address_.at(key).body_bytes -= bytes;
}

void ListenerImpl::begin_idle(Connection& connection) {
    const std::pair entry(connection.idle_since(), &connection);
    idle_.insert(entry);
    http_by_address_.at(connection.key()).idle.insert(entry);
}

void ListenerImpl::end_idle(Connection& connection) {
    const std::pair entry(connection.idle_since(), &connection);
    idle_.erase(entry);
    http_by_address_.at(connection.key()).idle.erase(entry);
}

void ListenerImpl::end_http(const std::string& key) {
    --http_;
    const auto entry = http_by_address_.find(key);
    if (--entry->second.connections == 0) http_by_address_.erase(entry);
}

void ListenerImpl::log_refused(const std::string& line) {
    const auto now = Clock::now();
    if (now - refused_logged_ < kRefusedLogPause) {
        ++refused_unlogged_;
        return;
    }
    refused_logged_ = now;
    const uint64_t others = std::exchange(refused_unlogged_, 0);
    log(LogLevel::kWarn, "net",
        others == 0 ? line : line + " (and " + std::to_string(others) + " more)");
}

}  // namespace

void raise_descriptor_limit() {
    rlimit limit = {};
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
    limit.rlim_cur = limit.rlim_max;
    (void)::setrlimit(RLIMIT_NOFILE, &limit);
}

Result<std::unique_ptr<Listener>> Listener::make(const Endpoint& listen, OnStream on_stream,
                                                 ListenerOptions options) {
    if (listen.tls && !options.tls) {
        return fail(Errc::kUsage, "listening with TLS needs a certificate and its key");
    }
    try {
        auto listener = std::make_unique<ListenerImpl>(std::move(on_stream), std::move(options));
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

Result<std::unique_ptr<Listener>> Listener::make(const Endpoint& listen, OnStream on_stream,
                                                 const HandshakeLimits& handshake,
                                                 MessageLimits limits) {
    ListenerOptions options;
    options.handshake = handshake;
    options.messages = limits;
    return make(listen, std::move(on_stream), std::move(options));
}

}  // namespace kvasir::net
