// The flag --kernels of run, bench and worker.
#pragma once

#include <CLI/CLI.hpp>
#include <map>
#include <string>

#include "engine/expert_engine.hpp"

namespace kvasir::apps {

inline void add_kernels_flag(CLI::App& command, engine::ComputeWith& with) {
    static const std::map<std::string, engine::ComputeWith> values = {
        {"on", engine::ComputeWith::kKernels}, {"off", engine::ComputeWith::kGraph}};
    command
        .add_option("--kernels", with,
                    "on: Kvasir's kernels compute the experts where they can (the same bits); "
                    "off: ggml does (default: on)")
        ->transform(CLI::CheckedTransformer(values).description("{on,off}"));
}

}  // namespace kvasir::apps
