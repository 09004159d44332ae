// The expert kernels beside ggml (Google Benchmark): one expert through gate, up, SwiGLU and down,
// in every kernel set, against graphs of the same expert in plain and in repacked buffers.
//
//   kernels_bench [--benchmark_filter=REGEX]    e.g. q4_K/rows:1
//
// An iteration is a round: every peer once, each on experts of its own, the order reversed from
// round to round, so that a machine that slows down is unfair to none. Experts are taken in turn
// from more memory than any cache holds. A ratio is the median over rounds of the peer's time / the
// kernels' of the same round; the peer is the faster of ggml's two. Times of one thread are CPU
// times of the thread: other processes take the machine, but not from the count. The table at the
// end is what docs/performance.md quotes; the kernels' rows are held to ggml's plain rows first.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/check.hpp"
#include "engine/engine_testing.hpp"
#include "kernels_peers.hpp"

namespace {

using namespace kvasir;
using bench::Experts;
using bench::ExpertShape;
using bench::GgmlPeer;
using bench::KernelPeer;
namespace kernels = engine::kernels;
namespace toy = engine::testing;

constexpr uint64_t kStreamedBytes = 320'000'000;

double thread_us() {
    timespec now = {};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) / 1e3;
}

double wall_us() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double, std::micro>(now).count();
}

double median(std::vector<double> values) {
    KVASIR_CHECK(!values.empty());
    const auto middle = values.begin() + static_cast<long>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
}

// One who is measured: `run(n)` does the work for the n-th time.
struct Peer {
    std::string name;
    std::function<void(uint32_t)> run;
    std::vector<double> us = {};
};

// Rounds of all peers.
void rounds(benchmark::State& state, std::vector<Peer>& peers, double (*clock)()) {
    for (Peer& peer : peers) peer.run(0);
    uint32_t next = 1;
    bool forward = true;
    for (auto _ : state) {
        const double begin = clock();
        for (size_t i = 0; i < peers.size(); ++i) {
            Peer& peer = peers[forward ? i : peers.size() - 1 - i];
            const double before = clock();
            peer.run(next++);
            peer.us.push_back(clock() - before);
        }
        forward = !forward;
        state.SetIterationTime((clock() - begin) / 1e6);
    }
    for (const Peer& peer : peers) state.counters[peer.name + "_us"] = median(peer.us);
}

double ratio(const Peer& over, const Peer& under) {
    std::vector<double> each;
    for (size_t i = 0; i < over.us.size(); ++i) each.push_back(over.us[i] / under.us[i]);
    return median(std::move(each));
}

// ---- the table --------------------------------------------------------------------------------

struct Line {
    std::string type;
    uint32_t rows;
    double expert_mb;
    std::vector<Peer> peers;  // plain, repacked if there is, read, kernel sets
};
std::vector<Line> g_lines;
std::vector<std::string> g_more;  // other findings

const Peer* find(const std::vector<Peer>& peers, const std::string& name) {
    for (const Peer& peer : peers) {
        if (peer.name == name) return &peer;
    }
    return nullptr;
}

void print_set(const Line& line, const Peer& faster, const char* name) {
    const Peer* set = find(line.peers, name);
    if (set == nullptr) {
        std::printf(" %9s %5s", "", "");
        return;
    }
    std::printf(" %9.1f %5.2f", median(set->us) / line.rows, ratio(faster, *set));
}

void print_table() {
    if (!g_lines.empty()) {
        std::printf("\nus per expert and row; x: times the kernels' speed is of ggml's faster\n");
        std::printf("%-7s %4s %9s %9s %9s %9s %5s %9s %5s %9s %5s %9s %5s %8s\n", "type", "rows",
                    "read", "plain", "repacked", "avx512", "x", "avxvnni", "x", "avx2", "x",
                    "reference", "x", "bound x");
    }
    for (const Line& line : g_lines) {
        const Peer& plain = *find(line.peers, "plain");
        const Peer* repacked = find(line.peers, "repacked");
        const Peer& read = *find(line.peers, "read");
        const bool use_plain = repacked == nullptr || median(plain.us) <= median(repacked->us);
        const Peer& faster = use_plain ? plain : *repacked;
        std::printf("%-7s %4u %9.1f %9.1f ", line.type.c_str(), line.rows,
                    median(read.us) / line.rows, median(plain.us) / line.rows);
        if (repacked == nullptr) std::printf("%9s", "-");
        if (repacked != nullptr) std::printf("%9.1f", median(repacked->us) / line.rows);
        for (const char* set : {"avx512", "avxvnni", "avx2", "reference"})
            print_set(line, faster, set);
        std::printf(" %8.2f\n", ratio(faster, read));
    }
    for (const std::string& line : g_more) std::printf("%s\n", line.c_str());
}

