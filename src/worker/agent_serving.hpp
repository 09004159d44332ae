// Parts of the agent that its two source files share. Private to agent*.cpp.
// Thread: see the fields. Owns: the serving thread. Limits: none.
#pragma once

#include <string>
#include <thread>

#include "base/result.hpp"
#include "worker/agent.hpp"

namespace kvasir::worker {

struct Agent::Serving {
    // Constant once the thread runs.
    std::string path;
    MarketInfo info;
    bool is_next_try = false;  // the last one with this slice failed
    std::thread thread;        // agent's thread
    Worker* worker = nullptr;  // Guarded by Agent::mu_
    bool is_stopping = false;  // Guarded by Agent::mu_
};

}  // namespace kvasir::worker
