// Round trip of a request and its answer between two processes over loopback, one thread each:
// MessageStream with and without TLS, and beside it bare TCP sockets with blocking calls (the
// floor).
//
//   stream_bench [seconds per line]
//   stream_bench idle [connections]
//
// All alternate in one run, so that a busy machine is unfair to none. `idle` opens connections to a
// Listener in another process and prints what each costs it in memory, plain and TLS.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "net/message_stream.hpp"
#include "net/socket_wait.hpp"
#include "net/tls.hpp"
#include "net/transport.hpp"
#include "net/upgrade.hpp"
#include "wire/messages.hpp"

namespace {

using namespace kvasir;
using namespace kvasir::net;

struct Shape {
    const char* name;
    size_t request_bytes;
    size_t reply_bytes;
};

void require(bool condition, const char* what) {
    if (condition) return;
    std::perror(what);
    std::exit(1);
}

struct Sockets {
    UniqueFd client;
    UniqueFd server;
};

Sockets connect_loopback() {
    UniqueFd listener(::socket(AF_INET, SOCK_STREAM, 0));
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* plain = reinterpret_cast<sockaddr*>(&address);
    require(::bind(listener.get(), plain, size) == 0, "bind");
    require(::listen(listener.get(), 1) == 0, "listen");
    require(::getsockname(listener.get(), plain, &size) == 0, "getsockname");
    Sockets sockets;
    sockets.client.reset(::socket(AF_INET, SOCK_STREAM, 0));
    require(::connect(sockets.client.get(), plain, size) == 0, "connect");
    sockets.server.reset(::accept(listener.get(), nullptr, nullptr));
    require(sockets.server.get() >= 0, "accept");
    const int on = 1;
    for (const int fd : {sockets.client.get(), sockets.server.get()}) {
        require(::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) == 0, "nodelay");
    }
    return sockets;
}

// ---- bare TCP ----

bool read_all(int fd, std::vector<uint8_t>& buffer) {
    size_t done = 0;
    while (done < buffer.size()) {
        const ssize_t got = ::recv(fd, buffer.data() + done, buffer.size() - done, MSG_WAITALL);
        if (got <= 0) return false;
        done += static_cast<size_t>(got);
    }
    return true;
}

bool write_all(int fd, const std::vector<uint8_t>& buffer) {
    size_t done = 0;
    while (done < buffer.size()) {
        const ssize_t sent = ::send(fd, buffer.data() + done, buffer.size() - done, MSG_NOSIGNAL);
        if (sent <= 0) return false;
        done += static_cast<size_t>(sent);
    }
    return true;
}

struct TcpPair {
    TcpPair(Sockets sockets, const Shape& shape)
        : fds(std::move(sockets)), request(shape.request_bytes), reply(shape.reply_bytes) {}
    void serve() {
        fds.client.reset();
        while (read_all(fds.server.get(), request) && write_all(fds.server.get(), reply)) {
        }
    }
    void start() { fds.server.reset(); }
    void exchange() {
        require(write_all(fds.client.get(), request), "write");
        require(read_all(fds.client.get(), reply), "read");
    }
    Sockets fds;
    std::vector<uint8_t> request;
    std::vector<uint8_t> reply;
};

// ---- TLS ----

struct Tls {
    std::shared_ptr<const TlsServer> server;
    std::shared_ptr<const TlsClient> client;

    Tls() {
        std::string folder =
            (std::filesystem::temp_directory_path() / "stream_bench-XXXXXX").string();
        require(::mkdtemp(folder.data()) != nullptr, "mkdtemp");
        auto made = TlsServer::self_signed(folder);
        require(made.has_value(), "self_signed");
        server = std::move(*made);
        auto trusting = TlsClient::make({server->pin(), ""});
        require(trusting.has_value(), "TlsClient");
        client = std::move(*trusting);
        std::filesystem::remove_all(folder);
    }
};

Transport make_transport(UniqueFd fd, Side side, const Tls* tls) {
    if (tls == nullptr) return Transport(std::move(fd));
    auto* context = side == Side::kServer ? tls->server->context() : tls->client->context();
    auto transport = Transport::make_tls(std::move(fd), context, side);
    require(transport.has_value(), "make_tls");
    while (true) {
        const auto done = transport->handshake();
        require(done.has_value(), "handshake");
        if (*done) return std::move(*transport);
        require(wait_for(transport->fd(), POLLIN, Deadline::max()).has_value(), "poll");
    }
}

