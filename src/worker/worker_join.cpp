// Worker, the part that joins: at a hub, or at a relay.
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/log.hpp"
#include "engine/runtime.hpp"
#include "wire/attach.hpp"
#include "worker/worker.hpp"

namespace kvasir::worker {
namespace {

using namespace std::chrono_literals;

std::string host_name() {
    char name[256] = {};
    return ::gethostname(name, sizeof(name) - 1) == 0 ? name : "worker";
}

}  // namespace

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
    watch_from_now();
    if (Status ok = on_welcome(*frame); !ok) return tl::unexpected(ok.error());
    return stream;
}

Status Worker::on_welcome(const wire::FrameView& frame) {
    auto welcome = wire::decode_welcome(frame.payload);
    if (!welcome) return tl::unexpected(welcome.error());
    if (!options_.attach) {
        ping_interval_ = std::clamp<std::chrono::milliseconds>(
            std::chrono::milliseconds(welcome->ping_interval_ms), 1s, 60s);
        limit_ping_interval();
    }
    serving_.store(true);
    told_waiting_ = false;
    const std::string where =
        printable(options_.attach ? options_.attach->route->endpoint().host : options_.connect);
    if (options_.on_line) options_.on_line("joined " + where);
    log(LogLevel::kInfo, "worker",
        "joined " + where + " with " + std::to_string(holding_.experts()) + " experts; backbone: " +
            printable(welcome->build.engine) + ", " + printable(welcome->build.isa));
    return {};
}

// Whatever the other side says: its answer must come before it is taken for gone.
void Worker::limit_ping_interval() {
    ping_interval_ = std::min(ping_interval_, options_.silence_max / 2);
}

Result<net::MessageStream> Worker::attach() {
    auto relay = options_.attach->route->address();
    if (!relay) return tl::unexpected(relay.error());
    access::AttachOptions options;
    options.endpoint = relay->endpoint;
    options.tls = relay->tls;
    auto attachment = access::attach(options, options_.attach->credentials());
    if (!attachment) return tl::unexpected(attachment.error());
    ping_interval_ = std::clamp<std::chrono::milliseconds>(
        std::chrono::milliseconds(attachment->attached.ping_interval_ms), 1s, 60s);
    limit_ping_interval();
    watch_from_now();
    log(LogLevel::kInfo, "worker", "attached to " + access::to_string(relay->endpoint));
    return std::move(attachment->stream);
}

}  // namespace kvasir::worker
