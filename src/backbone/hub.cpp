#include "backbone/hub.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/log.hpp"
#include "wire/messages.hpp"

namespace kvasir::backbone {
namespace {

constexpr uint64_t kEventTag = 0;
constexpr int kTickMs = 100;
constexpr size_t kDepartedMax = 1024;

void watch(int epoll_fd, int operation, int fd, uint64_t tag, uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = tag;
    ::epoll_ctl(epoll_fd, operation, fd, &event);
}

}  // namespace

Hub::Hub(HubOptions options, Replica& replica, RosterBoard& board, Verifier& verifier)
    : options_(std::move(options)),
      replica_(replica),
      board_(board),
      verifier_(verifier),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      event_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

Result<std::unique_ptr<Hub>> Hub::make(HubOptions options, Replica& replica, RosterBoard& board,
                                       Verifier& verifier) {
    std::unique_ptr<Hub> hub(new Hub(std::move(options), replica, board, verifier));
    Hub* self = hub.get();
    if (!hub->epoll_ || !hub->event_)
        return fail(Errc::kEnvironment, std::string("the hub cannot start: ") + strerror(errno));
    watch(hub->epoll_.get(), EPOLL_CTL_ADD, hub->event_.get(), kEventTag, EPOLLIN);
    if (!self->options_.listen.empty()) {
        auto endpoint = net::parse_listen(self->options_.listen);
        if (!endpoint) return tl::unexpected(endpoint.error());
        auto listener =
            net::Listener::make(*endpoint, [self](net::MessageStream stream, std::string address) {
                self->on_stream(std::move(stream), std::move(address));
            });
        if (!listener) return tl::unexpected(listener.error());
        hub->listener_ = std::move(*listener);
    }
    hub->thread_ = std::thread([self] { self->run(); });
    return hub;
}

Hub::~Hub() {
    listener_.reset();  // no new streams
    stopping_.store(true);
    notify(event_.get());
    if (thread_.joinable()) thread_.join();
    for (const auto& session : sessions()) {
        session->close({Errc::kClosed, "the backbone stops"});
        board_.remove(session->tag());
    }
    for (const auto& [tag, state] : links_)
        state.link->close({Errc::kClosed, "the backbone stops"});
}

std::vector<std::shared_ptr<WorkerSession>> Hub::sessions() const {
    const std::lock_guard lock(mu_);
    std::vector<std::shared_ptr<WorkerSession>> out;
    for (const auto& [tag, session] : sessions_) out.push_back(session);
    return out;
}

std::shared_ptr<WorkerSession> Hub::session_of(uint64_t link_tag, uint16_t peer) const {
    const std::lock_guard lock(mu_);
    for (const auto& [tag, session] : sessions_) {
        const bool here = session->link()->tag() == link_tag && session->peer() == peer;
        if (here && session->open()) return session;
    }
    return nullptr;
}

std::vector<WorkerReport> Hub::departed() const {
    const std::lock_guard lock(mu_);
    return departed_;
}

void Hub::reset_reports() {
    const std::lock_guard lock(mu_);
    departed_.clear();
    for (const auto& [tag, session] : sessions_) session->reset_report();
}

void Hub::on_stream(net::MessageStream stream, std::string address) {
    {
        const std::lock_guard lock(mu_);
        if (incoming_.size() >= options_.limits.joining_max)
            return;  // closes it: the peer will retry with backoff
        incoming_.push_back({next_tag_++, std::move(stream), std::move(address), false, {}});
    }
    notify(event_.get());
}

uint64_t Hub::adopt_relay(net::MessageStream stream, std::string address, RelayEvents events) {
    uint64_t tag = 0;
    {
        const std::lock_guard lock(mu_);
        tag = next_tag_++;
        incoming_.push_back({tag, std::move(stream), std::move(address), true, std::move(events)});
    }
    notify(event_.get());
    return tag;
}

void Hub::renew(uint64_t connection, std::string token) {
    {
        const std::lock_guard lock(mu_);
        renewals_.push_back({connection, std::move(token)});
    }
    notify(event_.get());
}

// ---- the thread ----

void Hub::run() {
    std::vector<epoll_event> events(64);
    auto last_tick = net::Clock::now();
    while (!stopping_.load()) {
        const int count =
            ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), kTickMs);
        for (int i = 0; i < count; ++i) on_event(events[static_cast<size_t>(i)].data.u64);
        if (net::Clock::now() - last_tick >= std::chrono::milliseconds(kTickMs)) {
            last_tick = net::Clock::now();
            tick();
        }
    }
    joining_.clear();
}

void Hub::on_event(uint64_t tag) {
    if (tag == kEventTag) {
        uint64_t value = 0;
        [[maybe_unused]] const ssize_t got = ::read(event_.get(), &value, sizeof(value));
        take_incoming();
        send_renewals();
        for (auto& [link_tag, state] : links_) take_control(state);
        sweep();
    } else if (joining_.contains(tag)) {
        on_joining(tag);
    } else {
        read_link(tag);
    }
}

