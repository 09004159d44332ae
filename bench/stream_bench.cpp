// Round trip of a request and its answer between two processes over loopback, one thread each:
// MessageStream, and beside it bare TCP sockets with blocking calls (the floor).
//
//   stream_bench [seconds per line]
//
// Both sides alternate in one run, so that a busy machine is unfair to neither.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <span>
#include <vector>

#include "net/message_stream.hpp"
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

// ---- MessageStream with COMPUTE and RESULT frames ----

struct StreamPair {
    StreamPair(Sockets sockets, const Shape& shape)
        : fds(std::move(sockets)), request(shape.request_bytes), reply(shape.reply_bytes / 4 * 4) {}
    void serve() {
        fds.client.reset();
        MessageStream served(std::move(fds.server), Side::kServer, {});
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
        stream.emplace(std::move(fds.client), Side::kClient, std::vector<uint8_t>());
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

void compare(const Shape& shape, double seconds) {
    Times tcp_times;
    Times stream_times;
    {
        TcpPair tcp(connect_loopback(), shape);
        const pid_t tcp_child = fork_server(tcp);
        StreamPair stream(connect_loopback(), shape);
        const pid_t stream_child = fork_server(stream);
        Times warm_up;
        measure(tcp, warm_up, 200);
        measure(stream, warm_up, 200);
        const auto end = Clock::now() + std::chrono::duration<double>(seconds);
        while (Clock::now() < end) {
            measure(tcp, tcp_times, 500);
            measure(stream, stream_times, 500);
        }
        stream.stream.reset();
        tcp.fds.client.reset();
        ::kill(tcp_child, SIGKILL);  // the stream's child holds a copy of the bare client socket
        ::waitpid(tcp_child, nullptr, 0);
        ::waitpid(stream_child, nullptr, 0);
    }
    tcp_times.print("tcp", shape);
    stream_times.print("message stream", shape);
}

}  // namespace

int main(int argc, char** argv) {
    const double seconds = argc > 1 ? std::atof(argv[1]) : 3;
    for (const Shape& shape :
         {Shape{"3.5 KB/98 KB", 3504, 98304}, Shape{"128 B/1 KB", 128, 1024}}) {
        compare(shape, seconds);
    }
    return 0;
}
