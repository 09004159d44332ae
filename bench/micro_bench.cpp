// Micro-benchmarks (Google Benchmark) of what a layer costs besides the network: codec, planner,
// expert compute.
//
//   micro_bench [--benchmark_filter=REGEX] [--benchmark_format=json]
//
// Expert compute uses one layer of the shape of Qwen3.5-122B-A10B (hidden 3072, expert width 1024,
// Q4_K, 5.3 MB an expert), 64 experts of it (340 MB), written once to the temporary folder and
// mapped, one thread. Each call takes the next experts in turn, so that weights come from memory as
// they do in a real layer, not from a cache. KVASIR_BENCH_EXPERTS sets another number of experts
// (at least 32).
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/bytes.hpp"
#include "base/check.hpp"
#include "dispatch/planner.hpp"
#include "engine/engine_testing.hpp"
#include "engine/expert_engine.hpp"
#include "moe/program.hpp"
#include "synth/spec.hpp"
#include "wire/messages.hpp"
#include "wire/ws.hpp"

namespace {

using namespace kvasir;
namespace toy = engine::testing;

constexpr uint32_t kHidden = 3072;
constexpr uint32_t kExpertWidth = 1024;
constexpr uint32_t kUsed = 8;
constexpr uint64_t kRowQ8KBytes = kHidden / 256 * 292;                        // 3,504
constexpr uint64_t kResultBytes = uint64_t{kUsed} * kHidden * sizeof(float);  // 98,304

// ---- codec ------------------------------------------------------------------------------------

std::vector<wire::Pair> one_row_pairs() {
    std::vector<wire::Pair> pairs;
    for (uint32_t i = 0; i < kUsed; ++i) pairs.push_back({0, i * 31});
    return pairs;
}

std::vector<uint8_t> whole_message(const ByteWriter& head, std::span<const uint8_t> body) {
    std::vector<uint8_t> message = head.data();
    message.insert(message.end(), body.begin(), body.end());
    return message;
}

// What a lane does for one worker: the fixed part; the row goes out as a second piece, uncopied.
void encode_compute(benchmark::State& state) {
    const auto pairs = one_row_pairs();
    ByteWriter head;
    uint32_t request_id = 0;
    for (auto _ : state) {
        head.clear();
        wire::begin_compute(head, ++request_id, 7, engine::kRowQ8K, 1, pairs, kRowQ8KBytes);
        benchmark::DoNotOptimize(head.data().data());
    }
}
BENCHMARK(encode_compute);

// What a worker does with it: header, counts, every pair.
void decode_compute(benchmark::State& state) {
    ByteWriter head;
    wire::begin_compute(head, 1, 7, engine::kRowQ8K, 1, one_row_pairs(), kRowQ8KBytes);
    const auto message = whole_message(head, std::vector<uint8_t>(kRowQ8KBytes, 1));
    for (auto _ : state) {
        const auto frame = wire::decode_frame(message);
        const auto view = wire::decode_compute(frame->payload);
        uint32_t sum = 0;
        for (uint32_t i = 0; i < view->pair_count; ++i) sum += view->pair(i).local;
        benchmark::DoNotOptimize(sum);
    }
}
BENCHMARK(decode_compute);

void encode_result(benchmark::State& state) {
    ByteWriter head;
    for (auto _ : state) {
        head.clear();
        wire::begin_result(head, 1, 1000, kUsed, kHidden);
        benchmark::DoNotOptimize(head.data().data());
    }
}
BENCHMARK(encode_result);

// Decoding alone is a look at 32 bytes; /1 also copies the 98 KB out, as somebody must.
void decode_result(benchmark::State& state) {
    ByteWriter head;
    wire::begin_result(head, 1, 1000, kUsed, kHidden);
    const auto message = whole_message(head, std::vector<uint8_t>(kResultBytes, 1));
    std::vector<float> rows(kResultBytes / sizeof(float));
    for (auto _ : state) {
        const auto frame = wire::decode_frame(message);
        const auto view = wire::decode_result(frame->payload);
        if (state.range(0) == 1) std::memcpy(rows.data(), view->rows.data(), view->rows.size());
        benchmark::DoNotOptimize(view->width);
        benchmark::DoNotOptimize(rows.data());
        benchmark::ClobberMemory();
    }
    if (state.range(0) == 1) state.SetBytesProcessed(state.iterations() * int64_t{kResultBytes});
}
BENCHMARK(decode_result)->ArgName("copy")->Arg(0)->Arg(1);

void encode_ws_header(benchmark::State& state) {
    uint8_t bytes[wire::kWsHeaderBytesMax];
    wire::WsHeader header;
    header.payload_bytes = static_cast<uint64_t>(state.range(0));
    for (auto _ : state) {
        benchmark::DoNotOptimize(header);
        benchmark::DoNotOptimize(wire::encode_ws_header(header, bytes));
    }
}
BENCHMARK(encode_ws_header)->ArgName("bytes")->Arg(100)->Arg(3600)->Arg(98336);

void decode_ws_header(benchmark::State& state) {
    uint8_t bytes[wire::kWsHeaderBytesMax];
    wire::WsHeader header;
    header.payload_bytes = static_cast<uint64_t>(state.range(0));
    const size_t count = wire::encode_ws_header(header, bytes);
    for (auto _ : state) {
        benchmark::ClobberMemory();
        benchmark::DoNotOptimize(wire::decode_ws_header({bytes, count}, false));
    }
}
BENCHMARK(decode_ws_header)->ArgName("bytes")->Arg(100)->Arg(3600)->Arg(98336);

// ---- planner ----------------------------------------------------------------------------------

// Every group may go to `replicas` of the workers.
void plan(benchmark::State& state) {
    const auto group_count = static_cast<uint32_t>(state.range(0));
    const auto workers = static_cast<uint32_t>(state.range(1));
    const auto replicas = static_cast<uint32_t>(state.range(2));
    std::vector<std::vector<uint32_t>> holders(group_count);
    std::vector<dispatch::Group> groups;
    for (uint32_t g = 0; g < group_count; ++g) {
        for (uint32_t r = 0; r < replicas; ++r) {
            holders[g].push_back((g * 7 + r * 13) % workers);
        }
        std::sort(holders[g].begin(), holders[g].end());
        groups.push_back({1 + g % 5, holders[g]});
    }
    std::vector<dispatch::HolderCost> costs;
    for (uint32_t w = 0; w < workers; ++w) costs.push_back({100.0 + w, 900.0 + 10 * w, 0, true});
    std::vector<int32_t> out;
    std::vector<double> busy_us;
    for (auto _ : state) {
        dispatch::plan_into(groups, costs, out, busy_us);
        benchmark::DoNotOptimize(out.data());
    }
}
BENCHMARK(plan)
    ->ArgNames({"groups", "workers", "replicas"})
    ->Args({8, 4, 1})
    ->Args({8, 4, 4})
    ->Args({256, 64, 2})
    ->Args({256, 64, 64});

// ---- expert compute ---------------------------------------------------------------------------

uint32_t expert_count() {
    const char* text = std::getenv("KVASIR_BENCH_EXPERTS");
    return text == nullptr ? 64 : std::max(32, std::atoi(text));
}

struct Experts {
    Experts() {
        synth::SynthSpec spec = toy::toy_spec();
        spec.layers = 1;
        spec.embd = kHidden;
        spec.ff = kExpertWidth;
        spec.experts = expert_count();
        spec.used = kUsed;
        model.emplace(toy::write_toy(folder, "experts.gguf", spec));
        engine = toy::make_engine();
        bank = model->prepare(*engine, {0, 0});
        expert_bytes = model->model.find_bank({0, 0})->expert_bytes();
    }
    toy::Folder folder;
    std::optional<toy::Toy> model;
    std::unique_ptr<engine::ExpertEngine> engine;
    std::shared_ptr<const engine::Bank> bank;
    uint64_t expert_bytes = 0;
};

// Made when the first benchmark needs it, removed from the disk at the end of main().
std::unique_ptr<Experts> g_experts;
Experts& experts() {
    if (!g_experts) g_experts = std::make_unique<Experts>();
    return *g_experts;
}

// `rows` rows, each for `used` experts; with several rows the experts are shared, as in a batch.
void compute(benchmark::State& state, uint32_t row_type) {
    Experts& with = experts();
    const auto rows = static_cast<uint32_t>(state.range(0));
    const auto used = static_cast<uint32_t>(state.range(1));
    const uint32_t held = with.bank->experts;
    const uint32_t touched = std::min(rows * used, held);
    const auto values = toy::random_floats(size_t{rows} * kHidden, 1);
    std::vector<uint8_t> bytes(engine::row_bytes(row_type, kHidden) * rows);
    if (row_type == engine::kRowQ8K) {
        KVASIR_CHECK(with.bank->takes_q8k);
        KVASIR_CHECK(with.engine->quantise(values.data(), rows, kHidden, bytes.data()).has_value());
    } else {
        std::memcpy(bytes.data(), values.data(), bytes.size());
    }
    std::vector<engine::PairIn> pairs(size_t{rows} * used);
    uint32_t next = 0;
    for (auto _ : state) {
        for (uint32_t i = 0; i < pairs.size(); ++i) pairs[i] = {i / used, (next + i) % held};
        next = (next + touched) % held;
        const auto out = with.engine->compute(*with.bank, row_type, rows, bytes, pairs);
        KVASIR_CHECK(out.has_value());
        benchmark::DoNotOptimize(out->data());
    }
    state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(pairs.size()));
    state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(with.expert_bytes * touched));
}
BENCHMARK_CAPTURE(compute, f32, engine::kRowF32)
    ->ArgNames({"rows", "experts"})
    ->Args({1, 1})
    ->Args({1, 8})
    ->Args({32, 8})
    ->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(compute, q8k, engine::kRowQ8K)
    ->ArgNames({"rows", "experts"})
    ->Args({1, 1})
    ->Args({1, 8})
    ->Args({32, 8})
    ->Unit(benchmark::kMicrosecond);

void quantise(benchmark::State& state) {
    Experts& with = experts();
    const auto rows = static_cast<uint32_t>(state.range(0));
    const auto values = toy::random_floats(size_t{rows} * kHidden, 1);
    std::vector<uint8_t> out(engine::row_bytes(engine::kRowQ8K, kHidden) * rows);
    for (auto _ : state) {
        KVASIR_CHECK(with.engine->quantise(values.data(), rows, kHidden, out.data()).has_value());
        benchmark::DoNotOptimize(out.data());
    }
    state.SetItemsProcessed(state.iterations() * rows);
}
BENCHMARK(quantise)->ArgName("rows")->Arg(1)->Arg(32)->Unit(benchmark::kMicrosecond);

}  // namespace

int main(int argc, char** argv) {
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
    benchmark::RunSpecifiedBenchmarks();
    benchmark::Shutdown();
    g_experts.reset();
    return 0;
}
