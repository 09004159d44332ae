#include "market/leases.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <numeric>

#include "market/auditor_testing.hpp"
#include "market/offer.hpp"
#include "market/proof.hpp"

namespace kvasir::market {
namespace {

using namespace std::chrono_literals;
using testing::Auditor;

constexpr TimePoint kStart{std::chrono::hours(5)};

NodeKey node(uint8_t number) {
    NodeKey key;
    key.bytes[0] = number;
    return key;
}

Segment segment(uint32_t layer, uint32_t begin, uint32_t end) {
    return {{layer, 0}, begin, end};
}

// Three layers of eight experts of 100, 100 and 150 bytes.
Catalogue small() {
    return Catalogue({{{0, 0}, 8, 100}, {{1, 0}, 8, 100}, {{2, 0}, 8, 150}});
}

uint64_t bytes(const std::vector<Lease>& leases) {
    return std::accumulate(leases.begin(), leases.end(), uint64_t{0},
                           [](uint64_t sum, const Lease& lease) { return sum + lease.bytes; });
}

void serve_all(LeaseBook& book, const NodeKey& key, TimePoint now) {
    for (const Lease& lease : book.leases_of(key, now)) {
        ASSERT_TRUE(book.proved(key, lease.id, now));
    }
}

TEST(Catalogue, LeavesOutMtpLayersAndKnowsBytes) {
    moe::Model model;
    moe::ExpertBank bank;
    bank.key = {3, 0};
    bank.experts = 4;
    bank.tensors.resize(2);
    bank.tensors[0].slab_bytes = 10;
    bank.tensors[1].slab_bytes = 7;
    model.banks.push_back(bank);
    bank.key = {4, 0};
    bank.is_mtp = true;
    model.banks.push_back(bank);
    const Catalogue catalogue = Catalogue::from(model);
    ASSERT_EQ(catalogue.banks().size(), 1U);
    EXPECT_EQ(catalogue.experts_total(), 4U);
    EXPECT_EQ(catalogue.bytes_total(), 68U);
    EXPECT_EQ(catalogue.bytes(segment(3, 1, 3)), 34U);
    EXPECT_FALSE(catalogue.contains(segment(3, 2, 5)));
    EXPECT_FALSE(catalogue.contains(segment(3, 2, 2)));
    EXPECT_FALSE(catalogue.contains(segment(4, 0, 1)));
    EXPECT_FALSE(catalogue.contains({{3, 1}, 0, 1}));
}

TEST(Offer, FitsTheBudgetToTheByte) {
    for (const uint64_t budget : {0, 99, 100, 149, 150, 199, 200, 1100, 2799, 2800, 5000}) {
        LeaseBook book(small(), {});
        const auto leases = book.offer({node(1), budget, {}, 7}, kStart);
        EXPECT_LE(bytes(leases), budget);
        const uint64_t left = budget - bytes(leases);
        EXPECT_TRUE(left < 100 || bytes(leases) == 2800) << budget;
    }
}

TEST(Offer, OneLayerIsEnoughWhereOneIsEnough) {
    for (uint64_t seed = 0; seed < 32; ++seed) {
        LeaseBook book(small(), {});
        const auto leases = book.offer({node(1), 500, {}, seed}, kStart);
        ASSERT_EQ(leases.size(), 1U);
        EXPECT_EQ(leases[0].segment.count(), 5U);
        EXPECT_LT(leases[0].segment.layer.layer, 2U);
    }
}

TEST(Offer, TheSeedDecidesBetweenEqualsAndNothingElseDoes) {
    std::set<uint32_t> layers;
    for (uint64_t seed = 0; seed < 32; ++seed) {
        LeaseBook book(small(), {}), twin(small(), {});
        const auto leases = book.offer({node(1), 800, {}, seed}, kStart);
        const auto same = twin.offer({node(9), 800, {}, seed}, kStart + 1h);
        ASSERT_EQ(leases.size(), 1U);
        ASSERT_EQ(same.size(), 1U);
        EXPECT_EQ(leases[0].segment, same[0].segment);
        layers.insert(leases[0].segment.layer.layer);
    }
    EXPECT_EQ(layers, (std::set<uint32_t>{0, 1}));
}

TEST(Offer, TwoJoinersDoNotTakeTheSameGap) {
    LeaseBook book(small(), {});
    const auto first = book.offer({node(1), 1400, {}, 1}, kStart);
    const auto second = book.offer({node(2), 1400, {}, 2}, kStart);
    for (const Lease& a : first) {
        for (const Lease& b : second) {
            EXPECT_FALSE(a.segment.layer == b.segment.layer && a.segment.begin < b.segment.end &&
                         b.segment.begin < a.segment.end);
        }
    }
    const CoverageMap map = book.coverage(kStart);
    EXPECT_EQ(map.experts_serving, 0U);  // promises are no coverage
    EXPECT_GE(map.experts_promised, 22U);
}

TEST(Offer, PrefersWhatIsInTheCacheAmongEquals) {
    LeaseBook book(small(), {});
    const auto leases = book.offer({node(1), 400, {segment(1, 3, 5), segment(2, 6, 8)}, 3}, kStart);
    std::set<Segment> got;
    for (const Lease& lease : leases) got.insert(lease.segment);
    EXPECT_TRUE(got.contains(segment(2, 6, 8)));  // the larger part of the cache first
    EXPECT_LE(bytes(leases), 400U);
    // A gap goes before the cache: what another node serves already is not offered again.
    LeaseBook other(small(), {});
    other.offer({node(1), 800, {segment(1, 0, 8)}, 3}, kStart);
    for (const Lease& lease : other.offer({node(2), 800, {segment(1, 0, 8)}, 3}, kStart)) {
        EXPECT_NE(lease.segment.layer.layer, 1U);
    }
}

// Whatever decides between equals: what has bytes already goes on, after what is whole.
TEST(Offer, ADownloadThatWasBrokenOffGoesOn) {
    const std::vector<Segment> begun = {segment(0, 5, 7), segment(2, 1, 3)};
    for (uint64_t seed = 0; seed < 16; ++seed) {
        LeaseBook book(small(), {});
        std::vector<Segment> got;
        for (const Lease& lease : book.offer({node(1), 500, {}, seed, begun}, kStart))
            got.push_back(lease.segment);
        EXPECT_EQ(got, begun);
        LeaseBook other(small(), {});
        const std::vector<Segment> have = {segment(1, 4, 8)};
        const auto leases = other.offer({node(1), 400, have, seed, begun}, kStart);
        ASSERT_EQ(leases.size(), 1U);
        EXPECT_EQ(leases[0].segment, have[0]);
        // No claim to it: what another node was promised meanwhile stays that one's.
        for (const Lease& lease : other.offer({node(2), 400, {}, seed, have}, kStart))
            EXPECT_FALSE(lease.segment.layer.layer == 1 && lease.segment.end > 4);
    }
}

// What is served must be whole.
TEST(Offer, WhatIsOnlyBegunIsNotServed) {
    LeaseBook book(small(), {});
    const auto before = book.offer({node(1), 400, {}, 1}, kStart);
    ASSERT_EQ(before.size(), 1U);
    serve_all(book, node(1), kStart);
    const std::vector<Segment> begun = {before[0].segment};
    const auto after = book.offer({node(1), 400, {}, 2, begun}, kStart);
    ASSERT_EQ(after.size(), 1U);
    EXPECT_EQ(after[0].state, LeaseState::kLoading);
}

TEST(Offer, WhatTheCatalogueDoesNotKnowIsIgnored) {
    LeaseBook book(small(), {});
    const std::vector<Segment> have = {segment(77, 0, 8), segment(0, 7, 900), segment(1, 5, 2)};
    EXPECT_EQ(bytes(book.offer({node(1), 300, have, 1}, kStart)), 300U);
}

TEST(Offer, GrowsBesideWhatTheNodeHolds) {
    LeaseBook book(small(), {});
    const auto before = book.offer({node(1), 300, {}, 1}, kStart);
    ASSERT_EQ(before.size(), 1U);
    const auto after = book.offer({node(1), 600, {}, 2}, kStart + 1s);
    ASSERT_EQ(after.size(), 2U);
    EXPECT_EQ(after[0].id, before[0].id);
    EXPECT_EQ(after[1].segment.layer, before[0].segment.layer);
    EXPECT_EQ(bytes(after), 600U);
}

// A remainder elsewhere would fit exactly, but would be one more layer to wait for.
TEST(Offer, StaysInTheLayersItHas) {
    const Catalogue catalogue({{{0, 0}, 8, 100}, {{1, 0}, 8, 100}});
    Coverage coverage(catalogue);
    coverage.add(segment(0, 0, 2), LeaseState::kServing);
    coverage.add(segment(1, 0, 6), LeaseState::kServing);
    for (uint64_t seed = 0; seed < 8; ++seed) {
        OfferInput input;
        input.held = {segment(0, 0, 2)};
        input.bytes_left = 200;
        input.segments_max = 10;
        input.seed = seed;
        EXPECT_EQ(choose_segments(catalogue, coverage, input),
                  std::vector<Segment>{segment(0, 2, 4)});
    }
}

TEST(Offer, ASmallerBudgetReleasesPromisesFirst) {
    LeaseBook book(small(), {});
    const auto first = book.offer({node(1), 800, {}, 1}, kStart);
    serve_all(book, node(1), kStart);
    const std::vector<Segment> have = {first[0].segment};
    ASSERT_EQ(book.offer({node(1), 1600, have, 1}, kStart).size(), 2U);
    const auto after = book.offer({node(1), 800, have, 1}, kStart);
    ASSERT_EQ(after.size(), 1U);
    EXPECT_EQ(after[0].id, first[0].id);
    EXPECT_EQ(after[0].state, LeaseState::kServing);
    EXPECT_LE(bytes(book.offer({node(1), 450, have, 1}, kStart)), 450U);
}

TEST(Offer, ReplicasFillUpLevelByLevel) {
    LeaseBook book(small(), {});
    for (uint8_t n = 1; n <= 3; ++n) {
        EXPECT_EQ(bytes(book.offer({node(n), 2800, {}, n}, kStart)), 2800U);
        serve_all(book, node(n), kStart);
        for (const BankCoverage& bank : book.coverage(kStart).banks) {
            ASSERT_EQ(bank.ranges.size(), 1U);
            EXPECT_EQ(bank.ranges[0].serving, n);
        }
    }
    EXPECT_EQ(book.coverage(kStart).experts_serving, 24U);
}

TEST(Leases, LoadingLastsAsLongAsTheDownload) {
    LeaseRules rules;
    LeaseBook book(Catalogue({{{0, 0}, 8, 100000000}}), rules);
    const auto leases = book.offer({node(1), 300000000, {}, 1}, kStart);
    ASSERT_EQ(leases.size(), 1U);
    EXPECT_GE(leases[0].expires - kStart, 300s);
    EXPECT_LE(leases[0].expires - kStart, 302s);
    // No growth, no renewal; growth renews for what is missing.
    const uint64_t id = leases[0].id;
    const Progress nothing[] = {{id, 0}};
    auto renewal = book.progress(node(1), nothing, kStart + 100s);
    EXPECT_EQ(renewal.leases.at(0).expires, leases[0].expires);
    const Progress some[] = {{id, 100000000}};
    renewal = book.progress(node(1), some, kStart + 250s);
    EXPECT_GE(renewal.leases.at(0).expires - kStart, 450s);
    // Near the end at least a minute.
    const Progress nearly[] = {{id, 299999999}};
    renewal = book.progress(node(1), nearly, kStart + 400s);
    EXPECT_EQ(renewal.leases.at(0).expires, kStart + 460s);
    EXPECT_EQ(book.leases_of(node(1), kStart + 459s).size(), 1U);
    EXPECT_TRUE(book.leases_of(node(1), kStart + 460s).empty());
    EXPECT_EQ(book.progress(node(1), nearly, kStart + 460s).lost, std::vector<uint64_t>{id});
}

TEST(Leases, AByteAMinuteDoesNotHoldAGapForEver) {
    LeaseBook book(small(), {});
    const auto leases = book.offer({node(1), 800, {}, 1}, kStart);
    TimePoint now = kStart;
    uint64_t done = 0;
    while (!book.leases_of(node(1), now).empty() && done < 700) {
        now += 50s;
        const Progress report[] = {{leases[0].id, ++done}};
        (void)book.progress(node(1), report, now);
    }
    EXPECT_LE(now - kStart, 1h + 50s);
    EXPECT_GE(now - kStart, 1h);
}

TEST(Leases, HeartbeatsRenewWhatServesAndTellWhatIsLost) {
    LeaseBook book(small(), {});
    const auto mine = book.offer({node(1), 1600, {}, 1}, kStart);
    ASSERT_EQ(mine.size(), 2U);
    ASSERT_TRUE(book.proved(node(1), mine[0].id, kStart));
    const uint64_t ids[] = {mine[0].id, mine[1].id, 999};
    const auto renewal = book.heartbeat(node(1), ids, kStart + 30s);
    EXPECT_EQ(renewal.lost, std::vector<uint64_t>{999});
    ASSERT_EQ(renewal.leases.size(), 2U);
    EXPECT_EQ(renewal.leases[0].expires, kStart + 90s);
    EXPECT_EQ(renewal.leases[1].expires, mine[1].expires);  // a promise is not kept by a heartbeat
    // Another node cannot renew, prove, doubt or release it.
    EXPECT_EQ(book.heartbeat(node(2), ids, kStart + 31s).lost.size(), 3U);
    EXPECT_EQ(book.proved(node(2), mine[1].id, kStart + 31s).error().code, Errc::kNotHeld);
    EXPECT_FALSE(book.proof_wrong(node(2), mine[1].id, kStart + 31s));
    EXPECT_EQ(book.release(node(2), ids, kStart + 31s), 0U);
    EXPECT_EQ(book.leases_of(node(1), kStart + 59s).size(), 2U);
    EXPECT_EQ(book.leases_of(node(1), kStart + 89s).size(), 1U);
    EXPECT_TRUE(book.leases_of(node(1), kStart + 90s).empty());
    EXPECT_EQ(book.proved(node(1), mine[0].id, kStart + 91s).error().code, Errc::kNotHeld);
}

TEST(Leases, ThreeWrongProofsReleaseALease) {
    LeaseBook book(small(), {});
    const uint64_t id = book.offer({node(1), 100, {}, 1}, kStart).at(0).id;
    EXPECT_FALSE(*book.proof_wrong(node(1), id, kStart));
    EXPECT_FALSE(*book.proof_wrong(node(1), id, kStart));
    EXPECT_EQ(book.leases_of(node(1), kStart).at(0).state, LeaseState::kLoading);
    EXPECT_TRUE(*book.proof_wrong(node(1), id, kStart));
    EXPECT_TRUE(book.leases_of(node(1), kStart).empty());
}

// Three nodes, one restarted 20 times, then gone: never more than one identity of it, coverage is
// right throughout and falls one lease time after the last sign of life.
TEST(Leases, RestartsMakeNoGhosts) {
    LeaseBook book(small(), {});
    for (uint8_t n = 1; n <= 3; ++n) {
        book.offer({node(n), 1000, {}, n}, kStart);
        serve_all(book, node(n), kStart);
    }
    const uint64_t served = book.coverage(kStart).experts_serving;
    const auto before = book.leases_of(node(2), kStart);
    std::vector<Segment> have;
    for (const Lease& lease : before) have.push_back(lease.segment);
    TimePoint now = kStart;
    for (int restart = 0; restart < 20; ++restart) {
        now += 500ms;
        if (restart % 5 == 4) book.release_all(node(2), now);  // a clean end
        const auto after = book.offer({node(2), 1000, have, 40U + restart}, now);
        EXPECT_EQ(after.size(), before.size());
        EXPECT_EQ(bytes(after), bytes(before));
        for (size_t i = 0; i < after.size(); ++i) EXPECT_EQ(after[i].segment, before[i].segment);
        serve_all(book, node(2), now);
        EXPECT_EQ(book.coverage(now).experts_serving, served);
        EXPECT_EQ(book.leases_total(), before.size() + book.leases_of(node(1), now).size() +
                                           book.leases_of(node(3), now).size());
    }
    for (const uint8_t n : {1, 3}) {
        std::vector<uint64_t> ids;
        for (const Lease& lease : book.leases_of(node(n), now)) ids.push_back(lease.id);
        book.heartbeat(node(n), ids, now + 40s);
    }
    const uint64_t lost = bytes(before) / 100;  // upper bound of experts
    EXPECT_GE(book.coverage(now + 60s).experts_serving, served - lost);
    EXPECT_LT(book.coverage(now + 60s).experts_serving, served);
    EXPECT_TRUE(book.leases_of(node(2), now + 60s).empty());
}

TEST(Leases, ALostCacheIsLoadingAgain) {
    LeaseBook book(small(), {});
    const uint64_t id = book.offer({node(1), 800, {}, 1}, kStart).at(0).id;
    serve_all(book, node(1), kStart);
    EXPECT_EQ(book.coverage(kStart).experts_serving, 8U);
    const auto after = book.offer({node(1), 800, {}, 1}, kStart + 5s);
    ASSERT_EQ(after.size(), 1U);
    EXPECT_EQ(after[0].id, id);
    EXPECT_EQ(after[0].state, LeaseState::kLoading);
    EXPECT_EQ(book.coverage(kStart + 5s).experts_serving, 0U);
}

TEST(Leases, ARestoredLeaseHasOneMoreLeaseTime) {
    LeaseBook book(small(), {});
    std::vector<Lease> stored(5);
    stored[0] = {1, node(1), segment(0, 0, 4), 1, LeaseState::kServing, 0, 0, {}, {}};
    stored[1] = {2, node(1), segment(0, 3, 8), 1, LeaseState::kServing, 0, 0, {}, {}};  // doubled
    stored[2] = {3, node(2), segment(9, 0, 4), 1, LeaseState::kServing, 0, 0, {}, {}};  // unknown
    stored[3] = {4, node(2), segment(0, 0, 4), 1, LeaseState::kLoading, 0, 0, {}, {}};
    stored[4] = {7, node(3), segment(2, 0, 8), 1, LeaseState::kServing, 0, 0, {}, {}};
    book.restore(stored, 8, kStart);
    const LeaseChanges changes = book.take_changes();
    ASSERT_EQ(changes.size(), 2U);
    EXPECT_FALSE(changes.at(2).has_value());
    EXPECT_FALSE(changes.at(3).has_value());
    EXPECT_EQ(book.coverage(kStart).experts_serving, 12U);
    EXPECT_EQ(book.find(node(1), 1, kStart)->expires, kStart + 60s);
    EXPECT_EQ(book.find(node(1), 1, kStart)->bytes, 400U);
    EXPECT_EQ(book.coverage(kStart + 60s).experts_serving, 0U);
    EXPECT_EQ(book.offer({node(5), 100, {}, 0}, kStart).at(0).id, 8U);  // ids are never reused
}

TEST(Leases, GapsAreTold) {
    LeaseBook book(small(), {});
    EXPECT_FALSE(book.has_gap_for(node(1), kStart));  // has not asked
    book.offer({node(1), 850, {}, 1}, kStart);
    EXPECT_FALSE(book.has_gap_for(node(1), kStart));  // no room
    book.offer({node(2), 2000, {}, 1}, kStart);
    serve_all(book, node(2), kStart);
    book.offer({node(3), 2800, {}, 1}, kStart);  // everything, so with room for nothing
    EXPECT_FALSE(book.has_gap_for(node(3), kStart));
    book.release_all(node(1), kStart);
    EXPECT_FALSE(book.has_gap_for(node(2), kStart));
    book.release_all(node(3), kStart);
    EXPECT_FALSE(book.has_gap_for(node(2), kStart));
    const uint64_t one[] = {book.leases_of(node(2), kStart).at(0).id};
    book.release(node(2), one, kStart);
    EXPECT_TRUE(book.has_gap_for(node(2), kStart));
}

TEST(Proof, ProbesLieInTheLeaseAndReachEveryTensor) {
    moe::ExpertBank bank;
    bank.key = {2, 0};
    bank.experts = 16;
    bank.tensors.resize(3);
    for (size_t i = 0; i < 3; ++i) {
        bank.tensors[i].slab_bytes = i == 1 ? 100 : 50000;
        bank.tensors[i].offset = 1000 + i * 10000000;
    }
    Lease lease;
    lease.id = 5;
    lease.segment = segment(2, 3, 9);
    std::mt19937_64 random(1);
    std::set<uint32_t> experts, tensors;
    for (int round = 0; round < 200; ++round) {
        for (const Probe& probe : make_probes(lease, bank, 8, random)) {
            EXPECT_EQ(probe.lease, 5U);
            experts.insert(probe.expert);
            tensors.insert(probe.tensor);
            const moe::SlabTensor& tensor = bank.tensors[probe.tensor];
            EXPECT_LE(probe.bytes, kProbeBytesMax);
            EXPECT_GT(probe.bytes, 0U);
            EXPECT_LE(probe.offset + probe.bytes, tensor.slab_bytes);
            EXPECT_EQ(probe_offset(probe, bank),
                      tensor.offset + probe.expert * tensor.slab_bytes + probe.offset);
        }
    }
    EXPECT_EQ(experts, (std::set<uint32_t>{3, 4, 5, 6, 7, 8}));
    EXPECT_EQ(tensors, (std::set<uint32_t>{0, 1, 2}));
    lease.segment = segment(2, 15, 16);
    for (const Probe& probe : make_probes(lease, bank, 3, random)) EXPECT_EQ(probe.expert, 15U);
}

// Random sequences, LeaseBook and the auditor side by side.
class Play {
public:
    Play(Catalogue catalogue, LeaseRules rules)
        : rules_(rules),
          catalogue_(catalogue),
          book_(catalogue, rules),
          auditor_(catalogue_, rules_) {}

