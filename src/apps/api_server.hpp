// The OpenAI API of `kvasir up`: stock llama-server with the plugin, attached to our relay.
//
// Used by up. Thread: blocks its caller until a signal or until llama-server ends. Owns: the
// process and the token file that it reads.
#pragma once

#include <cstdint>
#include <string>

#include "apps/servers.hpp"
#include "base/result.hpp"

namespace kvasir::apps {

struct ApiServerOptions {
    std::string program;  // empty: beside libllama, else in PATH
    std::string address;  // HOST:PORT
    std::string model_path;
    std::string state_dir;
    std::string exact = "strict";
    uint32_t threads = 1;
};

// Errors: kEnvironment (no such program, it cannot start), kUsage (address), kClosed (it ended by
// itself).
Status run_api_server(const ApiServerOptions& options, Servers& servers);

}  // namespace kvasir::apps
