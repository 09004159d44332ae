// A scripted HTTP origin for tests: a script decides about every request, the origin counts.
//
// Raw sockets and a thread per connection, so that any fault can be sent: cuts, stalls, drips,
// lies. With an identity it speaks TLS. Thread: the script runs on connection threads, one at a
// time. Owns: its sockets and threads; the destructor ends and joins them. Limits: none; tests
// only.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <csignal>

#include "base/check.hpp"

namespace kvasir::net::testing {

using Headers = std::vector<std::pair<std::string, std::string>>;

struct OriginRequest {
    std::string method;
    std::string target;
    Headers headers;  // names in lower case
    std::string body;
    uint64_t number = 0;  // of this origin, from 0

    std::string header(std::string_view name) const {
        for (const auto& [key, value] : headers) {
            if (key == name) return value;
        }
        return {};
    }
    // Of "bytes=A-B".
    std::optional<std::pair<uint64_t, uint64_t>> range() const {
        unsigned long long first = 0, last = 0;
        if (std::sscanf(header("range").c_str(), "bytes=%llu-%llu", &first, &last) != 2) return {};
        return std::pair<uint64_t, uint64_t>{first, last};
    }
};

struct OriginReply {
    int status = 200;
    Headers headers;
    std::string body;
    std::string_view shared;  // in place of body: outlives the origin
    bool length = true;       // with Content-Length, unless the headers have one
    bool chunked = false;
    bool close = false;                 // after this reply
    bool silent = false;                // no answer at all
    std::optional<uint64_t> cut_after;  // bytes of the body; then the connection ends
    bool stall = false;                 // in place of the cut: nothing more, until the client goes
    size_t drip_bytes = 0;              // this many at a time
    std::chrono::milliseconds drip_pause{0};
};

class TestOrigin {
public:
    using Script = std::function<OriginReply(const OriginRequest&)>;
    struct Options {
        std::string address = "127.0.0.1";
        uint16_t port = 0;
        SSL_CTX* tls = nullptr;  // kept by the caller
        int send_buffer_bytes = 0;
    };

