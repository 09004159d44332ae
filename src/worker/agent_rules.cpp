#include "worker/agent_rules.hpp"

#include <algorithm>
#include <utility>

#include "moe/segments.hpp"

namespace kvasir::worker {
namespace {

using Kind = AgentAction::Kind;
using std::chrono::duration_cast;

constexpr AgentTime kStable{60000};  // a worker that ran so long had no failure

AgentAction call(AgentStep step, std::vector<uint64_t> ids = {}) {
    AgentAction action;
    action.step = step;
    action.ids = std::move(ids);
    return action;
}

AgentAction action(Kind kind, std::vector<Segment> segments = {}) {
    AgentAction out;
    out.kind = kind;
    out.segments = std::move(segments);
    return out;
}

bool is_market_gone(Errc code) {
    return code == Errc::kIo || code == Errc::kTimeout || code == Errc::kClosed;
}

}  // namespace

std::string_view to_string(AgentStep step) {
    static constexpr std::array<std::string_view, static_cast<size_t>(AgentStep::kCount_)> kNames =
        {"looking up the market",
         "enrolling",
         "renewing the token",
         "asking for leases",
         "reporting progress",
         "proving",
         "heartbeat",
         "releasing the leases",
         "fetching",
         "serving"};
    return kNames[static_cast<size_t>(step)];
}

std::string_view to_string(AgentState state) {
    static constexpr std::array<std::string_view, 7> kNames = {
        "joining", "waiting", "fetching", "disk full", "proving", "serving", "stopping"};
    return kNames[static_cast<size_t>(state)];
}

std::vector<AgentAction> AgentRules::on_event(const AgentEvent& event, AgentTime now) {
    std::visit([&](const auto& one) { apply(one, now); }, event);
    std::vector<AgentAction> actions;
    if (!has_ended_) decide(now, actions);
    return actions;
}

AgentState AgentRules::state() const {
    if (is_stopping_) return AgentState::kStopping;
    if (has_worker_ && !is_draining_) return AgentState::kServing;
    if (disk_is_full_) return AgentState::kDiskFull;
    if (is_fetching_) return AgentState::kFetching;
    if (!leases_.empty()) return AgentState::kProving;
    return has_nothing_ ? AgentState::kWaiting : AgentState::kJoining;
}

std::vector<Segment> AgentRules::wanted() const {
    std::vector<Segment> segments;
    for (const NodeLease& lease : leases_) segments.push_back(lease.segment);
    return moe::normalise(std::move(segments));
}

AgentTime AgentRules::wake_at(AgentTime now) const {
    AgentTime at = now + limits_.tick_max;
    for (const AgentTime due :
         {call_at_, lease_at_, beat_at_, fetch_at_, progress_at_, serve_at_, token_renew_}) {
        if (due > now) at = std::min(at, due);
    }
    return at;
}

bool AgentRules::token_is_good(AgentTime now) const {
    return has_token_ && !token_refused_ && now < token_expires_;
}

bool AgentRules::all_proved() const {
    return std::ranges::all_of(is_proved_, [](const auto& entry) { return entry.second; });
}

AgentTime AgentRules::pause(AgentStep step, AgentTime first, AgentTime most) {
    uint32_t& count = failures_[static_cast<size_t>(step)];
    const AgentTime full = std::min(first * (1u << std::min(count, 20u)), most);
    ++count;
    return full / 2 + full * static_cast<int64_t>(random_() % 1000) / 1000;
}

// ---- events ----

void AgentRules::succeeded(AgentStep step) {
    call_pending_ = false;
    failures_[static_cast<size_t>(step)] = 0;
}

void AgentRules::forget_leases() {
    leases_.clear();
    lease_expires_.clear();
    is_proved_.clear();
    needs_leases_ = true;
    lease_at_ = AgentTime(0);
}

void AgentRules::apply(const event::Seen& seen, AgentTime) {
    succeeded(AgentStep::kLookUp);
    // Another outline: another model, or other bytes of it. What was planned with the old is void.
    if (ever_seen_ && seen.outline != outline_) {
        forget_leases();
        ready_.clear();
        fetching_.clear();
        is_void_ = true;
    }
    has_seen_ = ever_seen_ = true;
    outline_ = seen.outline;
}

void AgentRules::take_token(const event::Granted& granted, AgentTime now) {
    has_token_ = true;
    token_refused_ = false;
    is_unknown_ = false;
    token_is_new_ = true;
    token_expires_ = now + granted.expires_in;
    // Never at once, and before it expires.
    const AgentTime lifetime = granted.expires_in;
    token_renew_ = now + std::clamp<AgentTime>(granted.renew_in, lifetime / 4,
                                               std::max(lifetime * 3 / 4, lifetime / 4));
}

void AgentRules::apply(const event::Granted& granted, AgentTime now) {
    succeeded(AgentStep::kRenew);
    succeeded(AgentStep::kEnroll);
    take_token(granted, now);
}

void AgentRules::apply(const event::Leased& leased, AgentTime now) {
    succeeded(AgentStep::kLease);
    const auto before = std::exchange(is_proved_, {});
    leases_ = leased.leases;
    lease_expires_.clear();
    for (const NodeLease& lease : leases_) {
        lease_expires_[lease.id] = now + lease.expires_in;
        const auto found = before.find(lease.id);
        is_proved_[lease.id] = found != before.end() && found->second;
    }
    beat_every_ = leased.heartbeat_every;
    beat_at_ = now + beat_every_;
    has_nothing_ = needs_leases_ = leases_.empty();
    lease_at_ = needs_leases_ ? now + limits_.idle_pause : AgentTime(0);
}

void AgentRules::take_news(const LeaseNews& news, AgentTime now) {
    for (const LeaseLife& life : news.leases) {
        const auto found = lease_expires_.find(life.id);
        if (found != lease_expires_.end()) found->second = now + life.expires_in;
    }
    for (const uint64_t id : news.lost) {
        if (is_proved_.erase(id) == 0) continue;
        lease_expires_.erase(id);
        std::erase_if(leases_, [id](const NodeLease& lease) { return lease.id == id; });
        needs_leases_ = true;
        lease_at_ = AgentTime(0);
    }
}

void AgentRules::apply(const event::Progressed& progressed, AgentTime now) {
    succeeded(AgentStep::kProgress);
    progress_at_ = now + limits_.progress_every;
    take_news(progressed.news, now);
}

void AgentRules::apply(const event::Proved& proved, AgentTime now) {
    succeeded(AgentStep::kProve);
    take_news(proved.news, now);
    for (auto& [id, is_proved] : is_proved_) is_proved = true;
    beat_at_ = now + beat_every_;
}

void AgentRules::apply(const event::Beaten& beaten, AgentTime now) {
    succeeded(AgentStep::kBeat);
    beat_at_ = now + beat_every_;
    take_news(beaten.news, now);
    if (beaten.granted) take_token(*beaten.granted, now);
    if (beaten.has_more && now >= more_at_) {
        needs_leases_ = true;
        lease_at_ = AgentTime(0);
        more_at_ = now + limits_.idle_pause;
    }
}

void AgentRules::apply(const event::Released&, AgentTime) {
    succeeded(AgentStep::kRelease);
    has_released_ = true;
}

void AgentRules::apply(const event::Fetched&, AgentTime) {
    is_fetching_ = is_cancelling_ = disk_is_full_ = false;
    if (fetching_.empty()) return;  // of a model that is void
    failures_[static_cast<size_t>(AgentStep::kFetch)] = 0;
    ready_ = std::exchange(fetching_, {});
}

void AgentRules::apply(const event::Failed& failed, AgentTime now) {
    if (failed.step == AgentStep::kFetch) {
        fetch_failed(failed.error, now);
    } else {
        call_pending_ = false;
        call_failed(failed.step, failed.error, now);
    }
}

bool AgentRules::is_final(AgentStep step, Errc code) const {
    if (code == Errc::kRevoked || code == Errc::kVersion) return true;
    if (step == AgentStep::kLease && code == Errc::kUsage) return true;  // the budget
    if (step == AgentStep::kEnroll) return code == Errc::kDenied || code == Errc::kUsage;
    if (step != AgentStep::kLookUp || ever_seen_) return false;
    // The first answer of all: what is wrong about it is wrong about the command line.
    return !errc_info(code).retryable;
}

void AgentRules::call_failed(AgentStep step, const Error& error, AgentTime now) {
    if (step == AgentStep::kRelease) {
        has_released_ = true;  // they expire by themselves
        return;
    }
    if (is_final(step, error.code)) return end_with(error);
    failed_since_asked_ = true;
    if (is_market_gone(error.code)) has_seen_ = false;  // who comes back may be another
    if (step == AgentStep::kRenew &&
        (error.code == Errc::kNotFound || error.code == Errc::kDenied)) {
        is_unknown_ = true;
        return;  // enrolling has its own pauses
    }
    const bool with_token = step == AgentStep::kLease || step == AgentStep::kProgress ||
                            step == AgentStep::kProve || step == AgentStep::kBeat;
    if (with_token && (error.code == Errc::kExpired || error.code == Errc::kDenied))
        token_refused_ = true;
    if (step == AgentStep::kProve || step == AgentStep::kBeat || step == AgentStep::kProgress) {
        if (error.code == Errc::kNotHeld || error.code == Errc::kNotFound) {
            needs_leases_ = true;
            lease_at_ = AgentTime(0);
        } else if (error.code == Errc::kMismatch || error.code == Errc::kBadAnswer) {
            ready_.clear();     // every slab is checked again
            has_seen_ = false;  // and it may be another model by now
        }
    }
    const AgentTime until = now + pause(step, limits_.pause_first, limits_.pause_max);
    // A refused token is renewed at once; what was refused waits for its turn.
    call_at_ = until;
    if (step == AgentStep::kBeat) beat_at_ = std::max(beat_at_, until);
}

void AgentRules::fetch_failed(const Error& error, AgentTime now) {
    is_fetching_ = false;
    fetching_.clear();
    if (std::exchange(is_cancelling_, false) && error.code == Errc::kClosed) return;
    disk_is_full_ = error.code == Errc::kNoSpace;
    if (error.code == Errc::kDenied || error.code == Errc::kExpired) token_refused_ = true;
    if (error.code == Errc::kMismatch || error.code == Errc::kNotFound) has_seen_ = false;
    // The leases may be others' meanwhile: ask before the next try.
    needs_leases_ = true;
    const AgentTime wait =
        disk_is_full_
            ? pause(AgentStep::kFetch, limits_.full_pause_first, limits_.full_pause_max)
            : pause(AgentStep::kFetch, limits_.fetch_pause_first, limits_.fetch_pause_max);
    fetch_at_ = lease_at_ = now + wait;
}

void AgentRules::apply(const event::WorkerEnded& ended, AgentTime now) {
    has_worker_ = is_draining_ = attach_asked_ = false;
    serving_.clear();
    if (ended.status) return;
    const Errc code = ended.status.error().code;
    if (code == Errc::kRevoked || code == Errc::kVersion) return end_with(ended.status.error());
    if (code == Errc::kExpired || code == Errc::kDenied) token_refused_ = true;
    if (code == Errc::kMismatch) has_seen_ = false;
    if (now - served_since_ > kStable) failures_[static_cast<size_t>(AgentStep::kServe)] = 0;
    serve_at_ = now + pause(AgentStep::kServe, limits_.pause_first, limits_.pause_max);
}

void AgentRules::apply(const event::AttachAsked&, AgentTime) {
    attach_asked_ = true;
    failed_since_asked_ = false;
}

void AgentRules::apply(const event::StopAsked&, AgentTime) {
    is_stopping_ = true;
}

void AgentRules::end_with(Error error) {
    if (!is_stopping_) end_ = tl::unexpected(std::move(error));
    is_stopping_ = true;
    // A market that took the token back, or that we do not understand, needs no goodbye.
    has_released_ = true;
}

// ---- decisions ----

void AgentRules::decide(AgentTime now, std::vector<AgentAction>& actions) {
    if (is_stopping_) return decide_end(actions);
    if (std::exchange(token_is_new_, false) && has_worker_)
        actions.push_back(action(Kind::kShowToken));
    decide_fetch(now, actions);
    decide_serve(now, actions);
    decide_attach(now, actions);
    decide_call(now, actions);
}

void AgentRules::stop_serving(std::vector<AgentAction>& actions) {
    if (!has_worker_ || is_draining_) return;
    is_draining_ = true;
    actions.push_back(action(Kind::kStopServing));
}

void AgentRules::decide_end(std::vector<AgentAction>& actions) {
    if (is_fetching_ && !std::exchange(is_cancelling_, true))
        actions.push_back(action(Kind::kCancelFetch));
    if (std::exchange(attach_asked_, false)) actions.push_back(action(Kind::kAllowAttach));
    stop_serving(actions);
    if (is_fetching_ || has_worker_ || call_pending_) return;
    if (!has_released_ && has_token_ && !leases_.empty()) {
        call_pending_ = true;
        actions.push_back(call(AgentStep::kRelease));
        return;
    }
    has_ended_ = true;
    AgentAction end = action(Kind::kEnd);
    end.status = end_;
    actions.push_back(std::move(end));
}

bool AgentRules::take_call(AgentTime now) {
    const double most = limits_.calls_per_minute_max;
    const auto passed = std::max(now - calls_counted_, AgentTime(0));
    calls_counted_ = now;
    calls_left_ = std::min(most, calls_left_ + most * static_cast<double>(passed.count()) / 60000);
    if (calls_left_ < 1) return false;
    calls_left_ -= 1;
    return true;
}

std::optional<AgentStep> AgentRules::due_call(AgentTime now) {
    if (!has_seen_) return AgentStep::kLookUp;
    if (!token_is_good(now) || now >= token_renew_)
        return is_unknown_ ? AgentStep::kEnroll : AgentStep::kRenew;
    const bool has_serving =
        std::ranges::any_of(is_proved_, [](const auto& entry) { return entry.second; });
    if (has_serving && now >= beat_at_) return AgentStep::kBeat;
    // Promises that ran out are not ours any more; what serves is told by the heartbeat.
    for (const auto& [id, proved] : is_proved_) {
        if (!proved && now >= lease_expires_.at(id)) needs_leases_ = true;
    }
    if (needs_leases_) {
        if (now >= lease_at_) return AgentStep::kLease;
        return std::nullopt;
    }
    if (leases_.empty()) return std::nullopt;
    if (!all_proved() && ready_ == wanted()) return AgentStep::kProve;
    if (is_fetching_ && now >= progress_at_) return AgentStep::kProgress;
    return std::nullopt;
}

void AgentRules::decide_call(AgentTime now, std::vector<AgentAction>& actions) {
    if (call_pending_ || now < call_at_) return;
    const auto step = due_call(now);
    if (!step) return;
    if (!take_call(now)) {
        call_at_ = now + limits_.pause_first;
        return;
    }
    std::vector<uint64_t> ids;
    for (const auto& [id, proved] : is_proved_) {
        const bool is_named = *step == AgentStep::kProgress ||
                              (*step == AgentStep::kBeat && proved) ||
                              (*step == AgentStep::kProve && !proved);
        if (is_named) ids.push_back(id);
    }
    call_pending_ = true;
    actions.push_back(call(*step, std::move(ids)));
}

void AgentRules::decide_fetch(AgentTime now, std::vector<AgentAction>& actions) {
    const auto want = wanted();
    if (is_fetching_) {
        // A loss of some leases is followed by new ones: what is under way serves most of them.
        const bool is_other = fetching_ != want && !needs_leases_;
        if ((is_other || fetching_.empty()) && !is_cancelling_) {
            is_cancelling_ = true;
            actions.push_back(action(Kind::kCancelFetch));
        }
        return;
    }
    if (needs_leases_ || want.empty() || ready_ == want || now < fetch_at_) return;
    if (!has_seen_ || !token_is_good(now)) return;
    is_fetching_ = true;
    fetching_ = want;
    progress_at_ = now + limits_.progress_every;
    actions.push_back(action(Kind::kFetch, want));
}

void AgentRules::decide_serve(AgentTime now, std::vector<AgentAction>& actions) {
    const auto want = wanted();
    if (has_worker_) {
        const bool has_next = !want.empty() && ready_ == want && all_proved();
        // Without leases, and the market there to say so, nothing is to be served.
        const bool has_none = leases_.empty() && has_seen_ && lease_at_ > now;
        if (is_void_ || has_none || (has_next && !needs_leases_ && serving_ != want))
            stop_serving(actions);
        return;
    }
    if (needs_leases_ || want.empty() || ready_ != want || !all_proved()) return;
    if (now < serve_at_ || !token_is_good(now)) return;
    has_worker_ = true;
    is_void_ = false;
    served_since_ = now;
    serving_ = want;
    actions.push_back(action(Kind::kServe, want));
}

void AgentRules::decide_attach(AgentTime now, std::vector<AgentAction>& actions) {
    if (!attach_asked_ || !token_is_good(now)) return;
    const bool is_checked = now < beat_at_ && !needs_leases_ && all_proved();
    // A market that does not answer must not keep a relay waiting that does.
    if (!is_checked && !failed_since_asked_) return;
    attach_asked_ = false;
    actions.push_back(action(Kind::kAllowAttach));
}

}  // namespace kvasir::worker
