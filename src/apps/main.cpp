// The `kvasir` program: the list of its subcommands.
#include "apps/commands.hpp"
#include "apps/program.hpp"

int main(int argc, char** argv) {
    using namespace kvasir::apps;
    constexpr AddCommand kCommands[] = {add_run,    add_bench,      add_inspect, add_slice,
                                        add_verify, add_worker,     add_relay,   add_market,
                                        add_up,     add_plugin_path};
    return run_program(argc, argv, kCommands);
}