    explicit TestOrigin(Script script) : TestOrigin(std::move(script), Options()) {}
    TestOrigin(Script script, Options options)
        : script_(std::move(script)), options_(std::move(options)) {
        listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        const int yes = 1;
        setsockopt(listener_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
        sockaddr_in address = {};
        address.sin_family = AF_INET;
        address.sin_port = htons(options_.port);
        KVASIR_CHECK(inet_pton(AF_INET, options_.address.c_str(), &address.sin_addr) == 1);
        socklen_t size = sizeof(address);
        auto* generic = reinterpret_cast<sockaddr*>(&address);
        KVASIR_CHECK(bind(listener_, generic, size) == 0 && listen(listener_, 128) == 0);
        KVASIR_CHECK(getsockname(listener_, generic, &size) == 0);
        port_ = ntohs(address.sin_port);
        acceptor_ = std::thread([this] { accept_all(); });
    }
    ~TestOrigin() {
        stopping_ = true;
        shutdown(listener_, SHUT_RDWR);
        acceptor_.join();
        close(listener_);
        {
            const std::lock_guard lock(mu_);
            for (const int fd : open_) shutdown(fd, SHUT_RDWR);
        }
        for (std::thread& thread : connections_) thread.join();
    }
    TestOrigin(const TestOrigin&) = delete;
    TestOrigin& operator=(const TestOrigin&) = delete;

    uint16_t port() const { return port_; }
    std::string url(std::string_view path, std::string_view host = "") const {
        return std::string(options_.tls ? "https://" : "http://") +
               std::string(host.empty() ? std::string_view(options_.address) : host) + ":" +
               std::to_string(port_) + std::string(path);
    }
    uint64_t accepts() const { return accepts_; }
    uint64_t body_bytes() const { return body_bytes_; }  // handed to the kernel
    uint64_t clients_gone() const { return clients_gone_; }
    std::vector<OriginRequest> requests() const {
        const std::lock_guard lock(mu_);
        return requests_;
    }

private:
    struct Peer {
        int fd = -1;
        SSL* ssl = nullptr;
        std::string unread;

        bool read_some() {
            char buffer[16 << 10];
            const ssize_t bytes = ssl != nullptr ? SSL_read(ssl, buffer, sizeof(buffer))
                                                 : recv(fd, buffer, sizeof(buffer), 0);
            if (bytes <= 0) return false;
            unread.append(buffer, static_cast<size_t>(bytes));
            return true;
        }
        bool write_all(std::string_view data) {
            while (!data.empty()) {
                const size_t most = std::min<size_t>(data.size(), 1 << 20);
                const ssize_t bytes = ssl != nullptr
                                          ? SSL_write(ssl, data.data(), static_cast<int>(most))
                                          : send(fd, data.data(), most, MSG_NOSIGNAL);
                if (bytes <= 0) return false;
                data.remove_prefix(static_cast<size_t>(bytes));
            }
            return true;
        }
        // Until the client goes, or for so long (-1: for ever). True: it went.
        bool wait_gone(int milliseconds) {
            pollfd entry = {fd, POLLRDHUP, 0};
            return poll(&entry, 1, milliseconds) > 0;
        }
    };

    void accept_all() {
        for (;;) {
            const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
            if (stopping_ || fd < 0) {
                if (fd >= 0) close(fd);
                return;
            }
            ++accepts_;
            const std::lock_guard lock(mu_);
            open_.push_back(fd);
            connections_.emplace_back([this, fd] { serve(fd); });
        }
    }

    void serve(int fd) {
        sigset_t pipe = {};
        sigemptyset(&pipe);
        sigaddset(&pipe, SIGPIPE);
        pthread_sigmask(SIG_BLOCK, &pipe, nullptr);  // OpenSSL writes without MSG_NOSIGNAL
        const int yes = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
        if (options_.send_buffer_bytes != 0) {
            setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &options_.send_buffer_bytes, sizeof(int));
        }
        Peer peer;
        peer.fd = fd;
        bool ready = true;
        if (options_.tls != nullptr) {
            peer.ssl = SSL_new(options_.tls);
            SSL_set_fd(peer.ssl, fd);
            ready = SSL_accept(peer.ssl) == 1;
        }
        while (ready && serve_one(peer)) {
        }
        if (peer.ssl != nullptr) SSL_free(peer.ssl);
        const std::lock_guard lock(mu_);
        std::erase(open_, fd);
        close(fd);
    }

    bool serve_one(Peer& peer) {
        OriginRequest request;
        if (!read_request(peer, request)) return false;
        OriginReply reply;
        {
            const std::lock_guard lock(mu_);
            request.number = requests_.size();
            requests_.push_back(request);
        }
        {
            const std::lock_guard lock(script_mu_);
            reply = script_(request);
        }
        return answer(peer, request, reply);
    }

    static bool read_request(Peer& peer, OriginRequest& request) {
        size_t end = 0;
        while ((end = peer.unread.find("\r\n\r\n")) == std::string::npos) {
            if (!peer.read_some()) return false;
        }
        std::string head = peer.unread.substr(0, end + 2);
        peer.unread.erase(0, end + 4);
        const size_t line = head.find("\r\n");
        const std::string first = head.substr(0, line);
        const size_t space = first.find(' ');
        request.method = first.substr(0, space);
        request.target = first.substr(space + 1, first.rfind(' ') - space - 1);
        for (size_t at = line + 2; at < head.size();) {
            const size_t stop = head.find("\r\n", at);
            const std::string text = head.substr(at, stop - at);
            const size_t colon = text.find(':');
            std::string name = text.substr(0, colon);
            std::transform(name.begin(), name.end(), name.begin(), ::tolower);
            size_t value = colon + 1;
            while (value < text.size() && text[value] == ' ') ++value;
            request.headers.emplace_back(name, text.substr(value));
            at = stop + 2;
        }
        const std::string length = request.header("content-length");
        const size_t bytes = length.empty() ? 0 : std::stoull(length);
        while (peer.unread.size() < bytes) {
            if (!peer.read_some()) return false;
        }
        request.body = peer.unread.substr(0, bytes);
        peer.unread.erase(0, bytes);
        return true;
    }

