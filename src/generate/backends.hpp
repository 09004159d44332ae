// Before the first model: ggml's backends, llama.cpp's log, and what build this is.
//
// Used by Session and by the programs before anything of llama.cpp is touched.
// Thread: load_backends() and add_rpc_server() at start, from one thread; the rest from any. Owns:
// llama.cpp's log callback. (engine/runtime owns the loading of ggml's modules.)
#pragma once

#include <string>

#include "base/result.hpp"

namespace kvasir::generate {

// engine::load_ggml(), with llama.cpp's log routed to base/log at debug level first. Errors: its.
Status load_backends();

// Connects to a ggml-rpc-server ("127.0.0.1:50052") and registers its devices; returns the name of
// the first. The server must be listening already (ggml aborts otherwise; wait for the port).
// Errors: kEnvironment (no RPC backend here, no device there).
Result<std::string> add_rpc_server(const std::string& endpoint);

// Version of the llama.cpp library in use, and what it says about the CPU's instruction sets.
std::string llama_version_text();
std::string llama_system_text();

}  // namespace kvasir::generate
