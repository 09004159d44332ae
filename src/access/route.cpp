#include "access/route.hpp"

#include <algorithm>
#include <utility>

#include "base/log.hpp"

namespace kvasir::access {
namespace {

using std::chrono::milliseconds;

milliseconds part_of(milliseconds time, double part) {
    return milliseconds(static_cast<int64_t>(static_cast<double>(time.count()) * part));
}

}  // namespace

std::string to_string(const net::Endpoint& endpoint) {
    const bool is_v6 = endpoint.host.find(':') != std::string::npos;
    const std::string host = printable(endpoint.host);
    return (is_v6 ? "[" + host + "]" : host) + ":" + std::to_string(endpoint.port);
}

Route::Route(RelayAddress home, TlsFor tls_for, uint32_t seed, milliseconds alone_first)
    : home_(std::move(home)),
      tls_for_(std::move(tls_for)),
      alone_first_(alone_first),
      random_(seed),
      alone_(alone_first) {}

Result<RelayAddress> Route::address() {
    if (!is_away_) return home_;
    if (away_->endpoint.tls && !away_->tls) {
        auto tls = tls_for_(away_->endpoint);
        if (!tls) return tl::unexpected(tls.error());
        away_->tls = std::move(*tls);
    }
    return *away_;
}

void Route::on_attached(net::Deadline now) {
    attached_at_ = now;
    moving_.reset();
    alone_until_ = net::Deadline::max();
    if (!is_away_) away_.reset();
}

void Route::on_failed() {
    if (away_) is_away_ = !is_away_;
}

Status Route::on_move(const wire::Move& move, net::Deadline now) {
    if (moving_) return {};
    Moving moving;
    // Below 1 in any case, so that the moment lies within the time.
    moving.part = std::uniform_real_distribution<double>(0, 0.999999)(random_);
    const milliseconds within(move.within_ms);
    Status usable;
    if (move.url.empty()) {
        moving.away = away_;
        moving.is_away = is_away_;
    } else if (auto to = net::parse_url(move.url); !to) {
        usable = tl::unexpected(to.error());
    } else if (home_.endpoint.tls && !to->tls) {
        usable = fail(Errc::kDenied, printable(move.url) +
                                         " has no TLS, though the configured relay has it: tokens "
                                         "are not shown there");
    } else if (to->tls && !tls_for_ && *to != home_.endpoint) {
        usable = fail(Errc::kDenied, printable(move.url) + " cannot be checked here");
    } else if (*to != home_.endpoint) {
        moving.away = RelayAddress{std::move(*to), nullptr};
        moving.is_away = true;
    }
    // Who comes back to this very address makes way for what is started there.
    const bool stays = (moving.is_away ? moving.away->endpoint : home_.endpoint) != endpoint();
    moving.dial_at = now + part_of(std::min(within, stays ? kStayMax : kAwayMax), moving.part);
    moving.leave_at = stays ? moving.dial_at : now;
    moving.others_by = now + std::min(within, kStayMax);
    moving_ = std::move(moving);
    return usable;
}

void Route::on_company(bool has_company, net::Deadline now) {
    if (has_company) alone_ = alone_first_;
    if (has_company || !is_away_) {
        alone_until_ = net::Deadline::max();
    } else if (alone_until_ == net::Deadline::max()) {
        // Not all at once, as ever.
        const double part = std::uniform_real_distribution<double>(0, 0.5)(random_);
        alone_until_ = std::max(now, others_by_) + alone_ + part_of(alone_, part);
    }
}

net::Deadline Route::leave_at() const {
    return moving_ ? moving_->leave_at : alone_until_;
}

Route::End Route::on_end(net::Deadline now) {
    End end;
    end.was_stable = now - attached_at_ >= kStable;
    if (!moving_ && now >= alone_until_) {
        is_away_ = false;  // and back, if nobody answers at home
        alone_ = std::min(alone_ * 2, std::max(alone_first_, kAloneMax));
        end.pause = milliseconds(0);
        return end;
    }
    if (!moving_) {
        if (!end.was_stable) on_failed();
        return end;
    }
    const auto left = std::chrono::ceil<milliseconds>(moving_->dial_at - now);
    end.pause = std::clamp(left, milliseconds(0), part_of(kAwayMax, moving_->part));
    away_ = std::move(moving_->away);
    is_away_ = moving_->is_away;
    alone_ = alone_first_;
    others_by_ = moving_->others_by;
    moving_.reset();
    return end;
}

}  // namespace kvasir::access