    void step() {
        now_ += milliseconds(*rc::gen::inRange<int64_t>(0, 9000));
        auditor_.pass(now_);
        const NodeKey who = node(*rc::gen::inRange<uint8_t>(1, 6));
        switch (*rc::gen::inRange(0, 8)) {
            case 0:
            case 1:
                ask(who);
                break;
            case 2:
                report(who);
                break;
            case 3:
                prove(who, *rc::gen::inRange(0, 4) != 0);
                break;
            case 4:
            case 5:
                beat(who);
                break;
            case 6:
                leave(who);
                break;
            default:
                now_ += milliseconds(*rc::gen::inRange<int64_t>(0, 40000));
                break;
        }
        auditor_.pass(now_);
        compare();
    }

private:
    void ask(const NodeKey& who) {
        Ask ask{who, *rc::gen::inRange<uint64_t>(0, 2500), {}, *rc::gen::arbitrary<uint64_t>()};
        for (const BankUnit& bank : catalogue_.banks()) {
            const uint32_t begin = *rc::gen::inRange<uint32_t>(0, bank.experts);
            const uint32_t end = *rc::gen::inRange<uint32_t>(0, bank.experts);
            ask.have.push_back({bank.layer, begin, end});
        }
        const auto before = auditor_.leases();
        const auto after = book_.offer(ask, now_);
        budgets_[who] = ask.budget_bytes;
        for (const uint64_t id : auditor_.ids_of(who)) auditor_.leases().erase(id);
        for (const Lease& lease : after) {
            RC_ASSERT(lease.node == who);
            const auto old = before.find(lease.id);
            if (old == before.end()) {
                RC_ASSERT(lease.id > id_last_);
                RC_ASSERT(lease.state == LeaseState::kLoading);
            } else {
                RC_ASSERT(old->second.node == who && old->second.segment == lease.segment);
                const bool is_kept = std::ranges::any_of(ask.have, [&](const Segment& have) {
                    return have.layer == lease.segment.layer && have.begin <= lease.segment.begin &&
                           lease.segment.end <= have.end;
                });
                RC_ASSERT(lease.state == LeaseState::kLoading ||
                          (old->second.state == LeaseState::kServing && is_kept));
            }
            auditor_.leases()[lease.id] = lease;
        }
        for (const Lease& lease : after) {
            id_last_ = std::max(id_last_, lease.id);
            RC_ASSERT(lease.expires == (lease.state == LeaseState::kServing
                                            ? now_ + rules_.serving
                                            : auditor_.loading_expiry(lease, now_)));
        }
        RC_ASSERT(auditor_.bytes_of(who) <= ask.budget_bytes);
        check_placement(ask);
    }

