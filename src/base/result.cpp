#include "base/result.hpp"

#include <array>

namespace kvasir {
namespace {

constexpr size_t kErrcCount = static_cast<size_t>(Errc::kCount_);

constexpr std::array<ErrcInfo, kErrcCount> kTable = {{
    {"usage", 1, 2, false, 400},       {"bad_input", 2, 3, false, 400},
    {"environment", 3, 4, false, 500}, {"io", 4, 4, true, 502},
    {"protocol", 5, 1, false, 400},    {"version", 6, 1, false, 426},
    {"mismatch", 7, 1, false, 409},    {"not_held", 8, 1, true, 404},
    {"unsupported", 9, 1, false, 501}, {"limit", 10, 1, false, 413},
    {"busy", 11, 1, true, 503},        {"timeout", 12, 1, true, 504},
    {"closed", 13, 1, true, 503},      {"bad_answer", 14, 1, true, 502},
    {"denied", 15, 1, false, 403},     {"expired", 16, 1, true, 401},
    {"revoked", 17, 1, false, 403},    {"not_found", 18, 1, false, 404},
    {"no_space", 19, 4, true, 507},
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
