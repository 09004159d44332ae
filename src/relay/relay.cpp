#include "relay/relay.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <future>
#include <utility>

#include "relay/relay_impl.hpp"

namespace kvasir::relay {
namespace {

using net::MessageStream;

net::HttpResponse text_response(int status, std::string type, std::string body) {
    net::HttpResponse response;
    response.status = status;
    response.content_type = std::move(type);
    response.body = std::move(body);
    return response;
}

}  // namespace

RelayImpl::~RelayImpl() {
    local_listener_.reset();
    listener_.reset();  // nothing comes in any more
    if (!thread_.joinable()) return;
    stopping_.store(true);
    post([] {});
    thread_.join();
}

Status RelayImpl::start(const net::Endpoint& listen) {
    epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
    wake_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!epoll_ || !wake_) {
        return fail(Errc::kEnvironment, std::string("relay: epoll: ") + std::strerror(errno));
    }
    epoll_event event = {};
    event.events = EPOLLIN;
    event.data.u64 = RelayImpl::kWakeKey;
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) != 0) {
        return fail(Errc::kEnvironment, std::string("relay: epoll: ") + std::strerror(errno));
    }
    net::ListenerOptions listener;
    listener.handshake = options_.handshake;
    listener.messages.message_bytes_max = kAttachMessageBytesMax;
    listener.messages.receive_bytes_per_call = options_.turn_bytes;
    listener.tls = options_.tls;
    listener.http_limits = options_.http_limits;
    listener.http = [this](net::HttpRequest request, net::Respond respond) {
        answer_http(std::move(request), std::move(respond));
    };
    thread_ = std::thread([this] { run(); });
    const auto take = [this](MessageStream stream, std::string peer) {
        auto shared = std::make_shared<MessageStream>(std::move(stream));
        post([this, shared, peer = std::move(peer)] { adopt(std::move(*shared), peer); });
    };
    auto made = net::Listener::make(listen, take, listener);
    if (!made) return tl::unexpected(std::move(made.error()));
    listener_ = std::move(*made);
    if (!options_.local_port) return {};
    listener.tls = nullptr;
    auto local = net::Listener::make(*net::parse_listen("127.0.0.1:0"), take, std::move(listener));
    if (!local) return tl::unexpected(std::move(local.error()));
    local_listener_ = std::move(*local);
    return {};
}

void RelayImpl::post(std::function<void()> work) const {
    {
        const std::lock_guard lock(mu_);
        posted_.push_back(std::move(work));
    }
    const uint64_t one = 1;
    (void)!::write(wake_.get(), &one, sizeof(one));
}

void RelayImpl::drain(milliseconds within, std::string url) {
    draining_.store(true);
    url.resize(std::min<size_t>(url.size(), wire::kAttachTextMax));
    post([this, within, url = std::move(url)] { apply(Drain{within, url}); });
}

void RelayImpl::revoke(std::vector<uint64_t> serials) {
    std::ranges::sort(serials);
    post([this, serials = std::move(serials)] { apply(Revoke{serials}); });
}

RelayStats RelayImpl::stats() const {
    auto promise = std::make_shared<std::promise<RelayStats>>();
    auto future = promise->get_future();
    post([this, promise] { promise->set_value(collect()); });
    return future.get();
}

void RelayImpl::answer_http(net::HttpRequest request, net::Respond respond) {
    if (request.path == "/healthz" || request.path == "/metrics") {
        if (request.method != "GET" && request.method != "HEAD") {
            return respond(text_response(405, "text/plain", "GET only\n"));
        }
        if (request.path == "/healthz") {
            if (draining_.load()) return respond(text_response(503, "text/plain", "draining\n"));
            return respond(text_response(200, "text/plain", "ok\n"));
        }
        return post([this, respond = std::move(respond)] {
            respond(text_response(200, "text/plain; version=0.0.4; charset=utf-8",
                                  prometheus_text(collect())));
        });
    }
    if (options_.http) return options_.http(std::move(request), std::move(respond));
    respond(net::error_response({Errc::kNotFound, "a relay has /kvasir, /healthz and /metrics"}));
}

Result<std::unique_ptr<Relay>> Relay::start(const net::Endpoint& listen, RelayOptions options) {
    net::raise_descriptor_limit();
    auto relay = std::make_unique<RelayImpl>(std::move(options));
    if (Status ok = relay->start(listen); !ok) return tl::unexpected(std::move(ok.error()));
    return std::unique_ptr<Relay>(std::move(relay));
}

}  // namespace kvasir::relay