    // Nothing that fits is left out: no gap is left while someone has room.
    void check_placement(const Ask& ask) {
        const uint64_t left = ask.budget_bytes - auditor_.bytes_of(ask.node);
        for (const BankUnit& bank : catalogue_.banks()) {
            for (uint32_t e = 0; e < bank.experts; ++e) {
                const bool is_held = auditor_.holds(ask.node, bank.layer, e);
                RC_ASSERT(is_held || bank.expert_bytes > left);
            }
        }
    }

    void report(const NodeKey& who) {
        std::vector<Progress> reports;
        bool has_grown = false;
        for (const uint64_t id : auditor_.ids_of(who)) {
            Lease& lease = auditor_.leases().at(id);
            const uint64_t done = *rc::gen::inRange<uint64_t>(0, lease.bytes + 50);
            reports.push_back({id, done});
            has_grown = has_grown || std::min(done, lease.bytes) > lease.bytes_done;
            lease.bytes_done = std::max(lease.bytes_done, std::min(done, lease.bytes));
        }
        const Renewal renewal = book_.progress(who, reports, now_);
        RC_ASSERT(renewal.lost.empty() && renewal.leases.size() == reports.size());
        if (!has_grown) return;
        std::map<uint64_t, TimePoint> expiries;
        for (const uint64_t id : auditor_.ids_of(who)) {
            const Lease& lease = auditor_.leases().at(id);
            if (lease.state == LeaseState::kLoading) {
                expiries[id] = auditor_.loading_expiry(lease, now_);
            }
        }
        for (const auto& [id, expires] : expiries) auditor_.leases().at(id).expires = expires;
    }

