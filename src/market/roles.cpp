#include "market/roles.hpp"

#include <array>
#include <utility>

#include "crypto/token.hpp"

namespace kvasir::market {
namespace {

constexpr std::array<std::pair<uint8_t, std::string_view>, 3> kRoles = {{
    {crypto::kRoleWorker, "worker"},
    {crypto::kRoleBackbone, "backbone"},
    {crypto::kRoleObserver, "observer"},
}};

std::string joined(uint8_t roles) {
    std::string out;
    for (const std::string& name : role_names(roles)) out += (out.empty() ? "" : "+") + name;
    return out;
}

}  // namespace

std::vector<std::string> role_names(uint8_t roles) {
    std::vector<std::string> out;
    for (const auto& [bit, name] : kRoles) {
        if ((roles & bit) != 0) out.emplace_back(name);
    }
    return out;
}

std::optional<uint8_t> parse_role(std::string_view name) {
    for (const auto& [bit, known] : kRoles) {
        if (name == known) return bit;
    }
    return std::nullopt;
}

std::string wrong_role_text(uint8_t granted, uint8_t wanted) {
    const std::string needed = joined(wanted);
    return "the invite code gives the role " + joined(granted) + ", this node needs the role " +
           needed + ": ask for a code of that role; this one was not used up";
}

}  // namespace kvasir::market
