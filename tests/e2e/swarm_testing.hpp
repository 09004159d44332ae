// What several end-to-end tests share: folders, JSON runs, a backbone with outside workers.
//
// Used by the end-to-end tests. Thread: one owner. Owns: its processes and files.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "run_program.hpp"

namespace kvasir::e2e {

using Json = nlohmann::json;

// Built for speed and not under a sanitizer: only then do times and resident memory mean something.
#ifdef KVASIR_SANITIZED
constexpr bool kMeasures = false;
#else
constexpr bool kMeasures = true;
#endif

// A folder that goes away with the object.
class ScratchFolder {
public:
    ScratchFolder();
    ~ScratchFolder();
    ScratchFolder(const ScratchFolder&) = delete;
    ScratchFolder& operator=(const ScratchFolder&) = delete;
    std::string path(const std::string& name) const { return path_ + "/" + name; }

private:
    std::string path_;
};

// "1,2,3,..." of `count` token numbers, all of them small.
std::string tokens_up_to(uint32_t count);

// `kvasir` with these arguments and --json; a null value (and a test failure) unless it ends with
// 0 and prints one JSON value.
Json run_json(std::vector<std::string> arguments, const ProgramOptions& options = {});

// `kvasir-synth` into `path`; returns the first file it names.
std::string synth(const std::string& path, std::vector<std::string> flags);

// One of llama.cpp's own programs; a test failure that says what to build when it is missing.
std::string llama_program(const std::string& name);

// `kvasir worker --model M --experts E --name N`, at info level.
Program start_worker(const std::string& url, const std::string& name, const std::string& model,
                     const std::string& experts);
Program start_slice_worker(const std::string& url, const std::string& name,
                           const std::string& slice);

// `kvasir run --listen 127.0.0.1:PORT --json` at debug level, which shows every piece of text.
class ListeningRun {
public:
    ListeningRun(const std::string& model, std::vector<std::string> flags,
                 const std::string& port = "0");
    const std::string& url() const { return url_; }
    std::string port() const { return url_.substr(url_.rfind(':') + 1); }
    Program& program() { return program_; }
    // Until `count` tokens have been generated.
    bool wait_tokens(size_t count);
    // Waits for the end; null (and a test failure) unless it ends well.
    Json result();
    // Dispatch warnings (requests given up) about the worker of that name.
    size_t given_up(const std::string& name) const;
    // What it said, without the debug lines.
    std::string log() const;

private:
    Program program_;
    std::string url_;
};

// Sum over the connections of the workers of that name in a report.
uint64_t pairs_of(const Json& report, const std::string& name);

}  // namespace kvasir::e2e
