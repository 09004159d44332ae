// HubScene: a hub on a model whose programs nobody has shown, so that its workers are idle.
//
// Used by backbone's tests of what the hub does with connections. Thread: the test's; the hub has
// its own. Owns: the hub and what it needs. Limits: failures of its own abort with KVASIR_CHECK.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backbone/hub.hpp"
#include "backbone/swarm_testing.hpp"

namespace kvasir::backbone::testing {

class HubScene {
public:
    explicit HubScene(const HubLimits& limits = {}) {
        auto engine = toy::make_engine();
        auto replica = Replica::open(toy_file().path, true, toy_file().cache);
        KVASIR_CHECK(replica.has_value());
        replica_ = std::move(*replica);
        board_ = std::make_unique<RosterBoard>(
            std::map<LayerKey, uint32_t>{{kLayer0, kToyExperts}, {kLayer1, kToyExperts}});
        verifier_ = std::make_unique<Verifier>(*replica_, *board_, std::move(engine), true);
        HubOptions options;
        options.listen = "127.0.0.1:0";
        options.limits = limits;
        auto hub = Hub::make(std::move(options), *replica_, *board_, *verifier_);
        KVASIR_CHECK(hub.has_value());
        hub_ = std::move(*hub);
    }
    ~HubScene() {
        hub_.reset();
        verifier_.reset();
    }
    Hub& hub() { return *hub_; }
    // One that dials the hub itself; node {}: any.
    std::unique_ptr<FakeWorker> worker(const std::string& name = "fake",
                                       const wire::NodeId& node = {}) const {
        FakeOptions options;
        options.model = toy_file().path;
        options.cache_dir = toy_file().cache;
        options.segments = {{kLayer0, 0, 8}};
        options.port = hub_->port();
        options.name = name;
        options.node = node;
        return std::make_unique<FakeWorker>(std::move(options));
    }

    // A HELLO that fits, of a worker behind a relay.
    std::vector<uint8_t> hello(uint16_t peer) const {
        const Segment held{kLayer0, 0, 2};
        wire::Hello hello;
        hello.model_id = replica_->manifest()->model_id;
        hello.segments = {{held, replica_->manifest()->segment_digest(held)}};
        hello.rows_max = hello.pairs_max = 64;
        auto message = wire::encode_hello(hello);
        wire::set_peer(message, peer);
        return message;
    }

private:
    std::unique_ptr<Replica> replica_;
    std::unique_ptr<RosterBoard> board_;
    std::unique_ptr<Verifier> verifier_;
    std::unique_ptr<Hub> hub_;
};

}  // namespace kvasir::backbone::testing
