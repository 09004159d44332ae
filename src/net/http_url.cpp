#include "net/http_url.hpp"

#include <algorithm>
#include <memory>

#include <curl/curl.h>

#include "base/log.hpp"

namespace kvasir::net {
namespace {

constexpr size_t kUrlBytesMax = 16 << 10;
constexpr size_t kSecretBytesMin = 4;  // shorter ones would blank out ordinary words
constexpr size_t kKeyLikeBytesMin = 32;

struct FreeUrl {
    void operator()(CURLU* url) const { curl_url_cleanup(url); }
};
using UrlHandle = std::unique_ptr<CURLU, FreeUrl>;

std::string part(CURLU* url, CURLUPart which, unsigned flags = 0) {
    char* text = nullptr;
    if (curl_url_get(url, which, &text, flags) != CURLUE_OK || text == nullptr) return {};
    std::string out(text);
    curl_free(text);
    return out;
}

std::string lower(std::string text) {
    std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) {
        return static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
    });
    return text;
}

bool has_control_bytes(std::string_view text) {
    return std::any_of(text.begin(), text.end(),
                       [](unsigned char c) { return c < 0x20 || c == 0x7f; });
}

struct UrlParts {
    std::string text, origin, shown, query;
};

UrlParts take_apart(CURLU* url) {
    UrlParts parts;
    curl_url_set(url, CURLUPART_FRAGMENT, nullptr, 0);
    parts.text = part(url, CURLUPART_URL);
    parts.origin = lower(part(url, CURLUPART_SCHEME) + "://" + part(url, CURLUPART_HOST) + ":" +
                         part(url, CURLUPART_PORT, CURLU_DEFAULT_PORT));
    parts.query = part(url, CURLUPART_QUERY);
    curl_url_set(url, CURLUPART_QUERY, nullptr, 0);
    parts.shown = printable(part(url, CURLUPART_URL));
    return parts;
}

bool is_http(CURLU* url) {
    const std::string scheme = lower(part(url, CURLUPART_SCHEME));
    return (scheme == "http" || scheme == "https") && !part(url, CURLUPART_HOST).empty();
}

std::string percent_decoded(std::string_view text) {
    int bytes = 0;
    char* decoded = curl_easy_unescape(nullptr, text.data(), static_cast<int>(text.size()), &bytes);
    if (decoded == nullptr) return std::string(text);
    std::string out(decoded, static_cast<size_t>(bytes));
    curl_free(decoded);
    return out;
}

bool key_like(unsigned char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           std::string_view("+/=%_~-.\\").find(static_cast<char>(c)) != std::string_view::npos;
}

std::string without_key_like(std::string_view text) {
    std::string out;
    for (size_t i = 0; i < text.size();) {
        size_t end = i;
        while (end < text.size() && key_like(static_cast<unsigned char>(text[end]))) ++end;
        if (end - i >= kKeyLikeBytesMin) {
            out += "[hidden]";
        } else {
            out += text.substr(i, end - i);
        }
        if (end < text.size()) out.push_back(text[end++]);
        i = end;
    }
    return out;
}

}  // namespace

Result<HttpUrl> HttpUrl::parse(std::string_view text) {
    // The text itself may hold a secret, so messages do not quote it.
    if (text.size() > kUrlBytesMax || has_control_bytes(text)) {
        return fail(Errc::kUsage, "a URL is too long or has control characters in it");
    }
    UrlHandle url(curl_url());
    if (url == nullptr) return fail(Errc::kEnvironment, "no memory for a URL");
    const CURLUcode code = curl_url_set(url.get(), CURLUPART_URL, std::string(text).c_str(), 0);
    if (code != CURLUE_OK) {
        return fail(Errc::kUsage, std::string("not a URL: ") + curl_url_strerror(code) +
                                      "; write http://HOST:PORT/PATH or https://HOST/PATH");
    }
    if (!is_http(url.get())) {
        return fail(Errc::kUsage, "not an http or https URL: " +
                                      printable(part(url.get(), CURLUPART_SCHEME)) + "://...");
    }
    if (!part(url.get(), CURLUPART_USER).empty() || !part(url.get(), CURLUPART_PASSWORD).empty()) {
        return fail(Errc::kUsage, "a URL of " + printable(part(url.get(), CURLUPART_HOST)) +
                                      " has a user name in it; give credentials as a header");
    }
    UrlParts parts = take_apart(url.get());
    HttpUrl out;
    out.text_ = std::move(parts.text);
    out.origin_ = std::move(parts.origin);
    out.shown_ = std::move(parts.shown);
    out.query_ = std::move(parts.query);
    return out;
}

