// `kvasir bench`: the swarm against plain llama.cpp (and llama.cpp RPC) in one process, in turn,
// bits compared.
#include <fmt/core.h>

#include <cstdio>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "apps/commands.hpp"
#include "apps/comparison.hpp"
#include "apps/console.hpp"
#include "apps/first_part.hpp"
#include "apps/kernels_flag.hpp"
#include "apps/machine.hpp"
#include "apps/rpc_server.hpp"
#include "apps/run_report.hpp"
#include "apps/swarm.hpp"
#include "apps/threads_flag.hpp"
#include "base/log.hpp"
#include "base/units.hpp"
#include "generate/backends.hpp"
#include "generate/session.hpp"

namespace kvasir::apps {
namespace {

using Json = nlohmann::ordered_json;

struct BenchFlags {
    generate::SessionOptions session;
    SwarmOptions swarm;
    uint32_t rounds = 5;
    uint32_t steps = 64;
    uint32_t prompt_tokens = 512;
    std::string rpc_server;
    bool skip_swarm = false;
    bool beside_graph = false;
    bool pin = false;
    double efficiency_min = 0;
    bool json = false;
};

// What the swarm counted while it decoded, one entry per measured round.
struct SwarmCounts {
    std::vector<double> overhead_us_p50, overhead_us_p99;
    std::vector<double> wire_bytes_per_token, bytes_out_per_layer, experts_ms_per_token;
    backbone::Report last;

