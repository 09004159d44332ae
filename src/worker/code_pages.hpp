// Gives back the pages of program and library code that only starting and joining needed.
//
// Used by the agent once it serves: OpenSSL's certificate checks, libcurl and the dynamic linker
// touch several MiB that serving never does, and what a phone's kernel looks at when memory is
// short is the resident size. The pages are clean and come back from the file when they are used.
// Thread: any. Owns: nothing. Limits: does nothing where /proc is not there.
#pragma once

#include <cstdint>

namespace kvasir::worker {

// Returns the size of the mappings (not all of it was resident).
uint64_t give_back_code_pages();

}  // namespace kvasir::worker