    void prove(const NodeKey& who, bool is_right) {
        const auto ids = auditor_.ids_of(who);
        if (ids.empty()) return;
        const uint64_t id = ids[*rc::gen::inRange<size_t>(0, ids.size())];
        Lease& lease = auditor_.leases().at(id);
        if (is_right) {
            RC_ASSERT(book_.proved(who, id, now_).has_value());
            lease.state = LeaseState::kServing;
            lease.bytes_done = lease.bytes;
            lease.proofs_wrong = 0;
            lease.expires = now_ + rules_.serving;
            return;
        }
        const auto is_released = book_.proof_wrong(who, id, now_);
        RC_ASSERT(is_released.has_value());
        RC_ASSERT(*is_released == (++lease.proofs_wrong >= rules_.proofs_wrong_max));
        if (*is_released) {
            auditor_.leases().erase(id);
            return;
        }
        if (lease.state == LeaseState::kServing) lease.loading_since = now_;
        lease.state = LeaseState::kLoading;
        lease.bytes_done = 0;
    }

    void beat(const NodeKey& who) {
        std::vector<uint64_t> ids = auditor_.ids_of(who);
        const size_t known = ids.size();
        ids.push_back(1000000);
        const Renewal renewal = book_.heartbeat(who, ids, now_);
        RC_ASSERT(renewal.leases.size() == known);
        RC_ASSERT(renewal.lost == std::vector<uint64_t>{1000000});
        for (auto& [id, lease] : auditor_.leases()) {
            if (lease.node == who && lease.state == LeaseState::kServing) {
                lease.expires = now_ + rules_.serving;
            }
        }
    }

