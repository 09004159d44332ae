// A stock llama-server under test, with or without the plugin, and a small HTTP client for it.
//
// Used by the plugin tests. Thread: request() from any thread; the rest from one owner.
// Owns: the server process. Limits: one request per connection.
#pragma once

#include <string>
#include <vector>

#include "swarm_testing.hpp"

namespace kvasir::e2e {

struct PluginOptions {
    std::string model;  // KVASIR_MODEL
    std::string log = "info";
};

// POST with a JSON body to a server on this machine: all that it says, headers included; empty when
// it does not answer.
std::string http_post(unsigned port, const std::string& path, const Json& body);
// The body of /v1/chat/completions for an answer at temperature 0.
Json chat_request(const std::string& question, unsigned tokens);

// The environment that makes a llama.cpp program load the plugin.
ProgramOptions with_plugin(const PluginOptions& options);

class LlamaServer {
public:
    // One thread, --no-repack, any free port; ready when it returns.
    LlamaServer(const std::string& model, std::vector<std::string> flags,
                const ProgramOptions& options = {});

    // ws://... of the plugin's hub.
    std::string hub() const;
    // Until workers hold all experts in use (of `experts`).
    bool wait_experts(unsigned experts);
    // POST with a JSON body; null (and a test failure) unless it answers 200 with JSON.
    Json post(const std::string& path, const Json& body) const;
    // The text of a chat answer at temperature 0.
    std::string chat(const std::string& question, unsigned tokens = 32) const;
    Program& program() { return program_; }
    // Lines of the plugin.
    std::string log() const;

private:
    Program program_;
    unsigned port_ = 0;
};

}  // namespace kvasir::e2e
