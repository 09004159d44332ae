// OriginHeaders: which secret headers go to which hop of a request.
//
// Private to net/ (the HTTP client). Thread: constant after construction, any. Owns: the headers.
// Limits: none of its own; worker/origin_auth.hpp has those of the command line.
#pragma once

#include <map>
#include <string>

#include "net/http_url.hpp"
#include "net/origin.hpp"

namespace kvasir::net {

class OriginHeaders {
public:
    // Errors: those of check_secrets().
    static Result<OriginHeaders> make(const OriginSecrets& secrets);

    bool has(const HttpUrl& hop) const { return by_origin_.contains(hop.origin()); }
    // Appends what `hop` may see: `own`, if it is of the origin `first` that they were given for,
    // and what belongs to its own origin. Of a name in both, the value in `own` is sent.
    void append(HeaderList& out, const HttpUrl& hop, const HttpUrl& first,
                const HeaderList& own) const;
    // So that nobody who echoes them is quoted.
    void hide_in(Redactor& redactor) const;
    const std::string& flag() const { return flag_; }

private:
    std::map<std::string, HeaderList> by_origin_;
    std::string flag_;
};

}  // namespace kvasir::net
