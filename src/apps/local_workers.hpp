// LocalWorkers: N `kvasir worker` processes of this machine, each with its own share of the
// experts.
//
// Used by Swarm for `--workers N`. Every worker maps the model file itself, so the page cache
// holds the weights once.
// Thread: one owner (the one that starts them; they die with it). Owns: the processes.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "apps/child_process.hpp"
#include "base/result.hpp"
#include "engine/expert_engine.hpp"

namespace kvasir::apps {

struct LocalWorkersOptions {
    std::string program;  // empty: this program itself
    std::string model_path;
    std::vector<std::string> experts;  // one segment list ("0-7:0-63") per worker
    std::string connect;               // ws://127.0.0.1:PORT
    uint32_t threads = 1;              // per worker
    engine::ComputeWith compute_with = engine::ComputeWith::kKernels;
    std::vector<int> cpus;  // worker i runs on cpus[i % size]; empty: anywhere
    std::string log_level;  // --log-level of the workers; empty: theirs
};

class LocalWorkers {
public:
    // Errors: kEnvironment (and none remain).
    static Result<LocalWorkers> start(const LocalWorkersOptions& options);

    size_t count() const { return workers_.size(); }
    pid_t pid(size_t index) const { return workers_[index].pid(); }
    // kClosed if a worker has ended, with how and its last words; never blocks. Call it while
    // waiting.
    Status check();
    // SIGTERM to all, then SIGKILL to those left after `grace`; reaps. Idempotent.
    void stop(std::chrono::milliseconds grace = std::chrono::seconds(2));

private:
    std::vector<ChildProcess> workers_;
};

// Path of the running program. Errors: kEnvironment.
Result<std::string> own_program();

}  // namespace kvasir::apps
