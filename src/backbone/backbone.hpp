// Backbone: the swarm as llama.cpp's graph sees it: hub, roster, planner, local replica,
// statistics.
//
// Used by the ggml backend (src/plugin) for every MoE layer of every batch and by `kvasir run`. A
// Lane belongs to one llama_context; lanes share workers. compute() blocks only its own lane.
//
// Thread: Backbone from any thread; a Lane from one thread at a time.
// Owns: the listener, sessions, verifier thread; the model's mapping. Limits: Options.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backbone/report.hpp"
#include "backbone/uplink.hpp"
#include "base/ids.hpp"
#include "base/result.hpp"
#include "engine/expert_engine.hpp"
#include "engine/weights.hpp"
#include "moe/program.hpp"

namespace kvasir::backbone {

struct Options {
    std::string model_path;             // GGUF (any part of a split set)
    std::string listen = ":0";          // where workers dial in; empty: no such place
    std::vector<UplinkOptions> relays;  // that lead to more workers
    bool exact_strict = true;    // only workers whose bits equal ours; else answers are labelled
    uint32_t local_threads = 1;  // for what the backbone computes itself next to workers' work
    engine::ComputeWith compute_with = engine::ComputeWith::kKernels;  // what it computes itself
    std::chrono::milliseconds stall_max{
        400};                   // longest wait for a decode answer before a retry elsewhere
    std::string cache_dir;      // manifest cache; empty: the user's
    bool need_manifest = true;  // compute the model id (reads the model once, then cached)
};

// One MoE layer of one batch.
struct LayerBatch {
    LayerKey layer;
    const moe::Program* program = nullptr;
    engine::BankWeights::Tensors weights = {};  // llama.cpp's own tensors
    const uint8_t* rows = nullptr;              // f32 rows, row r at rows + r * row_stride
    uint64_t row_stride = 0;                    // bytes
    uint32_t row_count = 0;
    uint32_t used = 0;  // k: pairs per token
    struct Pair {
        uint32_t row = 0;
        uint32_t expert = 0;   // global id, in range
        float* out = nullptr;  // shape.output() floats
    };
    std::vector<Pair> pairs;
};

class Lane {
public:
    virtual ~Lane() = default;
    // True: every pair's output was written. False: no worker holds anything of this layer, or the
    // batch is not for the swarm (warm-up): the caller computes its graph itself. Errors:
    // kEnvironment when even the local replica failed.
    virtual Result<bool> compute(const LayerBatch& batch) = 0;
    // Accounts for a layer that the caller computed itself.
    virtual void note_local(uint64_t pairs) = 0;
    // The time that a layer took, whoever computed it.
    virtual void note_time(std::chrono::nanoseconds in_backend) = 0;
    virtual void set_threads(uint32_t threads) = 0;
};

class Backbone {
public:
    // Errors: kEnvironment, kBadInput (model), kUsage (address).
    static Result<std::unique_ptr<Backbone>> start(const Options& options);
    virtual ~Backbone() = default;  // drains and closes every session

    virtual uint16_t port() const = 0;  // 0 when nothing listens
    // The program of a bank, as seen in the graph; sent to every holder. The first one wins.
    virtual void learn(LayerKey layer, const moe::Program& program) = 0;
    virtual std::unique_ptr<Lane> open_lane() = 0;
    // With what lanes compute that are opened from now on.
    virtual void set_compute_with(engine::ComputeWith with) = 0;

    // Share of the experts of learned layers that a checked worker holds, 0..1; 1 while nothing is
    // learned.
    virtual double coverage() const = 0;
    // Waits until coverage() >= share, or the deadline. Errors: kTimeout, saying what is missing;
    // kRevoked: no relay takes this backbone any more, and it listens nowhere itself.
    virtual Status wait_coverage(double share, std::chrono::milliseconds timeout) = 0;

    virtual Report report() const = 0;
    virtual void reset_report() = 0;
};

}  // namespace kvasir::backbone
