// Runs a program to its end and gives back what it printed.
//
// Used by the end-to-end tests. No shell in between.
// Thread: any.
// Limits: a program that runs longer than `seconds_max` is killed and reported with signal 9.
#pragma once

#include <string>
#include <vector>

namespace kvasir::e2e {

struct Outcome {
    int exit_code = -1;  // 128 + signal when killed
    std::string out;
    std::string err;
};

struct ProgramOptions {
    std::vector<std::string> environment;  // "NAME=value", on top of this process's own
    std::string stdout_path;               // in place of a captured stdout
    unsigned seconds_max = 120;
};

Outcome run_program(const std::vector<std::string>& argv, const ProgramOptions& options = {});
// `kvasir` with these arguments.
Outcome kvasir(std::vector<std::string> arguments, const ProgramOptions& options = {});

std::string demo_model();

}  // namespace kvasir::e2e
