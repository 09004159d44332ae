#include "base/units.hpp"

#include <array>
#include <cstdio>

namespace kvasir {

std::string format_bytes(double bytes) {
    static constexpr std::array<const char*, 6> kUnits = {"B", "kB", "MB", "GB", "TB", "PB"};
    size_t unit = 0;
    // 999.5 would round to "1000": it belongs to the next unit.
    while (bytes >= 999.5 && unit + 1 < kUnits.size()) {
        bytes /= 1000;
        ++unit;
    }
    std::array<char, 400> text = {};  // the largest double has 309 digits
    const int digits = unit > 0 && bytes < 99.95 ? 1 : 0;
    std::snprintf(text.data(), text.size(), "%.*f %s", digits, bytes, kUnits[unit]);
    return text.data();
}

}  // namespace kvasir
