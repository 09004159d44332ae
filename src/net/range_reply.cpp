#include "net/range_reply.hpp"

#include <algorithm>
#include <charconv>

#include <curl/curl.h>

#include "base/log.hpp"

namespace kvasir::net {
namespace {

std::string lower(std::string_view text) {
    std::string out(text);
    for (char& c : out) {
        if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    }
    return out;
}

std::string show_span(uint64_t first, uint64_t last) {
    return std::to_string(first) + "-" + std::to_string(last);
}

// The body's length as the server states it. Errors: kMismatch when that is no number.
Result<std::optional<uint64_t>> content_length(const ReplyHead& head) {
    const std::string* text = head.find("content-length");
    if (text == nullptr || head.find("transfer-encoding") != nullptr) return std::nullopt;
    const std::optional<uint64_t> bytes = parse_decimal(*text);
    if (!bytes) return fail(Errc::kMismatch, "Content-Length is not a number");
    return bytes;
}

Error other_size(uint64_t known, uint64_t now) {
    return {Errc::kMismatch, "the file changed: it had " + std::to_string(known) +
                                 " bytes and now has " + std::to_string(now)};
}

Result<AcceptedRange> accept_part(const ReplyHead& head, const AskedRange& asked,
                                  std::optional<uint64_t> length) {
    const std::string wanted = show_span(asked.offset, asked.offset + asked.bytes - 1);
    const std::string* text = head.find("content-range");
    if (text == nullptr) {
        return fail(Errc::kMismatch,
                    "a 206 without Content-Range (asked for bytes " + wanted + ")");
    }
    const std::optional<ContentRange> range = parse_content_range(*text);
    if (!range) {
        return fail(Errc::kMismatch, "Content-Range is malformed: " + printable(*text));
    }
    const uint64_t bytes = range->last - range->first + 1;
    if (range->first != asked.offset || bytes > asked.bytes) {
        return fail(Errc::kMismatch, "asked for bytes " + wanted + " and got bytes " +
                                         show_span(range->first, range->last));
    }
    if (range->total && asked.file_bytes != 0 && *range->total != asked.file_bytes) {
        return tl::unexpected(other_size(asked.file_bytes, *range->total));
    }
    if (length && *length != bytes) {
        return fail(Errc::kMismatch, "Content-Range means " + std::to_string(bytes) +
                                         " bytes, Content-Length " + std::to_string(*length));
    }
    return AcceptedRange{bytes, range->total.value_or(asked.file_bytes), false};
}

// A 200: of use only if the wanted bytes are the first ones.
Result<AcceptedRange> accept_whole(const ReplyHead& head, const AskedRange& asked,
                                   std::optional<uint64_t> length) {
    const std::string* type = head.find("content-type");
    if (type != nullptr && lower(*type).starts_with("text/html")) {
        return fail(Errc::kUnsupported,
                    "a web page (text/html) came in place of the file: is a login or a token "
                    "needed, or the address wrong?");
    }
    if (asked.offset != 0) {
        return fail(Errc::kUnsupported,
                    "the server ignores ranges (it answered 200 with the whole file); a download "
                    "in parts is not possible there: use another origin");
    }
    if (length && asked.file_bytes != 0 && *length != asked.file_bytes) {
        return tl::unexpected(other_size(asked.file_bytes, *length));
    }
    if (length && *length < asked.bytes) {
        return fail(Errc::kMismatch, "the file has only " + std::to_string(*length) +
                                         " bytes, asked for " + std::to_string(asked.bytes));
    }
    const uint64_t file_bytes = length.value_or(asked.file_bytes);
    return AcceptedRange{asked.bytes, file_bytes, file_bytes != asked.bytes};
}

}  // namespace

const std::string* ReplyHead::find(std::string_view name) const {
    for (const auto& [key, value] : headers) {
        if (key == name) return &value;
    }
    return nullptr;
}

std::optional<uint64_t> parse_decimal(std::string_view text) {
    uint64_t value = 0;
    const char* end = text.data() + text.size();
    const auto [at, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc() || at != end || text.empty()) return std::nullopt;
    return value;
}

std::optional<ContentRange> parse_content_range(std::string_view text) {
    const size_t space = text.find(' ');
    if (space == text.npos || lower(text.substr(0, space)) != "bytes") return std::nullopt;
    text.remove_prefix(space);
    text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
    const size_t dash = text.find('-');
    const size_t slash = text.find('/');
    if (dash == text.npos || slash == text.npos || dash > slash) return std::nullopt;
    const auto first = parse_decimal(text.substr(0, dash));
    const auto last = parse_decimal(text.substr(dash + 1, slash - dash - 1));
    const std::string_view total_text = text.substr(slash + 1);
    const auto total = parse_decimal(total_text);
    if (!first || !last || *last < *first || (!total && total_text != "*")) return std::nullopt;
    // last + 1 must not wrap either.
    if (*last == UINT64_MAX || (total && *last >= *total)) return std::nullopt;
    return ContentRange{*first, *last, total};
}

std::optional<std::chrono::seconds> parse_retry_after(std::string_view text, std::time_t now) {
    constexpr uint64_t kSecondsMax = 10ull * 365 * 24 * 3600;
    if (const auto seconds = parse_decimal(text)) {
        return std::chrono::seconds(std::min(*seconds, kSecondsMax));
    }
    const std::time_t date = curl_getdate(std::string(text).c_str(), nullptr);
    if (date < 0) return std::nullopt;
    const int64_t ahead = std::max<int64_t>(0, date - now);
    return std::chrono::seconds(std::min(static_cast<uint64_t>(ahead), kSecondsMax));
}

Validators Validators::of(const ReplyHead& head) {
    Validators out;
    if (const std::string* etag = head.find("etag")) {
        out.etag = lower(*etag);
        if (out.etag.starts_with("w/")) out.etag.erase(0, 2);
        std::erase(out.etag, '"');
    }
    if (const std::string* modified = head.find("last-modified")) out.modified = *modified;
    return out;
}

bool Validators::agree(const Validators& other) {
    const bool tags = !etag.empty() && !other.etag.empty();
    if (tags && etag != other.etag) return false;
    const bool dates = !modified.empty() && !other.modified.empty();
    if (!tags && dates && modified != other.modified) return false;
    if (etag.empty()) etag = other.etag;
    if (modified.empty()) modified = other.modified;
    return true;
}

ReplyKind classify_status(int status) {
    switch (status) {
        case 200:
        case 206:
            return ReplyKind::kBytes;
        case 301:
        case 302:
        case 303:
        case 307:
        case 308:
            return ReplyKind::kRedirect;
        case 401:
        case 403:
        case 410:
            return ReplyKind::kRefused;
        case 408:
        case 425:
        case 429:
            return ReplyKind::kLater;
        case 501:
        case 505:
            return ReplyKind::kFinal;
        default:
            return status >= 500 ? ReplyKind::kLater : ReplyKind::kFinal;
    }
}

Status check_coding(const ReplyHead& head) {
    for (const auto& [name, value] : head.headers) {
        if (name == "content-encoding" && !value.empty() && lower(value) != "identity") {
            return fail(Errc::kUnsupported,
                        "the server sends the body coded (Content-Encoding: " + printable(value) +
                            ") although identity was asked for");
        }
    }
    return {};
}

Result<AcceptedRange> accept_reply(const ReplyHead& head, const AskedRange& asked) {
    if (auto plain = check_coding(head); !plain) return tl::unexpected(plain.error());
    const auto length = content_length(head);
    if (!length) return tl::unexpected(length.error());
    return head.status == 206 ? accept_part(head, asked, *length)
                              : accept_whole(head, asked, *length);
}

}  // namespace kvasir::net
