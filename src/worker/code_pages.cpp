#include "worker/code_pages.hpp"

#include <charconv>
#include <fstream>
#include <string>
#include <string_view>

#include <sys/mman.h>

namespace kvasir::worker {
namespace {

bool parse_address(std::string_view text, uint64_t& value) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
    return error == std::errc{} && end == text.data() + text.size();
}

}  // namespace

uint64_t give_back_code_pages() {
    uint64_t bytes = 0;
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
        // "7f0123456000-7f0123457000 r-xp 00001000 08:01 1234   /path": code of a file. Not what is
        // merely read: the linker wrote relocations there, and they are in no file.
        const size_t dash = line.find('-');
        const size_t space = line.find(' ');
        const size_t path = line.find('/');
        if (dash == std::string::npos || space == std::string::npos || path == std::string::npos ||
            line.compare(space, 6, " r-xp ") != 0)
            continue;
        uint64_t begin = 0, end = 0;
        const std::string_view text(line);
        if (!parse_address(text.substr(0, dash), begin) ||
            !parse_address(text.substr(dash + 1, space - dash - 1), end) || end <= begin)
            continue;
        // NOLINTNEXTLINE(performance-no-int-to-ptr)
        if (::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED) == 0)
            bytes += end - begin;
    }
    return bytes;
}

}  // namespace kvasir::worker
