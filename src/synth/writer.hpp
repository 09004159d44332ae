// Writes a plan as a GGUF file, or as a set of splits.
//
// Used by the kvasir-synth program, tests and benchmarks: write_synth(spec, path) is the whole of
// it. Every file is made under a temporary name, synced, and renamed when all are complete; an
// error leaves no file of this call behind. Thread: any, one call writes from one thread. Limits:
// memory of a few MiB plus the header, whatever the size of the model.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "synth/plan.hpp"
#include "synth/spec.hpp"

namespace kvasir::synth {

struct SynthReport {
    std::vector<std::string> paths;  // in split order; the first is the one to open
    uint64_t tensors = 0;
    uint64_t bytes = 0;          // of all files, holes included
    uint64_t bytes_on_disk = 0;  // blocks that they occupy
};

// The names write_plan() uses: `path` itself, or for splits its stem (".gguf" removed) with
// "-00001-of-0000N.gguf" and so on.
std::vector<std::string> split_paths(const std::string& path, uint32_t splits);

// Errors: kUsage (a plan no GGUF file can hold: names the tensor; a path that is not a file),
// kEnvironment (no space for it), those of moe::AtomicFile.
Result<SynthReport> write_plan(const Plan& plan, const std::string& path);

// make_plan() and write_plan().
Result<SynthReport> write_synth(const SynthSpec& spec, const std::string& path);

}  // namespace kvasir::synth
