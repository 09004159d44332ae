#include "apps/flag_values.hpp"

#include <fmt/core.h>

#include <charconv>

#include "base/log.hpp"

namespace kvasir::apps {
namespace {

std::string_view trimmed(std::string_view text) {
    while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
    while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
    return text;
}

}  // namespace

Result<std::vector<int32_t>> parse_tokens(std::string_view text) {
    std::vector<int32_t> out;
    for (;;) {
        const size_t comma = text.find(',');
        const std::string_view item = trimmed(text.substr(0, comma));
        int32_t value = 0;
        const auto [end, error] = std::from_chars(item.data(), item.data() + item.size(), value);
        if (item.empty() || error != std::errc{} || end != item.data() + item.size()) {
            return fail(Errc::kUsage,
                        fmt::format("'{}' is not a token number (item {} of --prompt-tokens; give "
                                    "numbers like 3,5,7)",
                                    printable(item), out.size() + 1));
        }
        out.push_back(value);
        if (comma == std::string_view::npos) return out;
        text.remove_prefix(comma + 1);
    }
}

Result<double> parse_share(std::string_view text) {
    std::string_view number = trimmed(text);
    if (!number.empty() && number.back() == '%') number.remove_suffix(1);
    double percent = 0;
    const auto [end, error] =
        std::from_chars(number.data(), number.data() + number.size(), percent);
    const bool parsed =
        !number.empty() && error == std::errc{} && end == number.data() + number.size();
    if (!parsed || !(percent >= 0 && percent <= 100)) {
        return fail(Errc::kUsage,
                    fmt::format("'{}' is not a share from 0% to 100%", printable(text)));
    }
    return percent / 100;
}

}  // namespace kvasir::apps
