// Origins (scheme, host and port of a URL), and headers that belong to one of them.
//
// Used by HttpClient and by whoever decides where credentials and redirects may go. Thread: values.
// Limits: 16 KiB of URL.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.hpp"

namespace kvasir::net {

using HeaderList = std::vector<std::pair<std::string, std::string>>;

struct Origin {
    std::string text;  // "https://host:port", the port always there: equal origins, equal strings
    bool is_secure = false;    // https
    bool is_loopback = false;  // 127.0.0.0/8, [::1] or localhost, as written
    bool is_all = false;       // the URL was the origin and nothing else
    bool has_query = false;
};
// Errors: kUsage (not an http or https URL; a user name in it). They do not quote it.
Result<Origin> parse_origin(std::string_view url);

// Headers for one origin, whether a request begins there or a redirect leads there.
struct OriginSecret {
    std::string origin;  // "https://host[:port]"; http for loopback only
    HeaderList headers;
};
struct OriginSecrets {
    std::vector<OriginSecret> origins;
    // "--flag", with which people give them ("--flag ORIGIN=FILE"): named when an origin answers
    // 401 or 403. Empty: nothing is.
    std::string flag;
};
// Errors: kUsage (not an origin; plain http to another machine; one origin twice).
Status check_secrets(const OriginSecrets& secrets);

}  // namespace kvasir::net
