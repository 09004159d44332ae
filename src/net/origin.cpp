#include "net/origin.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

#include "base/log.hpp"
#include "net/origin_headers.hpp"

namespace kvasir::net {
namespace {

// "127.1.2.3", all four parts: the parser of URLs has written shorter forms out.
bool is_loopback_v4(std::string_view host) {
    std::array<unsigned, 4> parts = {};
    const char* at = host.data();
    const char* end = host.data() + host.size();
    for (size_t i = 0; i < parts.size(); ++i) {
        if (i > 0 && (at == end || *at++ != '.')) return false;
        const auto [next, error] = std::from_chars(at, end, parts[i]);
        if (error != std::errc() || parts[i] > 255) return false;
        at = next;
    }
    return at == end && parts[0] == 127;
}

bool same_name(std::string_view a, std::string_view b) {
    const auto lower = [](char c) {
        return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    };
    return std::ranges::equal(a, b, {}, lower, lower);
}

}  // namespace

Result<Origin> parse_origin(std::string_view url) {
    const Result<HttpUrl> parsed = HttpUrl::parse(url);
    if (!parsed) return tl::unexpected(parsed.error());
    Origin out;
    out.text = parsed->origin();
    out.is_secure = parsed->secure();
    out.has_query = !parsed->query().empty();
    const size_t begin = out.text.find("://") + 3;
    const std::string host = out.text.substr(begin, out.text.rfind(':') - begin);
    out.is_loopback = host == "localhost" || host == "[::1]" || is_loopback_v4(host);
    const std::string& text = parsed->text();
    const size_t slash = text.find('/', text.find("://") + 3);
    out.is_all = (slash == text.npos || slash + 1 == text.size()) && !out.has_query;
    return out;
}

Status check_secrets(const OriginSecrets& secrets) {
    const auto made = OriginHeaders::make(secrets);
    return made ? Status() : tl::unexpected(made.error());
}

Result<OriginHeaders> OriginHeaders::make(const OriginSecrets& secrets) {
    OriginHeaders out;
    out.flag_ = secrets.flag;
    for (const OriginSecret& one : secrets.origins) {
        const Result<Origin> origin = parse_origin(one.origin);
        if (!origin) return tl::unexpected(origin.error());
        if (!origin->is_all) {
            return fail(Errc::kUsage,
                        "credentials are for an origin, https://HOST or https://HOST:PORT, and not "
                        "for a path of " +
                            printable(origin->text));
        }
        if (!origin->is_secure && !origin->is_loopback) {
            return fail(Errc::kUsage, "credentials for " + printable(origin->text) +
                                          " could be read on the way: only https protects them");
        }
        if (!out.by_origin_.emplace(origin->text, one.headers).second) {
            return fail(Errc::kUsage,
                        "credentials for " + printable(origin->text) + " are given twice");
        }
    }
    return out;
}

void OriginHeaders::append(HeaderList& out, const HttpUrl& hop, const HttpUrl& first,
                           const HeaderList& own) const {
    const bool is_own = hop.origin() == first.origin();
    if (is_own) out.insert(out.end(), own.begin(), own.end());
    const auto found = by_origin_.find(hop.origin());
    if (found == by_origin_.end()) return;
    for (const auto& header : found->second) {
        const bool is_there = is_own && std::ranges::any_of(own, [&](const auto& other) {
                                  return same_name(other.first, header.first);
                              });
        if (!is_there) out.push_back(header);
    }
}

void OriginHeaders::hide_in(Redactor& redactor) const {
    for (const auto& [origin, headers] : by_origin_) {
        for (const auto& [name, value] : headers) redactor.add_header_value(value);
    }
}

}  // namespace kvasir::net
