#include "apps/swarm.hpp"

#include <algorithm>
#include <utility>

#include <fmt/core.h>

#include "apps/console.hpp"
#include "apps/local_workers.hpp"
#include "backbone/backbone.hpp"
#include "moe/model.hpp"
#include "moe/segments.hpp"
#include "plugin/device.hpp"

namespace kvasir::apps {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kLocalCoverageTime{
    120};  // local workers map the file and answer a challenge per layer
constexpr milliseconds kCoverageStep{
    200};                          // how often a dead local worker is noticed while waiting
constexpr seconds kTellFirst{3};   // waiting so long for outside workers is told
constexpr seconds kTellEvery{10};  // at most so often
constexpr seconds kEndless{100L * 365 * 86400};

class ProcessSwarm final : public Swarm {
public:
    explicit ProcessSwarm(SwarmOptions options) : options_(std::move(options)) {}
    ~ProcessSwarm() override { stop(); }

    Status start() {
        backbone::Options backbone;
        backbone.model_path = options_.model_path;
        const bool wants_workers = options_.workers > 0 || options_.wait_outside;
        backbone.listen = wants_workers ? options_.listen : "";
        backbone.relays = options_.relays;
        backbone.exact_strict = options_.exact_strict;
        backbone.local_threads = options_.threads;
        backbone.compute_with = options_.compute_with;
        auto started = backbone::Backbone::start(backbone);
        if (!started) return tl::unexpected(started.error());
        backbone_ = std::move(*started);
        plugin::register_device(backbone_.get());
        return options_.workers > 0 ? start_workers() : Status();
    }

    uint16_t port() const override { return backbone_->port(); }

    Status wait_ready() override {
        if (options_.workers == 0 && !options_.wait_outside) return {};
        auto limit = options_.coverage_timeout;
        if (limit.count() == 0) limit = options_.wait_outside ? kEndless : kLocalCoverageTime;
        const auto begin = std::chrono::steady_clock::now();
        const auto deadline = begin + limit;
        auto tell_at = begin + kTellFirst;
        std::string told;
        for (;;) {
            Status covered = backbone_->wait_coverage(options_.coverage, kCoverageStep);
            if (covered) return {};
            if (covered.error().code != Errc::kTimeout) return covered;
            if (Status alive = workers_.check(); !alive) return alive;
            const auto now = std::chrono::steady_clock::now();
            if (now >= deadline) return covered;
            // A person waits here: what for is said, and again when it has changed.
            if (options_.wait_outside && now >= tell_at && covered.error().detail != told) {
                told = covered.error().detail;
                tell("waiting for {:.0f} %: {}\n", options_.coverage * 100, told);
                tell_at = now + kTellEvery;
            }
        }
    }

    backbone::Report report() const override { return backbone_->report(); }
    void reset_counters() override { backbone_->reset_report(); }
    void set_compute_with(engine::ComputeWith with) override { backbone_->set_compute_with(with); }

    void stop() override { workers_.stop(); }

private:
    // Of the hub, as a worker on this machine dials it.
    std::string address() const {
        const std::string host = options_.listen.substr(0, options_.listen.rfind(':'));
        return "ws://" + (host.empty() ? "127.0.0.1" : host) + ":" +
               std::to_string(backbone_->port());
    }

    Status start_workers() {
        auto model = moe::open_model(options_.model_path);
        if (!model) return tl::unexpected(model.error());
        LocalWorkersOptions local;
        local.model_path = options_.model_path;
        local.connect = address();
        local.threads = options_.worker_threads;
        local.compute_with = options_.compute_with;
        local.cpus = options_.worker_cpus;
        for (const auto& share : moe::split_evenly(*model, options_.workers)) {
            if (!share.empty()) local.experts.push_back(moe::to_string(share));
        }
        auto workers = LocalWorkers::start(local);
        if (!workers) return tl::unexpected(workers.error());
        workers_ = std::move(*workers);
        return {};
    }

    const SwarmOptions options_;
    std::unique_ptr<backbone::Backbone> backbone_;
    LocalWorkers workers_;
};

}  // namespace

Result<std::unique_ptr<Swarm>> Swarm::start(const SwarmOptions& options) {
    auto swarm = std::make_unique<ProcessSwarm>(options);
    if (Status ok = swarm->start(); !ok) return tl::unexpected(ok.error());
    return std::unique_ptr<Swarm>(std::move(swarm));
}

}  // namespace kvasir::apps