void Hub::take_incoming() {
    std::vector<Incoming> streams;
    {
        const std::lock_guard lock(mu_);
        streams.swap(incoming_);
    }
    for (Incoming& incoming : streams) {
        if (incoming.relay) {
            take_relay(std::move(incoming));
            continue;
        }
        make_room();
        const uint64_t tag = incoming.tag;
        const int fd = incoming.stream.fd();
        net::MessageLimits before_hello = options_.messages;
        before_hello.message_bytes_max =
            std::min(before_hello.message_bytes_max, options_.limits.join_bytes_max);
        incoming.stream.set_limits(before_hello);
        Joining joining{std::move(incoming.stream),
                        net::Clock::now() + options_.limits.hello_deadline,
                        std::move(incoming.address)};
        joining_.emplace(tag, std::move(joining));
        watch(epoll_.get(), EPOLL_CTL_ADD, fd, tag, EPOLLIN | EPOLLRDHUP);
        on_joining(tag);  // bytes that came with the upgrade make no event
    }
}

void Hub::take_relay(Incoming incoming) {
    const uint64_t tag = incoming.tag;
    const int fd = incoming.stream.fd();
    LinkState& state =
        make_link(tag, Link::Kind::kRelay, std::move(incoming.stream), std::move(incoming.address));
    state.events = std::move(incoming.events);
    state.last_ping = net::Clock::now();
    tell_company(state);  // none yet
    watch(epoll_.get(), EPOLL_CTL_ADD, fd, tag, 0);
    log(LogLevel::kInfo, "hub", "attached to relay " + state.link->address());
    read_link(tag);
    state.link->watch();
}

void Hub::send_renewals() {
    std::vector<Renewal> renewals;
    {
        const std::lock_guard lock(mu_);
        renewals.swap(renewals_);
    }
    for (const Renewal& renewal : renewals) {
        const auto found = links_.find(renewal.tag);
        if (found == links_.end()) continue;  // its end was told
        LinkState& state = found->second;
        const uint32_t request = ++state.renewals;
        const Status ok = state.link->send(wire::encode_renew(renewal.token, request));
        if (!ok) on_renewed(state, request, tl::unexpected(ok.error()));
    }
}

Hub::LinkState& Hub::make_link(uint64_t tag, Link::Kind kind, net::MessageStream stream,
                               std::string address) {
    LinkState state;
    if (kind != Link::Kind::kRelay) stream.set_limits(options_.messages);
    state.link = std::make_shared<Link>(tag, kind, std::move(stream), std::move(address),
                                        epoll_.get(), event_.get());
    return links_.emplace(tag, std::move(state)).first->second;
}

// Reads a link that nobody else reads, and deals with what is for the hub.
void Hub::read_link(uint64_t tag) {
    const auto found = links_.find(tag);
    if (found == links_.end()) return;
    LinkState& state = found->second;
    if (state.link->claim(this)) {
        (void)state.link->pump(nullptr, {});
        state.link->give_back(this);
    }
    take_control(state);
}

// ---- now and then ----

void Hub::tick() {
    const auto now = net::Clock::now();
    for (auto it = joining_.begin(); it != joining_.end();) {
        if (now >= it->second.deadline) {
            refuse(it->second, {Errc::kTimeout, "no HELLO in time"});
            it = joining_.erase(it);
        } else {
            ++it;
        }
    }
    tick_links();
    tick_sessions();
    sweep();
}

void Hub::tick_links() {
    const auto now = net::Clock::now();
    for (auto& [tag, state] : links_) {
        Link& link = *state.link;
        if (!link.open()) continue;
        link.give_back_idle();
        if (link.kind() != Link::Kind::kRelay) continue;  // its session is looked after
        leave_in_time(state, now);
        const uint64_t refused = link.hellos_refused();
        if (refused != state.hellos_refused && refusals_.take(now)) {
            log(LogLevel::kWarn, "hub",
                link.address() + ": " + std::to_string(refused - state.hellos_refused) +
                    " HELLOs were not taken: too many, or too long" + refusals_.left_out());
            state.hellos_refused = refused;
        }
        if (now - link.last_heard() > options_.limits.silence_max) {
            link.close({Errc::kTimeout, "silent for too long"});
        } else if (now - std::max(state.last_ping, link.last_heard()) >=
                   options_.limits.ping_interval) {
            state.last_ping = now;
            (void)link.send(wire::encode_ping(static_cast<uint64_t>(tag)));
        }
    }
}

void Hub::tick_sessions() {
    const auto now = net::Clock::now();
    for (const auto& session : sessions()) {
        if (!session->open()) continue;
        if (now - session->last_heard() > options_.limits.silence_max) {
            session->close({Errc::kTimeout, "silent for too long"});
        } else if (session->wants_probe()) {
            if (now - session->last_ping() >= options_.limits.probe_interval) session->ping();
        } else if (now - std::max(session->last_ping(), session->last_heard()) >=
                   options_.limits.ping_interval) {
            session->ping();
        }
    }
}

// Takes ended sessions and links away, and draining ones out of the roster.
void Hub::sweep() {
    for (const auto& session : sessions()) {
        if (session->draining()) board_.remove(session->tag());
        if (session->open()) continue;
        board_.remove(session->tag());
        verifier_.remove(session->tag());
        const std::lock_guard lock(mu_);
        sessions_.erase(session->tag());
        if (departed_.size() < kDepartedMax) departed_.push_back(session->report());
    }
    for (auto it = links_.begin(); it != links_.end();) {
        LinkState& state = it->second;
        if (state.link->open()) {
            ++it;
            continue;
        }
        // What came before its end counts, whoever read it: a MOVE above all.
        take_control(state);
        if (state.events.on_end) state.events.on_end();
        it = links_.erase(it);
    }
}

}  // namespace kvasir::backbone
