// Everything called by the handler is async-signal-safe: no allocation, no stdio.
#include "apps/bus_error.hpp"

#include <fcntl.h>
#include <unistd.h>
#include <csignal>

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/result.hpp"

namespace kvasir::apps {
namespace {

constexpr size_t kLineBytesMax = 4096 + 128;  // a path and what stands in front of it

// Calls `use` with every line of /proc/self/maps until it says that it is done.
template <class Use>
void each_mapping(const Use& use) {
    const int fd = ::open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    char line[kLineBytesMax];
    size_t used = 0;
    char chunk[1024];
    for (bool done = false; !done;) {
        const ssize_t got = ::read(fd, chunk, sizeof(chunk));
        if (got <= 0) break;
        for (ssize_t i = 0; i < got && !done; ++i) {
            if (chunk[i] == '\n') {
                done = use(std::string_view(line, used));
                used = 0;
            } else if (used < sizeof(line)) {
                line[used++] = chunk[i];
            }
        }
    }
    ::close(fd);
}

uint64_t take_hex(std::string_view& text) {
    uint64_t value = 0;
    while (!text.empty()) {
        const char c = text.front();
        const bool digit = c >= '0' && c <= '9';
        if (!digit && (c < 'a' || c > 'f')) break;
        value = value * 16 + static_cast<uint64_t>(digit ? c - '0' : c - 'a' + 10);
        text.remove_prefix(1);
    }
    return value;
}

void say(std::string_view text) {
    [[maybe_unused]] const ssize_t put = ::write(STDERR_FILENO, text.data(), text.size());
}

void say_printable(std::string_view text) {
    char safe[kLineBytesMax];
    for (size_t i = 0; i < text.size(); ++i)
        safe[i] = text[i] >= 0x20 && text[i] < 0x7f ? text[i] : '?';
    say({safe, text.size()});
}

// A line is "BEGIN-END MODE OFFSET DEVICE INODE      PATH".
bool explain(std::string_view line, uint64_t address) {
    std::string_view rest = line;
    const uint64_t begin = take_hex(rest);
    if (rest.empty()) return false;
    rest.remove_prefix(1);
    const uint64_t end = take_hex(rest);
    if (address < begin || address >= end) return false;
    const size_t path = line.find('/');
    if (path == std::string_view::npos) return true;
    say("kvasir: ");
    say_printable(line.substr(path));
    say(": became shorter, or cannot be read any more, while it was in use; fetch it again, and "
        "replace such files by renaming\n");
    ::_exit(errc_info(Errc::kBadInput).exit_code);
}

void on_bus_error(int, siginfo_t* info, void*) {
    const auto address = reinterpret_cast<uint64_t>(info->si_addr);
    if (info->si_code == BUS_ADRERR) {
        each_mapping([&](std::string_view line) { return explain(line, address); });
    }
    ::signal(SIGBUS, SIG_DFL);  // returning repeats the access
}

}  // namespace

void explain_bus_errors() {
    struct sigaction action = {};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO;
    ::sigaction(SIGBUS, &action, nullptr);
}

}  // namespace kvasir::apps
