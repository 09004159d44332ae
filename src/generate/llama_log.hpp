// llama.cpp's log: forwarded to base/log at debug level, its last error kept for error messages.
//
// Private to generate/.
// Thread: any (ggml logs from several threads); one capture per process, so two models that fail
// to load at the same time may get each other's reason.
// Limits: one line of at most 1 KiB is kept.
#pragma once

#include <string>

namespace kvasir::generate {

void install_llama_log();
void clear_llama_error();
// The most telling error line since clear_llama_error(), printable, without its function-name
// prefix; empty when there was none.
std::string last_llama_error();

}  // namespace kvasir::generate
