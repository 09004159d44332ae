#include "backbone/hub.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/check.hpp"
#include "base/log.hpp"
#include "engine/runtime.hpp"
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

wire::BuildFingerprint own_build() {
    const engine::Fingerprint print = engine::fingerprint();
    return {"kvasir " KVASIR_VERSION, print.engine, print.isa, print.compiler, print.kernels};
}

}  // namespace

Hub::Hub(Replica& replica, RosterBoard& board, Verifier& verifier, dispatch::HealthOptions health,
         HubLimits limits)
    : replica_(replica),
      board_(board),
      verifier_(verifier),
      health_(health),
      limits_(limits),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      event_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    KVASIR_CHECK(epoll_ && event_);
    watch(epoll_.get(), EPOLL_CTL_ADD, event_.get(), kEventTag, EPOLLIN);
}

Result<std::unique_ptr<Hub>> Hub::make(const std::string& listen, Replica& replica,
                                       RosterBoard& board, Verifier& verifier,
                                       dispatch::HealthOptions health, HubLimits limits) {
    auto endpoint = net::parse_listen(listen);
    if (!endpoint) return tl::unexpected(endpoint.error());
    std::unique_ptr<Hub> hub(new Hub(replica, board, verifier, health, limits));
    Hub* self = hub.get();
    auto listener =
        net::Listener::make(*endpoint, [self](net::MessageStream stream, std::string address) {
            self->on_stream(std::move(stream), std::move(address));
        });
    if (!listener) return tl::unexpected(listener.error());
    hub->listener_ = std::move(*listener);
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
}

std::vector<std::shared_ptr<WorkerSession>> Hub::sessions() const {
    const std::lock_guard lock(mu_);
    std::vector<std::shared_ptr<WorkerSession>> out;
    for (const auto& [tag, session] : sessions_) out.push_back(session);
    return out;
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
        if (incoming_.size() >= limits_.joining_max)
            return;  // closes it: the peer will retry with backoff
        incoming_.emplace_back(std::move(stream), std::move(address));
    }
    notify(event_.get());
}

void Hub::run() {
    std::vector<epoll_event> events(64);
    auto last_tick = net::Clock::now();
    while (!stopping_.load()) {
        const int count =
            ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), kTickMs);
        for (int i = 0; i < count; ++i) {
            const uint64_t tag = events[static_cast<size_t>(i)].data.u64;
            if (tag == kEventTag) {
                uint64_t value = 0;
                [[maybe_unused]] const ssize_t got = ::read(event_.get(), &value, sizeof(value));
                take_incoming();
                sweep();
            } else if (joining_.contains(tag)) {
                on_joining(tag);
            } else {
                on_session(tag);
            }
        }
        if (net::Clock::now() - last_tick >= std::chrono::milliseconds(kTickMs)) {
            last_tick = net::Clock::now();
            tick();
        }
    }
    joining_.clear();
}

void Hub::take_incoming() {
    std::vector<std::pair<net::MessageStream, std::string>> streams;
    {
        const std::lock_guard lock(mu_);
        streams.swap(incoming_);
    }
    for (auto& [stream, address] : streams) {
        make_room();
        const uint64_t tag = next_tag_++;
        const int fd = stream.fd();
        joining_.emplace(tag, Joining{std::move(stream), net::Clock::now() + limits_.hello_deadline,
                                      address, false});
        watch(epoll_.get(), EPOLL_CTL_ADD, fd, tag, EPOLLIN | EPOLLRDHUP);
        on_joining(tag);  // bytes that came with the upgrade make no event
    }
}

// An honest worker says HELLO at once, so the oldest of many that do not is the one to lose.
void Hub::make_room() {
    if (joining_.size() < limits_.joining_max) return;
    refuse(joining_.begin()->second, {Errc::kBusy, "too many connections wait for a HELLO"});
    joining_.erase(joining_.begin());
}

void Hub::on_joining(uint64_t tag) {
    const auto found = joining_.find(tag);
    if (found == joining_.end()) return;
    bool joined = false;
    if (Status ok = join_step(tag, found->second, joined); !ok) refuse(found->second, ok.error());
    if (joined || found->second.stream.closed()) joining_.erase(found);
}

Status Hub::join_step(uint64_t tag, Joining& joining, bool& joined) {
    for (;;) {
        auto message = joining.stream.try_receive();
        if (!message) return tl::unexpected(message.error());
        if (!*message) return {};
        if (!joining.role_seen) {
            if ((*message)->size() != 1 ||
                (**message)[0] != static_cast<uint8_t>(wire::Role::kWorker)) {
                return fail(Errc::kProtocol, "the first message must be the role byte 'W'");
            }
            joining.role_seen = true;
            continue;
        }
        if (Status ok = on_hello(tag, joining, **message); !ok) return ok;
        joined = true;
        return {};
    }
}

