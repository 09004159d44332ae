// RpcServer: llama.cpp's own ggml-rpc-server as a child, to measure against.
//
// Used by bench.
// Thread: one owner. Owns: the process.
// Limits: loopback only.
#pragma once

#include <cstdint>
#include <string>

#include "apps/child_process.hpp"
#include "base/result.hpp"

namespace kvasir::apps {

class RpcServer {
public:
    // Starts `program` on a free loopback port and waits until it accepts connections.
    // Errors: kEnvironment (program, port), kTimeout, kClosed (it ended, with its words).
    static Result<RpcServer> start(const std::string& program, uint32_t threads, int cpu);
    const std::string& endpoint() const { return endpoint_; }  // "127.0.0.1:PORT"

private:
    RpcServer(ChildProcess process, std::string endpoint)
        : process_(std::move(process)), endpoint_(std::move(endpoint)) {}
    ChildProcess process_;
    std::string endpoint_;
};

}  // namespace kvasir::apps
