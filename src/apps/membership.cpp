#include "apps/membership.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <optional>
#include <system_error>
#include <utility>

#include "apps/market_pins.hpp"
#include "apps/progress.hpp"
#include "apps/state_lock.hpp"
#include "base/log.hpp"
#include "crypto/token.hpp"
#include "moe/manifest.hpp"
#include "moe/model.hpp"
#include "net/client.hpp"
#include "worker/market_client.hpp"

namespace kvasir::apps {
namespace {

using Clock = std::chrono::steady_clock;

std::string host_name() {
    char name[256] = {};
    return ::gethostname(name, sizeof(name) - 1) == 0 ? name : "backbone";
}

// Asks the market for tokens; shared by all who attach with them.
class Member {
public:
    Member(std::shared_ptr<const crypto::KeyPair> key, std::unique_ptr<net::HttpClient> http,
           worker::MarketAddress address, std::string name)
        : key_(std::move(key)),
          http_(std::move(http)),
          market_(*http_, std::move(address)),
          name_(std::move(name)) {}

    worker::MarketClient& market() { return market_; }

    Status enroll(const std::optional<crypto::Invite>& invite) {
        auto grant =
            invite ? market_.enroll(*invite, *key_, name_, "backbone") : market_.renew(*key_);
        if (!grant) return tl::unexpected(grant.error());
        keep(*grant);
        return {};
    }

    access::Credentials credentials() {
        const std::lock_guard lock(mu_);
        if (Clock::now() >= renew_at_) {
            if (auto grant = market_.renew(*key_)) {
                keep(*grant);
            } else {
                log(LogLevel::kWarn, "membership",
                    "the token could not be renewed: " + grant.error().detail);
            }
        }
        return {key_, token_, name_};
    }

private:
    void keep(const worker::Grant& grant) {
        token_ = grant.token;
        renew_at_ = Clock::now() + grant.renew_in;
    }

