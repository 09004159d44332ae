// ggml's backends: loading them, finding devices, llama.cpp's log.
//
// Used by Session and by the programs before anything of llama.cpp is touched.
// Thread: load_backends() and add_rpc_server() at start, from one thread; the rest from any. Owns:
// the process-wide ggml registry's contents (there is only one) and llama.cpp's log callback.
#pragma once

#include <string>

#include "base/result.hpp"

namespace kvasir::generate {

// Loads the ggml backends that lie beside libggml.so (else in the folder the program was built
// against), and routes llama.cpp's log to base/log at debug level. Does nothing more when called
// again, or where the backends are compiled in. The variable GGML_BACKEND_PATH is ignored here: it
// would load the plugin into the very program that compares against plain llama.cpp. Errors:
// kEnvironment when there is no CPU device.
Status load_backends();

// Connects to a ggml-rpc-server ("127.0.0.1:50052") and registers its devices; returns the name of
// the first. The server must be listening already (ggml aborts otherwise; wait for the port).
// Errors: kEnvironment (no RPC backend here, no device there).
Result<std::string> add_rpc_server(const std::string& endpoint);

// Version of the llama.cpp library in use, and what it says about the CPU's instruction sets.
std::string llama_version_text();
std::string llama_system_text();

}  // namespace kvasir::generate