// ---- MessageStream with COMPUTE and RESULT frames ----

struct StreamPair {
    StreamPair(Sockets sockets, const Shape& shape, const Tls* tls_in)
        : fds(std::move(sockets)),
          request(shape.request_bytes),
          reply(shape.reply_bytes / 4 * 4),
          tls(tls_in) {}
    void serve() {
        fds.client.reset();
        MessageStream served(make_transport(std::move(fds.server), Side::kServer, tls),
                             Side::kServer, {});
        while (true) {
            const auto message = served.receive(Deadline::max());
            if (!message) return;
            const auto frame = wire::decode_frame(*message);
            require(frame.has_value(), "frame");
            ByteWriter start;
            wire::begin_result(start, frame->header.request_id, 1, 1,
                               static_cast<uint32_t>(reply.size() / 4));
            const std::span<const uint8_t> pieces[] = {start.data(), reply};
            if (!served.enqueue(pieces) || !served.flush_until(Deadline::max())) return;
        }
    }
    void start() {
        fds.server.reset();
        stream.emplace(make_transport(std::move(fds.client), Side::kClient, tls), Side::kClient,
                       std::vector<uint8_t>());
    }
    void exchange() {
        const wire::Pair pair = {0, 3};
        head.clear();
        wire::begin_compute(head, ++request_id, 7, 15, 1, {&pair, 1}, request.size());
        const std::span<const uint8_t> pieces[] = {head.data(), request};
        require(stream->enqueue(pieces) && stream->flush_until(Deadline::max()), "enqueue");
        const auto message = stream->receive(Deadline::max());
        require(message.has_value(), "receive");
        const auto frame = wire::decode_frame(*message);
        require(frame && wire::decode_result(frame->payload), "result");
    }
    Sockets fds;
    std::vector<uint8_t> request;
    std::vector<uint8_t> reply;
    const Tls* tls;  // null: plain
    std::optional<MessageStream> stream;
    ByteWriter head;
    uint32_t request_id = 0;
};

template <class T>
pid_t fork_server(T& pair) {
    const pid_t child = ::fork();
    require(child >= 0, "fork");
    if (child == 0) {
        pair.serve();
        ::_exit(0);
    }
    pair.start();
    return child;
}

struct Times {
    std::vector<double> us;
    void print(const char* name, const Shape& shape) {
        std::sort(us.begin(), us.end());
        const auto at = [this](double q) { return us[static_cast<size_t>(q * (us.size() - 1))]; };
        std::printf("%-14s %-18s p50 %7.1f us   p90 %7.1f us   p99 %7.1f us   (%zu round trips)\n",
                    shape.name, name, at(0.5), at(0.9), at(0.99), us.size());
    }
};

template <class T>
void measure(T& pair, Times& times, int count) {
    for (int i = 0; i < count; ++i) {
        const auto start = Clock::now();
        pair.exchange();
        times.us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
    }
}

void compare(const Shape& shape, double seconds, const Tls& tls) {
    Times tcp_times;
    Times stream_times;
    Times tls_times;
    {
        TcpPair tcp(connect_loopback(), shape);
        const pid_t tcp_child = fork_server(tcp);
        StreamPair stream(connect_loopback(), shape, nullptr);
        const pid_t stream_child = fork_server(stream);
        StreamPair secure(connect_loopback(), shape, &tls);
        const pid_t tls_child = fork_server(secure);
        Times warm_up;
        measure(tcp, warm_up, 200);
        measure(stream, warm_up, 200);
        measure(secure, warm_up, 200);
        const auto end = Clock::now() + std::chrono::duration<double>(seconds);
        while (Clock::now() < end) {
            measure(tcp, tcp_times, 500);
            measure(stream, stream_times, 500);
            measure(secure, tls_times, 500);
        }
        for (const pid_t child : {tcp_child, stream_child, tls_child}) {
            ::kill(child, SIGKILL);  // later children hold copies of the sockets of earlier ones
            ::waitpid(child, nullptr, 0);
        }
    }
    tcp_times.print("tcp", shape);
    stream_times.print("message stream", shape);
    tls_times.print("... over TLS", shape);
}

// ---- memory of idle connections ----