// ---- one expert, one thread -------------------------------------------------------------------

// Weights of one type at a time: a machine holds no more.
const Experts& experts_of(const ExpertShape& shape, uint64_t bytes) {
    static std::unique_ptr<Experts> experts;
    if (!experts || experts->shape().name != shape.name) {
        experts.reset();
        experts = std::make_unique<Experts>(shape, bytes);
    }
    return *experts;
}

void one_expert(benchmark::State& state, const ExpertShape& shape) {
    const Experts& experts = experts_of(shape, kStreamedBytes);
    const auto rows = static_cast<uint32_t>(state.range(0));
    const auto x = toy::random_floats(size_t{rows} * shape.hidden, 1);
    const uint32_t count = experts.count();
    std::vector<Peer> peers;
    auto plain = std::make_shared<GgmlPeer>(experts, experts.plain(), rows);
    peers.push_back({"plain", [&, plain](uint32_t n) { plain->run(x, n % count); }});
    if (experts.repacked() != nullptr) {
        auto repacked = std::make_shared<GgmlPeer>(experts, experts.repacked(), rows);
        peers.push_back({"repacked", [&, repacked](uint32_t n) { repacked->run(x, n % count); }});
    }
    peers.push_back({"read", [&](uint32_t n) {
                         benchmark::DoNotOptimize(bench::read_weights(experts, n % count));
                     }});
    const kernels::KernelSets sets = kernels::available_kernels();
    plain->run(x, 0);
    for (uint32_t s = 0; s < sets.count; ++s) {
        const std::string name = sets.begin[s]->name;
        if (name == "reference" && (rows > 1 || shape.gate_up != GGML_TYPE_Q4_K)) continue;
        auto kernel = std::make_shared<KernelPeer>(experts, sets.begin[s]);
        kernel->run(x, 0);
        KVASIR_CHECK(
            std::memcmp(kernel->out().data(), plain->out().data(), plain->out().size_bytes()) == 0);
        peers.push_back({name, [&, kernel](uint32_t n) { kernel->run(x, n % count); }});
    }
    rounds(state, peers, thread_us);
    g_lines.push_back({shape.name, rows, static_cast<double>(shape.bytes()) / 1e6, peers});
}

// ---- a small expert ---------------------------------------------------------------------------

// The arithmetic of one row alone, in memory that is there already.
class Bare {
public:
    explicit Bare(const Experts& experts)
        : experts_(experts),
          set_(*kernels::available_kernels().begin[0]),
          q_(size_t{4} * experts.shape().hidden),
          d_(q_.size()),
          sums_(q_.size()),
          pairs_(q_.size()),
          gate_(experts.shape().width),
          up_(gate_.size()),
          out_(experts.shape().hidden) {}

    void run(const float* x, uint32_t expert) {
        const ExpertShape& s = experts_.shape();
        quantise(s.gate_up, s.hidden, x);
        dot(s.gate_up, 0, expert, s.hidden, gate_);
        dot(s.gate_up, 1, expert, s.hidden, up_);
        set_.elementwise.swiglu_v4(s.width, gate_.data(), up_.data(), gate_.data());
        quantise(s.down, s.width, gate_.data());
        dot(s.down, 2, expert, s.width, out_);
        benchmark::DoNotOptimize(out_.data());
    }

private:
    void quantise(ggml_type type, uint32_t width, const float* x) {
        if (kernels::row_kind(static_cast<kernels::WeightType>(type)) == kernels::RowKind::kQ8_0) {
            return set_.elementwise.quantise_q8_0(width, x, q_.data(), d_.data());
        }
        set_.elementwise.quantise_q8_k(width, x, q_.data(), d_.data(), sums_.data(), pairs_.data());
    }
    void dot(ggml_type type, uint32_t part, uint32_t expert, uint32_t width,
             std::vector<float>& out) {
        const kernels::Row row{q_.data(), d_.data(), sums_.data(), pairs_.data()};
        const auto count = static_cast<uint32_t>(out.size());
        set_.dot[kernels::index_of(static_cast<kernels::WeightType>(type))](
            width, experts_.slab(part, expert).data(), ggml_row_size(type, width), count, &row, 1,
            out.data(), count);
    }

    const Experts& experts_;
    const kernels::Kernels& set_;
    std::vector<int8_t> q_;
    std::vector<float> d_;
    std::vector<int16_t> sums_, pairs_;
    std::vector<float> gate_, up_, out_;
};

