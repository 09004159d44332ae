#include "backbone/uplink.hpp"

#include <algorithm>
#include <utility>

#include "base/log.hpp"

namespace kvasir::backbone {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLeftMax = std::chrono::hours(24 * 365);  // believed of a relay

std::string to_text(milliseconds time) {
    return std::to_string(time.count()) + " ms";
}

}  // namespace

milliseconds token_left(const wire::Attached& attached) {
    const auto most = static_cast<uint64_t>(kLeftMax.count());
    return milliseconds(std::min(attached.token_left_ms, most));
}

Uplink::Uplink(UplinkOptions options, Adopt adopt)
    : options_(std::move(options)),
      adopt_(std::move(adopt)),
      state_(
          std::make_shared<State>(access::Route({options_.endpoint, options_.tls}, options_.tls_for,
                                                std::random_device{}(), options_.alone_first))),
      thread_([this] { run(); }) {}

Uplink::~Uplink() {
    {
        const std::lock_guard lock(state_->mu);
        state_->stopping = true;
    }
    state_->changed.notify_all();
    thread_.join();
}

std::optional<Error> Uplink::ended() const {
    const std::lock_guard lock(state_->mu);
    return state_->ended;
}

bool Uplink::pause(milliseconds time) {
    std::unique_lock lock(state_->mu);
    state_->changed.wait_for(lock, time, [this] { return state_->stopping; });
    return !state_->stopping;
}

milliseconds Uplink::jittered(milliseconds time) {
    return time / 2 + time * static_cast<int>(random_() % 1000) / 1000;
}

void Uplink::run() {
    auto wait = options_.pause_first;
    for (;;) {
        const access::Credentials credentials = options_.credentials();
        auto attachment = attach(credentials);
        std::string reason = "the connection ended";
        auto next = jittered(wait);
        if (attachment) {
            serve(std::move(*attachment), credentials.token);
            const std::lock_guard lock(state_->mu);
            if (state_->stopping) return;
            const auto end = state_->route.on_end(net::Clock::now());
            if (end.was_stable) wait = options_.pause_first;
            next = end.pause_or(end.was_stable ? jittered(wait) : next);
        } else {
            reason = attachment.error().detail;
            const std::lock_guard lock(state_->mu);
            // Where a MOVE led, nobody's word is final: the configured relay is asked again.
            if (attachment.error().code == Errc::kRevoked && state_->route.at_home()) {
                log(LogLevel::kError, "uplink",
                    "relay " + address_ + ": " + reason + "; it is not tried again");
                state_->ended = attachment.error();
                return;
            }
            state_->route.on_failed();
        }
        if (options_.is_ending && options_.is_ending()) return;
        log(LogLevel::kWarn, "uplink",
            "relay " + address_ + ": " + reason + "; next try in " + to_text(next));
        if (!pause(next)) return;
        wait = std::min(wait * 2, options_.pause_max);
    }
}

Result<access::Attachment> Uplink::attach(const access::Credentials& credentials) {
    Result<access::RelayAddress> relay;
    {
        const std::lock_guard lock(state_->mu);
        address_ = access::to_string(state_->route.endpoint());
        relay = state_->route.address();
    }
    if (!relay) return tl::unexpected(relay.error());
    access::AttachOptions options;
    options.endpoint = relay->endpoint;
    options.role = wire::Role::kBackbone;
    options.tls = relay->tls;
    return access::attach(options, credentials);
}

// Until the connection is over, or the uplink stops.
void Uplink::serve(access::Attachment attachment, std::string token) {
    {
        const std::lock_guard lock(state_->mu);
        if (state_->stopping) return;
        state_->attached = true;
        state_->route.on_attached(net::Clock::now());
    }
    const ShowToken show = adopt_(std::move(attachment.stream), address_, events());
    keep_fresh(show, std::move(token), token_left(attachment.attached));
}

RelayEvents Uplink::events() const {
    RelayEvents events;
    events.on_end = [state = state_] {
        const std::lock_guard lock(state->mu);
        state->attached = false;
        state->changed.notify_all();
    };
    events.on_move = [state = state_](const wire::Move& move) {
        const std::lock_guard lock(state->mu);
        if (Status ok = state->route.on_move(move, net::Clock::now()); !ok)
            log(LogLevel::kWarn, "uplink", "the relay's MOVE: " + ok.error().detail);
        return state->route.leave_at();
    };
    events.on_company = [state = state_](bool has_company) {
        const std::lock_guard lock(state->mu);
        state->route.on_company(has_company, net::Clock::now());
        return state->route.leave_at();
    };
    events.on_renewed = [state = state_](Result<milliseconds> left) {
        const std::lock_guard lock(state->mu);
        state->renewed = std::move(left);
        state->changed.notify_all();
    };
    return events;
}

// A token that cannot be renewed ends nothing: the relay does that when its time has come, and
// until then it is tried again.
void Uplink::keep_fresh(const ShowToken& show, std::string token, milliseconds left) {
    auto wait = options_.pause_first;
    std::string last_reason;
    auto renew_at = net::Clock::now() + std::max(left * 3 / 4, wait);
    for (;;) {
        {
            std::unique_lock lock(state_->mu);
            if (state_->changed.wait_until(lock, renew_at, [this] { return state_->over(); }))
                return;
        }
        const auto renewed = renew(show, token);
        if (renewed) {
            log(LogLevel::kDebug, "uplink",
                "relay " + address_ + ": token renewed, good for " + to_text(*renewed));
            wait = options_.pause_first;
            last_reason.clear();
            left = *renewed;
            renew_at = net::Clock::now() + std::max(left * 3 / 4, wait);
            continue;
        }
        {
            const std::lock_guard lock(state_->mu);
            if (state_->over()) return;
        }
        const auto next = jittered(wait);
        const std::string& reason = renewed.error().detail;
        log(reason == last_reason ? LogLevel::kDebug : LogLevel::kWarn, "uplink",
            "relay " + address_ + ": the token is not renewed: " + reason + "; next try in " +
                to_text(next));
        last_reason = reason;
        renew_at = net::Clock::now() + next;
        wait = std::min(wait * 2, std::max(options_.pause_max, left / 50));
    }
}

// For how long the newer token is good; it is then the one in `token`.
Result<milliseconds> Uplink::renew(const ShowToken& show, std::string& token) {
    std::string newer = options_.credentials().token;
    if (newer == token) return fail(Errc::kExpired, "there is no newer one yet");
    {
        const std::lock_guard lock(state_->mu);
        state_->renewed.reset();
    }
    show(newer);
    std::unique_lock lock(state_->mu);
    const auto told = [this] { return state_->over() || state_->renewed; };
    if (!state_->changed.wait_for(lock, options_.answer_max, told) || !state_->renewed)
        return fail(Errc::kTimeout, "the relay does not answer");
    if (*state_->renewed) token = std::move(newer);
    return *state_->renewed;
}

}  // namespace kvasir::backbone
