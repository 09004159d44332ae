#include "net/http_text.hpp"

#include <algorithm>
#include <limits>

#include "base/log.hpp"
#include "net/http.hpp"

namespace kvasir::net {
namespace {

int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

char lower(char c) {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

bool starts_with_word(std::string_view text, std::string_view lower_word) {
    return text.size() >= lower_word.size() &&
           std::equal(lower_word.begin(), lower_word.end(), text.begin(),
                      [](char a, char b) { return a == lower(b); });
}

std::string_view trim(std::string_view text) {
    while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
    while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
    return text;
}

bool is_control(char c) {
    return (c >= 0 && c < ' ') || c == 0x7f;
}

bool legal_path(std::string_view path) {
    if (path == "/") return true;
    if (std::any_of(path.begin(), path.end(), is_control)) return false;
    while (!path.empty()) {
        path.remove_prefix(1);  // the slash in front of every part
        const std::string_view part = path.substr(0, path.find('/'));
        if (part.empty() || part == "." || part == "..") return false;
        path.remove_prefix(part.size());
    }
    return true;
}

bool parse_query(std::string_view text, std::map<std::string, std::string>& query) {
    while (!text.empty()) {
        const std::string_view pair = text.substr(0, text.find('&'));
        text.remove_prefix(std::min(text.size(), pair.size() + 1));
        if (pair.empty()) continue;
        const size_t equals = std::min(pair.find('='), pair.size());
        auto name = decode_percent(pair.substr(0, equals), true);
        auto value = decode_percent(equals == pair.size() ? "" : pair.substr(equals + 1), true);
        if (!name || !value) return false;
        query.emplace(std::move(*name), std::move(*value));
    }
    return true;
}

// A decimal number; what does not fit is the largest there is. nullopt: not a number.
std::optional<uint64_t> parse_number(std::string_view text) {
    if (text.empty()) return std::nullopt;
    constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();
    uint64_t value = 0;
    for (const char c : text) {
        if (c < '0' || c > '9') return std::nullopt;
        const auto digit = static_cast<uint64_t>(c - '0');
        value = value > (kMax - digit) / 10 ? kMax : value * 10 + digit;
    }
    return value;
}

tl::unexpected<Error> malformed(std::string_view header) {
    return fail(Errc::kBadInput, "Range: \"" + printable(header) +
                                     "\" is malformed, write bytes=FIRST-LAST or bytes=-COUNT");
}

tl::unexpected<Error> not_satisfiable(std::string_view header, uint64_t size) {
    return fail(Errc::kLimit, "Range: \"" + printable(header) + "\" is outside of " +
                                  std::to_string(size) + " bytes");
}

}  // namespace

std::optional<std::string> decode_percent(std::string_view text, bool plus_is_space) {
    std::string out;
    out.reserve(text.size());
    for (size_t i = 0; i < text.size(); ++i) {
        if (text[i] == '+' && plus_is_space) {
            out += ' ';
        } else if (text[i] != '%') {
            out += text[i];
        } else {
            if (text.size() - i < 3) return std::nullopt;
            const int high = hex_digit(text[i + 1]);
            const int low = hex_digit(text[i + 2]);
            if (high < 0 || low < 0) return std::nullopt;
            out += static_cast<char>(high << 4 | low);
            i += 2;
        }
    }
    return out;
}

Result<Target> parse_target(std::string_view target) {
    const auto bad = [target](const char* why) {
        return fail(Errc::kBadInput, "the target \"" + printable(target) + "\" " + why);
    };
    const std::string_view raw = target.substr(0, target.find_first_of("?#"));
    if (!raw.starts_with('/')) return bad("does not start with a slash");
    auto path = decode_percent(raw, false);
    if (!path) return bad("has a percent sign without two hex digits");
    if (path->size() > 2 && path->ends_with('/')) path->pop_back();
    if (!legal_path(*path)) return bad("has a path with \"..\", \"//\" or the like");
    Target parsed;
    parsed.path = std::move(*path);
    std::string_view rest = target.substr(raw.size());
    rest = rest.substr(0, rest.find('#'));
    if (!rest.empty() && !parse_query(rest.substr(1), parsed.query)) {
        return bad("has a query with a percent sign without two hex digits");
    }
    return parsed;
}

std::string_view parse_bearer(std::string_view authorization) {
    authorization = trim(authorization);
    if (!starts_with_word(authorization, "bearer ")) return {};
    const std::string_view token = trim(authorization.substr(7));
    const bool legal = std::all_of(token.begin(), token.end(), [](char c) {
        return (lower(c) >= 'a' && lower(c) <= 'z') || (c >= '0' && c <= '9') ||
               std::string_view("-._~+/=").find(c) != std::string_view::npos;
    });
    return legal ? token : std::string_view();
}

std::string_view HttpRequest::bearer() const {
    const auto entry = headers.find("authorization");
    return entry == headers.end() ? std::string_view() : parse_bearer(entry->second);
}

Result<std::optional<ByteSpan>> parse_range(std::string_view header, uint64_t size) {
    const std::string_view text = trim(header);
    if (text.empty()) return std::nullopt;
    const size_t equals = text.find('=');
    if (equals == std::string_view::npos) return malformed(header);
    const std::string_view unit = trim(text.substr(0, equals));
    if (!starts_with_word(unit, "bytes") || unit.size() != 5) return std::nullopt;
    const std::string_view range = trim(text.substr(equals + 1));
    if (range.find(',') != std::string_view::npos) {
        return fail(Errc::kUnsupported, "Range: more than one range; ask for one at a time");
    }
    const size_t dash = range.find('-');
    if (dash == std::string_view::npos) return malformed(header);
    const std::string_view first_text = trim(range.substr(0, dash));
    const std::string_view last_text = trim(range.substr(dash + 1));

    const auto last = parse_number(last_text);
    if (first_text.empty()) {  // the last N bytes
        if (!last) return malformed(header);
        if (*last == 0 || size == 0) return not_satisfiable(header, size);
        const uint64_t bytes = std::min(*last, size);
        return ByteSpan{size - bytes, bytes};
    }
    const auto first = parse_number(first_text);
    if (!first || (!last && !last_text.empty()) || (last && *last < *first)) {
        return malformed(header);
    }
    if (*first >= size) return not_satisfiable(header, size);
    const uint64_t end = last && *last < size - 1 ? *last + 1 : size;
    return ByteSpan{*first, end - *first};
}

}  // namespace kvasir::net