    void leave(const NodeKey& who) {
        const auto ids = auditor_.ids_of(who);
        if (*rc::gen::arbitrary<bool>()) {
            RC_ASSERT(book_.release_all(who, now_) == ids.size());
            budgets_.erase(who);
        } else {
            RC_ASSERT(book_.release(who, ids, now_) == ids.size());
        }
        for (const uint64_t id : ids) auditor_.leases().erase(id);
    }

    void compare() {
        const CoverageMap map = book_.coverage(now_);
        uint64_t serving = 0, promised = 0, gaps = 0;
        for (const BankCoverage& bank : map.banks) {
            uint32_t next = 0;
            for (const CoverageRange& range : bank.ranges) {
                RC_ASSERT(range.begin == next && range.end > range.begin);
                next = range.end;
                for (uint32_t e = range.begin; e < range.end; ++e) {
                    const LayerKey layer = bank.bank.layer;
                    RC_ASSERT(range.serving == auditor_.holders(layer, e, LeaseState::kServing));
                    RC_ASSERT(range.loading == auditor_.holders(layer, e, LeaseState::kLoading));
                    serving += range.serving > 0;
                    promised += range.serving + range.loading > 0;
                    gaps += range.serving + range.loading == 0;
                }
            }
            RC_ASSERT(next == bank.bank.experts);
        }
        RC_ASSERT(map.experts_serving == serving && map.experts_promised == promised);
        RC_ASSERT(map.experts_total == promised + gaps);
        RC_ASSERT(book_.leases_total() == auditor_.leases().size());
        for (auto& [id, lease] : auditor_.leases()) {
            const auto real = book_.find(lease.node, id, now_);
            RC_ASSERT(real.has_value());
            RC_ASSERT(real->expires == lease.expires && real->state == lease.state);
            RC_ASSERT(real->bytes_done == lease.bytes_done);
        }
        for (const auto& [who, budget] : budgets_) check_node(who, budget, map);
        follow(book_.take_changes());
    }