    // False: the connection ends.
    bool answer(Peer& peer, const OriginRequest& request, const OriginReply& reply) {
        if (reply.silent) {
            peer.wait_gone(-1);
            ++clients_gone_;
            return false;
        }
        const std::string_view body = reply.body.empty() ? reply.shared : reply.body;
        std::string head = "HTTP/1.1 " + std::to_string(reply.status) + " Scripted\r\n";
        bool has_length = false;
        for (const auto& [name, value] : reply.headers) {
            head += name + ": " + value + "\r\n";
            has_length = has_length || name == "Content-Length";
        }
        if (reply.chunked) {
            head += "Transfer-Encoding: chunked\r\n";
        } else if (reply.length && !has_length && reply.status != 204) {
            head += "Content-Length: " + std::to_string(body.size()) + "\r\n";
        }
        const bool ends = reply.close || (!reply.length && !reply.chunked) || reply.cut_after;
        if (reply.close) head += "Connection: close\r\n";
        if (!peer.write_all(head + "\r\n")) return false;
        if (request.method == "HEAD") return !ends;
        const uint64_t send_bytes =
            std::min<uint64_t>(reply.cut_after.value_or(body.size()), body.size());
        if (!send_body(peer, body.substr(0, send_bytes), reply)) {
            ++clients_gone_;
            return false;
        }
        if (reply.stall) {
            peer.wait_gone(-1);
            ++clients_gone_;
        }
        if (reply.chunked && !reply.cut_after && !peer.write_all("0\r\n\r\n")) return false;
        return !ends;
    }

    bool send_body(Peer& peer, std::string_view body, const OriginReply& reply) {
        const size_t piece_max = reply.drip_bytes != 0 ? reply.drip_bytes : 64 << 10;
        while (!body.empty()) {
            const std::string_view piece = body.substr(0, piece_max);
            bool sent = false;
            body_bytes_ += piece.size();  // before: whoever received it must find it counted
            if (reply.chunked) {
                char size[32];
                std::snprintf(size, sizeof(size), "%zx\r\n", piece.size());
                sent = peer.write_all(size) && peer.write_all(piece) && peer.write_all("\r\n");
            } else {
                sent = peer.write_all(piece);
            }
            if (!sent) {
                body_bytes_ -= piece.size();
                return false;
            }
            body.remove_prefix(piece.size());
            if (reply.drip_bytes != 0 && !body.empty() &&
                peer.wait_gone(static_cast<int>(reply.drip_pause.count()))) {
                return false;
            }
        }
        return true;
    }

    const Script script_;
    const Options options_;
    int listener_ = -1;
    uint16_t port_ = 0;
    std::thread acceptor_;
    std::atomic<bool> stopping_{false};
    std::atomic<uint64_t> accepts_{0};
    std::atomic<uint64_t> body_bytes_{0};
    std::atomic<uint64_t> clients_gone_{0};
    std::mutex script_mu_;
    mutable std::mutex mu_;
    // Guarded by mu_
    std::vector<OriginRequest> requests_;
    std::vector<int> open_;
    std::vector<std::thread> connections_;  // joined after the acceptor, so no longer guarded
};

// What a sound server answers about `content`, with these headers besides.
inline OriginReply serve_file(const OriginRequest& request, std::string_view content,
                              Headers headers = {}) {
    OriginReply reply;
    reply.headers = std::move(headers);
    const auto range = request.range();
    if (!range) {
        reply.shared = content;
        return reply;
    }
    if (range->first >= content.size()) {
        reply.status = 416;
        reply.headers.emplace_back("Content-Range", "bytes */" + std::to_string(content.size()));
        return reply;
    }
    const uint64_t last = std::min<uint64_t>(range->second, content.size() - 1);
    reply.status = 206;
    reply.headers.emplace_back("Content-Range", "bytes " + std::to_string(range->first) + "-" +
                                                    std::to_string(last) + "/" +
                                                    std::to_string(content.size()));
    reply.shared = content.substr(range->first, last - range->first + 1);
    return reply;
}

inline OriginReply redirect_to(std::string location, int status = 302) {
    OriginReply reply;
    reply.status = status;
    reply.headers.emplace_back("Location", std::move(location));
    reply.body = "moved";
    return reply;
}

inline OriginReply plain_reply(int status, std::string body, Headers headers = {}) {
    OriginReply reply;
    reply.status = status;
    reply.body = std::move(body);
    reply.headers = std::move(headers);
    return reply;
}

}  // namespace kvasir::net::testing
