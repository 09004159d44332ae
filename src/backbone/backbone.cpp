#include "backbone/backbone.hpp"

#include <atomic>
#include <map>
#include <utility>

#include "backbone/hub.hpp"
#include "backbone/lane.hpp"
#include "base/log.hpp"
#include "engine/runtime.hpp"

namespace kvasir::backbone {
namespace {

std::map<LayerKey, uint32_t> experts_per_layer(const moe::Model& model) {
    std::map<LayerKey, uint32_t> out;
    for (const moe::ExpertBank& bank : model.banks) out[bank.key] = bank.experts;
    return out;
}

Result<std::unique_ptr<engine::ExpertEngine>> make_engine(uint32_t threads,
                                                          engine::ComputeWith with) {
    auto device = engine::find_device("");
    if (!device) return tl::unexpected(device.error());
    return engine::ExpertEngine::make(*device, threads, with);
}

class SwarmBackbone final : public Backbone {
public:
    SwarmBackbone(const Options& options, std::unique_ptr<Replica> replica)
        : options_(options),
          replica_(std::move(replica)),
          board_(experts_per_layer(replica_->model())) {}

    Status start() {
        auto learner = make_engine(1, options_.compute_with);
        if (!learner) return tl::unexpected(learner.error());
        learner_ = std::move(*learner);
        if (options_.listen.empty() && options_.relays.empty()) return {};
        // Workers are held to ggml itself, not to this process's kernels.
        auto engine = make_engine(1, engine::ComputeWith::kGraph);
        if (!engine) return tl::unexpected(engine.error());
        verifier_ = std::make_unique<Verifier>(*replica_, board_, std::move(*engine),
                                               options_.exact_strict);
        if (!verifier_->works())
            return fail(Errc::kEnvironment, "the backbone cannot start: too many open files");
        HubOptions hub_options;
        hub_options.listen = options_.listen;
        hub_options.health.stall_max = options_.stall_max;
        auto hub = Hub::make(std::move(hub_options), *replica_, board_, *verifier_);
        if (!hub) return tl::unexpected(hub.error());
        hub_ = std::move(*hub);
        for (const UplinkOptions& relay : options_.relays) {
            uplinks_.push_back(std::make_unique<Uplink>(
                relay,
                [hub = hub_.get()](net::MessageStream stream, std::string address,
                                   RelayEvents events) -> Uplink::ShowToken {
                    const uint64_t connection =
                        hub->adopt_relay(std::move(stream), std::move(address), std::move(events));
                    return [hub, connection](std::string token) {
                        hub->renew(connection, std::move(token));
                    };
                }));
        }
        return {};
    }

    ~SwarmBackbone() override {
        uplinks_.clear();
        // The hub feeds the verifier; sessions end first, so that a pending challenge ends too.
        hub_.reset();
        verifier_.reset();
    }

    uint16_t port() const override { return hub_ ? hub_->port() : 0; }

    void learn(LayerKey layer, const moe::Program& program) override {
        const std::lock_guard lock(learn_mu_);
        auto fresh = replica_->learn(layer, program, *learner_);
        if (!fresh) {
            log(LogLevel::kDebug, "backbone",
                "layer " + to_string(layer) + " stays local: " + fresh.error().detail);
            if (fresh.error().code == Errc::kMismatch) replica_->warn_other_model(layer);
        } else if (*fresh) {
            board_.activate(layer);
            if (verifier_) verifier_->on_program(layer);
        }
    }

    std::unique_ptr<Lane> open_lane() override {
        auto engine = make_engine(options_.local_threads, compute_with_.load());
        if (!engine) {
            log(LogLevel::kError, "backbone", engine.error().detail);
            return nullptr;
        }
        std::vector<RelayHere> here;
        for (const UplinkOptions& relay : options_.relays) {
            if (relay.here) here.push_back(*relay.here);
        }
        auto lane = std::make_unique<SwarmLane>(*replica_, board_, stats_, std::move(*engine),
                                                std::move(here));
        if (lane->works()) return lane;
        log(LogLevel::kError, "backbone",
            "too many open files (ulimit -n): experts of this context are computed here");
        return nullptr;
    }

    void set_compute_with(engine::ComputeWith with) override { compute_with_ = with; }

    double coverage() const override {
        const uint64_t active = board_.experts_active();
        return active == 0
                   ? 1
                   : static_cast<double>(board_.experts_covered()) / static_cast<double>(active);
    }

    Status wait_coverage(double share, std::chrono::milliseconds timeout) override {
        if (board_.wait_share(share, net::Clock::now() + timeout)) return {};
        if (const auto reason = nobody_can_join()) {
            return fail(reason->code, "nobody can join any more: " + reason->detail);
        }
        return fail(Errc::kTimeout, "workers cover " +
                                        std::to_string(static_cast<int>(coverage() * 100)) +
                                        " % of the experts; nobody holds " + board_.missing(8));
    }

    Report report() const override {
        Report out;
        stats_.fill(out);
        if (!hub_) return out;
        for (const auto& session : hub_->sessions()) out.workers.push_back(session->report());
        for (const WorkerReport& gone : hub_->departed()) out.workers.push_back(gone);
        return out;
    }

    void reset_report() override {
        stats_.reset();
        if (hub_) hub_->reset_reports();
    }

private:
    // Why, when every way to workers has ended.
    std::optional<Error> nobody_can_join() const {
        std::optional<Error> reason;
        if (!options_.listen.empty()) return reason;
        for (const auto& uplink : uplinks_) {
            reason = uplink->ended();
            if (!reason) break;
        }
        return reason;
    }

    // Constant after start().
    const Options options_;
    std::unique_ptr<Replica> replica_;
    std::atomic<engine::ComputeWith> compute_with_{options_.compute_with};  // of new lanes
    RosterBoard board_;
    Stats stats_;
    std::unique_ptr<Verifier> verifier_;
    std::unique_ptr<Hub> hub_;
    std::vector<std::unique_ptr<Uplink>> uplinks_;

    std::mutex learn_mu_;
    std::unique_ptr<engine::ExpertEngine>
        learner_;  // Guarded by learn_mu_: checks programs, computes nothing
};

}  // namespace

Result<std::unique_ptr<Backbone>> Backbone::start(const Options& options) {
    if (Status ok = engine::load_ggml(); !ok) return tl::unexpected(ok.error());
    auto replica =
        Replica::open(options.model_path,
                      options.need_manifest && !(options.listen.empty() && options.relays.empty()),
                      options.cache_dir);
    if (!replica) return tl::unexpected(replica.error());
    auto backbone = std::make_unique<SwarmBackbone>(options, std::move(*replica));
    if (Status ok = backbone->start(); !ok) return tl::unexpected(ok.error());
    return std::unique_ptr<Backbone>(std::move(backbone));
}

}  // namespace kvasir::backbone
