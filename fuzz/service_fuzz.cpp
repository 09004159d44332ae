// Fuzz target: a worker's service over any sequence of messages.
//
// The input is a row of messages, each behind a 16-bit length; a leading byte of 1 puts a good
// frame header in front, so that the payload is reached. After every input a known request must
// still give the known bytes.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <span>
#include <vector>

#include "engine/engine_testing.hpp"
#include "worker/service.hpp"

namespace {

using namespace kvasir;
namespace toy = engine::testing;

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "service_fuzz: %s\n", what);
    std::abort();
}

struct World {
    World() {
        worker::HoldingOptions options;
        options.model_path = toy::write_toy(folder, "toy.gguf", toy::toy_spec());
        options.experts = "0:1-3,0:6";
        options.cache_dir = folder / "cache";
        auto opened = worker::Holding::open(options);
        require(opened.has_value(), "holding");
        holding = std::move(*opened);
        service = std::make_unique<worker::ExpertService>(*holding, toy::cpu(), toy::make_engine());
        program = wire::encode_program({7, {0, 0}, moe::encode(toy::swiglu())}, 1);
        const auto rows = toy::random_floats(2 * 256, 1);
        const std::vector<wire::Pair> pairs = {{0, 3}, {1, 0}};
        ByteWriter out;
        wire::begin_compute(out, 2, 7, 0, 2, pairs, rows.size() * sizeof(float));
        out.bytes(toy::as_bytes(rows));
        request = out.take();
        want = answer();
        require(want.size() == 2 * 256 * sizeof(float), "the known answer");
    }
    // From a fresh connection on.
    std::vector<uint8_t> answer() {
        service->reset();
        service->handle(program);
        const worker::Answer out = service->handle(request);
        return {out.body.begin(), out.body.end()};
    }
    toy::Folder folder;
    std::unique_ptr<worker::Holding> holding;
    std::unique_ptr<worker::ExpertService> service;
    std::vector<uint8_t> program, request, want;
};

void check(const worker::Answer& answer) {
    if (answer.head.empty()) return require(answer.body.empty(), "a body without a head");
    std::vector<uint8_t> whole = answer.head;
    whole.insert(whole.end(), answer.body.begin(), answer.body.end());
    const auto frame = wire::decode_frame(whole);
    require(frame.has_value(), "an answer that is no frame");
    if (frame->header.type == wire::FrameType::kResult) {
        require(wire::decode_result(frame->payload).has_value(), "a malformed result");
    } else {
        require(answer.body.empty(), "memory behind an answer that has none");
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static World world;
    world.service->reset();
    world.service->handle(world.program);
    ByteReader in({data, size});
    while (in.remaining() >= 4) {
        const uint8_t framed = in.u8();
        const uint8_t type = in.u8();
        const uint64_t wanted = in.u16();
        const uint64_t length = std::min<uint64_t>(wanted, in.remaining());
        const auto payload = in.bytes(length);
        ByteWriter message;
        if (framed == 1) {
            wire::FrameHeader header;
            header.type = static_cast<wire::FrameType>(type);
            header.request_id = 3;
            header.payload_bytes = length;
            wire::append_header(message, header);
        }
        message.bytes(payload);
        check(world.service->handle(message.data()));
    }
    require(world.answer() == world.want, "the known answer has changed");
    return 0;
}
