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

Result<uint64_t> parse_size(std::string_view text) {
    constexpr double kBytesMax = static_cast<double>(uint64_t{1} << 60);
    const auto malformed = [text] {
        return fail(Errc::kUsage, fmt::format("'{}' is not a size: give bytes, or a number with k, "
                                              "M, G, T, Ki, Mi, Gi or Ti, like 340M or 1.5G",
                                              printable(text)));
    };
    const std::string_view all = trimmed(text);
    double number = 0;
    const auto [end, error] =
        std::from_chars(all.data(), all.data() + all.size(), number, std::chars_format::fixed);
    if (error != std::errc{} || !(number >= 0)) return malformed();
    std::string_view unit = trimmed(all.substr(static_cast<size_t>(end - all.data())));
    if (unit.ends_with('B') || unit.ends_with('b')) unit.remove_suffix(1);
    double factor = 1;
    if (!unit.empty()) {
        constexpr std::string_view kPrefixes = "kmgt";
        const char letter = static_cast<char>(unit[0] | 0x20);  // of either case
        const size_t power = kPrefixes.find(letter);
        const std::string_view rest = unit.substr(1);
        if (power == std::string_view::npos || (!rest.empty() && rest != "i")) return malformed();
        for (size_t i = 0; i <= power; ++i) factor *= rest.empty() ? 1000 : 1024;
    }
    const double bytes = number * factor;
    if (bytes > kBytesMax) {
        return fail(Errc::kUsage, fmt::format("'{}' is more than any disk holds", printable(text)));
    }
    if (bytes < 1) return malformed();
    return static_cast<uint64_t>(bytes);
}

}  // namespace kvasir::apps
