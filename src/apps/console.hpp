// What a program says to a person: the error sentence, the exit code, the log lines.
//
// Used by every subcommand.
// Thread: report_error() from the main thread; tell() and the sink from any. Owns: nothing.
// Limits: log lines as in base/log.hpp.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include <fmt/core.h>

#include "base/result.hpp"

namespace kvasir::apps {

// Prints on stderr, at once. It is for people: if nobody can read it any more (a full disk, a pipe
// without a reader) the program goes on.
void tell_text(std::string_view text);
template <class... Args>
void tell(fmt::format_string<Args...> format, Args&&... args) {
    tell_text(fmt::format(format, std::forward<Args>(args)...));
}

// Prints "kvasir: <sentence>" on stderr and returns the process exit code of the error.
int report_error(const Error& error);

// Installs the stderr log sink. `level`: debug, info, warn, error or off; empty means the
// environment variable KVASIR_LOG, else warn. Errors: kUsage for any other word.
Status install_log(std::string_view level);

// Text as it may go to a terminal: control bytes other than newline and tab are dropped.
std::string terminal_text(std::string_view text);

}  // namespace kvasir::apps
