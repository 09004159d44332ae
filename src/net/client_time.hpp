// The time as the HTTP client sees it; tests put their own in, so that pauses cost them nothing.
//
// Private to net/. Thread: used by the client's caller's thread.
#pragma once

#include <chrono>
#include <ctime>
#include <memory>

#include "base/result.hpp"
#include "net/client.hpp"

namespace kvasir::net {

class ClientTime {
public:
    using Point = std::chrono::steady_clock::time_point;
    virtual ~ClientTime() = default;
    virtual Point now() { return std::chrono::steady_clock::now(); }
    virtual std::time_t wall() { return std::time(nullptr); }
    // Nothing is under way and nothing will be before `until`.
    virtual void idle_until(Point until) { static_cast<void>(until); }
};

Result<std::unique_ptr<HttpClient>> make_http_client(const ClientTrust& trust,
                                                     std::shared_ptr<ClientTime> time,
                                                     const OriginSecrets& secrets = {});

}  // namespace kvasir::net