Result<HttpUrl> HttpUrl::follow(std::string_view location) const {
    const auto refuse = [](std::string_view where) {
        return fail(Errc::kUnsupported, "a redirect to " + std::string(where));
    };
    if (location.empty() || location.size() > kUrlBytesMax || has_control_bytes(location)) {
        return refuse("something that is not a URL");
    }
    UrlHandle url(curl_url());
    if (url == nullptr) return fail(Errc::kEnvironment, "no memory for a URL");
    const unsigned flags = CURLU_URLENCODE | CURLU_ALLOW_SPACE;
    if (curl_url_set(url.get(), CURLUPART_URL, text_.c_str(), 0) != CURLUE_OK ||
        curl_url_set(url.get(), CURLUPART_URL, std::string(location).c_str(), flags) != CURLUE_OK) {
        return refuse("something that is not a URL");
    }
    if (!is_http(url.get())) return refuse("a scheme that is not http or https");
    for (const CURLUPart secret : {CURLUPART_USER, CURLUPART_PASSWORD, CURLUPART_OPTIONS}) {
        curl_url_set(url.get(), secret, nullptr, 0);
    }
    UrlParts parts = take_apart(url.get());
    HttpUrl out;
    out.text_ = std::move(parts.text);
    out.origin_ = std::move(parts.origin);
    out.shown_ = std::move(parts.shown);
    out.query_ = std::move(parts.query);
    if (secure() && !out.secure()) {
        return fail(Errc::kDenied,
                    "a redirect from https to " + printable(out.origin_) + " is not followed");
    }
    return out;
}

void Redactor::add(std::string_view secret) {
    if (secret.size() < kSecretBytesMin) return;
    const auto longer = [](const std::string& a, const std::string& b) {
        return a.size() != b.size() ? a.size() > b.size() : a < b;
    };
    std::string copy(secret);
    const auto at = std::lower_bound(secrets_.begin(), secrets_.end(), copy, longer);
    if (at != secrets_.end() && *at == copy) return;
    secrets_.insert(at, std::move(copy));
}

void Redactor::add_header_value(std::string_view value) {
    add(value);
    while (!value.empty()) {
        const size_t end = std::min(value.find(' '), value.size());
        const std::string_view word = value.substr(0, end);
        const std::string scheme = lower(std::string(word));
        if (scheme != "bearer" && scheme != "basic" && scheme != "token") add(word);
        value.remove_prefix(std::min(end + 1, value.size()));
    }
}

void Redactor::add_query(std::string_view query) {
    add(query);
    while (!query.empty()) {
        const size_t end = std::min(query.find('&'), query.size());
        std::string_view pair = query.substr(0, end);
        const size_t equals = pair.find('=');
        const std::string_view value = equals == pair.npos ? pair : pair.substr(equals + 1);
        add(value);
        add(percent_decoded(value));
        query.remove_prefix(std::min(end + 1, query.size()));
    }
}

std::string Redactor::hide(std::string_view text) const {
    std::string out(text);
    for (const std::string& secret : secrets_) {
        for (size_t at = 0; (at = out.find(secret, at)) != std::string::npos;) {
            out.replace(at, secret.size(), "[hidden]");
            at += std::string_view("[hidden]").size();
        }
    }
    return out;
}

std::string Redactor::clean(std::string_view text, size_t bytes_max, bool cut) const {
    // A secret that the cut went through could not be recognised.
    if (cut && !secrets_.empty()) {
        text.remove_suffix(std::min(text.size(), secrets_.front().size() - 1));
    }
    return printable(without_key_like(hide(text)), bytes_max);
}

}  // namespace kvasir::net
