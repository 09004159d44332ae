// Swarm: the backbone of this process as the subcommands see it: start it, count, stop it.
//
// Used by run and bench. start() registers the KVASIR device (models whose context is made before
// that are plain llama.cpp, those after it use it), opens the hub, spawns local workers or waits
// for outside ones.
//
// Thread: main thread; report() and reset_counters() also while a generation runs in another.
// Owns: the hub, its workers and their processes; one Swarm per process.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backbone/report.hpp"
#include "backbone/uplink.hpp"
#include "base/result.hpp"
#include "engine/expert_engine.hpp"

namespace kvasir::apps {

struct SwarmOptions {
    std::string model_path;
    uint32_t workers = 0;  // local worker processes to spawn; 0: none
    uint32_t worker_threads = 1;
    uint32_t threads = 1;  // the backbone's own, for experts that nobody holds
    engine::ComputeWith compute_with = engine::ComputeWith::kKernels;  // of all of them
    std::string listen = "127.0.0.1:0";           // HOST:PORT of the hub; port 0: any free one
    bool wait_outside = false;                    // wait for workers that somebody else starts
    std::vector<backbone::UplinkOptions> relays;  // that outside workers may come through
    double coverage = 1.0;  // share of the experts that must be held before start() returns
    std::chrono::seconds coverage_timeout{
        0};                        // 0: without end for outside workers, a default for local ones
    bool exact_strict = true;      // only workers of the backbone's numeric class
    std::vector<int> worker_cpus;  // local worker i runs on worker_cpus[i % size]; empty: anywhere
};

class Swarm {
public:
    virtual ~Swarm() = default;

    // Errors: kUsage, kBadInput (model), kEnvironment (port, process), kTimeout (coverage not
    // reached), kUnsupported.
    static Result<std::unique_ptr<Swarm>> start(const SwarmOptions& options);

    // To be called when the model's context has been made: workers are checked against the programs
    // that its graphs show. Waits until the wanted share of the experts is held by checked workers.
    // Errors: kTimeout (naming what nobody holds), kClosed (a local worker ended, with its last
    // words).
    virtual Status wait_ready() = 0;
    virtual uint16_t port() const = 0;            // of the hub
    virtual backbone::Report report() const = 0;  // since start() or reset_counters()
    virtual void reset_counters() = 0;
    // With what the backbone computes in contexts made from now on.
    virtual void set_compute_with(engine::ComputeWith with) = 0;
    virtual void stop() = 0;  // idempotent; the destructor calls it
};

}  // namespace kvasir::apps