    // No expert twice, and it is told of gaps exactly when it has room for one.
    void check_node(const NodeKey& who, uint64_t budget, const CoverageMap& map) {
        std::set<ExpertId> experts;
        for (const uint64_t id : auditor_.ids_of(who)) {
            const Segment& held = auditor_.leases().at(id).segment;
            for (uint32_t e = held.begin; e < held.end; ++e) {
                RC_ASSERT(experts.insert({held.layer, e}).second);
            }
        }
        bool has_gap = false;
        for (const BankCoverage& bank : map.banks) {
            for (const CoverageRange& range : bank.ranges) {
                has_gap = has_gap || (range.serving + range.loading == 0 &&
                                      auditor_.bytes_of(who) + bank.bank.expert_bytes <= budget);
            }
        }
        RC_ASSERT(book_.has_gap_for(who, now_) == has_gap);
    }

    // What storage would hold after every step: exactly the live leases.
    void follow(const LeaseChanges& changes) {
        for (const auto& [id, lease] : changes) {
            if (lease) stored_[id] = lease->state;
            if (!lease) stored_.erase(id);
        }
        std::map<uint64_t, LeaseState> expected;
        for (const auto& [id, lease] : auditor_.leases()) expected[id] = lease.state;
        RC_ASSERT(stored_ == expected);
    }

