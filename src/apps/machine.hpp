// The machine a number was measured on, and where on it a process may run.
//
// Used by bench.
// Thread: any for describe_machine(); pin_process() from the main thread before others start.
#pragma once

#include <string>
#include <vector>

#include "base/result.hpp"

namespace kvasir::apps {

struct Machine {
    std::string cpu;       // model name of the first CPU, "unknown" if the kernel does not say
    unsigned cores = 0;    // CPUs this process may use
    std::string compiler;  // of this program
};
Machine describe_machine();

// CPUs that this process may run on, ascending.
std::vector<int> allowed_cpus();
// The calling thread, and threads it starts later, run on `cpus` only. Errors: kEnvironment.
Status pin_process(const std::vector<int>& cpus);

}  // namespace kvasir::apps