const ExpertShape kSmall{"demo", 256, 128, GGML_TYPE_Q4_K, GGML_TYPE_Q8_0};
const ExpertShape kLarge{"q4_K", 3072, 1024, GGML_TYPE_Q4_K, GGML_TYPE_Q4_K};

// What a call costs besides: the demo model's expert, from the cache, `times` calls a round.
void small_expert(benchmark::State& state) {
    constexpr uint32_t kTimes = 50, kHeld = 4;
    const Experts& experts = experts_of(kSmall, kHeld * kSmall.bytes());
    const auto x = toy::random_floats(kSmall.hidden, 1);
    KernelPeer runner(experts, nullptr), two(experts, nullptr, 2);
    GgmlPeer plain(experts, experts.plain(), 1);
    Bare bare(experts);
    const auto times = [&](auto work) {
        return [work](uint32_t) {
            for (uint32_t i = 0; i < kTimes; ++i) work(i % kHeld);
        };
    };
    std::vector<Peer> peers = {
        {"bare", times([&](uint32_t e) { bare.run(x.data(), e); })},
        {"runner", times([&](uint32_t e) { runner.run(x, e); })},
        {"two_threads", times([&](uint32_t e) { two.run(x, e); })},
        {"plain", times([&](uint32_t e) { plain.run(x, e); })},
    };
    rounds(state, peers, wall_us);
    std::string line = "demo model's expert, 1 row, from the cache, us:";
    for (const Peer& peer : peers) {
        char text[64];
        std::snprintf(text, sizeof(text), " %s %.2f", peer.name.c_str(), median(peer.us) / kTimes);
        line += text;
    }
    g_more.push_back(line);
}

// ---- threads ----------------------------------------------------------------------------------

// `rows` rows, each through `used` experts, by one thread and by two; time on the clock.
void threads(benchmark::State& state) {
    const auto rows = static_cast<uint32_t>(state.range(0));
    const auto used = static_cast<uint32_t>(state.range(1));
    const Experts& experts = experts_of(kLarge, kStreamedBytes);
    const auto x = toy::random_floats(size_t{rows} * kLarge.hidden, 1);
    std::vector<engine::PairIn> pairs(size_t{rows} * used);
    KernelPeer one(experts, nullptr, 1), two(experts, nullptr, 2);
    const auto run = [&](KernelPeer& peer, uint32_t n) {
        for (uint32_t i = 0; i < pairs.size(); ++i) {
            pairs[i] = {i / used, (n * used + i % used) % experts.count()};
        }
        peer.run(x, pairs);
    };
    std::vector<Peer> peers = {{"one", [&](uint32_t n) { run(one, n); }},
                               {"two", [&](uint32_t n) { run(two, n); }}};
    rounds(state, peers, wall_us);
    char text[160];
    std::snprintf(text, sizeof(text),
                  "%u expert%s x %u row%s: 1 thread %.0f us, 2 threads %.0f us: x %.2f", used,
                  used == 1 ? "" : "s", rows, rows == 1 ? "" : "s", median(peers[0].us),
                  median(peers[1].us), ratio(peers[0], peers[1]));
    g_more.emplace_back(text);
}

void register_all() {
    const ExpertShape shapes[] = {
        kLarge,
        {"q6_K", 3072, 1024, GGML_TYPE_Q6_K, GGML_TYPE_Q6_K},
        {"q8_0", 3072, 1024, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0},
        {"mxfp4", 3072, 1024, GGML_TYPE_MXFP4, GGML_TYPE_MXFP4},
    };
    for (const ExpertShape& shape : shapes) {
        for (int64_t rows : {1, 2, 4, 8, 32}) {
            benchmark::RegisterBenchmark(
                shape.name.c_str(), [shape](benchmark::State& state) { one_expert(state, shape); })
                ->ArgName("rows")
                ->Arg(rows)
                ->Iterations(rows < 8 ? 200 : 60)
                ->UseManualTime()
                ->Unit(benchmark::kMicrosecond);
        }
        if (&shape != &shapes[0]) continue;
        benchmark::RegisterBenchmark("threads", threads)
            ->ArgNames({"rows", "experts"})
            ->Args({1, 8})
            ->Args({32, 1})
            ->Iterations(100)
            ->UseManualTime()
            ->Unit(benchmark::kMicrosecond);
    }
    benchmark::RegisterBenchmark("small", small_expert)
        ->Iterations(200)
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond);
}

}  // namespace

int main(int argc, char** argv) {
    register_all();
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
    benchmark::RunSpecifiedBenchmarks();
    benchmark::Shutdown();
    print_table();
    return 0;
}
