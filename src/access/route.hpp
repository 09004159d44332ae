// Route: which relay a node dials next, and when it leaves one that stops (MOVE).
//
// Used by the worker and by the backbone's uplink: both have one configured relay and go to another
// only because it said so. The rules: the moment is random, so that thousands of nodes do not come
// at once; towards another address a node works on until that moment, towards the same address it
// makes way at once and comes at that moment. An address that fails is tried in turn with the
// configured one, which, once it answers, is the only one again. Who has nobody to work with where
// a MOVE led asks the configured one, too: the others may have met there again.
// Thread: one at a time. Owns: values. Limits: kStayMax, kAwayMax, kAloneMax.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>

#include "base/result.hpp"
#include "net/upgrade.hpp"
#include "wire/attach.hpp"

namespace kvasir::access {

struct RelayAddress {
    net::Endpoint endpoint;
    std::shared_ptr<const net::TlsClient> tls;  // of a wss:// endpoint
};
std::string to_string(const net::Endpoint& endpoint);  // "HOST:PORT", for people

// Whom to trust as a relay at an address that is not the configured one.
using TlsFor =
    std::function<Result<std::shared_ptr<const net::TlsClient>>(const net::Endpoint& endpoint)>;

class Route {
public:
    // No node stays longer with a relay that stops, whatever MOVE says.
    static constexpr std::chrono::milliseconds kStayMax = std::chrono::hours(1);
    // Without a connection no node waits longer, whatever MOVE says.
    static constexpr std::chrono::milliseconds kAwayMax = std::chrono::minutes(1);
    // A connection that lasted so long was a good one.
    static constexpr std::chrono::milliseconds kStable = std::chrono::seconds(5);
    // With nobody to work with a node stays so long where a MOVE led (counted from when the others
    // should have come, too), and up to half as long again. Doubled each time, up to kAloneMax.
    static constexpr std::chrono::milliseconds kAloneFirst = std::chrono::minutes(1);
    static constexpr std::chrono::milliseconds kAloneMax = std::chrono::minutes(10);

    // Without `tls_for` no MOVE leads to a wss:// address.
    Route(RelayAddress home, TlsFor tls_for, uint32_t seed = std::random_device{}(),
          std::chrono::milliseconds alone_first = kAloneFirst);

    const RelayAddress& home() const { return home_; }
    bool at_home() const { return !is_away_; }
    const net::Endpoint& endpoint() const { return is_away_ ? away_->endpoint : home_.endpoint; }
    // The relay to dial, or the one that was dialed last. Errors: those of TlsFor.
    Result<RelayAddress> address();

    // What became of the attempt to attach to it.
    void on_attached(net::Deadline now);
    void on_failed();
    // MOVE on that connection; only the first counts. Errors: kUsage, kDenied: its address is
    // not used (no address, or without TLS though the configured one has it), and the configured
    // one is dialed in its place.
    Status on_move(const wire::Move& move, net::Deadline now);
    // Whether anybody to work with is there: once attached, and when that changes.
    void on_company(bool has_company, net::Deadline now);
    // When to begin to leave the connection; max(): it is not to be left.
    net::Deadline leave_at() const;
    bool relay_stops() const { return moving_.has_value(); }
    struct End {
        // Asked for by MOVE: when to dial next, zero: at once. Else as after any lost connection.
        std::optional<std::chrono::milliseconds> pause;
        bool was_stable = false;

        // `backoff`: what is due after a lost connection. Relays that send nodes round in a circle
        // are not followed in a loop.
        std::chrono::milliseconds pause_or(std::chrono::milliseconds backoff) const {
            if (!pause) return backoff;
            return was_stable ? *pause : std::max(*pause, backoff);
        }
    };
    // The connection is over, left or lost.
    End on_end(net::Deadline now);

private:
    struct Moving {
        double part = 0;  // of within_ms
        net::Deadline leave_at{};
        net::Deadline dial_at{};
        std::optional<RelayAddress> away;
        bool is_away = false;       // dials `away`
        net::Deadline others_by{};  // they were told as well
    };

    // Constant after construction.
    const RelayAddress home_;
    const TlsFor tls_for_;
    const std::chrono::milliseconds alone_first_;
    // State.
    std::mt19937 random_;
    std::optional<RelayAddress> away_;
    bool is_away_ = false;  // away_ is the one to dial
    net::Deadline attached_at_{};
    std::optional<Moving> moving_;
    net::Deadline others_by_{};                         // that the MOVE to away_ was for
    std::chrono::milliseconds alone_;                   // the next time alone
    net::Deadline alone_until_ = net::Deadline::max();  // of the connection
};

}  // namespace kvasir::access
