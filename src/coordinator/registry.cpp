#include "coordinator/registry.hpp"

#include <algorithm>
#include <utility>

#include "base/log.hpp"
#include "crypto/hash.hpp"
#include "crypto/mac.hpp"
#include "crypto/revocations.hpp"

namespace kvasir::coordinator {
namespace {

// How far a relay's clock may be behind ours: for so long it hears of revoked tokens that expired.
constexpr std::chrono::seconds kClockSkewMax{3600};

}  // namespace

Registry::Registry(market::Storage& storage, const crypto::KeyPair& key, const Sha256& model_id,
                   std::chrono::seconds token_life, Clocks clocks)
    : storage_(storage),
      key_(key),
      model_id_(model_id),
      token_life_(token_life),
      clocks_(std::move(clocks)) {}

Status Registry::restore(const market::StoredState& state) {
    const std::lock_guard lock(mu_);
    for (const market::NodeRow& row : state.nodes) {
        const auto key = crypto::parse_public_key(row.node);
        if (!key) {
            return fail(Errc::kBadInput, "the database names a node that is no key: " +
                                             printable(row.node) + "; restore a backup");
        }
        Node& node = nodes_[*key];
        node.row = row;
        node.counters->bytes_served = row.bytes_served;
    }
    for (const market::TokenRow& token : state.tokens_revoked) {
        revoked_[token.serial] = token.expires;
    }
    return {};
}

Grant Registry::issue(const crypto::PublicKey& node, const market::NodeRow& row,
                      const market::TokenMade& token) const {
    crypto::TokenClaims claims;
    claims.roles = row.roles;
    claims.name = row.name;
    claims.node = node;
    claims.serial = token.serial;
    claims.issued = clocks_.wall();
    claims.expires = crypto::WallTime(std::chrono::seconds(token.expires));
    claims.model_id = model_id_;
    const auto left = claims.expires - claims.issued;
    return {node, crypto::issue_token(key_, claims), left, left * 2 / 3};
}

Result<Grant> Registry::enroll(const crypto::PublicKey& node, const std::string& name,
                               std::span<const uint8_t> invite_secret, uint8_t role_wanted) {
    market::Registration asked;
    asked.node = crypto::to_hex(node);
    asked.name = printable(name, crypto::kNameBytesMax);
    asked.invite = crypto::sha256(invite_secret);
    asked.now = seconds_of(clocks_.wall());
    asked.token_expires = asked.now + token_life_.count();
    asked.role_wanted = role_wanted;
    const auto made = storage_.register_node(asked);
    if (!made) return tl::unexpected(made.error());
    const std::lock_guard lock(mu_);
    market::NodeRow& row = nodes_[node].row;
    if (made->is_new) row.registered = asked.now;
    row.node = asked.node;
    row.name = asked.name;
    row.roles = made->roles;
    return issue(node, row, made->token);
}

Result<Grant> Registry::renew(const crypto::PublicKey& node) {
    const int64_t now = seconds_of(clocks_.wall());
    const auto made = storage_.add_token(crypto::to_hex(node), now, now + token_life_.count());
    if (!made) return tl::unexpected(made.error());
    const std::lock_guard lock(mu_);
    return issue(node, nodes_[node].row, *made);
}

Result<crypto::TokenClaims> Registry::open_token(std::string_view text) const {
    if (text.empty()) {
        return fail(Errc::kDenied, "no node token: send it as Authorization: Bearer TOKEN");
    }
    auto claims = crypto::open_token(text, key_.public_key());
    if (!claims) return claims;
    {
        const std::lock_guard lock(mu_);
        const auto node = nodes_.find(claims->node);
        if (node == nodes_.end()) {
            return fail(Errc::kDenied,
                        "this market does not know the node (any more): register with an invite");
        }
        if (node->second.row.is_revoked || revoked_.contains(claims->serial)) {
            return fail(Errc::kRevoked, "the token was revoked by the market's operator");
        }
    }
    if (claims->model_id != Sha256{} && claims->model_id != model_id_) {
        return fail(Errc::kMismatch,
                    "the token is for model " + to_hex(claims->model_id).substr(0, 16) +
                        ", this market has " + to_hex(model_id_).substr(0, 16) + ": renew it");
    }
    if (Status ok = crypto::check_time(*claims, clocks_.wall(), crypto::kClockLeeway); !ok) {
        if (ok.error().code == Errc::kExpired) return tl::unexpected(ok.error());
        // Ours, and yet from the future: our own clock was set back. The node can only renew.
        return fail(Errc::kExpired,
                    "the market's clock was set back since the token was made: "
                    "renew it");
    }
    return claims;
}

bool Registry::is_revoked(uint64_t serial) const {
    const std::lock_guard lock(mu_);
    return revoked_.contains(serial);
}

std::string Registry::revocations() {
    const std::lock_guard lock(mu_);
    const TimePoint now = clocks_.steady();
    if (revocations_made_ && now - *revocations_made_ < std::chrono::seconds(1)) {
        return revocations_;
    }
    crypto::Revocations list;
    list.issued = clocks_.wall();
    // Nothing is forgotten here: the clock may be wrong for a moment.
    for (const auto& [serial, expires] : revoked_) {
        if (expires >= seconds_of(list.issued - kClockSkewMax)) list.serials.push_back(serial);
    }
    if (list.serials.size() > crypto::kRevokedMax) {
        log(LogLevel::kWarn, "market",
            "more than " + std::to_string(crypto::kRevokedMax) +
                " revoked tokens have not expired: relays elsewhere hear of the newest only");
    }
    // Serials ascend with time.
    const size_t dropped = list.serials.size() - std::min(list.serials.size(), crypto::kRevokedMax);
    list.serials.erase(list.serials.begin(), list.serials.begin() + ptrdiff_t(dropped));
    revocations_ = crypto::issue_revocations(key_, list);
    revocations_made_ = now;
    return revocations_;
}

Result<std::vector<uint64_t>> Registry::revoke(const crypto::PublicKey& node) {
    const auto tokens = storage_.revoke_node(crypto::to_hex(node));
    if (!tokens) return tl::unexpected(tokens.error());
    std::vector<uint64_t> serials;  // that open something
    const int64_t good = seconds_of(clocks_.wall() - kClockSkewMax);
    const std::lock_guard lock(mu_);
    nodes_[node].row.is_revoked = true;
    for (const market::TokenRow& token : *tokens) {
        revoked_[token.serial] = token.expires;
        if (token.expires >= good) serials.push_back(token.serial);
    }
    revocations_made_.reset();
    return serials;
}

Result<crypto::Invite> Registry::make_invite(uint32_t uses, std::chrono::seconds valid_for,
                                             uint8_t roles) {
    crypto::Invite invite;
    crypto::fill_random(invite.secret);
    invite.market = key_.public_key();
    market::InviteRow row;
    row.secret_sha256 = crypto::sha256(invite.secret);
    row.uses = uses;
    row.expires = seconds_of(clocks_.wall() + valid_for);
    row.roles = roles;
    if (Status ok = storage_.add_invite(row); !ok) return tl::unexpected(ok.error());
    return invite;
}

void Registry::saw(const crypto::PublicKey& node, std::optional<uint32_t> threads) {
    const std::lock_guard lock(mu_);
    const auto found = nodes_.find(node);
    if (found == nodes_.end()) return;
    found->second.seen = clocks_.steady();
    if (threads) found->second.threads = *threads;
}

std::shared_ptr<NodeCounters> Registry::counters(const crypto::PublicKey& node) const {
    const std::lock_guard lock(mu_);
    const auto found = nodes_.find(node);
    return found == nodes_.end() ? std::make_shared<NodeCounters>() : found->second.counters;
}

std::vector<NodeView> Registry::nodes() const {
    const std::lock_guard lock(mu_);
    std::vector<NodeView> out;
    for (const auto& [key, node] : nodes_) {
        out.push_back({key, node.row, node.seen, node.threads});
        out.back().row.bytes_served = node.counters->bytes_served;
    }
    return out;
}

Status Registry::save_bytes_served() {
    std::vector<market::BytesServed> served;
    std::vector<std::shared_ptr<NodeCounters>> counters;
    {
        const std::lock_guard lock(mu_);
        for (const auto& [key, node] : nodes_) {
            const uint64_t bytes = node.counters->bytes_unsaved.exchange(0);
            if (bytes == 0) continue;
            served.push_back({node.row.node, bytes});
            counters.push_back(node.counters);
        }
    }
    if (served.empty()) return {};
    Status ok = storage_.add_bytes_served(served);
    for (size_t i = 0; !ok && i < served.size(); ++i) counters[i]->bytes_unsaved += served[i].bytes;
    return ok;
}

}  // namespace kvasir::coordinator
