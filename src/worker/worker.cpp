#include "worker/worker.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <utility>

#include "base/log.hpp"
#include "engine/runtime.hpp"
#include "wire/attach.hpp"

namespace kvasir::worker {
namespace {

using namespace std::chrono_literals;

constexpr auto kStableTime =
    access::Route::kStable;  // a connection that lasted so long resets the pauses between attempts
constexpr auto kWriteDeadline =
    30s;  // a backbone that does not read its answers for so long is gone

void drain_event(int event_fd) {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(event_fd, &count, sizeof(count));
}

int milliseconds_until(net::Deadline deadline) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - net::Clock::now()).count();
    return static_cast<int>(std::clamp<int64_t>(left, 0, 60000));
}

constexpr auto kHelloPauseFirst = 1s;  // after a backbone behind a relay refused us
constexpr auto kHelloPauseMax = 60s;
constexpr size_t kPeersMax = 1024;

// No later attempt can succeed: the two sides do not fit, or the token must be renewed first.
bool is_final(Errc code) {
    return code == Errc::kVersion || code == Errc::kMismatch || code == Errc::kDenied ||
           code == Errc::kExpired || code == Errc::kRevoked;
}

}  // namespace

Result<std::unique_ptr<Worker>> Worker::make(const Holding& holding, const WorkerOptions& options) {
    auto endpoint = options.attach ? Result<net::Endpoint>(options.attach->route->home().endpoint)
                                   : net::parse_url(options.connect);
    if (!endpoint) return tl::unexpected(endpoint.error());
    if (endpoint->tls && !(options.attach ? options.attach->route->home().tls : options.tls)) {
        return fail(Errc::kUsage,
                    "a hub at wss:// cannot be checked here: give ws:// (in a private network), "
                    "or join a market with --join");
    }
    auto device = engine::find_device(options.device);
    if (!device) return tl::unexpected(device.error());
    auto engine = engine::ExpertEngine::make(*device, options.threads, options.compute_with);
    if (!engine) return tl::unexpected(engine.error());
    ExpertService service(holding, *device, std::move(*engine));
    std::unique_ptr<Worker> worker(new Worker(holding, options, *endpoint, std::move(service)));
    if (!worker->wake_)
        return fail(Errc::kEnvironment, std::string("the worker cannot start: ") + strerror(errno));
    return worker;
}

Worker::Worker(const Holding& holding, WorkerOptions options, net::Endpoint endpoint,
               ExpertService service)
    : holding_(holding),
      options_(std::move(options)),
      endpoint_(std::move(endpoint)),
      service_(std::move(service)),
      watch_(options_.sleep_max),
      wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    std::random_device random;
    for (uint8_t& byte : node_) byte = static_cast<uint8_t>(random());
}

Worker::~Worker() = default;

void Worker::stop() noexcept {
    stopping_.store(true);
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
}

void Worker::renew(std::string token) {
    {
        const std::lock_guard lock(mu_);
        token_ = std::move(token);
    }
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
}

bool Worker::pause(std::chrono::milliseconds time) {
    const auto deadline = net::Clock::now() + time;
    while (!stopping_.load() && net::Clock::now() < deadline) {
        pollfd entry{wake_.get(), POLLIN, 0};
        if (::poll(&entry, 1, milliseconds_until(deadline)) > 0) drain_event(wake_.get());
    }
    return !stopping_.load();
}

Status Worker::run() {
    auto wait = options_.pause_first;
    access::Route* const route = options_.attach ? options_.attach->route.get() : nullptr;
    while (!stopping_.load()) {
        // Where a MOVE led, nobody's word is final: the configured relay is asked again.
        const bool is_at_home = route == nullptr || route->at_home();
        auto stream = join();
        const auto joined = net::Clock::now();
        Error error;
        access::Route::End end;
        if (stream) {
            if (route != nullptr) route->on_attached(joined);
            Status served = serve(*stream);
            serving_.store(false);
            if (!served && stream->closed()) look_for_reason(*stream, served.error());
            stream->close();
            if (route != nullptr) end = route->on_end(net::Clock::now());
            if (served) return {};
            error = served.error();
        } else {
            error = stream.error();
            if (route != nullptr) route->on_failed();
        }
        if (Status ok = holding_.mapping().unchanged(); !ok) return ok;
        if (is_at_home && is_final(error.code)) return tl::unexpected(error);
        // Accepted and dropped at once, again and again, must not become a busy loop for both
        // sides.
        if (stream && net::Clock::now() - joined >= kStableTime) wait = options_.pause_first;
        const auto next = end.pause_or(wait / 2 + wait * static_cast<int>(random_() % 1000) / 1000);
        if (!end.pause) say_waiting(error.detail);
        log(LogLevel::kInfo, "worker",
            error.detail + "; next try in " + std::to_string(next.count()) + " ms");
        if (!pause(next)) break;
        wait = std::min(wait * 2, options_.pause_max);
    }
    return {};
}

