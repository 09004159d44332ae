#include "base/units.hpp"

#include <array>
#include <cstdio>

namespace kvasir {

std::string format_bytes(double bytes) {
    static constexpr std::array<const char*, 5> kUnits = {"B", "KB", "MB", "GB", "TB"};
    size_t unit = 0;
    while (bytes >= 999.95 && unit + 1 < kUnits.size()) {
        bytes /= 1000;
        ++unit;
    }
    std::array<char, 400> text = {};  // the largest double has 309 digits
    const int digits = unit == 0 ? 0 : 1;
    std::snprintf(text.data(), text.size(), "%.*f %s", digits, bytes, kUnits[unit]);
    return text.data();
}

}  // namespace kvasir
