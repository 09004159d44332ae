// One text from one prompt, written as it comes, with its report: what `run` and `up` have in
// common.
//
// Used by run and up. Thread: main. Owns: nothing. Limits: those of generate::Session.
#pragma once

#include "apps/run_report.hpp"
#include "apps/swarm.hpp"
#include "base/result.hpp"
#include "generate/session.hpp"

namespace kvasir::apps {

// Loads the model and makes its context, so that its graphs are known.
Result<generate::Session> open_ready(const generate::SessionOptions& options,
                                     const generate::Request& request);

enum class Show { kText, kJson };

// The text goes to stdout as it comes (kText), or to the debug log. A swarm's counters begin anew.
Result<RunOutcome> generate_once(generate::Session& session, generate::Request request,
                                 uint32_t threads, Swarm* swarm, Show show);
// Control bytes are dropped.
void stream_text(std::string_view text);
// Errors: kIo: the reader is gone or the disk is full.
Status flush_output();

}  // namespace kvasir::apps
