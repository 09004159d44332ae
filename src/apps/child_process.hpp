// ChildProcess: a program started by this one, that never outlives it, with its last words kept.
//
// Used by LocalWorkers, bench (the RPC server) and up (llama-server). The child gets SIGKILL from
// the kernel if this process dies. Its stderr is read by a small thread that keeps the tail (and
// copies it to the debug log), so a chatty child neither blocks nor fills memory. stdout goes to
// /dev/null, stdin comes from there. Thread: one owner; start it from a thread that lives as long
// as the child should. Owns: process and thread. Limits: kTailBytesMax bytes of stderr are kept.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"

namespace kvasir::apps {

constexpr size_t kTailBytesMax = 8192;

struct ChildOptions {
    std::string program;                        // path, not looked up in PATH
    std::vector<std::string> arguments;         // without the program's name
    std::string label;                          // for messages and log lines
    int cpu = -1;                               // run on this CPU only; -1: anywhere
    std::vector<std::string> environment = {};  // "NAME=VALUE", over what this process has
    // Every line of its stderr, cut at 1,000 bytes, not printable(). Called on the reading thread.
    std::function<void(std::string_view line)> on_line = {};
};

// How a child ended: an exit code, or a signal.
struct ChildExit {
    int code = 0;
    int signal = 0;
    std::string describe() const;  // "exit code 3", "signal 9 (Killed)"
};

class ChildProcess {
public:
    // Errors: kEnvironment (no such program, no process).
    static Result<ChildProcess> start(const ChildOptions& options);
    ChildProcess(ChildProcess&&) noexcept;
    ChildProcess& operator=(ChildProcess&&) noexcept;
    ~ChildProcess();  // stop(2 s)

    pid_t pid() const;
    // nullopt while it runs; reaps it otherwise. Never blocks.
    std::optional<ChildExit> poll();
    // SIGTERM, then SIGKILL after `grace`; reaps. Idempotent.
    ChildExit stop(std::chrono::milliseconds grace);
    // The last lines of its stderr so far, printable, at most `lines_max`, joined by " | ".
    std::string last_words(size_t lines_max = 3) const;

private:
    struct Impl;
    explicit ChildProcess(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

}  // namespace kvasir::apps
