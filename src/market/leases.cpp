#include "market/leases.hpp"

#include <algorithm>
#include <tuple>

#include "base/check.hpp"
#include "market/offer.hpp"
#include "moe/segments.hpp"

namespace kvasir::market {
namespace {

bool overlaps(const Segment& a, const Segment& b) {
    return a.layer == b.layer && a.begin < b.end && b.begin < a.end;
}

bool covers(const std::vector<Segment>& merged, const Segment& segment) {
    return std::ranges::any_of(merged, [&](const Segment& one) {
        return one.layer == segment.layer && one.begin <= segment.begin && segment.end <= one.end;
    });
}

tl::unexpected<Error> not_held(uint64_t id) {
    return fail(Errc::kNotHeld, "lease " + std::to_string(id) +
                                    " is not yours any more (expired or released): ask for leases");
}

}  // namespace

LeaseBook::LeaseBook(Catalogue catalogue, LeaseRules rules)
    : catalogue_(std::move(catalogue)), rules_(rules), coverage_(catalogue_) {
    KVASIR_CHECK(rules_.loading_bytes_per_second > 0 && rules_.leases_per_node_max > 0);
}

void LeaseBook::restore(std::span<const Lease> leases, uint64_t id_next, TimePoint now) {
    KVASIR_CHECK(leases_.empty());
    id_next_ = id_next;
    for (Lease lease : leases) {
        KVASIR_CHECK(lease.id < id_next);
        const std::vector<Segment> held = segments(holders_[lease.node]);
        const bool is_doubled = std::ranges::any_of(
            held, [&](const Segment& other) { return overlaps(other, lease.segment); });
        if (!catalogue_.contains(lease.segment) || is_doubled) {
            changes_[lease.id] = std::nullopt;
            continue;
        }
        lease.bytes = catalogue_.bytes(lease.segment);
        lease.bytes_done = 0;
        lease.proofs_wrong = 0;
        lease.loading_since = now;
        lease.expires = now + rules_.serving;
        insert(lease);
        changes_.erase(lease.id);  // storage has it
    }
    for (auto& [id, lease] : leases_) {
        if (lease.state == LeaseState::kServing) continue;
        renew_loading(lease, bytes_missing(holders_[lease.node]), now);
    }
}

std::vector<Lease> LeaseBook::offer(const Ask& ask, TimePoint now) {
    expire(now);
    Holder& holder = holders_[ask.node];
    holder.budget_bytes = ask.budget_bytes;
    const std::vector<Segment> have = moe::normalise(ask.have);
    for (const uint64_t id : holder.ids) {
        Lease& lease = leases_.at(id);
        lease.bytes_done = 0;
        if (lease.state == LeaseState::kServing && !covers(have, lease.segment)) {
            lease.loading_since = now;
            set_state(lease, LeaseState::kLoading);
        }
        if (lease.state == LeaseState::kServing) set_expiry(lease, now + rules_.serving);
    }
    shrink(ask, holder);
    OfferInput input;
    input.held = segments(holder);
    input.have = have;
    input.begun = ask.begun;
    input.bytes_left = ask.budget_bytes - bytes_held(holder);
    input.replicas_target = rules_.replicas_target;
    input.segments_max =
        rules_.leases_per_node_max -
        static_cast<uint32_t>(std::min<size_t>(holder.ids.size(), rules_.leases_per_node_max));
    input.seed = ask.seed;
    for (const Segment& segment : choose_segments(catalogue_, coverage_, input)) {
        Lease lease;
        lease.id = id_next_++;
        lease.node = ask.node;
        lease.segment = segment;
        lease.bytes = catalogue_.bytes(segment);
        lease.loading_since = now;
        lease.expires = now + rules_.loading_min;
        insert(lease);
    }
    const uint64_t missing = bytes_missing(holder);
    for (const uint64_t id : holder.ids) {
        Lease& lease = leases_.at(id);
        if (lease.state == LeaseState::kLoading) renew_loading(lease, missing, now);
    }
    std::vector<Lease> out = copy(holder.ids);
    // What was at the end of its patience is not renewed: it may end this very moment.
    std::erase_if(out, [&](const Lease& lease) { return lease.expires <= now; });
    return out;
}

// Releases until the budget holds: promises first, then what is not cached, then what most others
// have too.
void LeaseBook::shrink(const Ask& ask, const Holder& holder) {
    const std::vector<Segment> have = moe::normalise(ask.have);
    while (bytes_held(holder) > ask.budget_bytes) {
        const auto worth = [&](uint64_t id) {
            const Lease& lease = leases_.at(id);
            return std::tuple(lease.state == LeaseState::kServing, covers(have, lease.segment),
                              ~coverage_.promised_min(lease.segment), ~id);
        };
        erase(*std::ranges::min_element(holder.ids, {}, worth));
    }
}

Renewal LeaseBook::progress(const NodeKey& node, std::span<const Progress> reports, TimePoint now) {
    expire(now);
    Renewal out;
    std::set<uint64_t> named;
    bool has_grown = false;
    for (const Progress& report : reports) {
        Lease* lease = find_live(node, report.id);
        if (lease == nullptr) {
            out.lost.push_back(report.id);
            continue;
        }
        const uint64_t done = std::min(report.bytes_done, lease->bytes);
        has_grown = has_grown || done > lease->bytes_done;
        lease->bytes_done = std::max(done, lease->bytes_done);
        named.insert(report.id);
    }
    if (has_grown) {
        const uint64_t missing = bytes_missing(holders_.at(node));
        for (const uint64_t id : named) {
            Lease& lease = leases_.at(id);
            if (lease.state == LeaseState::kLoading) renew_loading(lease, missing, now);
        }
    }
    out.leases = copy(named);
    return out;
}

Status LeaseBook::proved(const NodeKey& node, uint64_t id, TimePoint now) {
    expire(now);
    Lease* lease = find_live(node, id);
    if (lease == nullptr) return not_held(id);
    lease->bytes_done = lease->bytes;
    lease->proofs_wrong = 0;
    set_state(*lease, LeaseState::kServing);
    set_expiry(*lease, now + rules_.serving);
    return {};
}

Result<bool> LeaseBook::proof_wrong(const NodeKey& node, uint64_t id, TimePoint now) {
    expire(now);
    Lease* lease = find_live(node, id);
    if (lease == nullptr) return not_held(id);
    if (++lease->proofs_wrong >= rules_.proofs_wrong_max) {
        erase(id);
        return true;
    }
    lease->bytes_done = 0;  // it has to fetch again
    if (lease->state == LeaseState::kServing) {
        lease->loading_since = now;
        set_state(*lease, LeaseState::kLoading);
    }
    return false;
}

Renewal LeaseBook::heartbeat(const NodeKey& node, std::span<const uint64_t> ids, TimePoint now) {
    expire(now);
    Renewal out;
    std::set<uint64_t> named;
    for (const uint64_t id : ids) {
        Lease* lease = find_live(node, id);
        if (lease == nullptr) {
            out.lost.push_back(id);
            continue;
        }
        if (lease->state == LeaseState::kServing) set_expiry(*lease, now + rules_.serving);
        named.insert(id);
    }
    out.leases = copy(named);
    return out;
}

size_t LeaseBook::release(const NodeKey& node, std::span<const uint64_t> ids, TimePoint now) {
    expire(now);
    size_t count = 0;
    for (const uint64_t id : ids) {
        if (find_live(node, id) == nullptr) continue;
        erase(id);
        ++count;
    }
    return count;
}

size_t LeaseBook::release_all(const NodeKey& node, TimePoint now) {
    expire(now);
    const auto holder = holders_.find(node);
    if (holder == holders_.end()) return 0;
    const std::set<uint64_t> ids = holder->second.ids;
    for (const uint64_t id : ids) erase(id);
    holders_.erase(node);
    return ids.size();
}

void LeaseBook::expire(TimePoint now) {
    while (!expiries_.empty() && expiries_.begin()->first <= now) erase(expiries_.begin()->second);
}

std::vector<Lease> LeaseBook::leases_of(const NodeKey& node, TimePoint now) {
    expire(now);
    const auto holder = holders_.find(node);
    return holder == holders_.end() ? std::vector<Lease>{} : copy(holder->second.ids);
}

Result<Lease> LeaseBook::find(const NodeKey& node, uint64_t id, TimePoint now) {
    expire(now);
    const Lease* lease = find_live(node, id);
    if (lease == nullptr) return not_held(id);
    return *lease;
}

CoverageMap LeaseBook::coverage(TimePoint now) {
    expire(now);
    return coverage_.map(rules_.replicas_target);
}

bool LeaseBook::has_gap_for(const NodeKey& node, TimePoint now) {
    expire(now);
    const auto holder = holders_.find(node);
    if (holder == holders_.end()) return false;
    if (holder->second.ids.size() >= rules_.leases_per_node_max) return false;
    const uint64_t held = bytes_held(holder->second);
    if (coverage_.gaps() == 0 || holder->second.budget_bytes <= held) return false;
    for (size_t b = 0; b < catalogue_.banks().size(); ++b) {
        const BankUnit& bank = catalogue_.banks()[b];
        if (bank.expert_bytes > holder->second.budget_bytes - held) continue;
        for (uint32_t e = 0; e < bank.experts; ++e) {
            if (coverage_.promised(b, e) == 0) return true;
        }
    }
    return false;
}

milliseconds LeaseBook::loading_time(uint64_t bytes_missing) const {
    const uint64_t seconds = bytes_missing / rules_.loading_bytes_per_second + 1;
    const auto assumed = std::chrono::seconds(std::min<uint64_t>(seconds, 10 * 365 * 86400));
    return std::max<milliseconds>(assumed, rules_.loading_min);
}

// A node downloads all its leases over one line, in an order that is its own.
uint64_t LeaseBook::bytes_missing(const Holder& holder) const {
    uint64_t bytes = 0;
    for (const uint64_t id : holder.ids) {
        const Lease& lease = leases_.at(id);
        if (lease.state == LeaseState::kLoading) bytes += lease.bytes - lease.bytes_done;
    }
    return bytes;
}

uint64_t LeaseBook::bytes_held(const Holder& holder) const {
    uint64_t bytes = 0;
    for (const uint64_t id : holder.ids) bytes += leases_.at(id).bytes;
    return bytes;
}

Lease* LeaseBook::find_live(const NodeKey& node, uint64_t id) {
    const auto lease = leases_.find(id);
    return lease == leases_.end() || lease->second.node != node ? nullptr : &lease->second;
}

void LeaseBook::insert(Lease lease) {
    coverage_.add(lease.segment, lease.state);
    expiries_.insert({lease.expires, lease.id});
    holders_[lease.node].ids.insert(lease.id);
    changes_[lease.id] = lease;
    leases_.emplace(lease.id, std::move(lease));
}

void LeaseBook::erase(uint64_t id) {
    const auto at = leases_.find(id);
    KVASIR_CHECK(at != leases_.end());
    coverage_.remove(at->second.segment, at->second.state);
    expiries_.erase({at->second.expires, id});
    holders_.at(at->second.node).ids.erase(id);
    changes_[id] = std::nullopt;
    leases_.erase(at);
}

void LeaseBook::set_state(Lease& lease, LeaseState state) {
    if (lease.state == state) return;
    coverage_.remove(lease.segment, lease.state);
    lease.state = state;
    coverage_.add(lease.segment, lease.state);
    changes_[lease.id] = lease;
}

void LeaseBook::set_expiry(Lease& lease, TimePoint expires) {
    expiries_.erase({lease.expires, lease.id});
    lease.expires = expires;
    expiries_.insert({expires, lease.id});
}

void LeaseBook::renew_loading(Lease& lease, uint64_t missing, TimePoint now) {
    const milliseconds whole = loading_time(lease.bytes) * rules_.loading_patience;
    const TimePoint last = lease.loading_since + std::max(whole, rules_.loading_hold);
    set_expiry(lease, std::min(now + loading_time(missing), last));
}

std::vector<Segment> LeaseBook::segments(const Holder& holder) const {
    std::vector<Segment> out;
    for (const uint64_t id : holder.ids) out.push_back(leases_.at(id).segment);
    return out;
}

std::vector<Lease> LeaseBook::copy(const std::set<uint64_t>& ids) const {
    std::vector<Lease> out;
    for (const uint64_t id : ids) out.push_back(leases_.at(id));
    return out;
}

}  // namespace kvasir::market
