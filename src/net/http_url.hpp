// HttpUrl: an http or https URL, taken apart by the same parser that libcurl connects with, so that
// what we compare (origins) is what is connected to. Also hides secrets in other people's text.
//
// Private to net/ (the HTTP client). Thread: values. Limits: 16 KiB of URL.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.hpp"

namespace kvasir::net {

class HttpUrl {
public:
    // Errors: kUsage (not http or https, no host, user names in it, characters no URL has).
    static Result<HttpUrl> parse(std::string_view text);

    // Where a redirect of this URL leads; `location` may be relative. User names are dropped,
    // fragments too. Errors do not name this URL: kDenied (from https to http), kUnsupported (not
    // http or https, not a URL).
    Result<HttpUrl> follow(std::string_view location) const;

    const std::string& text() const { return text_; }
    // "https://host:port", in lower case, the port always there: equal origins are equal strings.
    const std::string& origin() const { return origin_; }
    bool secure() const { return origin_.starts_with("https:"); }
    // For messages: without the query, which may be a signature.
    const std::string& shown() const { return shown_; }
    const std::string& query() const { return query_; }

private:
    std::string text_;
    std::string origin_;
    std::string shown_;
    std::string query_;
};

// Collects what must not be shown, and takes it out of text from a server (which may echo it).
class Redactor {
public:
    // The value of a header like "Bearer TOKEN": whole, and its words.
    void add_header_value(std::string_view value);
    // A query string: whole, and its values, percent-decoded too.
    void add_query(std::string_view query);
    // `text` without the secrets: for libcurl's words, which may name long hosts and files.
    std::string hide(std::string_view text) const;
    // For a server's words: `text` without the secrets and without anything that looks like one (32
    // characters of a key's alphabet in a row), then printable(), cut at `bytes_max`. `cut`: the
    // text goes on.
    std::string clean(std::string_view text, size_t bytes_max, bool cut = false) const;

private:
    void add(std::string_view secret);

    std::vector<std::string> secrets_;  // longest first
};

}  // namespace kvasir::net