// Nothing can be sent any more: what had arrived before says why, perhaps, and where to go.
void Worker::look_for_reason(net::MessageStream& stream, Error& error) const {
    const auto end = net::Clock::now() + 1s;
    while (net::Clock::now() < end) {
        auto message = stream.try_receive();
        if (!message) return;
        if (!*message && !stream.may_have_more()) return;
        if (!*message) {  // the rest of it is on its way
            const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - net::Clock::now());
            pollfd ready{stream.fd(), POLLIN, 0};
            if (::poll(&ready, 1, static_cast<int>(std::max<int64_t>(left.count(), 0))) <= 0)
                return;
            continue;
        }
        auto frame = wire::decode_frame(**message);
        if (!frame) return;
        const wire::FrameHeader& header = frame->header;
        if (header.peer != 0) continue;
        if (options_.attach && header.type == wire::FrameType::kMove) {
            (void)on_move(*frame);
            continue;
        }
        if (header.type != wire::FrameType::kError || header.request_id != 0) continue;
        auto told = wire::decode_error(frame->payload);
        if (!told) return;
        error = {told->code, (options_.attach ? "the relay says: " : "the backbone says: ") +
                                 printable(told->detail, 500)};
        return;
    }
}

// Once each time that the connection is lost or was never there; the attempts are in the log.
void Worker::say_waiting(const std::string& why) {
    if (told_waiting_ || !options_.on_line) return;
    told_waiting_ = true;
    options_.on_line(why + "; trying again until the " + (options_.attach ? "relay" : "backbone") +
                     " answers");
}

// ---- serving ----

// Ok: drained after stop(). An error: the connection is gone, or was left: the relay stops, or
// nobody to work with is there.
Status Worker::serve(net::MessageStream& stream) {
    auto last_ping = net::Clock::now();
    auto last_request = net::Clock::now();
    net::Deadline drain_end{};
    draining_ = false;
    tell_company();  // nobody yet
    for (;;) {
        // Before the next request: a busy backbone must not put the end off for ever.
        if (has_to_leave() && !draining_) {
            draining_ = true;
            last_request = net::Clock::now();
            drain_end = last_request + options_.drain_max;
            if (Status ok = drain(stream); !ok) return ok;
        }
        auto message = stream.try_receive();
        if (!message) return tl::unexpected(message.error());
        if (*message) {
            last_request = net::Clock::now();
            if (Status ok = answer(stream, **message); !ok) return ok;
            if (Status ok = check_awake(0ns); !ok) return ok;
            if (stream.may_have_more() && (!draining_ || last_request < drain_end)) continue;
        }
        const auto now = net::Clock::now();
        if (draining_ && (now >= drain_end || now - last_request >= options_.drain_quiet)) {
            (void)stream.enqueue(wire::encode_simple(wire::FrameType::kGoodbye));
            (void)stream.flush_until(now + 1s);
            if (stopping_.load()) return {};
            return fail(Errc::kClosed, options_.attach->route->relay_stops()
                                           ? "the relay stops"
                                           : "there is nobody to work with at this relay");
        }
        if (now - stream.last_heard() > options_.silence_max)
            return fail(Errc::kTimeout, "nothing heard from the other side");
        if (now - std::max(last_ping, stream.last_heard()) >= ping_interval_) {
            last_ping = now;
            const auto token = static_cast<uint64_t>(now.time_since_epoch().count());
            if (Status ok = stream.enqueue(wire::encode_ping(token)); !ok) return ok;
        }
        const auto ping_at = std::max(last_ping, stream.last_heard()) + ping_interval_;
        const auto wake_at = draining_ ? std::min(drain_end, last_request + options_.drain_quiet)
                                       : std::min(leave_at(), ping_at);
        if (Status ok = wait(stream, wake_at); !ok) return ok;
    }
}

