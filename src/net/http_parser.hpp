// HTTP/1.1 messages from bytes and to bytes, over Beast. No I/O.
//
// Private to net/: used by Listener's connections and dial. This is the only part that sees Beast.
// Thread: not thread-safe. Owns: what has been parsed, never memory for a length that was only
// said. Limits: those given at construction.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "net/http.hpp"

namespace kvasir::net {

// One request. Feed it until head_done(), decide, then on until done().
class RequestParser {
public:
    RequestParser(uint32_t header_bytes_max, uint64_t body_bytes_max);
    RequestParser(RequestParser&&) noexcept;
    RequestParser& operator=(RequestParser&&) noexcept;
    ~RequestParser();

    // How many bytes were used; the rest must be fed again, with more behind it. Stops at the end
    // of the head, then at the end of the body. Errors: kLimit (refusal_status() says of what),
    // kProtocol.
    Result<size_t> feed(std::span<const uint8_t> bytes);
    // After an error: the HTTP status it deserves; 0: it was no HTTP at all, just close.
    int refusal_status() const;

    bool head_done() const;
    bool done() const;

    // Once the head is there:
    std::string_view method() const;
    std::string_view target() const;
    bool http_1_1() const;
    bool keep_alive() const;
    bool has_body() const;        // by its headers; a length of 0 counts as a body too
    uint64_t body_bytes() const;  // that have come and were not taken
    // The first header of that name, or empty.
    std::string_view header(std::string_view name) const;
    // Is `token` in the comma-separated list of the header? Case does not matter.
    bool has_token(std::string_view name, std::string_view token) const;
    // Names in lower case; the first of a name counts.
    std::map<std::string, std::string> headers() const;
    std::string take_body();

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

// The head of a response.
class ResponseParser {
public:
    explicit ResponseParser(uint32_t header_bytes_max);
    ResponseParser(ResponseParser&&) noexcept;
    ResponseParser& operator=(ResponseParser&&) noexcept;
    ~ResponseParser();

    // As in RequestParser. Errors: kProtocol (no HTTP, or too long).
    Result<size_t> feed(std::span<const uint8_t> bytes);
    bool head_done() const;
    int status() const;
    std::string_view reason() const;
    std::string_view header(std::string_view name) const;
    bool has_token(std::string_view name, std::string_view token) const;

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

using HeaderPairs = std::vector<std::pair<std::string, std::string>>;

// Head of a response. With `content_length` a body of that many bytes follows.
struct ResponseHead {
    int status = 200;
    bool keep_alive = false;
    HeaderPairs headers;  // those with control characters are left out
    std::optional<uint64_t> content_length;
};
std::string format_head(const ResponseHead& head);
// "GET TARGET HTTP/1.1" with headers.
std::string format_get(std::string_view target, const HeaderPairs& headers);

}  // namespace kvasir::net
