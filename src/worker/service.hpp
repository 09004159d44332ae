// ExpertService: the worker's side of the protocol as a function from message to answer. No
// sockets.
//
// Used by Worker and by tests and fuzzers. Everything a backbone can send comes in here; what is
// wrong gets an ERROR for that request, what breaks the format ends the connection. Sizes are
// derived from the worker's own bank, never from the message. Thread: one. Owns: engine and
// prepared banks. Limits: pairs_max() pairs a request.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/bytes.hpp"
#include "base/result.hpp"
#include "engine/expert_engine.hpp"
#include "wire/messages.hpp"
#include "worker/holding.hpp"

struct ggml_backend_device;

namespace kvasir::worker {

// What goes back: the concatenation of head and body; body points into the engine's memory (valid
// until the next handle()).
struct Answer {
    std::vector<uint8_t> head;  // empty: nothing to say
    std::span<const uint8_t> body;
    bool close = false;  // after sending
    bool over = false;   // the weights are not what was checked: nobody can be served any more
    Error reason{Errc::kClosed, "the backbone ended the connection"};  // of a close
};

// Whose message it is, for what people read: a relay speaks for itself, too.
enum class Speaker : uint8_t { kBackbone, kRelay };

class ExpertService {
public:
    ExpertService(const Holding& holding, ggml_backend_device* device,
                  std::unique_ptr<engine::ExpertEngine> engine);

    // Most pairs a request may have, so that scratch memory stays within about 8 MiB.
    uint32_t pairs_max() const { return pairs_max_; }
    uint64_t pairs_done() const { return pairs_done_; }
    uint64_t requests_done() const { return requests_done_; }
    // Forgets programs: a new connection starts from nothing, and so does a new peer of a relay.
    void reset() { programs_.clear(); }
    void reset(uint16_t peer);
    // An answer carries the peer handle of the message. Programs of one peer are not another's.
    Answer handle(std::span<const uint8_t> message, Speaker speaker = Speaker::kBackbone);

private:
    struct Loaded {
        std::shared_ptr<const engine::Bank> bank;
        const std::vector<uint32_t>* file_index = nullptr;
    };
    Answer program(const wire::FrameView& frame);
    // `computes`: with what, for people.
    Status load(uint16_t peer, const wire::ProgramMessage& message, std::string& computes);
    Answer compute(const wire::FrameView& frame);
    Result<std::span<const float>> run(uint16_t peer, const wire::ComputeView& view,
                                       uint32_t& width);

    const Holding& holding_;
    ggml_backend_device* device_;
    std::unique_ptr<engine::ExpertEngine> engine_;
    uint32_t pairs_max_ = 0;
    Answer handle(const wire::FrameView& frame, Speaker speaker);
    std::map<std::pair<uint16_t, uint32_t>, Loaded> programs_;  // by peer and id
    std::vector<engine::PairIn> pairs_;
    uint64_t pairs_done_ = 0;
    uint64_t requests_done_ = 0;
};

}  // namespace kvasir::worker
