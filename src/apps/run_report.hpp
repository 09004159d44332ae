// What `kvasir run` prints about a run: JSON for programs, a table for people.
//
// Used by run.cpp and its tests.
// Thread: pure functions.
#pragma once

#include <optional>
#include <string>

#include "apps/logits_difference.hpp"
#include "backbone/report.hpp"
#include "generate/session.hpp"

namespace kvasir::apps {

struct RunOutcome {
    generate::Generation generation;
    std::optional<backbone::Report> swarm;       // none for a monolithic run
    std::optional<bool> bit_exact;               // result of --check
    std::optional<LogitsDifference> difference;  // with --exact any, unless bit-exact
    uint32_t threads = 1;
};

// Wire bytes (both ways) per token that was evaluated, of the prompt or generated.
double wire_bytes_per_token(const backbone::Report& swarm, uint64_t tokens_evaluated);
// No approximate answer was used: every worker that computed something is of the backbone's class.
bool all_exact(const backbone::Report& swarm);

// One JSON object, one line, without a newline. Text that is not UTF-8 is repaired with U+FFFD.
std::string to_json(const RunOutcome& outcome);
// Lines with newlines.
std::string to_table(const RunOutcome& outcome);

}  // namespace kvasir::apps
