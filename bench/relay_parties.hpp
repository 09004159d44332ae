// The parties of relay_bench: each a process of its own.
//
// Used by relay_bench.cpp. Thread: main thread. Owns: children, which die with their objects.
#pragma once

#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

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
constexpr size_t kFloodPiece = 16 << 10;
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

// This process, and the children it starts, run before all that is not urgent. False: not allowed.
inline bool run_at_once() {
    sched_param priority = {};
    priority.sched_priority = 1;
    return ::sched_setscheduler(0, SCHED_FIFO, &priority) == 0;
}

// Gives way at once to whoever is urgent; where nobody may be, to everybody.
inline void run_when_idle() {
    const bool urgent = ::sched_getscheduler(0) == SCHED_FIFO;
    const sched_param none = {};
    require(::sched_setscheduler(0, urgent ? SCHED_OTHER : SCHED_IDLE, &none) == 0,
            "sched_setscheduler");
}

// A sender and its receiver in one process, at two ends of a relay.
struct HostilePair {
    explicit HostilePair(const Target& target)
        : sink(Node::attach(target, Role::kBackbone)), source(Node::attach(target, Role::kWorker)) {
        uint16_t peer = 0;
        while (peer == 0) {
            const auto up = must(source.next_peer(), "peer");
            if (up.generation == sink.attached.generation) peer = up.handle;
        }
        frame = make_frame(FrameType::kResult, peer, 1, Bytes(kBulkFrame));
    }
    Node sink, source;
    Bytes frame;
};

// Sends as fast as the line takes it, and reads as fast as it comes. Ends with the connection.
// In small pieces: many kernels let nobody else run until a system call is over, however urgent.
inline void flood(net::MessageStream& source, net::MessageStream& sink, const Bytes& frame,
                  const Tally& tally) {
    net::MessageLimits limits;
    limits.receive_bytes_per_call = limits.send_bytes_per_call = kFloodPiece;
    source.set_limits(limits);
    sink.set_limits(limits);
    while (true) {
        if (!source.wants_write()) (void)source.enqueue(frame);
        (void)source.flush();
        const auto got = sink.try_receive();
        if (!got) ::_exit(1);
        if (*got) tally.add((*got)->size());
    }
}

inline Child start_flooder(const Target& target, const Tally& tally) {
    return Child([&](int fd) {
        run_when_idle();
        HostilePair pair(target);
        ready(fd, 1);
        flood(pair.source.stream, pair.sink.stream, pair.frame, tally);
    });
}

// As much work for the machine, without a relay: it floods itself.
inline Child start_neighbour(const Tally& tally) {
    return Child([&](int fd) {
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
        flood(source.stream, sink, make_frame(FrameType::kResult, 1, 1, Bytes(kBulkFrame)), tally);
    });
}

// Its receiver takes nothing, so its queue at the relay is full.
inline Child start_slow(const Target& target) {
    return Child([&](int fd) {
        run_when_idle();
        HostilePair pair(target);
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
