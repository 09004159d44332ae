#include "relay/handles.hpp"

#include <algorithm>

#include "base/check.hpp"

namespace kvasir::relay {

std::optional<uint16_t> HandleTable::take(ConnectionId connection, Time now) {
    while (!held_ && started_ != 0 &&
           now - std::max(*resting_.front().since, rest_floor_) >= rest_) {
        is_resting_.erase(resting_.front().handle);
        resting_.pop_front();
        --started_;
    }
    if (live_.size() + resting_.size() >= handle_max_) return std::nullopt;
    do {
        if (last_ == handle_max_) wrapped_ = true;
        last_ = last_ == handle_max_ ? uint16_t{1} : static_cast<uint16_t>(last_ + 1);
    } while (live_.contains(last_) || is_resting_.contains(last_));
    live_.emplace(last_, Peer{connection, 0});
    return last_;
}

void HandleTable::set_peer_handle(uint16_t handle, uint16_t peers_handle) {
    const auto entry = live_.find(handle);
    KVASIR_CHECK(entry != live_.end());
    entry->second.handle = peers_handle;
}

void HandleTable::release(uint16_t handle) {
    KVASIR_CHECK(live_.erase(handle) == 1);
    resting_.push_back({handle, std::nullopt});
    is_resting_.insert(handle);
}

void HandleTable::on_drained(Time now) {
    for (; started_ < resting_.size(); ++started_) resting_[started_].since = now;
}

const HandleTable::Peer* HandleTable::find(uint16_t handle) const {
    const auto entry = live_.find(handle);
    return entry == live_.end() ? nullptr : &entry->second;
}

HandleTable::State HandleTable::state(uint16_t handle) const {
    if (live_.contains(handle)) return State::kLive;
    // One that has rested and was not given out again is still one that the node once knew.
    const bool known = handle != 0 && (wrapped_ ? handle <= handle_max_ : handle <= last_);
    return known ? State::kResting : State::kNever;
}

}  // namespace kvasir::relay
