// A toy swarm for tests: a model on disk, a backbone on it, batches with known answers.
//
// Used by backbone's tests. Thread: check() from several at once, each with a lane of its own.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backbone/backbone.hpp"
#include "backbone/fake_worker_testing.hpp"

namespace kvasir::backbone::testing {

constexpr LayerKey kLayer0{0, 0};
constexpr LayerKey kLayer1{1, 0};
constexpr uint32_t kToyExperts = 8;
constexpr uint32_t kToyUsed = 2;

// Polls until `ready`; false after ten seconds.
inline bool eventually(const std::function<bool()>& ready) {
    const auto end = net::Clock::now() + 10s;
    while (!ready()) {
        if (net::Clock::now() >= end) return false;
        std::this_thread::sleep_for(2ms);  // tidy: sleep, polls what another thread does
    }
    return true;
}

// Made once a process: quantising it costs more than most tests.
struct ToyFile {
    toy::Folder folder;
    std::string path = toy::write_toy(folder, "toy.gguf", toy::toy_spec());
    std::string cache = folder / "cache";
};
inline const ToyFile& toy_file() {
    static const ToyFile file;
    return file;
}

class ToySwarm {
public:
    explicit ToySwarm(bool strict = true, std::chrono::milliseconds stall_max = 150ms,
                      std::vector<UplinkOptions> relays = {}) {
        Options options;
        options.model_path = path_;
        options.listen = "127.0.0.1:0";
        options.exact_strict = strict;
        options.stall_max = stall_max;
        options.relays = std::move(relays);
        options.cache_dir = cache();
        auto started = Backbone::start(options);
        KVASIR_CHECK(started.has_value());
        backbone_ = std::move(*started);
        for (LayerKey layer : {kLayer0, kLayer1}) {
            backbone_->learn(layer, program_);
            auto weights =
                engine::BankWeights::map(*toy_.model.find_bank(layer), toy_.mapping, toy::cpu());
            KVASIR_CHECK(weights.has_value());
            weights_.push_back(std::move(*weights));
        }
    }

    Backbone& backbone() { return *backbone_; }
    const std::string& cache() const { return toy_file().cache; }
    const std::string& path() const { return path_; }

    // A worker with these experts of both layers.
    std::unique_ptr<FakeWorker> worker(uint32_t begin, uint32_t end,
                                       const std::string& name = "fake", Mood mood = Mood::kHonest,
                                       std::function<void(wire::Hello&)> edit = {}) const {
        FakeOptions options;
        options.model = path_;
        options.cache_dir = cache();
        options.segments = {{kLayer0, begin, end}, {kLayer1, begin, end}};
        options.port = backbone_->port();
        options.mood = mood;
        options.name = name;
        options.edit = std::move(edit);
        return std::make_unique<FakeWorker>(std::move(options));
    }

    bool covered(double share = 1) { return backbone_->wait_coverage(share, 20s).has_value(); }

    struct Outcome {
        bool computed = false;  // compute() returned true
        uint64_t remote_pairs = 0;
        bool same_bits = false;  // as ggml's, when computed
        std::chrono::milliseconds took{0};
    };
    // `ids`: used experts for each token.
    Outcome check(Lane& lane, LayerKey layer, const std::vector<uint32_t>& ids, uint32_t used,
                  uint64_t seed) const {
        const uint32_t width = 256;
        const auto tokens = static_cast<uint32_t>(ids.size()) / used;
        const auto rows = toy::random_floats(size_t{tokens} * width, seed);
        std::vector<float> out(ids.size() * width, -1e30f);
        LayerBatch batch;
        batch.layer = layer;
        batch.program = &program_;
        for (size_t role = 0; role < engine::kRoleCount; ++role) {
            for (size_t part = 0; part < engine::kPartCount; ++part) {
                batch.weights[role * engine::kPartCount + part] = weights_[layer.layer].get(
                    static_cast<moe::SlabRole>(role), static_cast<moe::SlabPart>(part));
            }
        }
        batch.rows = reinterpret_cast<const uint8_t*>(rows.data());
        batch.row_stride = width * sizeof(float);
        batch.row_count = tokens;
        batch.used = used;
        std::vector<engine::PairIn> pairs;
        for (uint32_t i = 0; i < ids.size(); ++i) {
            batch.pairs.push_back({i / used, ids[i], out.data() + size_t{i} * width});
            pairs.push_back({i / used, ids[i]});
        }
        Outcome outcome;
        const auto start = net::Clock::now();
        const uint64_t remote_before = backbone_->report().pairs_remote;
        auto done = lane.compute(batch);
        outcome.took =
            std::chrono::duration_cast<std::chrono::milliseconds>(net::Clock::now() - start);
        EXPECT_TRUE(done) << (done ? "" : done.error().detail);
        outcome.computed = done && *done;
        outcome.remote_pairs = backbone_->report().pairs_remote - remote_before;
        if (!outcome.computed) return outcome;
        auto engine = toy::make_engine(1, engine::ComputeWith::kGraph);
        const auto bank = toy_.prepare(*engine, layer);
        auto want = engine->compute(*bank, engine::kRowF32, tokens, toy::as_bytes(rows), pairs);
        EXPECT_TRUE(want);
        outcome.same_bits = std::memcmp(want->data(), out.data(), want->size_bytes()) == 0;
        return outcome;
    }

    // Every expert once, two a token.
    static std::vector<uint32_t> all_experts() { return {0, 4, 1, 5, 2, 6, 3, 7}; }

private:
    const std::string path_ = toy_file().path;
    toy::Toy toy_{path_};
    moe::Program program_ = toy::swiglu();
    std::vector<engine::BankWeights> weights_;
    std::unique_ptr<Backbone> backbone_;
};

}  // namespace kvasir::backbone::testing
