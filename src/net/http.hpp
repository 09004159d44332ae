// HTTP/1.1 requests and answers, as the roles see them: no Beast in sight.
//
// A Listener (net/upgrade.hpp) with a handler answers plain HTTP on the same port as WebSocket
// upgrades, TLS or not, with keep-alive. A handler runs on the listener's thread and must not
// block: it may answer at once or later, from any thread, exactly once (who drops every copy of
// Respond without an answer, or throws, makes it a 500). File bodies are sent in
// pieces of at most 256 KiB, so a slow reader costs no memory; a reader slower than the deadline is
// dropped.
//
// Thread: HttpHandler on the listener's; Respond from any, also after the client or the listener is
// gone (then it does nothing). Limits: HttpLimits.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.hpp"

namespace kvasir::net {

struct HttpLimits {
    uint32_t header_bytes_max = 16 << 10;
    uint32_t body_bytes_max = 1 << 20;
    // Of bodies as far as they have come, until their answers are there: of all requests, and of
    // those of one address (a /64 of IPv6). Beyond these a request is refused (kBusy). Sizes: the
    // memory may be twice as much.
    uint64_t bodies_bytes_max = 64 << 20;
    uint64_t bodies_bytes_per_address_max = 8 << 20;
    std::chrono::milliseconds request_deadline{15000};  // from the first byte to the last
    std::chrono::milliseconds idle_max{60000};          // between requests of a connection
    std::chrono::milliseconds write_stall_max{30000};   // without a byte taken by the client
    // Beyond these the one that is idle the longest, between two requests, gives its place to the
    // next; if none is, the next is refused (kBusy). An address may be that of a proxy.
    uint32_t connections_max = 20000;
    uint32_t connections_per_address_max = 1024;
};

struct HttpRequest {
    std::string method;  // "GET"
    // Percent-decoded, without query; no "..", no empty or "." parts, no control characters (400);
    // a slash at the end is dropped.
    std::string path;
    std::map<std::string, std::string> query;    // decoded; the first one of a name counts
    std::map<std::string, std::string> headers;  // names in lower case; the first of a name counts
    std::string body;
    std::string peer_address;  // without port
    bool tls = false;
    // The token of "Authorization: Bearer TOKEN", or empty.
    std::string_view bearer() const;
};

// A part of an open file as a body.
struct FileBody {
    std::shared_ptr<const int> fd;  // closed with the last owner
    uint64_t offset = 0;
    uint64_t bytes = 0;
};

struct HttpResponse {
    int status = 200;
    std::string content_type = "application/json";
    std::string body;
    std::optional<FileBody> file;  // in place of body
    std::vector<std::pair<std::string, std::string>> headers;
    // Called once, when the client's system has acknowledged the whole answer (noticed within half
    // a second) or the connection has ended: how many bytes of the body it has acknowledged. Never
    // more than arrived (unless 256 later answers were not acknowledged either); of an answer cut
    // short, fewer by what was acknowledged too late, and by TLS's framing of what was under way.
    // On the listener's thread; not when the listener has gone before the answer.
    std::function<void(uint64_t bytes_taken)> on_sent;
};

using Respond = std::function<void(HttpResponse)>;
using HttpHandler = std::function<void(HttpRequest, Respond)>;

// {"error": {"code": NAME, "message": DETAIL, "retryable": bool}} with the code's HTTP status.
HttpResponse error_response(const Error& error);

// "bytes=A-B", "bytes=A-", "bytes=-N" against a body of `size` bytes (RFC 9110 section 14).
// nullopt: no or unknown range unit, serve the whole. Errors: kLimit (not satisfiable: 416),
// kUnsupported (more than one range), kBadInput (malformed).
struct ByteSpan {
    uint64_t offset = 0;
    uint64_t bytes = 0;
};
Result<std::optional<ByteSpan>> parse_range(std::string_view header, uint64_t size);

}  // namespace kvasir::net