    LeaseRules rules_;
    Catalogue catalogue_;
    LeaseBook book_;
    Auditor auditor_;
    TimePoint now_ = kStart;
    uint64_t id_last_ = 0;
    std::map<uint64_t, LeaseState> stored_;
    std::map<NodeKey, uint64_t> budgets_;
};

RC_GTEST_PROP(Leases, RandomSequencesAgreeWithTheAuditor, ()) {
    LeaseRules rules;
    rules.loading_bytes_per_second = *rc::gen::inRange<uint64_t>(1, 100);
    rules.loading_min = milliseconds(*rc::gen::inRange<int64_t>(1000, 30000));
    rules.loading_hold = milliseconds(*rc::gen::inRange<int64_t>(1000, 90000));
    rules.loading_patience = *rc::gen::inRange<uint32_t>(1, 4);
    rules.serving = milliseconds(*rc::gen::inRange<int64_t>(1000, 60000));
    rules.replicas_target = *rc::gen::inRange<uint32_t>(1, 4);
    std::vector<BankUnit> banks;
    const auto count = *rc::gen::inRange<uint32_t>(1, 5);
    for (uint32_t b = 0; b < count; ++b) {
        banks.push_back({{b / 2, b % 2},
                         *rc::gen::inRange<uint32_t>(1, 9),
                         *rc::gen::inRange<uint64_t>(50, 200)});
    }
    Play play(Catalogue(banks), rules);
    const auto steps = *rc::gen::inRange(1, 60);
    for (int i = 0; i < steps; ++i) play.step();
}

// The levels, seen from outside: what a node is given was promised by no more nodes (up to the
// target) than what it was not given although it would fit.
RC_GTEST_PROP(Offer, NoLevelIsBegunBeforeTheOneBelowIsExhausted, ()) {
    const Catalogue catalogue({{{0, 0}, 6, 100}, {{1, 0}, 7, 130}, {{1, 1}, 3, 40}});
    Coverage coverage(catalogue);
    std::vector<std::vector<uint32_t>> promised;
    for (const BankUnit& bank : catalogue.banks()) {
        promised.emplace_back(bank.experts, 0U);
        for (uint32_t e = 0; e < bank.experts; ++e) {
            promised.back()[e] = *rc::gen::inRange<uint32_t>(0, 4);
            for (uint32_t i = 0; i < promised.back()[e]; ++i) {
                coverage.add({bank.layer, e, e + 1},
                             i % 2 ? LeaseState::kServing : LeaseState::kLoading);
            }
        }
    }
    OfferInput input;
    input.bytes_left = *rc::gen::inRange<uint64_t>(0, 2000);
    input.replicas_target = *rc::gen::inRange<uint32_t>(1, 4);
    input.segments_max = 100;
    input.seed = *rc::gen::arbitrary<uint64_t>();
    uint64_t left = input.bytes_left;
    std::set<ExpertId> given;
    for (const Segment& one : choose_segments(catalogue, coverage, input)) {
        RC_ASSERT(catalogue.bytes(one) <= left);
        left -= catalogue.bytes(one);
        for (uint32_t e = one.begin; e < one.end; ++e) {
            RC_ASSERT(given.insert({one.layer, e}).second);
        }
    }
    // What was left when a level was done: the budget less all that was given up to it.
    for (uint32_t level = 0; level <= input.replicas_target; ++level) {
        uint64_t left_then = input.bytes_left;
        for (const ExpertId& one : given) {
            const size_t bank = *catalogue.find(one.layer);
            if (std::min(promised[bank][one.index], input.replicas_target) <= level) {
                left_then -= catalogue.banks()[bank].expert_bytes;
            }
        }
        for (size_t b = 0; b < promised.size(); ++b) {
            const BankUnit& bank = catalogue.banks()[b];
            for (uint32_t e = 0; e < bank.experts; ++e) {
                if (std::min(promised[b][e], input.replicas_target) != level) continue;
                RC_ASSERT(given.contains({bank.layer, e}) || bank.expert_bytes > left_then);
            }
        }
    }
}

}  // namespace
}  // namespace kvasir::market
