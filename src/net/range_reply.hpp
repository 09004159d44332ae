// What a server's reply to a range request means: pure rules, no I/O.
//
// Used by the range download. A reply is believed only if it says that it is exactly the bytes
// asked for, not coded, of a file that has not changed. Thread: values.
#pragma once

#include <chrono>
#include <cstdint>
#include <ctime>
#include <optional>
#include <string>
#include <string_view>

#include "base/result.hpp"
#include "net/client.hpp"

namespace kvasir::net {

struct ReplyHead {
    int status = 0;
    HeaderList headers;  // names in lower case, values without outer spaces
    // The first of that name, or nullptr.
    const std::string* find(std::string_view name) const;
};

// "bytes 0-499/1234", "bytes 0-499/*". nullopt: anything else ("bytes */1234" too).
struct ContentRange {
    uint64_t first = 0;
    uint64_t last = 0;
    std::optional<uint64_t> total;
};
std::optional<ContentRange> parse_content_range(std::string_view text);

// Decimal digits only. nullopt: anything else, or more than 64 bits.
std::optional<uint64_t> parse_decimal(std::string_view text);

// Seconds or a date (RFC 9110 section 10.2.3); a date that is past is 0.
std::optional<std::chrono::seconds> parse_retry_after(std::string_view text, std::time_t now);

// What is known of one version of a file at one host. Empty: the server did not say.
struct Validators {
    std::string etag;      // without quotes, weak mark and upper case
    std::string modified;  // Last-Modified as it was sent
    static Validators of(const ReplyHead& head);
    // False: another version. ETags decide where both have one, else the dates. What `other` knows
    // and this did not is kept.
    bool agree(const Validators& other);
};

enum class ReplyKind {
    kBytes,     // take the body
    kRedirect,  // 301, 302, 303, 307, 308
    kLater,     // 408, 425, 429, most of 5xx: ask again
    kRefused,   // 401, 403, 410: at the end of a redirect the link may have expired
    kFinal,     // any other status: no use asking again
};
ReplyKind classify_status(int status);

// Anything but "identity" (which codes nothing) is refused: we asked for identity, and the piece of
// a coded file is not the coded piece of the file. Errors: kUnsupported.
Status check_coding(const ReplyHead& head);

struct AskedRange {
    uint64_t offset = 0;
    uint64_t bytes = 0;
    uint64_t file_bytes = 0;  // 0: not known
};
struct AcceptedRange {
    uint64_t bytes = 0;           // of the body to take, from the offset asked for
    uint64_t file_bytes = 0;      // 0: still not known
    bool ignores_ranges = false;  // the whole file came in place of its beginning
};
// For a status of kBytes. A 206 may end earlier than asked. Errors say what is wrong, not where:
// kUnsupported (no ranges, coded), kMismatch (other bytes, or other size, than asked for).
Result<AcceptedRange> accept_reply(const ReplyHead& head, const AskedRange& asked);

}  // namespace kvasir::net
