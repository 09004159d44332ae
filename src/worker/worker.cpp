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
    5s;  // a connection that lasted so long resets the pauses between attempts
constexpr auto kWriteDeadline =
    30s;  // a backbone that does not read its answers for so long is gone

void drain_event(int event_fd) {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(event_fd, &count, sizeof(count));
}

std::string host_name() {
    char name[256] = {};
    return ::gethostname(name, sizeof(name) - 1) == 0 ? name : "worker";
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
    auto endpoint = options.attach ? Result<net::Endpoint>(options.attach->endpoint)
                                   : net::parse_url(options.connect);
    if (!endpoint) return tl::unexpected(endpoint.error());
    if (endpoint->tls && !(options.attach ? options.attach->tls : options.tls)) {
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
    std::mt19937 random(std::random_device{}());
    auto wait = options_.pause_first;
    while (!stopping_.load()) {
        auto stream = join();
        Error error;
        if (stream) {
            const auto joined = net::Clock::now();
            Status served = serve(*stream);
            serving_.store(false);
            if (!served && stream->closed()) look_for_reason(*stream, served.error());
            stream->close();
            if (served) return {};
            error = served.error();
            // Accepted and dropped at once, again and again, must not become a busy loop for both
            // sides.
            if (net::Clock::now() - joined >= kStableTime) wait = options_.pause_first;
        } else {
            error = stream.error();
        }
        if (Status ok = holding_.mapping().unchanged(); !ok) return ok;
        if (is_final(error.code)) return tl::unexpected(error);
        auto jittered = wait / 2 + wait * static_cast<int>(random() % 1000) / 1000;
        // A server that stops has thousands of nodes: all of them at once would be its successor's
        // end.
        if (move_pause_.count() > 0)
            jittered = move_pause_ * static_cast<int>(random() % 1000) / 1000;
        move_pause_ = 0ms;
        say_waiting(error.detail);
        log(LogLevel::kInfo, "worker",
            error.detail + "; next try in " + std::to_string(jittered.count()) + " ms");
        if (!pause(jittered)) break;
        wait = std::min(wait * 2, options_.pause_max);
    }
    return {};
}

// Nothing can be sent any more: what had arrived before says why, perhaps.
void Worker::look_for_reason(net::MessageStream& stream, Error& error) const {
    const auto end = net::Clock::now() + 1s;
    while (net::Clock::now() < end) {
        auto message = stream.try_receive();
        if (!message) return;
        if (!*message && !stream.may_have_more()) return;
        if (!*message) continue;
        auto frame = wire::decode_frame(**message);
        if (!frame) return;
        const wire::FrameHeader& header = frame->header;
        if (header.type != wire::FrameType::kError || header.peer != 0 || header.request_id != 0)
            continue;
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

// ---- joining ----

Result<net::MessageStream> Worker::join() {
    peers_.clear();
    service_.reset();
    return options_.attach ? attach() : join_hub();
}

wire::Hello Worker::hello() const {
    wire::Hello hello;
    const engine::Fingerprint print = engine::fingerprint();
    hello.node = node_;
    hello.name = options_.name.empty() ? host_name() : options_.name;
    hello.build = {"kvasir " KVASIR_VERSION, print.engine, print.isa, print.compiler,
                   print.kernels};
    hello.model_id = holding_.model_id();
    hello.threads = options_.threads;
    hello.rows_max = hello.pairs_max = service_.pairs_max();
    hello.segments = holding_.segments();
    return hello;
}

Result<net::MessageStream> Worker::join_hub() {
    auto stream = net::dial(endpoint_, {}, {}, options_.tls);
    if (!stream) return stream;
    const uint8_t role[] = {static_cast<uint8_t>(wire::Role::kWorker)};
    if (Status ok = stream->enqueue(role); !ok) return tl::unexpected(ok.error());
    if (Status ok = stream->enqueue(wire::encode_hello(hello())); !ok)
        return tl::unexpected(ok.error());
    const auto deadline = net::Clock::now() + 10s;
    if (Status ok = stream->flush_until(deadline); !ok) return tl::unexpected(ok.error());
    auto message = stream->receive(deadline);
    if (!message) return tl::unexpected(message.error());
    auto frame = wire::decode_frame(*message);
    if (!frame) return tl::unexpected(frame.error());
    if (frame->header.type == wire::FrameType::kError) {
        auto error = wire::decode_error(frame->payload);
        if (!error) return tl::unexpected(error.error());
        return fail(error->code,
                    "the backbone refused this worker: " + printable(error->detail, 500));
    }
    if (frame->header.type == wire::FrameType::kNonce) {
        return fail(Errc::kDenied, printable(options_.connect) +
                                       " asks for a token: it is a relay; join its market with "
                                       "--join");
    }
    if (frame->header.type != wire::FrameType::kWelcome)
        return fail(Errc::kProtocol, "expected WELCOME");
    if (Status ok = on_welcome(*frame); !ok) return tl::unexpected(ok.error());
    return stream;
}

Status Worker::on_welcome(const wire::FrameView& frame) {
    auto welcome = wire::decode_welcome(frame.payload);
    if (!welcome) return tl::unexpected(welcome.error());
    if (!options_.attach) {
        ping_interval_ = std::clamp<std::chrono::milliseconds>(
            std::chrono::milliseconds(welcome->ping_interval_ms), 1s, 60s);
    }
    serving_.store(true);
    told_waiting_ = false;
    if (options_.on_line)
        options_.on_line("joined " +
                         printable(options_.attach ? endpoint_.host : options_.connect));
    log(LogLevel::kInfo, "worker",
        "joined " + (options_.attach ? endpoint_.host : options_.connect) + " with " +
            std::to_string(holding_.experts()) + " experts; backbone: " +
            printable(welcome->build.engine) + ", " + printable(welcome->build.isa));
    return {};
}

Result<net::MessageStream> Worker::attach() {
    access::AttachOptions options;
    options.endpoint = endpoint_;
    options.tls = options_.attach->tls;
    auto attachment = access::attach(options, options_.attach->credentials());
    if (!attachment) return tl::unexpected(attachment.error());
    ping_interval_ = std::clamp<std::chrono::milliseconds>(
        std::chrono::milliseconds(attachment->attached.ping_interval_ms), 1s, 60s);
    log(LogLevel::kInfo, "worker", "attached to " + endpoint_.host);
    return std::move(attachment->stream);
}

// ---- serving ----

// Ok: drained after stop(). An error: the connection is gone.
Status Worker::serve(net::MessageStream& stream) {
    auto last_ping = net::Clock::now();
    auto last_request = net::Clock::now();
    net::Deadline drain_end{};
    bool draining = false;
    watch_ = SleepWatch(options_.sleep_max);
    (void)watch_.check(boot_time(), process_cpu_time(), 0ns);
    for (;;) {
        // Before the next request: a busy backbone must not put the end off for ever.
        if (stopping_.load() && !draining) {
            draining = true;
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
            if (stream.may_have_more() && (!draining || last_request < drain_end)) continue;
        }
        const auto now = net::Clock::now();
        if (draining && (now >= drain_end || now - last_request >= options_.drain_quiet)) {
            (void)stream.enqueue(wire::encode_simple(wire::FrameType::kGoodbye));
            (void)stream.flush_until(now + 1s);
            return {};
        }
        if (now - stream.last_heard() > options_.silence_max)
            return fail(Errc::kTimeout, "nothing heard from the other side");
        if (now - std::max(last_ping, stream.last_heard()) >= ping_interval_) {
            last_ping = now;
            const auto token = static_cast<uint64_t>(now.time_since_epoch().count());
            if (Status ok = stream.enqueue(wire::encode_ping(token)); !ok) return ok;
        }
        const auto wake_at = draining ? std::min(drain_end, last_request + options_.drain_quiet)
                                      : std::max(last_ping, stream.last_heard()) + ping_interval_;
        if (Status ok = wait(stream, wake_at, draining); !ok) return ok;
    }
}

// Until a message, stop(), renew(), or `until`; says HELLO where one is due.
Status Worker::wait(net::MessageStream& stream, net::Deadline until, bool draining) {
    if (!draining && options_.attach) {
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
        peer.welcome_by = now + options_.welcome_max;  // the HELLO or its WELCOME may be lost
        auto message = wire::encode_hello(hello());
        wire::set_peer(message, handle);
        if (Status ok = send(stream, message); !ok) return ok;
    }
    return {};
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
    Error reason;
    if (frame.header.type == wire::FrameType::kWelcome) {
        Status ok = on_welcome(frame);
        if (ok) peer.pause = 0ms;
        if (ok) peer.welcome_by = net::Deadline::max();
        if (ok) return {};
        reason = ok.error();
    } else {
        const Answer answer = compute(message, Speaker::kBackbone);
        if (!answer.head.empty()) {
            if (Status ok = send(stream, answer.head, answer.body); !ok) return ok;
        }
        if (answer.over) return tl::unexpected(answer.reason);
        if (!answer.close) return {};
        reason = answer.reason;
    }
    service_.reset(frame.header.peer);
    peer.said_hello = false;
    peer.pause =
        std::clamp<std::chrono::milliseconds>(peer.pause * 2, kHelloPauseFirst, kHelloPauseMax);
    peer.hello_again = net::Clock::now() + peer.pause;
    log(LogLevel::kWarn, "worker",
        "backbone " + printable(peer.info.name, 40) + ": " + reason.detail + "; HELLO again in " +
            std::to_string(peer.pause.count()) + " ms");
    // With nobody else to work for, what cannot be mended ends the worker.
    if (peers_.size() == 1 && (reason.code == Errc::kVersion || reason.code == Errc::kMismatch))
        return tl::unexpected(reason);
    return {};
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
            return say_hello(stream);
        }
        case wire::FrameType::kPeerDown: {
            auto info = wire::decode_peer_down(frame.payload);
            if (!info) return tl::unexpected(info.error());
            service_.reset(info->handle);
            peers_.erase(info->handle);
            return {};
        }
        case wire::FrameType::kMove: {
            auto move = wire::decode_move(frame.payload);
            if (!move) return tl::unexpected(move.error());
            move_pause_ = std::chrono::milliseconds(std::min<uint32_t>(move->within_ms, 60000));
            return {};
        }
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

}  // namespace kvasir::worker
