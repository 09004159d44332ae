// Counts of bytes as people read them.
//
// Used by whoever prints tables and lines for people. Thread: pure. Limits: none.
#pragma once

#include <string>

namespace kvasir {

// "512 B", "1.4 kB", "5.3 MB", "340 MB", "77.1 GB" (powers of 1000; three digits at most, up to 999
// PB).
std::string format_bytes(double bytes);

}  // namespace kvasir