    // Constant after construction.
    const std::shared_ptr<const crypto::KeyPair> key_;
    const std::unique_ptr<net::HttpClient> http_;
    worker::MarketClient market_;  // used with mu_ held, or before others know this object
    const std::string name_;
    std::mutex mu_;
    // Guarded by mu_.
    std::string token_;
    Clock::time_point renew_at_{};
};

std::string describe(const std::string& name, const Sha256& id) {
    return "'" + printable(name, 64) + "' (id " + to_hex(id).substr(0, 16) + "...)";
}

// With another model, or another quantisation, it would wait for ever: no worker of that market
// holds its experts.
Status check_model(const std::string& path, const worker::MarketInfo& market) {
    const auto model = moe::open_model(path);
    if (!model) return tl::unexpected(model.error());
    if (model->is_slice) return {};  // whoever opens it as a backbone's model says so
    ProgressLine line("hashing the model (once)");
    const auto manifest = moe::load_or_compute_manifest(
        *model, {}, [&line](uint64_t done, uint64_t total) { line.show(done, total); });
    if (!manifest) return tl::unexpected(manifest.error());
    if (manifest->model_id == market.model_id) return {};
    return fail(Errc::kMismatch,
                printable(path) + " is the model " + describe(model->name, manifest->model_id) +
                    ", the market's is " + describe(market.model_name, market.model_id) +
                    ": another model, or another quantisation of it");
}

std::string where_from(const MarketPins& pins) {
    return "; the pin is in " + printable(pins.path()) +
           " since this backbone joined that market, and --invite with a new code replaces it";
}

// Without it the backbone is as good, but for its next start.
void keep_pin(MarketPins& pins, const std::string& url, const std::optional<Sha256>& pin) {
    const auto before = pins.find(url);
    const Status kept = pins.keep(url, pin);
    if (kept && before && before != pin) {
        log(LogLevel::kInfo, "membership",
            printable(url) + " is recognised from now on by " +
                (pin ? "the key that this invite code names" : "a certificate of a known CA") +
                ", no more by the key of the one before");
    }
    if (kept) return;
    log(LogLevel::kWarn, "membership",
        "the market's pin is not kept, so the next start needs the invite code again: " +
            kept.error().detail);
}

}  // namespace

Result<std::string> make_state_dir(const std::string& wanted) {
    std::string path = wanted;
    if (path.empty()) {
        const char* state = std::getenv("XDG_STATE_HOME");
        const char* home = std::getenv("HOME");
        if (state != nullptr && *state != '\0') {
            path = std::string(state) + "/kvasir";
        } else if (home != nullptr && *home != '\0') {
            path = std::string(home) + "/.local/state/kvasir";
        } else {
            return fail(Errc::kEnvironment, "HOME is not set: name a folder with --state");
        }
    }
    std::error_code error;
    const bool made = std::filesystem::create_directories(path, error);
    if (error) {
        return fail(Errc::kEnvironment, printable(path) + ": cannot be made: " + error.message() +
                                            "; name another folder with --state");
    }
    if (made) ::chmod(path.c_str(), 0700);  // keys will be in it
    return path;
}

Result<backbone::UplinkOptions> enroll_backbone(const MembershipOptions& options) {
    auto address = worker::parse_market_url(options.url);
    if (!address) return tl::unexpected(address.error());
    std::optional<crypto::Invite> invite;
    if (!options.invite.empty()) {
        auto parsed = crypto::parse_invite(options.invite);
        if (!parsed) return tl::unexpected(parsed.error());
        invite = *parsed;
        if (Status ok = worker::check_address(*address, *invite); !ok)
            return tl::unexpected(ok.error());
    }
    auto state = make_state_dir(options.state_dir);
    if (!state) return tl::unexpected(state.error());
    auto lock = lock_backbone(*state);
    if (!lock) return tl::unexpected(lock.error());
    auto key = crypto::load_or_make_key(*state + "/backbone.key");
    if (!key) return tl::unexpected(key.error());
    auto pins = MarketPins::load(*state);
    if (!pins) return tl::unexpected(pins.error());
    if (!address->tls && !invite && pins->find("https" + address->base.substr(4))) {
        return fail(Errc::kUsage,
                    "this backbone knows that market behind TLS: give its address "
                    "as https://HOST:PORT, or a new --invite");
    }
    net::ClientTrust trust;
    trust.ca_file = options.ca_file;
    trust.advice = worker::kTrustAdvice;
    trust.pin = invite ? invite->tls_pin : pins->find(address->base);
    trust.pin_url = address->base;
    auto http = net::HttpClient::make(trust);
    if (!http) return tl::unexpected(http.error());

    auto member = std::make_shared<Member>(std::make_shared<crypto::KeyPair>(std::move(*key)),
                                           std::move(*http), *address,
                                           options.name.empty() ? host_name() : options.name);
    auto info = member->market().look_up();
    if (!info) {
        Error error = info.error();
        const bool is_pin = error.detail.find(net::kNotThePinnedKey) != std::string::npos;
        if (is_pin && !invite) error.detail += where_from(*pins);
        return tl::unexpected(std::move(error));
    }
    if (invite && info->market_key != invite->market) {
        return fail(Errc::kDenied, "the market at " + printable(options.url) +
                                       " is not the one that made this invite code");
    }
    if (Status ok = check_model(options.model_path, *info); !ok) return tl::unexpected(ok.error());
    if (Status ok = member->enroll(invite); !ok) return tl::unexpected(ok.error());
    const auto claims = crypto::open_token(member->credentials().token, info->market_key);
    if (!claims) return tl::unexpected(claims.error());
    if ((claims->roles & crypto::kRoleBackbone) == 0) {
        return fail(Errc::kDenied,
                    "the market knows this node, but not as a backbone: join with a backbone's "
                    "invite code (kvasir market --print-invite backbone)");
    }
    auto endpoint = worker::relay_endpoint(*info, *address);
    if (!endpoint) return tl::unexpected(endpoint.error());
    if (invite) keep_pin(*pins, address->base, invite->tls_pin);
    const auto tls_for = [trust, market = *address](const net::Endpoint& relay) {
        return net::TlsClient::make(worker::relay_trust(trust, relay, market));
    };
    auto tls = tls_for(*endpoint);
    if (!tls) return tl::unexpected(tls.error());
    backbone::UplinkOptions uplink;
    uplink.endpoint = *endpoint;
    uplink.tls = *tls;
    uplink.tls_for = tls_for;
    uplink.credentials = [member, lock = std::make_shared<moe::Fd>(std::move(*lock))] {
        return member->credentials();
    };
    return uplink;
}

}  // namespace kvasir::apps
