// Logging: one line per event to a sink that main() installs; silent until then.
//
// Used by every module. The library never writes to a terminal itself. Text from peers and files
// goes through printable() first, so that it cannot smuggle terminal escapes or line breaks.
// Thread: log() from any thread; set_log_sink() once at start. Limits: a line is cut at 1 KiB.
#pragma once

#include <string>
#include <string_view>

namespace kvasir {

enum class LogLevel { kDebug, kInfo, kWarn, kError };

using LogSink = void (*)(LogLevel level, std::string_view component, std::string_view line);

void set_log_sink(LogSink sink, LogLevel lowest);
bool log_enabled(LogLevel level);
void log(LogLevel level, std::string_view component, std::string_view line);

// Untrusted text made safe to show: control bytes and non-ASCII become '?', cut at `bytes_max`.
std::string printable(std::string_view text, size_t bytes_max = 200);

}  // namespace kvasir
