// The parties of relay_bench: each a process of its own.
//
// Used by relay_bench.cpp. Thread: main thread. Owns: children, which die with their objects.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <future>
#include <mutex>
#include <string>
#include <vector>

#include "relay/relay_testing.hpp"

namespace kvasir::bench {

using namespace kvasir::relay;
using namespace kvasir::relay::testing;

constexpr size_t kSmall = 4096;
constexpr size_t kBulkFrame = 256 << 10;
constexpr auto kPatience = milliseconds(60000);

inline void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "relay_bench: %s: %s\n", what, std::strerror(errno));
    std::exit(1);
}

inline std::string g_folder;  // certificates and nginx's files

// ---- processes ----

// A child that runs `work` and says one number when it is ready. It dies with us.
class Child {
public:
    Child(const std::function<void(int ready_fd)>& work) {
        int ends[2];
        require(::pipe(ends) == 0, "pipe");
        pid_ = ::fork();
        require(pid_ >= 0, "fork");
        if (pid_ == 0) {
            ::close(ends[0]);
            work(ends[1]);
            ::_exit(0);
        }
        ::close(ends[1]);
        require(::read(ends[0], &value_, sizeof(value_)) == sizeof(value_), "a child failed");
        ::close(ends[0]);
    }
    Child(Child&& other) noexcept : pid_(std::exchange(other.pid_, -1)), value_(other.value_) {}
    ~Child() {
        if (pid_ < 0) return;
        ::kill(pid_, SIGKILL);
        ::waitpid(pid_, nullptr, 0);
    }
    uint64_t value() const { return value_; }
    bool running() {
        if (pid_ > 0 && ::waitpid(pid_, nullptr, WNOHANG) != 0) pid_ = -1;
        return pid_ > 0;
    }
    pid_t pid() const { return pid_; }

private:
    pid_t pid_ = -1;
    uint64_t value_ = 0;
};

inline void ready(int fd, uint64_t value) {
    require(::write(fd, &value, sizeof(value)) == sizeof(value), "write");
    ::close(fd);
}

inline std::shared_ptr<const net::TlsServer> server_tls(bool tls) {
    if (!tls) return nullptr;
    return must(net::TlsServer::self_signed(g_folder), "certificate");
}

inline Target target_at(uint64_t port, bool tls) {
    Target target;
    target.endpoint.host = "127.0.0.1";
    target.endpoint.port = static_cast<uint16_t>(port);
    target.endpoint.tls = tls;
    if (tls) {
        net::ClientTrust trust;
        trust.pin = server_tls(true)->pin();
        target.tls = must(net::TlsClient::make(trust), "trust");
    }
    return target;
}

inline Child start_relay(bool tls) {
    return Child([tls](int fd) {
        RelayOptions options;
        options.tls = server_tls(tls);
        options.switchboard.connections_per_address_max = 100000;
        options.switchboard.connections_max = 100000;
        options.handshake.pending_per_address_max = 1024;
        const auto relay =
            must(Relay::start(must(net::parse_listen("127.0.0.1:0"), "listen"), options), "relay");
        ready(fd, relay->port());
        while (true) ::pause();
    });
}

// COMPUTE is answered by a RESULT of the same size; PING by as many bulk frames as its token says.
inline void serve(Node& node) {
    const Bytes bulk(kBulkFrame, 1);
    while (true) {
        const auto message = node.stream.receive(in(std::chrono::hours(1)));
        if (!message) return;
        const auto frame = wire::decode_frame(*message);
        if (!frame) return;
        wire::FrameHeader header = frame->header;
        if (header.type == FrameType::kCompute) {
            ByteWriter head;
            header.type = FrameType::kResult;
            wire::append_header(head, header);
            const std::span<const uint8_t> pieces[] = {head.data(), frame->payload};
            if (!node.stream.enqueue(pieces) || !node.stream.flush_until(in(kPatience))) return;
        } else if (header.type == FrameType::kPing && frame->payload.size() == 8) {
            const uint64_t count = ByteReader(frame->payload).u64();
            header.type = FrameType::kResult;
            header.payload_bytes = bulk.size();
            for (uint64_t i = 0; i < count; ++i) {
                ByteWriter head;
                wire::append_header(head, header);
                const std::span<const uint8_t> pieces[] = {head.data(), bulk};
                if (!node.stream.enqueue(pieces) || !node.stream.flush_until(in(kPatience))) return;
            }
        }
    }
}

