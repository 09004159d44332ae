#include "backbone/uplink.hpp"

#include <algorithm>
#include <random>
#include <utility>

#include "base/log.hpp"

namespace kvasir::backbone {
namespace {

constexpr auto kStableTime = std::chrono::seconds(5);  // then pauses start from the first again

}  // namespace

Uplink::Uplink(UplinkOptions options, Adopt adopt)
    : options_(std::move(options)), adopt_(std::move(adopt)), thread_([this] { run(); }) {}

Uplink::~Uplink() {
    {
        const std::lock_guard lock(state_->mu);
        state_->stopping = true;
    }
    state_->changed.notify_all();
    thread_.join();
}

bool Uplink::pause(std::chrono::milliseconds time) {
    std::unique_lock lock(state_->mu);
    state_->changed.wait_for(lock, time, [this] { return state_->stopping; });
    return !state_->stopping;
}

void Uplink::run() {
    std::mt19937 random(std::random_device{}());
    const std::string address =
        options_.endpoint.host + ":" + std::to_string(options_.endpoint.port);
    auto wait = options_.pause_first;
    for (;;) {
        access::AttachOptions attach;
        attach.endpoint = options_.endpoint;
        attach.role = wire::Role::kBackbone;
        attach.tls = options_.tls;
        auto attachment = access::attach(attach, options_.credentials());
        std::string reason;
        std::chrono::milliseconds asked{0};
        if (attachment) {
            const auto begin = net::Clock::now();
            {
                const std::lock_guard lock(state_->mu);
                if (state_->stopping) return;
                state_->attached = true;
                state_->pause = std::chrono::milliseconds(0);
            }
            adopt_(std::move(attachment->stream), address,
                   [state = state_](std::chrono::milliseconds pause) {
                       const std::lock_guard lock(state->mu);
                       state->attached = false;
                       state->pause = pause;
                       state->changed.notify_all();
                   });
            std::unique_lock lock(state_->mu);
            state_->changed.wait(lock, [this] { return state_->stopping || !state_->attached; });
            if (state_->stopping) return;
            asked = state_->pause;
            reason = "the connection ended";
            if (net::Clock::now() - begin >= kStableTime) wait = options_.pause_first;
        } else {
            reason = attachment.error().detail;
        }
        auto jittered = wait / 2 + wait * static_cast<int>(random() % 1000) / 1000;
        if (asked.count() > 0) jittered = asked * static_cast<int>(random() % 1000) / 1000;
        log(LogLevel::kWarn, "uplink",
            "relay " + address + ": " + reason + "; next try in " +
                std::to_string(jittered.count()) + " ms");
        if (!pause(jittered)) return;
        wait = std::min(wait * 2, options_.pause_max);
    }
}

}  // namespace kvasir::backbone
