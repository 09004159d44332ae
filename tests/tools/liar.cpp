// A worker that is honest for some requests and then answers one kind of rubbish to everything.
//
// Used by the churn tests. Usage: liar URL MODEL EXPERTS NAME HONEST KIND, where HONEST counts
// COMPUTE requests (the numeric challenge first) and KIND is one of the words in lie(). Prints
// "lying" at the first lie and "closed: REASON" when the backbone has had enough; exit code 0 then.
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "engine/runtime.hpp"
#include "net/upgrade.hpp"
#include "worker/service.hpp"

namespace {

using namespace kvasir;

struct Arguments {
    std::string url, model, experts, name, kind;
    int honest = 0;
};

std::vector<uint8_t> whole(const worker::Answer& answer) {
    std::vector<uint8_t> out = answer.head;
    out.insert(out.end(), answer.body.begin(), answer.body.end());
    return out;
}

// An answer with `pairs` rows of `width` floats.
std::vector<uint8_t> result(uint32_t request_id, uint32_t pairs, uint32_t width, float value) {
    ByteWriter head;
    wire::begin_result(head, request_id, 1000, pairs, width);
    std::vector<uint8_t> out = head.take();
    const std::vector<float> rows(size_t{pairs} * width, value);
    const auto* bytes = reinterpret_cast<const uint8_t*>(rows.data());
    out.insert(out.end(), bytes, bytes + rows.size() * sizeof(float));
    return out;
}

std::vector<uint8_t> lie(const std::string& kind, std::vector<uint8_t> truth) {
    const auto frame = wire::decode_frame(truth);
    if (!frame || frame->header.type != wire::FrameType::kResult) return truth;
    const auto view = wire::decode_result(frame->payload);
    if (!view) return truth;
    const uint32_t id = frame->header.request_id;
    if (kind == "nan") {
        return result(id, view->pair_count, view->width, std::numeric_limits<float>::quiet_NaN());
    }
    if (kind == "narrow") return result(id, view->pair_count, view->width - 1, 1);
    if (kind == "few") return result(id, view->pair_count - 1, view->width, 1);
    if (kind == "many") return result(id, view->pair_count + 1, view->width, 1);
    if (kind == "stranger") return result(id + 12345, view->pair_count, view->width, 1);
    if (kind == "cut") {
        truth.resize(truth.size() - 5);
        return truth;
    }
    if (kind == "unknown") {
        truth[0] = 99;  // frame type
        return truth;
    }
    if (kind == "error") {
        return wire::encode_error({Errc::kBusy, "I would \x1b[31mrather\n not"}, id);
    }
    std::minstd_rand random(7);  // "noise": bytes of no meaning
    for (uint8_t& byte : truth) byte = static_cast<uint8_t>(random());
    return truth;
}

Result<net::MessageStream> join(const Arguments& arguments, const worker::Holding& holding,
                                uint32_t pairs_max) {
    auto endpoint = net::parse_url(arguments.url);
    if (!endpoint) return tl::unexpected(endpoint.error());
    auto stream = net::dial(*endpoint);
    if (!stream) return stream;
    wire::Hello hello;
    std::random_device random;
    for (uint8_t& byte : hello.node) byte = static_cast<uint8_t>(random());
    hello.name = arguments.name;
    hello.model_id = holding.model_id();
    hello.rows_max = hello.pairs_max = pairs_max;
    hello.segments = holding.segments();
    const uint8_t role[] = {static_cast<uint8_t>(wire::Role::kWorker)};
    if (Status ok = stream->enqueue(role); !ok) return tl::unexpected(ok.error());
    if (Status ok = stream->enqueue(wire::encode_hello(hello)); !ok) {
        return tl::unexpected(ok.error());
    }
    auto welcome = stream->receive(net::Clock::now() + std::chrono::seconds(10));
    if (!welcome) return tl::unexpected(welcome.error());
    return stream;
}

// Until the backbone ends the connection: the reason.
Error serve(const Arguments& arguments, net::MessageStream& stream,
            worker::ExpertService& service) {
    int asked = 0;
    for (;;) {
        auto message = stream.receive(net::Clock::now() + std::chrono::minutes(5));
        if (!message) return message.error();
        const auto frame = wire::decode_frame(*message);
        const bool compute = frame && frame->header.type == wire::FrameType::kCompute;
        const worker::Answer answer = service.handle(*message);
        if (answer.head.empty()) continue;
        std::vector<uint8_t> bytes = whole(answer);
        if (compute && ++asked > arguments.honest) {
            if (asked == arguments.honest + 1) {
                std::puts("lying");
                std::fflush(stdout);
            }
            if (arguments.kind == "silent") continue;
            bytes = lie(arguments.kind, std::move(bytes));
        }
        if (Status ok = stream.enqueue(bytes); !ok) return ok.error();
        if (Status ok = stream.flush_until(net::Clock::now() + std::chrono::seconds(10)); !ok) {
            return ok.error();
        }
    }
}

Status run(const Arguments& arguments) {
    if (Status ok = engine::load_ggml(); !ok) return ok;
    auto holding = worker::Holding::open({.slice_path = {},
                                          .model_path = arguments.model,
                                          .experts = arguments.experts,
                                          .cache_dir = {},
                                          .verify = true});
    if (!holding) return tl::unexpected(holding.error());
    auto device = engine::find_device("");
    if (!device) return tl::unexpected(device.error());
    auto made = engine::ExpertEngine::make(*device, 1);
    if (!made) return tl::unexpected(made.error());
    worker::ExpertService service(**holding, *device, std::move(*made));
    auto stream = join(arguments, **holding, service.pairs_max());
    if (!stream) return tl::unexpected(stream.error());
    const Error reason = serve(arguments, *stream, service);
    std::printf("closed: %s\n", reason.detail.c_str());
    return {};
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 7) {
        std::fputs("usage: liar URL MODEL EXPERTS NAME HONEST KIND\n", stderr);
        return 2;
    }
    const Arguments arguments{argv[1], argv[2], argv[3], argv[4], argv[6], std::atoi(argv[5])};
    if (const Status ok = run(arguments); !ok) {
        std::fprintf(stderr, "liar: %s\n", ok.error().detail.c_str());
        return 1;
    }
    return 0;
}