// A server without a relay: one connection after the other.
inline Child start_direct(bool tls) {
    return Child([tls](int fd) {
        std::mutex mu;
        std::condition_variable wake;
        std::vector<net::MessageStream> streams;
        net::ListenerOptions options;
        options.tls = server_tls(tls);
        const auto listener = must(net::Listener::make(
                                       must(net::parse_listen("127.0.0.1:0"), "listen"),
                                       [&](net::MessageStream stream, std::string) {
                                           const std::lock_guard lock(mu);
                                           streams.push_back(std::move(stream));
                                           wake.notify_one();
                                       },
                                       std::move(options)),
                                   "listener");
        ready(fd, listener->port());
        while (true) {
            std::unique_lock lock(mu);
            wake.wait(lock, [&] { return !streams.empty(); });
            Node node(std::move(streams.back()));
            streams.pop_back();
            lock.unlock();
            serve(node);
        }
    });
}

inline Child start_worker(const Target& target) {
    return Child([target](int fd) {
        Node node = Node::attach(target, Role::kWorker);
        ready(fd, 1);
        serve(node);
    });
}

// ---- company for a healthy pair ----

// Bytes, counted by a child and read by its parent.
class Tally {
public:
    Tally() {
        void* memory = ::mmap(nullptr, sizeof(Counter), PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        require(memory != MAP_FAILED, "mmap");
        counter_ = new (memory) Counter(0);
    }
    ~Tally() { ::munmap(counter_, sizeof(Counter)); }
    Tally(const Tally&) = delete;
    Tally& operator=(const Tally&) = delete;
    void add(uint64_t bytes) const { counter_->fetch_add(bytes, std::memory_order_relaxed); }
    uint64_t bytes() const { return counter_->load(std::memory_order_relaxed); }

private:
    using Counter = std::atomic<uint64_t>;
    Counter* counter_;
};

// The first two processors this process may run on; -1 each when there is only one.
struct Cores {
    int relay = -1, others = -1;
};
inline Cores two_cores() {
    cpu_set_t set;
    require(::sched_getaffinity(0, sizeof(set), &set) == 0, "sched_getaffinity");
    std::vector<int> found;
    for (int core = 0; core < CPU_SETSIZE && found.size() < 2; ++core) {
        if (CPU_ISSET(core, &set)) found.push_back(core);
    }
    return found.size() == 2 ? Cores{found[0], found[1]} : Cores{};
}

// This thread, and the children it starts, run on one processor as long as the object lives.
class Pinned {
public:
    explicit Pinned(int core) {
        require(::sched_getaffinity(0, sizeof(before_), &before_) == 0, "sched_getaffinity");
        if (core < 0) return;
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(core, &set);
        require(::sched_setaffinity(0, sizeof(set), &set) == 0, "sched_setaffinity");
    }
    ~Pinned() { (void)::sched_setaffinity(0, sizeof(before_), &before_); }
    Pinned(const Pinned&) = delete;
    Pinned& operator=(const Pinned&) = delete;

private:
    cpu_set_t before_;
};

// Gives way to everybody, the kernel's own network threads included.
inline void run_when_idle() {
    const sched_param none = {};
    require(::sched_setscheduler(0, SCHED_IDLE, &none) == 0, "sched_setscheduler");
}

// A sender and its receiver in one process, at two ends of a relay.
struct HostilePair {
    HostilePair(const Target& target, size_t payload_bytes)
        : sink(Node::attach(target, Role::kBackbone)), source(Node::attach(target, Role::kWorker)) {
        uint16_t peer = 0;
        while (peer == 0) {
            const auto up = must(source.next_peer(), "peer");
            if (up.generation == sink.attached.generation) peer = up.handle;
        }
        frame = make_frame(FrameType::kResult, peer, 1, Bytes(payload_bytes));
    }
    Node sink, source;
    Bytes frame;
};

// What flood() sends: `frame` as a WebSocket client sends it, as often as fits into a MiB. A file
// in memory, so that sending it costs the sender next to nothing.
struct FloodFile {
    explicit FloodFile(const Bytes& frame) : fd(::memfd_create("flood", MFD_CLOEXEC)) {
        require(bool(fd), "memfd_create");
        wire::WsHeader header;
        header.masked = true;  // with the zero key
        header.payload_bytes = frame.size();
        std::array<uint8_t, wire::kWsHeaderBytesMax> head;
        const size_t head_bytes = wire::encode_ws_header(header, head);
        for (uint64_t i = 0; i < std::max<uint64_t>(1, (1 << 20) / frame.size()); ++i) {
            const iovec parts[] = {{head.data(), head_bytes},
                                   {const_cast<uint8_t*>(frame.data()), frame.size()}};
            const ssize_t written = ::writev(fd.get(), parts, 2);
            require(written == static_cast<ssize_t>(head_bytes + frame.size()), "writev");
            bytes += written;
        }
    }
    net::UniqueFd fd;
    off_t bytes = 0;
};

struct Flood {
    size_t piece_bytes = 256 << 10;  // of one system call
    size_t payload_bytes = kBulkFrame;
};

// Sends as fast as the line takes it, and throws away as fast as it comes, without a copy at either
// end. Ends with the connection.
inline void flood(const net::MessageStream& source, const net::MessageStream& sink,
                  const Bytes& frame, const Tally& tally, const Flood& how) {
    const FloodFile file(frame);
    require(::fcntl(source.fd(), F_SETFL, ::fcntl(source.fd(), F_GETFL) | O_NONBLOCK) == 0,
            "fcntl");
    for (off_t at = 0;; at = at == file.bytes ? 0 : at) {
        const ssize_t sent = ::sendfile(source.fd(), file.fd.get(), &at, how.piece_bytes);
        if (sent < 0 && errno != EAGAIN) ::_exit(1);
        const ssize_t got = ::recv(sink.fd(), nullptr, how.piece_bytes, MSG_TRUNC | MSG_DONTWAIT);
        if (got == 0 || (got < 0 && errno != EAGAIN)) ::_exit(1);
        if (got > 0) tally.add(static_cast<uint64_t>(got));
        if (sent > 0 || got > 0) continue;
        pollfd wanted[] = {{source.fd(), POLLOUT, 0}, {sink.fd(), POLLIN, 0}};
        (void)::poll(wanted, 2, -1);
    }
}

inline Child start_flooder(const Target& target, const Tally& tally, Flood how) {
    return Child([&, how](int fd) {
        run_when_idle();
        HostilePair pair(target, how.payload_bytes);
        ready(fd, 1);
        flood(pair.source.stream, pair.sink.stream, pair.frame, tally, how);
    });
}

// As much work for the machine, without a relay: it floods itself.
inline Child start_neighbour(const Tally& tally, Flood how) {
    return Child([&, how](int fd) {
        run_when_idle();
        std::promise<net::MessageStream> accepted;
        const auto listener =
            must(net::Listener::make(must(net::parse_listen("127.0.0.1:0"), "listen"),
                                     [&](net::MessageStream stream, std::string) {
                                         accepted.set_value(std::move(stream));
                                     }),
                 "listener");
        Node source = Node::connect(target_at(listener->port(), false));
        net::MessageStream sink = accepted.get_future().get();
        ready(fd, 1);
        const Bytes frame = make_frame(FrameType::kResult, 1, 1, Bytes(how.payload_bytes));
        flood(source.stream, sink, frame, tally, how);
    });
}

// Its receiver takes nothing, so its queue at the relay is full.
inline Child start_slow(const Target& target) {
    return Child([&](int fd) {
        run_when_idle();
        HostilePair pair(target, kBulkFrame);
        ready(fd, 1);
        auto& stream = pair.source.stream;
        while (stream.enqueue(pair.frame) && stream.flush_until(in(kPatience))) {
        }
        while (true) ::pause();
    });
}

// ---- nginx ----

inline bool have_nginx() {
    return ::access("/usr/sbin/nginx", X_OK) == 0 &&
           ::access("/usr/lib/nginx/modules/ngx_stream_module.so", R_OK) == 0;
}

inline uint16_t free_port() {
    return must(net::Listener::make(must(net::parse_listen("127.0.0.1:0"), "listen"),
                                    [](net::MessageStream, std::string) {}),
                "a port")
        ->port();
}

inline Child start_nginx(uint16_t port, uint64_t upstream, bool tls) {
    const std::string prefix = g_folder + (tls ? "/nginx_tls" : "/nginx_plain");
    ::mkdir(prefix.c_str(), 0700);
    std::ofstream conf(prefix + "/nginx.conf");
    conf << "load_module /usr/lib/nginx/modules/ngx_stream_module.so;\n"
         << "daemon off; master_process off; worker_processes 1; pid " << prefix << "/pid;\n"
         << "error_log " << prefix << "/error.log warn;\nevents { worker_connections 1024; }\n"
         << "stream { server { listen 127.0.0.1:" << port << (tls ? " ssl" : "")
         << "; tcp_nodelay on;\n"
         << "proxy_pass 127.0.0.1:" << upstream << ";\n";
    if (tls) {
        conf << "ssl_certificate " << g_folder << "/dev-cert.pem; ssl_certificate_key " << g_folder
             << "/dev-key.pem; ssl_protocols TLSv1.3;\n";
    }
    conf << "} }\n";
    conf.close();
    return Child([prefix](int fd) {
        ready(fd, 1);
        const std::string file = prefix + "/nginx.conf";
        ::execl("/usr/sbin/nginx", "nginx", "-p", prefix.c_str(), "-c", file.c_str(), nullptr);
        ::_exit(1);
    });
}

}  // namespace kvasir::bench