void Hub::refuse(Joining& joining, const Error& error) {
    log(LogLevel::kWarn, "hub", "refused " + joining.address + ": " + error.detail);
    if (joining.stream.closed()) return;
    (void)joining.stream.enqueue(wire::encode_error({error.code, error.detail}, 0));
    joining.stream.close(error.code == Errc::kProtocol ? 1002 : 1008);
}

Status Hub::check_hello(const wire::Hello& hello) const {
    if (hello.major != wire::kProtocolMajor) {
        return fail(Errc::kVersion, "worker speaks protocol " + std::to_string(hello.major) + "." +
                                        std::to_string(hello.minor) + ", this backbone " +
                                        std::to_string(wire::kProtocolMajor) + "." +
                                        std::to_string(wire::kProtocolMinor) +
                                        ": update the older one");
    }
    const moe::Manifest* manifest = replica_.manifest();
    const bool has_id = hello.model_id != Sha256{};
    if (manifest != nullptr && has_id && hello.model_id != manifest->model_id) {
        return fail(Errc::kMismatch, "worker holds model " + to_hex(hello.model_id).substr(0, 16) +
                                         "..., this backbone runs " +
                                         to_hex(manifest->model_id).substr(0, 16) +
                                         "... (another model or another quantisation of it)");
    }
    if (hello.segments.empty()) return fail(Errc::kMismatch, "worker holds no experts");
    const wire::HeldSegment* before = nullptr;
    for (const wire::HeldSegment& held : hello.segments) {
        const Segment& segment = held.segment;
        const std::string where = "segment " + to_string(segment.layer) + ":" +
                                  std::to_string(segment.begin) + "-" + std::to_string(segment.end);
        const moe::ExpertBank* bank = replica_.model().find_bank(segment.layer);
        if (bank == nullptr || segment.begin >= segment.end || segment.end > bank->experts) {
            return fail(Errc::kMismatch, where + " does not exist in this model");
        }
        if (before != nullptr &&
            (before->segment.layer > segment.layer ||
             (before->segment.layer == segment.layer && before->segment.end > segment.begin))) {
            return fail(Errc::kProtocol, where + " is out of order or overlaps");
        }
        if (manifest != nullptr && manifest->segment_digest(segment) != held.digest) {
            return fail(Errc::kMismatch,
                        where + " has other bytes than this model (digest differs)");
        }
        before = &held;
    }
    return {};
}

Status Hub::on_hello(uint64_t tag, Joining& joining, std::span<const uint8_t> message) {
    auto frame = wire::decode_frame(message);
    if (!frame) return tl::unexpected(frame.error());
    if (frame->header.type != wire::FrameType::kHello)
        return fail(Errc::kProtocol, "expected HELLO");
    auto hello = wire::decode_hello(frame->payload);
    if (!hello) return tl::unexpected(hello.error());
    if (Status ok = check_hello(*hello); !ok) return ok;
    const auto others = sessions();
    if (others.size() >= limits_.sessions_max)
        return fail(Errc::kBusy, "this backbone has enough workers");
    wire::Welcome welcome;
    welcome.generation = tag;
    welcome.ping_interval_ms = static_cast<uint32_t>(limits_.ping_interval.count());
    welcome.build = own_build();
    if (Status ok = joining.stream.enqueue(wire::encode_welcome(welcome)); !ok) return ok;
    for (const auto& other : others) {
        if (other->hello().node == hello->node) {
            other->close({Errc::kClosed, "replaced by a newer connection of the same node"});
        }
    }
    auto session = std::make_shared<WorkerSession>(
        tag, std::move(joining.stream), std::move(*hello), epoll_.get(), event_.get(), health_);
    log(LogLevel::kInfo, "hub", "worker " + session->label() + " joined from " + joining.address);
    {
        const std::lock_guard lock(mu_);
        sessions_.emplace(tag, session);
    }
    on_session(tag);  // what came right behind the HELLO makes no event
    session->watch();
    verifier_.add(session);
    return {};
}

void Hub::on_session(uint64_t tag) {
    std::shared_ptr<WorkerSession> session;
    {
        const std::lock_guard lock(mu_);
        if (const auto found = sessions_.find(tag); found != sessions_.end())
            session = found->second;
    }
    if (!session) return;
    if (session->claim(this)) {
        (void)session->pump(nullptr, {});
        session->give_back(this);
    }
}

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
    for (const auto& session : sessions()) {
        if (!session->open()) continue;
        session->give_back_idle();
        if (now - session->last_heard() > limits_.silence_max) {
            session->close({Errc::kTimeout, "silent for too long"});
        } else if (session->wants_probe()) {
            if (now - session->last_ping() >= limits_.probe_interval) session->ping();
        } else if (now - std::max(session->last_ping(), session->last_heard()) >=
                   limits_.ping_interval) {
            session->ping();
        }
    }
    sweep();
}

// Takes closed sessions away and draining ones out of the roster.
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
}

}  // namespace kvasir::backbone
