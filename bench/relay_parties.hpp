// The parties of relay_bench: each a process of its own.
//
// Used by relay_bench.cpp. Thread: main thread. Owns: children, which die with their objects.
#pragma once

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
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
