#include "worker/worker.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <utility>

#include "base/check.hpp"
#include "base/log.hpp"
#include "engine/runtime.hpp"

namespace kvasir::worker {
namespace {

using namespace std::chrono_literals;

constexpr auto kStableTime =
    5s;  // a connection that lasted so long resets the pauses between attempts
constexpr auto kWriteDeadline =
    30s;  // a backbone that does not read its answers for so long is gone

std::string host_name() {
    char name[256] = {};
    return ::gethostname(name, sizeof(name) - 1) == 0 ? name : "worker";
}

int milliseconds_until(net::Deadline deadline) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - net::Clock::now()).count();
    return static_cast<int>(std::clamp<int64_t>(left, 0, 60000));
}

// No later attempt can succeed: the two sides do not fit.
bool is_final(Errc code) {
    return code == Errc::kVersion || code == Errc::kMismatch;
}

}  // namespace

Result<std::unique_ptr<Worker>> Worker::make(const Holding& holding, const WorkerOptions& options) {
    auto endpoint = net::parse_url(options.connect);
    if (!endpoint) return tl::unexpected(endpoint.error());
    auto device = engine::find_device(options.device);
    if (!device) return tl::unexpected(device.error());
    auto engine = engine::ExpertEngine::make(*device, options.threads);
    if (!engine) return tl::unexpected(engine.error());
    ExpertService service(holding, *device, std::move(*engine));
    return std::unique_ptr<Worker>(new Worker(holding, options, *endpoint, std::move(service)));
}

Worker::Worker(const Holding& holding, WorkerOptions options, net::Endpoint endpoint,
               ExpertService service)
    : holding_(holding),
      options_(std::move(options)),
      endpoint_(std::move(endpoint)),
      service_(std::move(service)),
      wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    KVASIR_CHECK(wake_);
    std::random_device random;
    for (uint8_t& byte : node_) byte = static_cast<uint8_t>(random());
}

Worker::~Worker() = default;

void Worker::stop() noexcept {
    stopping_.store(true);
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
}

bool Worker::pause(std::chrono::milliseconds time) {
    const auto deadline = net::Clock::now() + time;
    while (!stopping_.load() && net::Clock::now() < deadline) {
        pollfd entry{wake_.get(), POLLIN, 0};
        ::poll(&entry, 1, milliseconds_until(deadline));
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
            stream->close();
            if (served) return {};
            error = served.error();
            // Accepted and dropped at once, again and again, must not become a busy loop for both
            // sides.
            if (net::Clock::now() - joined >= kStableTime) wait = options_.pause_first;
        } else {
            error = stream.error();
        }
        if (is_final(error.code)) return tl::unexpected(error);
        const auto jittered = wait / 2 + wait * static_cast<int>(random() % 1000) / 1000;
        log(LogLevel::kInfo, "worker",
            error.detail + "; next try in " + std::to_string(jittered.count()) + " ms");
        if (!pause(jittered)) break;
        wait = std::min(wait * 2, options_.pause_max);
    }
    return {};
}

Result<net::MessageStream> Worker::join() {
    auto stream = net::dial(endpoint_);
    if (!stream) return stream;
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
    const uint8_t role[] = {static_cast<uint8_t>(wire::Role::kWorker)};
    if (Status ok = stream->enqueue(role); !ok) return tl::unexpected(ok.error());
    if (Status ok = stream->enqueue(wire::encode_hello(hello)); !ok)
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
    if (frame->header.type != wire::FrameType::kWelcome)
        return fail(Errc::kProtocol, "expected WELCOME");
    auto welcome = wire::decode_welcome(frame->payload);
    if (!welcome) return tl::unexpected(welcome.error());
    if (welcome->major != wire::kProtocolMajor) {
        return fail(Errc::kVersion, "the backbone speaks protocol " +
                                        std::to_string(welcome->major) + ", this worker " +
                                        std::to_string(wire::kProtocolMajor));
    }
    ping_interval_ = std::clamp<std::chrono::milliseconds>(
        std::chrono::milliseconds(welcome->ping_interval_ms), 1s, 60s);
    log(LogLevel::kInfo, "worker",
        "joined " + options_.connect + " with " + std::to_string(holding_.experts()) +
            " experts; backbone: " + printable(welcome->build.engine) + ", " +
            printable(welcome->build.isa));
    return stream;
}

// Ok: drained after stop(). An error: the connection is gone.
Status Worker::serve(net::MessageStream& stream) {
    service_.reset();
    auto last_ping = net::Clock::now();
    auto last_request = net::Clock::now();
    net::Deadline drain_end{};
    bool draining = false;
    for (;;) {
        // Before the next request: a busy backbone must not put the end off for ever.
        if (stopping_.load() && !draining) {
            draining = true;
            last_request = net::Clock::now();
            drain_end = last_request + options_.drain_max;
            if (Status ok = stream.enqueue(wire::encode_simple(wire::FrameType::kDrain)); !ok)
                return ok;
        }
        auto message = stream.try_receive();
        if (!message) return tl::unexpected(message.error());
        if (*message) {
            last_request = net::Clock::now();
            if (Status ok = answer(stream, **message); !ok) return ok;
            if (stream.may_have_more() && (!draining || last_request < drain_end)) continue;
        }
        const auto now = net::Clock::now();
        if (draining && (now >= drain_end || now - last_request >= options_.drain_quiet)) {
            (void)stream.enqueue(wire::encode_simple(wire::FrameType::kGoodbye));
            (void)stream.flush_until(now + 1s);
            return {};
        }
        if (now - stream.last_heard() > options_.silence_max)
            return fail(Errc::kTimeout, "nothing heard from the backbone");
        if (now - std::max(last_ping, stream.last_heard()) >= ping_interval_) {
            last_ping = now;
            if (Status ok = stream.enqueue(
                    wire::encode_ping(static_cast<uint64_t>(now.time_since_epoch().count())));
                !ok) {
                return ok;
            }
        }
        pollfd entries[2] = {{stream.fd(), POLLIN, 0}, {draining ? -1 : wake_.get(), POLLIN, 0}};
        const auto wake_at = draining ? std::min(drain_end, last_request + options_.drain_quiet)
                                      : std::max(last_ping, stream.last_heard()) + ping_interval_;
        ::poll(entries, 2, milliseconds_until(wake_at));
    }
}

// An error also when the connection is over by what the message said.
Status Worker::answer(net::MessageStream& stream, std::span<const uint8_t> message) {
    const Answer answer = service_.handle(message);
    if (!answer.head.empty()) {
        const std::span<const uint8_t> pieces[] = {answer.head, answer.body};
        if (Status ok = stream.enqueue(pieces); !ok) return ok;
        if (stream.wants_write()) {
            if (Status ok = stream.flush_until(net::Clock::now() + kWriteDeadline); !ok) return ok;
        }
    }
    if (answer.close) return tl::unexpected(answer.reason);
    return {};
}

}  // namespace kvasir::worker
