// Runs programs: to their end, or in the background while a test reads what they print.
//
// Used by the end-to-end tests. No shell in between; output goes to files in memory, so that a
// program never waits for its reader. A background program is killed with the object, and by the
// kernel when the test dies. What a sanitizer reports in any of them is a failure of the test.
// Thread: one owner. Owns: the process and its captured output.
// Limits: run_program() kills what runs longer than `seconds_max` and reports it as signal 9.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace kvasir::e2e {

// How often `wanted` stands in `text`.
size_t count_of(const std::string& text, std::string_view wanted);

struct Outcome {
    int exit_code = -1;  // 128 + signal when killed
    std::string out;
    std::string err;
};

struct ProgramOptions {
    std::vector<std::string> environment;  // "NAME=value", on top of this process's own
    std::string stdout_path;               // in place of a captured stdout
    unsigned seconds_max = 120;
    bool stdin_pipe = false;  // for type(); else the input is empty
};

class Program {
public:
    explicit Program(const std::vector<std::string>& argv, const ProgramOptions& options = {});
    Program(Program&&) noexcept;
    Program& operator=(Program&&) noexcept;
    ~Program();

    pid_t pid() const;
    std::string out() const;  // so far
    std::string err() const;
    bool running() const;
    void signal(int number) const;
    // Into its input; a test failure when it no longer reads.
    void type(std::string_view text);
    void end_input();
    // Until `text` stands on stdout or stderr, `count` times; false when the program has ended
    // without it, or after `seconds`.
    bool wait_for(std::string_view text, size_t count = 1, unsigned seconds = 120);
    // What follows `before` on stdout or stderr, up to white space; empty if it is not there.
    std::string word_after(std::string_view before) const;
    // Waits for the end; kills it after `seconds`.
    Outcome wait(unsigned seconds = 120) const;

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

// Polls `condition` until it holds; false after `seconds`.
bool eventually(const std::function<bool()>& condition, unsigned seconds = 60);

Outcome run_program(const std::vector<std::string>& argv, const ProgramOptions& options = {});
// `kvasir` with these arguments.
Outcome kvasir(std::vector<std::string> arguments, const ProgramOptions& options = {});

std::string demo_model();

}  // namespace kvasir::e2e
