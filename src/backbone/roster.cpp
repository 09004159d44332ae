#include "backbone/roster.hpp"

#include <algorithm>
#include <utility>

namespace kvasir::backbone {

RosterBoard::RosterBoard(std::map<LayerKey, uint32_t> experts_per_layer)
    : experts_per_layer_(std::move(experts_per_layer)), current_(std::make_shared<Roster>()) {}

std::shared_ptr<const Roster> RosterBoard::snapshot() const {
    const std::lock_guard lock(mu_);
    return current_;
}

void RosterBoard::add(std::shared_ptr<WorkerSession> session, LayerKey layer) {
    const std::lock_guard lock(mu_);
    // Whoever closes a session removes it afterwards; so one that is open here will be removed, and
    // a closed one may have been already.
    if (!session->open()) return;
    auto& [held, layers] = verified_[session->tag()];
    held = std::move(session);
    if (std::find(layers.begin(), layers.end(), layer) == layers.end()) layers.push_back(layer);
    rebuild_locked();
}

void RosterBoard::remove(uint64_t tag) {
    const std::lock_guard lock(mu_);
    if (verified_.erase(tag) != 0) rebuild_locked();
}

void RosterBoard::rebuild_locked() {
    auto next = std::make_shared<Roster>();
    for (const auto& [tag, entry] : verified_) {
        const auto& [session, layers] = entry;
        const auto index = static_cast<uint32_t>(next->workers.size());
        next->workers.push_back(session);
        for (LayerKey layer : layers) {
            const HeldBank* bank = session->bank(layer);
            LayerRoster& roster = next->layers[layer];
            roster.holders.resize(experts_per_layer_.at(layer));
            for (uint32_t id : bank->globals) roster.holders[id].push_back(index);
        }
    }
    current_ = std::move(next);
    version_.fetch_add(1, std::memory_order_release);
    changed_.notify_all();
}

void RosterBoard::activate(LayerKey layer) {
    const std::lock_guard lock(mu_);
    active_.insert(layer);
    changed_.notify_all();
}

uint64_t RosterBoard::active_locked() const {
    uint64_t experts = 0;
    for (LayerKey layer : active_) experts += experts_per_layer_.at(layer);
    return experts;
}

uint64_t RosterBoard::covered_locked() const {
    uint64_t covered = 0;
    for (const auto& [layer, roster] : current_->layers) {
        if (!active_.contains(layer)) continue;
        for (const auto& holders : roster.holders) covered += holders.empty() ? 0 : 1;
    }
    return covered;
}

uint64_t RosterBoard::experts_active() const {
    const std::lock_guard lock(mu_);
    return active_locked();
}

uint64_t RosterBoard::experts_covered() const {
    const std::lock_guard lock(mu_);
    return covered_locked();
}

bool RosterBoard::wait_share(double share, net::Deadline deadline) const {
    std::unique_lock lock(mu_);
    return changed_.wait_until(lock, deadline, [&] {
        return static_cast<double>(covered_locked()) >=
               share * static_cast<double>(active_locked());
    });
}

std::string RosterBoard::missing(size_t segments_max) const {
    const std::lock_guard lock(mu_);
    std::string text;
    size_t segments = 0;
    for (LayerKey layer : active_) {
        const uint32_t experts = experts_per_layer_.at(layer);
        const auto found = current_->layers.find(layer);
        const auto held = [&](uint32_t id) {
            return found != current_->layers.end() && !found->second.holders[id].empty();
        };
        for (uint32_t id = 0; id < experts;) {
            if (held(id)) {
                ++id;
                continue;
            }
            const uint32_t begin = id;
            while (id < experts && !held(id)) ++id;
            if (++segments > segments_max) return text + ", ...";
            text += (text.empty() ? "" : ", ") + to_string(layer) + ":" + std::to_string(begin) +
                    "-" + std::to_string(id - 1);
        }
    }
    return text;
}

}  // namespace kvasir::backbone
