#include "market/offer.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "moe/segments.hpp"

namespace kvasir::market {
namespace {

enum class Cached : uint8_t { kWhole, kBegun, kNot };

// Neighbouring experts of a bank that are all free for the node and alike.
struct Run {
    size_t bank = 0;
    uint32_t begin = 0;
    uint32_t end = 0;
    uint32_t promised = 0;
    Cached cached = Cached::kNot;
    uint32_t count() const { return end - begin; }
};

uint64_t mix(uint64_t value) {  // splitmix64
    value += 0x9e3779b97f4a7c15;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
    value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
    return value ^ (value >> 31);
}

class Chooser {
public:
    Chooser(const Catalogue& catalogue, const Coverage& coverage, const OfferInput& input)
        : catalogue_(catalogue), coverage_(coverage), input_(input), left_(input.bytes_left) {
        for (const BankUnit& bank : catalogue.banks()) {
            held_.emplace_back(bank.experts);
            have_.emplace_back(bank.experts);
            begun_.emplace_back(bank.experts);
        }
        for (const Segment& segment : input.held) {
            mark(held_, segment);
            layers_.insert(segment.layer.layer);
        }
        for (const Segment& segment : input.have) mark(have_, segment);
        for (const Segment& segment : input.begun) mark(begun_, segment);
    }

    std::vector<Segment> choose() {
        std::map<uint32_t, std::vector<Run>> levels;
        for (const Run& run : runs()) {
            levels[std::min(run.promised, input_.replicas_target)].push_back(run);
        }
        for (auto& [level, pool] : levels) {
            while (chosen_.size() < input_.segments_max) {
                const auto best = find_best(pool);
                if (!best) break;
                take(pool, *best);
            }
        }
        return moe::normalise(std::move(chosen_));
    }

private:
    using Marks = std::vector<std::vector<bool>>;  // [bank][expert]

    void mark(Marks& marks, const Segment& segment) {
        if (!catalogue_.contains(segment)) return;
        auto& bank = marks[*catalogue_.find(segment.layer)];
        std::fill(bank.begin() + segment.begin, bank.begin() + segment.end, true);
    }

    Cached cached(size_t bank, uint32_t expert) const {
        if (have_[bank][expert]) return Cached::kWhole;
        return begun_[bank][expert] ? Cached::kBegun : Cached::kNot;
    }

    std::vector<Run> runs() const {
        std::vector<Run> out;
        for (size_t b = 0; b < held_.size(); ++b) {
            for (uint32_t e = 0; e < held_[b].size(); ++e) {
                if (held_[b][e]) continue;
                const Run one{b, e, e + 1, coverage_.promised(b, e), cached(b, e)};
                if (!out.empty() && out.back().bank == b && out.back().end == e &&
                    out.back().promised == one.promised && out.back().cached == one.cached) {
                    ++out.back().end;
                } else {
                    out.push_back(one);
                }
            }
        }
        return out;
    }

    uint32_t fitting(const Run& run) const {
        const uint64_t fit = left_ / catalogue_.banks()[run.bank].expert_bytes;
        return static_cast<uint32_t>(std::min<uint64_t>(fit, run.count()));
    }

    std::optional<size_t> find_best(const std::vector<Run>& pool) const {
        std::optional<size_t> best;
        std::tuple<Cached, uint32_t, bool, uint64_t, uint64_t, uint64_t> best_key;
        for (size_t i = 0; i < pool.size(); ++i) {
            const Run& run = pool[i];
            const uint32_t count = fitting(run);
            if (count == 0) continue;
            const BankUnit& bank = catalogue_.banks()[run.bank];
            const bool is_new_layer = !layers_.contains(bank.layer.layer);
            const uint64_t unused = left_ - count * bank.expert_bytes;
            const uint64_t cut_off = (run.count() - count) * bank.expert_bytes;
            const std::tuple key(run.cached, run.promised, is_new_layer, unused, cut_off,
                                 mix(input_.seed ^ mix(run.bank << 20 ^ run.begin)));
            if (!best || key < best_key) {
                best = i;
                best_key = key;
            }
        }
        return best;
    }

    // Takes what fits of a run, from the side where the node holds the neighbour already.
    void take(std::vector<Run>& pool, size_t index) {
        Run& run = pool[index];
        const BankUnit& bank = catalogue_.banks()[run.bank];
        auto& held = held_[run.bank];
        const uint32_t count = fitting(run);
        const bool left_is_ours = run.begin > 0 && held[run.begin - 1];
        const bool right_is_ours = run.end < held.size() && held[run.end];
        Segment taken{bank.layer, run.begin, run.begin + count};
        if (right_is_ours && !left_is_ours) {
            taken = {bank.layer, run.end - count, run.end};
            run.end = taken.begin;
        } else {
            run.begin = taken.end;
        }
        mark(held_, taken);
        layers_.insert(bank.layer.layer);
        left_ -= count * bank.expert_bytes;
        chosen_.push_back(taken);
        if (run.count() == 0) pool.erase(pool.begin() + static_cast<std::ptrdiff_t>(index));
    }

    const Catalogue& catalogue_;
    const Coverage& coverage_;
    const OfferInput& input_;
    uint64_t left_ = 0;
    Marks held_;
    Marks have_;
    Marks begun_;
    std::set<uint32_t> layers_;  // of which the node holds or was given something
    std::vector<Segment> chosen_;
};

}  // namespace

std::vector<Segment> choose_segments(const Catalogue& catalogue, const Coverage& coverage,
                                     const OfferInput& input) {
    return Chooser(catalogue, coverage, input).choose();
}

}  // namespace kvasir::market
