// The subcommands of `kvasir`: each file adds its own to the parser.
//
// Used by main.cpp. add_X() declares the flags and installs a callback that does the work after
// parsing and sets `exit_code` (0 done, 1 failed, 2 usage, 3 bad input, 4 environment).
// Thread: main thread. Owns: nothing; flag variables live as long as the app.
#pragma once

#include <CLI/App.hpp>

namespace kvasir::apps {

void add_run(CLI::App& app, int& exit_code);
void add_bench(CLI::App& app, int& exit_code);
void add_inspect(CLI::App& app, int& exit_code);
void add_slice(CLI::App& app, int& exit_code);
void add_verify(CLI::App& app, int& exit_code);
void add_worker(CLI::App& app, int& exit_code);
void add_plugin_path(CLI::App& app, int& exit_code);
void add_relay(CLI::App& app, int& exit_code);
void add_market(CLI::App& app, int& exit_code);
void add_up(CLI::App& app, int& exit_code);

}  // namespace kvasir::apps