uint64_t rss_bytes() {
    std::ifstream file("/proc/self/statm");
    uint64_t pages = 0;
    file >> pages >> pages;
    return pages * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

// In a child: a Listener that keeps its streams and, when asked, tells its memory.
void serve_idle(int pipe, std::shared_ptr<const TlsServer> tls) {
    std::mutex mu;
    std::condition_variable arrived;
    std::vector<MessageStream> streams;
    ListenerOptions options;
    options.tls = std::move(tls);
    auto listener = Listener::make(
        {false, "127.0.0.1", 0, ""},
        [&](MessageStream stream, const std::string&) {
            const std::lock_guard lock(mu);
            streams.push_back(std::move(stream));
            arrived.notify_one();
        },
        std::move(options));
    require(listener.has_value(), "listen");
    const uint64_t port = (*listener)->port();
    require(::send(pipe, &port, sizeof(port), 0) == sizeof(port), "send");
    uint64_t wanted = 0;
    while (::recv(pipe, &wanted, sizeof(wanted), MSG_WAITALL) == sizeof(wanted)) {
        {
            std::unique_lock lock(mu);
            arrived.wait(lock, [&] { return streams.size() >= wanted; });
            // One message has come over each, and been answered, as when a node attaches.
            MessageStream& last = streams.back();
            if (last.receive(Deadline::max())) (void)last.enqueue(std::vector<uint8_t>(100));
            last.release_idle_buffers();
        }
        const uint64_t bytes = rss_bytes();
        require(::send(pipe, &bytes, sizeof(bytes), 0) == sizeof(bytes), "send");
    }
}

void measure_idle(const char* name, uint32_t count, const Tls* tls) {
    int pipe[2];
    require(::socketpair(AF_UNIX, SOCK_STREAM, 0, pipe) == 0, "socketpair");
    const pid_t child = ::fork();
    require(child >= 0, "fork");
    if (child == 0) {
        ::close(pipe[0]);
        serve_idle(pipe[1], tls == nullptr ? nullptr : tls->server);
        ::_exit(0);
    }
    ::close(pipe[1]);
    uint64_t port = 0;
    require(::recv(pipe[0], &port, sizeof(port), MSG_WAITALL) == sizeof(port), "port");
    const Endpoint endpoint{tls != nullptr, "127.0.0.1", static_cast<uint16_t>(port), "/kvasir"};
    std::vector<MessageStream> streams;
    constexpr uint32_t kWarmUp = 20;
    uint64_t before = 0;
    const auto start = Clock::now();
    for (uint64_t made = 1; made <= count + kWarmUp; ++made) {
        auto stream = dial(endpoint, {}, {}, tls == nullptr ? nullptr : tls->client);
        require(stream.has_value(), "dial");
        streams.push_back(std::move(*stream));
        require(streams.back().enqueue(std::vector<uint8_t>(100)).has_value(), "enqueue");
        uint64_t bytes = 0;
        require(::send(pipe[0], &made, sizeof(made), 0) == sizeof(made), "ask");
        require(::recv(pipe[0], &bytes, sizeof(bytes), MSG_WAITALL) == sizeof(bytes), "rss");
        if (made == kWarmUp) before = bytes;
        if (made != count + kWarmUp) continue;
        const std::chrono::duration<double, std::milli> took = Clock::now() - start;
        std::printf("idle %-6s %u connections: %.1f KiB each, %.2f ms to make one\n", name, count,
                    static_cast<double>(bytes - before) / 1024 / count, took.count() / made);
    }
    ::close(pipe[0]);
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
}

}  // namespace

int main(int argc, char** argv) {
    const Tls tls;
    if (argc > 1 && std::strcmp(argv[1], "idle") == 0) {
        rlimit limit = {};
        require(::getrlimit(RLIMIT_NOFILE, &limit) == 0, "getrlimit");
        limit.rlim_cur = limit.rlim_max;
        (void)::setrlimit(RLIMIT_NOFILE, &limit);
        const auto count = static_cast<uint32_t>(argc > 2 ? std::atoi(argv[2]) : 1000);
        measure_idle("plain", count, nullptr);
        measure_idle("TLS", count, &tls);
        return 0;
    }
    const double seconds = argc > 1 ? std::atof(argv[1]) : 3;
    for (const Shape& shape : {Shape{"3.5 KB/98 KB", 3504, 98304}, Shape{"4 KB/4 KB", 4096, 4096},
                               Shape{"128 B/1 KB", 128, 1024}}) {
        compare(shape, seconds, tls);
    }
    return 0;
}