// Whether a backbone is there: told again it changes nothing.
void Worker::tell_company() {
    if (options_.attach) options_.attach->route->on_company(!peers_.empty(), net::Clock::now());
}

net::Deadline Worker::leave_at() const {
    return options_.attach ? options_.attach->route->leave_at() : net::Deadline::max();
}

bool Worker::has_to_leave() const {
    return stopping_.load() || net::Clock::now() >= leave_at();
}

// Until a message, stop(), renew(), or `until`; says HELLO where one is due.
Status Worker::wait(net::MessageStream& stream, net::Deadline until) {
    if (!draining_ && options_.attach) {
        if (Status ok = say_hello(stream); !ok) return ok;
        for (const auto& [handle, peer] : peers_) until = std::min(until, peer.hello_at());
    }
    // The shorter the wait, the less of a sleep hides in it.
    if (options_.sleep_max.count() > 0)
        until = std::min(until, net::Clock::now() + options_.sleep_max);
    pollfd entries[2] = {{stream.fd(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
    const int timeout = milliseconds_until(until);
    ::poll(entries, 2, timeout);
    if (Status ok = check_awake(std::chrono::milliseconds(timeout)); !ok) return ok;
    if (entries[1].revents == 0) return {};
    drain_event(wake_.get());
    std::string token;
    {
        const std::lock_guard lock(mu_);
        token.swap(token_);
    }
    return token.empty() ? Status() : stream.enqueue(wire::encode_renew(token, 1));
}

// A sleep counts from the moment that there is a connection, and before anybody is told of it.
void Worker::watch_from_now() {
    watch_ = SleepWatch(options_.sleep_max);
    (void)watch_.check(boot_time(), process_cpu_time(), 0ns);
}

Status Worker::check_awake(std::chrono::nanoseconds waited) {
    if (options_.sleep_max.count() == 0) return {};
    if (!watch_.check(boot_time(), process_cpu_time(), waited)) return {};
    return fail(Errc::kClosed, "this process was asleep: connecting anew");
}

Answer Worker::compute(std::span<const uint8_t> message, Speaker speaker) {
    Answer answer = service_.handle(message, speaker);
    if (options_.before_answer) options_.before_answer();
    return answer;
}

Status Worker::say_hello(net::MessageStream& stream) {
    const auto now = net::Clock::now();
    for (auto& [handle, peer] : peers_) {
        if (now < peer.hello_at()) continue;
        peer.said_hello = true;
        // The HELLO or its WELCOME may be lost.
        peer.welcome_by = now + with_jitter(options_.welcome_max);
        auto message = wire::encode_hello(hello());
        wire::set_peer(message, handle);
        if (Status ok = send(stream, message); !ok) return ok;
    }
    return {};
}

// Longer by up to a half: thousands that a backbone had no room for must not come at once.
std::chrono::milliseconds Worker::with_jitter(std::chrono::milliseconds time) {
    return time + time * static_cast<int>(random_() % 500) / 1000;
}

Status Worker::drain(net::MessageStream& stream) {
    auto message = wire::encode_simple(wire::FrameType::kDrain);
    if (!options_.attach) return stream.enqueue(message);
    for (const auto& [handle, peer] : peers_) {
        if (!peer.said_hello) continue;
        wire::set_peer(message, handle);
        if (Status ok = stream.enqueue(message); !ok) return ok;
    }
    return {};
}

Status Worker::send(net::MessageStream& stream, std::span<const uint8_t> head,
                    std::span<const uint8_t> body) {
    const std::span<const uint8_t> pieces[] = {head, body};
    if (Status ok = stream.enqueue(pieces); !ok) return ok;
    if (!stream.wants_write()) return {};
    return stream.flush_until(net::Clock::now() + kWriteDeadline);
}

// An error also when the connection is over by what the message said.
Status Worker::answer(net::MessageStream& stream, std::span<const uint8_t> message) {
    if (options_.attach) {
        auto frame = wire::decode_frame(message);
        if (!frame) return tl::unexpected(frame.error());
        return frame->header.peer == 0 ? on_server_frame(stream, *frame, message)
                                       : answer_peer(stream, *frame, message);
    }
    const Answer answer = compute(message, Speaker::kBackbone);
    if (!answer.head.empty()) {
        if (Status ok = send(stream, answer.head, answer.body); !ok) return ok;
    }
    if (answer.close) return tl::unexpected(answer.reason);
    return {};
}

// What a backbone does wrong ends what we have with it, not the connection.
Status Worker::answer_peer(net::MessageStream& stream, const wire::FrameView& frame,
                           std::span<const uint8_t> message) {
    const auto found = peers_.find(frame.header.peer);
    if (found == peers_.end() || !found->second.said_hello) return {};  // it has just left
    Peer& peer = found->second;
    if (frame.header.type == wire::FrameType::kWelcome) {
        Status ok = peer.welcomed ? fail(Errc::kProtocol, "a second WELCOME") : on_welcome(frame);
        if (!ok) {
            pause_peer(peer, ok.error());
            return {};
        }
        peer.welcomed = net::Clock::now();
        peer.welcome_by = net::Deadline::max();
        return {};
    }
    const Answer answer = compute(message, Speaker::kBackbone);
    if (!answer.head.empty()) {
        if (Status ok = send(stream, answer.head, answer.body); !ok) return ok;
    }
    if (answer.over) return tl::unexpected(answer.reason);
    if (answer.close) pause_peer(peer, answer.reason);
    return {};
}

// Whatever it says, also that it runs another version or model: others may come, and it may be
// another one when we ask again. Who welcomes and drops us in turn is asked less and less, too.
void Worker::pause_peer(Peer& peer, const Error& reason) {
    const auto now = net::Clock::now();
    if (peer.welcomed && now - *peer.welcomed >= kStableTime) peer.pause = 0ms;
    service_.reset(peer.info.handle);
    peer.said_hello = false;
    peer.welcomed.reset();
    peer.pause =
        std::clamp<std::chrono::milliseconds>(peer.pause * 2, kHelloPauseFirst, kHelloPauseMax);
    const auto pause = with_jitter(peer.pause);
    peer.hello_again = now + pause;
    log(LogLevel::kWarn, "worker",
        "backbone " + printable(peer.info.name, 40) + ": " + reason.detail + "; HELLO again in " +
            std::to_string(pause.count()) + " ms");
}

Status Worker::on_server_frame(net::MessageStream& stream, const wire::FrameView& frame,
                               std::span<const uint8_t> message) {
    switch (frame.header.type) {
        case wire::FrameType::kPeerUp: {
            auto info = wire::decode_peer_up(frame.payload);
            if (!info) return tl::unexpected(info.error());
            if (info->role != wire::Role::kBackbone) return {};
            if (peers_.size() >= kPeersMax) return fail(Errc::kLimit, "too many backbones");
            service_.reset(info->handle);
            Peer peer;
            peer.info = std::move(*info);
            const uint16_t handle = peer.info.handle;
            peers_.insert_or_assign(handle, std::move(peer));
            tell_company();
            draining_ = draining_ && has_to_leave();  // not when it was only alone
            return draining_ ? Status() : say_hello(stream);
        }
        case wire::FrameType::kPeerDown: {
            auto info = wire::decode_peer_down(frame.payload);
            if (!info) return tl::unexpected(info.error());
            service_.reset(info->handle);
            peers_.erase(info->handle);
            tell_company();
            return {};
        }
        case wire::FrameType::kMove:
            return on_move(frame);
        case wire::FrameType::kAttached:
            return {};  // the answer to a RENEW
        default: {
            const Answer answer = compute(message, Speaker::kRelay);
            if (!answer.head.empty()) {
                if (Status ok = send(stream, answer.head, answer.body); !ok) return ok;
            }
            if (answer.close) return tl::unexpected(answer.reason);
            return {};
        }
    }
}

// Only the first of a connection counts, and is logged.
Status Worker::on_move(const wire::FrameView& frame) const {
    auto move = wire::decode_move(frame.payload);
    if (!move) return tl::unexpected(move.error());
    access::Route& route = *options_.attach->route;
    if (route.relay_stops()) return {};
    if (Status ok = route.on_move(*move, net::Clock::now()); !ok)
        log(LogLevel::kWarn, "worker", "the relay's MOVE: " + ok.error().detail);
    log(LogLevel::kInfo, "worker",
        "the relay stops, its nodes go to " +
            (move->url.empty() ? "the same address" : printable(move->url)));
    return {};
}

}  // namespace kvasir::worker
