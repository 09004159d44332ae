// `kvasir` for machines that only ever work: the same program with the subcommands of a worker.
#include "apps/commands.hpp"
#include "apps/program.hpp"

int main(int argc, char** argv) {
    using namespace kvasir::apps;
    constexpr AddCommand kCommands[] = {add_worker, add_verify};
    return run_program(argc, argv, kCommands);
}