    void add(const backbone::Report& report, uint64_t steps) {
        overhead_us_p50.push_back(report.overhead_us_p50);
        overhead_us_p99.push_back(report.overhead_us_p99);
        wire_bytes_per_token.push_back(apps::wire_bytes_per_token(report, steps));
        uint64_t bytes_out = 0;
        for (const auto& worker : report.workers) bytes_out += worker.bytes_out;
        bytes_out_per_layer.push_back(report.layers == 0 ? 0
                                                         : static_cast<double>(bytes_out) /
                                                               static_cast<double>(report.layers));
        experts_ms_per_token.push_back(report.backend_ms / static_cast<double>(steps));
        last = report;
    }
};

// Destroyed bottom up: sessions before what computes for them.
struct Bench {
    std::optional<RpcServer> rpc_server;
    std::unique_ptr<Swarm> swarm;
    std::optional<generate::Session> mono, rpc, swarm_session, graph_session;
    SwarmCounts counts, graph_counts;
};

Status open_into(std::optional<generate::Session>& slot, const generate::SessionOptions& options,
                 uint64_t context) {
    auto session = generate::Session::open(options);
    if (!session) return tl::unexpected(session.error());
    if (const Status ready = session->prepare(context); !ready) return ready;
    slot.emplace(std::move(*session));
    return {};
}

Status open_rpc(Bench& bench, const BenchFlags& flags, uint64_t context) {
    const int cpu = flags.swarm.worker_cpus.empty() ? -1 : flags.swarm.worker_cpus.front();
    auto server = RpcServer::start(flags.rpc_server, flags.swarm.worker_threads, cpu);
    if (!server) return tl::unexpected(server.error());
    bench.rpc_server.emplace(std::move(*server));
    const auto device = generate::add_rpc_server(bench.rpc_server->endpoint());
    if (!device) return tl::unexpected(device.error());
    generate::SessionOptions options = flags.session;
    options.devices = {*device};
    options.placements = {{"_(ch)?exps", *device}};
    return open_into(bench.rpc, options, context);
}

// --pin: this process on the first CPUs, the workers on the others (all share when there are no
// others).
Status pin(BenchFlags& flags) {
    const std::vector<int> cpus = allowed_cpus();
    if (cpus.empty())
        return fail(Errc::kEnvironment, "the kernel does not say which CPUs there are");
    const size_t own = std::min<size_t>(flags.session.threads, cpus.size());
    const auto first_other = cpus.begin() + static_cast<std::ptrdiff_t>(own);
    flags.swarm.worker_cpus.assign(first_other, cpus.end());
    if (flags.swarm.worker_cpus.empty()) flags.swarm.worker_cpus = cpus;
    return pin_process(std::vector<int>(cpus.begin(), first_other));
}

// In this order: contexts made after the KVASIR device is registered use it.
Status open_all(Bench& bench, BenchFlags& flags) {
    if (flags.pin) {
        if (const Status pinned = pin(flags); !pinned) return pinned;
    }
    const auto first = first_part(flags.session.model_path);
    if (!first) return tl::unexpected(first.error());
    flags.session.model_path = *first;
    if (const Status loaded = generate::load_backends(); !loaded) return loaded;
    const uint64_t context = uint64_t{flags.prompt_tokens} + flags.steps + 1;
    if (const Status done = open_into(bench.mono, flags.session, context); !done) return done;
    if (!flags.rpc_server.empty()) {
        if (const Status done = open_rpc(bench, flags, context); !done) return done;
    }
    if (flags.skip_swarm) return {};
    flags.swarm.model_path = flags.session.model_path;
    flags.swarm.threads = flags.session.threads;
    auto swarm = Swarm::start(flags.swarm);
    if (!swarm) return tl::unexpected(swarm.error());
    bench.swarm = std::move(*swarm);
    if (const Status done = open_into(bench.swarm_session, flags.session, context); !done)
        return done;
    if (flags.beside_graph) {
        bench.swarm->set_compute_with(engine::ComputeWith::kGraph);
        if (const Status done = open_into(bench.graph_session, flags.session, context); !done)
            return done;
    }
    return bench.swarm->wait_ready();
}

Result<std::vector<Series>> measure(Bench& bench, const BenchFlags& flags) {
    std::vector<Contender> contenders;
    contenders.push_back({"mono", &*bench.mono, {}, {}});
    const auto add = [&](const char* name, std::optional<generate::Session>& session,
                         SwarmCounts& counts) {
        if (!session) return;
        Contender swarm{name, &*session, {}, {}};
        // Only the decoding is counted: one row per layer.
        swarm.on_prompt_done = [&bench] { bench.swarm->reset_counters(); };
        swarm.on_measured = [&bench, &counts](const generate::Generation& generation) {
            counts.add(bench.swarm->report(), generation.step_times.size());
        };
        contenders.push_back(std::move(swarm));
    };
    add("swarm", bench.swarm_session, bench.counts);
    add("graph", bench.graph_session, bench.graph_counts);
    if (bench.rpc) contenders.push_back({"rpc", &*bench.rpc, {}, {}});
    const Work work = make_work(bench.mono->vocabulary(), flags.prompt_tokens, flags.steps);
    return compare(contenders, work, flags.rounds);
}

Json machine_json() {
    const Machine machine = describe_machine();
    return {{"cpu", machine.cpu},
            {"cores", machine.cores},
            {"compiler", machine.compiler},
            {"llama_cpp", generate::llama_version_text()},
            {"llama_cpp_system", printable(generate::llama_system_text(), 600)}};
}

Json to_json(const std::vector<Series>& all, const Bench& bench, const BenchFlags& flags) {
    const Series& mono = all.front();
    bool bit_exact = true;
    Json out;
    out["bit_exact"] = true;
    for (const Series& series : all) {
        out[series.name + "_tok_s"] = median(series.gen_tok_s);
        out[series.name + "_prompt_tok_s"] = median(series.prompt_tok_s);
        if (&series == &mono) continue;
        const std::string prefix = series.name == "swarm" ? "" : series.name + "_";
        out[prefix + "efficiency"] = median_ratio(series.gen_tok_s, mono.gen_tok_s);
        out[prefix + "prefill_efficiency"] = median_ratio(series.prompt_tok_s, mono.prompt_tok_s);
        if (series.name != "rpc") bit_exact = bit_exact && series.bit_exact;
        if (series.name != "swarm") out[prefix + "bit_exact"] = series.bit_exact;
    }
    bit_exact = bit_exact && mono.bit_exact;
    out["bit_exact"] = bit_exact;
    out["logits_sha256"] = mono.logits_sha256;
    if (bench.swarm != nullptr) {
        out["overhead_us_p50"] = median(bench.counts.overhead_us_p50);
        out["overhead_us_p99"] = median(bench.counts.overhead_us_p99);
        out["experts_ms_per_token"] = median(bench.counts.experts_ms_per_token);
        out["wire_bytes_per_token"] = median(bench.counts.wire_bytes_per_token);
        out["bytes_out_per_layer"] = median(bench.counts.bytes_out_per_layer);
        out["pairs_remote"] = bench.counts.last.pairs_remote;
        out["pairs_local"] = bench.counts.last.pairs_local;
    }
    if (bench.graph_session) {
        const auto& graph_ms = bench.graph_counts.experts_ms_per_token;
        out["graph_experts_ms_per_token"] = median(graph_ms);
        out["experts_speedup"] = median_ratio(graph_ms, bench.counts.experts_ms_per_token);
    }
    out["rounds"] = Json::array();
    for (uint32_t i = 0; i < flags.rounds; ++i) {
        Json round;
        for (const Series& series : all) {
            round[series.name + "_tok_s"] = series.gen_tok_s[i];
            round[series.name + "_prompt_tok_s"] = series.prompt_tok_s[i];
        }
        out["rounds"].push_back(std::move(round));
    }
    out["setting"] = {{"model", printable(flags.session.model_path)},
                      {"workers", flags.skip_swarm ? 0 : flags.swarm.workers},
                      {"threads", flags.session.threads},
                      {"worker_threads", flags.swarm.worker_threads},
                      {"prompt_tokens", flags.prompt_tokens},
                      {"decode_steps", flags.steps},
                      {"ubatch", flags.session.ubatch_tokens},
                      {"pinned", flags.pin}};
    out["machine"] = machine_json();
    return out;
}

std::string to_table(const std::vector<Series>& all, const Bench& bench) {
    std::string out;
    auto line = std::back_inserter(out);
    const Series& mono = all.front();
    fmt::format_to(line, "{:<6} {:>12} {:>8} {:>14} {:>8}  {}\n", "", "decode tok/s", "ratio",
                   "prompt tok/s", "ratio", "bits");
    for (const Series& series : all) {
        fmt::format_to(line, "{:<6} {:>12.2f} {:>8.3f} {:>14.2f} {:>8.3f}  {}\n", series.name,
                       median(series.gen_tok_s), median_ratio(series.gen_tok_s, mono.gen_tok_s),
                       median(series.prompt_tok_s),
                       median_ratio(series.prompt_tok_s, mono.prompt_tok_s),
                       series.bit_exact ? "same" : "DIFFERENT");
    }
    if (bench.swarm != nullptr) {
        fmt::format_to(line,
                       "added per layer: {:.0f} us p50, {:.0f} us p99; on the wire: {} per token\n",
                       median(bench.counts.overhead_us_p50), median(bench.counts.overhead_us_p99),
                       format_bytes(median(bench.counts.wire_bytes_per_token)));
        fmt::format_to(line, "experts: {:.2f} ms per token",
                       median(bench.counts.experts_ms_per_token));
        if (bench.graph_session) {
            const auto& graph_ms = bench.graph_counts.experts_ms_per_token;
            fmt::format_to(line, "; as ggml's graph {:.2f} ms: x {:.2f}", median(graph_ms),
                           median_ratio(graph_ms, bench.counts.experts_ms_per_token));
        }
        fmt::format_to(line, "\n");
    }
    return out;
}

// True when the bits are the same and the swarm is as fast as asked.
Result<bool> bench_once(BenchFlags& flags) {
    if (flags.beside_graph && (flags.swarm.workers != 0 || flags.skip_swarm))
        return fail(Errc::kUsage,
                    "--beside-graph compares what the backbone computes by itself: "
                    "use it with --workers 0");
    if (flags.beside_graph && flags.swarm.compute_with == engine::ComputeWith::kGraph)
        return fail(Errc::kUsage, "--beside-graph --kernels off: that is the graph beside itself");
    Bench bench;
    if (const Status ready = open_all(bench, flags); !ready) return tl::unexpected(ready.error());
    const auto all = measure(bench, flags);
    if (!all) return tl::unexpected(all.error());
    const Json json = to_json(*all, bench, flags);
    if (flags.json) {
        fmt::print("{}\n", json.dump(-1, ' ', false, Json::error_handler_t::replace));
    } else {
        fmt::print("{}", to_table(*all, bench));
    }
    if (bench.swarm != nullptr) bench.swarm->stop();
    if (std::fflush(stdout) != 0) return fail(Errc::kIo, "standard output: cannot be written");
    if (!json["bit_exact"].get<bool>()) {
        tell("kvasir: the logits are not the same bits as llama.cpp's\n");
        return false;
    }
    const double efficiency = json.value("efficiency", 1.0);
    if (efficiency < flags.efficiency_min) {
        tell("kvasir: efficiency {:.3f} is below --min-efficiency {:.3f}\n", efficiency,
             flags.efficiency_min);
        return false;
    }
    return true;
}

void add_flags(CLI::App& command, BenchFlags& flags) {
    command.add_option("-m,--model", flags.session.model_path, "the model (GGUF)")->required();
    auto* workers = command
                        .add_option("--workers", flags.swarm.workers,
                                    "local worker processes; 0: the backbone computes all experts "
                                    "through the backend")
                        ->check(CLI::Range(0, 1024))
                        ->capture_default_str();
    check_threads(command.add_option("--threads", flags.session.threads,
                                     "threads of llama.cpp and of the backbone"));
    check_threads(command.add_option("--worker-threads", flags.swarm.worker_threads,
                                     "threads of each worker and of the RPC server"));
    add_kernels_flag(command, flags.swarm.compute_with);
    command.add_flag(
        "--beside-graph", flags.beside_graph,
        "with no workers: also measure the experts as ggml's graph, in the same rounds");
    command.add_option("--pairs", flags.rounds, "measured runs of each")
        ->check(CLI::Range(1, 1000))
        ->capture_default_str();
    command.add_option("-n,--tokens", flags.steps, "tokens decoded one at a time in each run")
        ->check(CLI::Range(1, 1000000))
        ->capture_default_str();
    command.add_option("--prompt", flags.prompt_tokens, "tokens of the prompt in each run")
        ->check(CLI::Range(1, 1000000))
        ->capture_default_str();
    command.add_option("--ubatch", flags.session.ubatch_tokens, "tokens computed at once")
        ->check(CLI::Range(1, 65536))
        ->capture_default_str();
    command.add_option("--ctx", flags.session.context_tokens, "context size; 0: as needed")
        ->capture_default_str();
    auto* rpc = command.add_option("--rpc-server", flags.rpc_server,
                                   "also measure llama.cpp RPC with this ggml-rpc-server");
    command.add_flag("--skip-swarm", flags.skip_swarm, "measure only llama.cpp RPC")
        ->needs(rpc)
        ->excludes(workers);
    command.add_flag("--pin", flags.pin, "this process and the workers on different CPUs");
    command
        .add_option("--min-efficiency", flags.efficiency_min,
                    "exit with 1 if swarm / monolithic tokens per second is lower")
        ->check(CLI::Range(0.0, 100.0))
        ->capture_default_str();
    command.add_flag("--json", flags.json, "one JSON object");
}

}  // namespace

void add_bench(CLI::App& app, int& exit_code) {
    CLI::App* command = app.add_subcommand("bench", "measure the swarm against plain llama.cpp");
    auto flags = std::make_shared<BenchFlags>();
    flags->swarm.workers = 1;
    add_flags(*command, *flags);
    command->callback([flags, &exit_code] {
        const Result<bool> done = bench_once(*flags);
        exit_code = !done ? report_error(done.error()) : (*done ? 0 : 1);
    });
}

}  // namespace kvasir::apps
