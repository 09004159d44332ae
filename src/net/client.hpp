// HttpClient: small calls (JSON APIs) and downloads of byte ranges, over libcurl.
//
// Used by the worker (market calls, fetching slabs) and tests. libcurl is used nowhere else.
// Credentials: a header in HttpCall::secret_headers or RangeJob goes to exactly the origin (scheme,
// host, port) of the URL it was given for, one in OriginSecrets to exactly its own; redirects are
// followed by us, hop by hop, so that no other hop sees it and none goes from https to http;
// secrets and query strings of redirects are never logged, nor shown when a server echoes them.
// Accept-Encoding: identity; any other Content-Encoding is refused. HTTP/1.1, no cookies; proxies
// from the environment.
//
// Thread: one at a time per object; cancel() from any. Owns: the connections. Limits: below, 64 KiB
// of reply headers; a name lookup that cancel() left behind ends by itself.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.hpp"
#include "net/origin.hpp"
#include "net/tls.hpp"

namespace kvasir::net {

// In the kDenied of a server that has another key than the pinned one, and of no other.
inline constexpr std::string_view kNotThePinnedKey = "the server's key is not the pinned one";

// At most 5 redirects, with methods changed as browsers do; a body goes to its own origin only. A
// request over a kept connection that the server closed unread is sent once more.
struct HttpCall {
    std::string method = "GET";
    std::string url;
    HeaderList headers;         // for every hop; Authorization and cookies are refused here
    HeaderList secret_headers;  // for the URL's own origin only
    std::string body;
    uint64_t reply_bytes_max = 1 << 20;  // more is kLimit
    std::chrono::milliseconds timeout{15000};
};
struct HttpReply {
    int status = 0;
    std::string body;
    HeaderList headers;  // names in lower case
};

// Bytes [offset, offset + bytes) of what `url` names.
struct RangeJob {
    std::string url;
    HeaderList secret_headers;
    uint64_t offset = 0;
    uint64_t bytes = 0;
    uint64_t file_bytes = 0;  // what Content-Range must say; 0: not known
    uint64_t tag = 0;         // the caller's
};

struct RangeOptions {
    uint32_t parallel = 4;
    uint32_t attempts_max = 5;  // of one job without a new byte
    // Doubled, with jitter. Retry-After is obeyed for all jobs of that origin, up to 10 *
    // pause_max; a longer one ends the download with kBusy.
    std::chrono::milliseconds pause_first{200};
    std::chrono::milliseconds pause_max{30000};
    std::chrono::milliseconds stall_max{30000};  // without a byte
    uint32_t redirects_max = 5;
    // Bytes pulled over all jobs, wasted ones included, may not be more than
    // sum(bytes) * (1 + over_share) + 64 KiB a job that failed or was redirected; beyond it kLimit.
    double over_share = 0.01;
    uint64_t bytes_per_second_max = 0;  // 0: no limit
};

// Of all downloads of a client.
struct RangeCounters {
    uint64_t bytes_wanted = 0;  // delivered to the sink
    uint64_t bytes_pulled = 0;  // bodies as received, wasted ones included
    uint64_t requests = 0;
    uint64_t retries = 0;
};

class HttpClient {
public:
    // Errors: kUsage (a secret that is not for one origin, or for plain http to another machine),
    // kEnvironment (certificates).
    static Result<std::unique_ptr<HttpClient>> make(const ClientTrust& trust,
                                                    const OriginSecrets& secrets = {});
    virtual ~HttpClient() = default;

    // Any status is a reply. Errors: kIo, kTimeout, kDenied (certificate or pin not accepted; a
    // redirect that would betray something), kLimit, kUsage (URL, header), kUnsupported (coded
    // body, redirect to no http URL), kEnvironment (certificates unusable), kClosed (cancelled).
    virtual Result<HttpReply> call(const HttpCall& call) = 0;

    // Pieces arrive in any order, each job's own bytes in order from its offset; an interrupted job
    // goes on from its last byte. `offset` is in the file. on_data failing ends everything with its
    // error. on_done is called for each job that is complete. A 206 must have the Content-Range
    // asked for, or a beginning of it (the rest is asked for then). One validator (ETag or
    // Last-Modified, normalised) per URL and hop, and one size, must not change between requests,
    // of earlier downloads of this client too: kMismatch, "the file changed"; what was known of it
    // is forgotten then. A 200 is read only as far as the budget allows if the range starts at 0,
    // else refused: the origin is named as range-incapable. The target of a redirect is kept for
    // the other jobs of that URL; when it answers 401/403/410 later, the original URL is asked
    // again (a signed link has expired), at most attempts_max times. A link that was just given and
    // is refused, and other 4xx, end it with the first 300 bytes of the server's text. A 401 or 403
    // names OriginSecrets::flag besides. Errors: kIo, kTimeout, kDenied, kNotFound, kMismatch,
    // kLimit, kUnsupported (no ranges), kBusy (come back much later), kUsage (jobs), kEnvironment,
    // kClosed (cancelled).
    using OnData =
        std::function<Status(const RangeJob& job, uint64_t offset, std::span<const uint8_t> data)>;
    using OnDone = std::function<Status(const RangeJob& job)>;
    virtual Status download(std::vector<RangeJob> jobs, const RangeOptions& options,
                            const OnData& on_data, const OnDone& on_done) = 0;
    virtual const RangeCounters& counters() const = 0;
    // Ends what is under way within 200 ms, and everything later: kClosed. For good, so that no
    // cancel() is lost between two calls.
    virtual void cancel() = 0;
};

}  // namespace kvasir::net
