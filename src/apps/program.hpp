// The frame of our programs with subcommands: global flags, parsing, exit codes, last-resort
// errors.
//
// Used by main() of `kvasir` and of the worker built alone. Thread: main. Owns: nothing.
#pragma once

#include <span>

namespace CLI {
class App;
}

namespace kvasir::apps {

using AddCommand = void (*)(CLI::App& app, int& exit_code);

// Parses the arguments and runs the subcommand they name; returns the process's exit code.
int run_program(int argc, char** argv, std::span<const AddCommand> commands);

}  // namespace kvasir::apps
