// Says which file it was when a mapped file shrinks or its disk fails, in place of a bare SIGBUS.
//
// Used by run_program(). The handler names the file by /proc/self/maps and ends the process with
// the exit code of bad input; any other SIGBUS is a crash as before. Thread: any. Owns: the
// process's SIGBUS handler.
#pragma once

namespace kvasir::apps {

void explain_bus_errors();

}  // namespace kvasir::apps
