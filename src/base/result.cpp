#include "base/result.hpp"

#include <array>

namespace kvasir {
namespace {

constexpr size_t kErrcCount = static_cast<size_t>(Errc::kCount_);

constexpr std::array<ErrcInfo, kErrcCount> kTable = {{
    {"usage", 1, 2, false},
    {"bad_input", 2, 3, false},
    {"environment", 3, 4, false},
    {"io", 4, 4, true},
    {"protocol", 5, 1, false},
    {"version", 6, 1, false},
    {"mismatch", 7, 1, false},
    {"not_held", 8, 1, true},
    {"unsupported", 9, 1, false},
    {"limit", 10, 1, false},
    {"busy", 11, 1, true},
    {"timeout", 12, 1, true},
    {"closed", 13, 1, true},
    {"bad_answer", 14, 1, true},
}};

}  // namespace

const ErrcInfo& errc_info(Errc code) {
    const auto index = static_cast<size_t>(code);
    return kTable[index < kErrcCount ? index : static_cast<size_t>(Errc::kProtocol)];
}

Errc errc_from_wire(uint16_t wire_code) {
    for (size_t i = 0; i < kErrcCount; ++i) {
        if (kTable[i].wire_code == wire_code) return static_cast<Errc>(i);
    }
    return Errc::kProtocol;
}

}  // namespace kvasir
