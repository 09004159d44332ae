#include "apps/machine.hpp"

#include <sched.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "base/log.hpp"

namespace kvasir::apps {
namespace {

std::string cpu_model() {
    std::ifstream in("/proc/cpuinfo");
    std::string line;
    while (std::getline(in, line)) {
        if (line.rfind("model name", 0) != 0) continue;
        const size_t colon = line.find(": ");
        if (colon != std::string::npos) return printable(line.substr(colon + 2));
    }
    return "unknown";
}

}  // namespace

Machine describe_machine() {
    Machine out;
    out.cpu = cpu_model();
    out.cores = static_cast<unsigned>(allowed_cpus().size());
#if defined(__clang__)
    out.compiler = __VERSION__;
#else
    out.compiler = std::string("gcc ") + __VERSION__;
#endif
    return out;
}

std::vector<int> allowed_cpus() {
    cpu_set_t set;
    CPU_ZERO(&set);
    std::vector<int> out;
    if (sched_getaffinity(0, sizeof(set), &set) != 0) return out;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (CPU_ISSET(cpu, &set)) out.push_back(cpu);
    }
    return out;
}

Status pin_process(const std::vector<int>& cpus) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int cpu : cpus) {
        if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
    }
    if (sched_setaffinity(0, sizeof(set), &set) == 0) return {};
    return fail(Errc::kEnvironment, std::string("cannot pin to the chosen CPUs: ") +
                                        std::strerror(errno) + "; leave out --pin");
}

}  // namespace kvasir::apps
