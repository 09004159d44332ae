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

// What the API needs of this machine.
struct ApiServerParts {
    std::string program;  // llama-server
    std::string plugin;
    net::Endpoint listen;
};

struct ApiServerOptions {
    ApiServerParts parts;
    std::string address;  // HOST:PORT
    std::string model_path;
    std::string state_dir;
    std::string exact = "strict";
    uint32_t threads = 1;
};

// To be called before anything is made for it. Errors: kEnvironment (no such program, no plugin),
// kUsage (address).
Result<ApiServerParts> find_api_server(const std::string& program, const std::string& address);

// Errors: kEnvironment (it cannot start), kClosed (it ended by itself).
Status run_api_server(const ApiServerOptions& options, Servers& servers);

}  // namespace kvasir::apps
