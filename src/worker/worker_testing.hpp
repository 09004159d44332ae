// What a worker in a test holds, and what it is asked.
//
// Used by *_test.cpp only. Thread: the test's. Owns: a model on disk. Limits: failures of its own
// abort with KVASIR_CHECK.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine_testing.hpp"
#include "worker/worker.hpp"

namespace kvasir::worker::testing {

using namespace std::chrono_literals;
namespace toy = engine::testing;
using wire::FrameType;

constexpr LayerKey kLayer0{0, 0};

struct ToyHolding {
    ToyHolding() {
        HoldingOptions options;
        options.model_path = toy::write_toy(folder, "toy.gguf", toy::toy_spec());
        options.experts = "0:0-3";
        options.cache_dir = folder / "cache";
        auto opened = Holding::open(options);
        KVASIR_CHECK(opened.has_value());
        holding = std::move(*opened);
    }
    std::string path() const { return holding->model().shards.front().path; }
    toy::Folder folder;
    std::unique_ptr<Holding> holding;
};
inline const Holding& toy_holding() {
    static const ToyHolding toy;
    return *toy.holding;
}

inline FrameType receive_type(net::MessageStream& stream) {
    auto message = stream.receive(net::Clock::now() + 5s);
    if (!message) return FrameType{0};
    auto frame = wire::decode_frame(*message);
    return frame ? frame->header.type : FrameType{0};
}

// One row for local expert 1, with program 1.
inline std::vector<uint8_t> request(uint32_t id) {
    const auto rows = toy::random_floats(256, id);
    const wire::Pair pair{0, 1};
    ByteWriter out;
    wire::begin_compute(out, id, 1, 0, 1, {&pair, 1}, 1024);
    out.bytes(toy::as_bytes(rows));
    return out.take();
}

}  // namespace kvasir::worker::testing
