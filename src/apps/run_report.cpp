#include "apps/run_report.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>

#include "base/log.hpp"
#include "base/units.hpp"

namespace kvasir::apps {
namespace {

using Json = nlohmann::ordered_json;

uint64_t tokens_evaluated(const generate::Generation& generation) {
    return generation.prompt_tokens + generation.step_times.size();
}

double microseconds(std::chrono::nanoseconds time) {
    return std::chrono::duration<double, std::micro>(time).count();
}

void add_swarm(Json& out, const backbone::Report& swarm, uint64_t tokens) {
    out["pairs_remote"] = swarm.pairs_remote;
    out["pairs_local"] = swarm.pairs_local;
    Json workers = Json::array();
    for (const backbone::WorkerReport& worker : swarm.workers) {
        workers.push_back({{"id", printable(worker.id)},
                           {"build", printable(worker.build, 1000)},
                           {"computes", printable(worker.computes, 200)},
                           {"experts_held", worker.experts_held},
                           {"pairs", worker.pairs},
                           {"bytes_in", worker.bytes_in},
                           {"bytes_out", worker.bytes_out},
                           {"compute_us_p50", worker.compute_us_p50},
                           {"exact", worker.exact},
                           {"connected", worker.connected}});
    }
    out["workers"] = std::move(workers);
    out["overhead_us_p50"] = swarm.overhead_us_p50;
    out["overhead_us_p99"] = swarm.overhead_us_p99;
    out["wire_bytes_per_token"] = wire_bytes_per_token(swarm, tokens);
    out["layers_remote"] = swarm.layers;
    out["retries"] = swarm.retries;
    out["stall_ms_max"] = swarm.stall_ms_max;
    out["answers"] = all_exact(swarm) ? "exact" : "approximate";
}

double share(uint64_t part, uint64_t whole) {
    return whole == 0 ? 0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole);
}

void append_swarm(std::string& out, const backbone::Report& swarm, uint64_t tokens) {
    auto line = std::back_inserter(out);
    const uint64_t pairs = swarm.pairs_remote + swarm.pairs_local;
    fmt::format_to(line, "{:<20} {:>8} {:>10} {:>6} {:>10} {:>10} {:>12}\n", "computed by",
                   "experts", "pairs", "share", "bytes out", "bytes in", "compute p50");
    for (const backbone::WorkerReport& worker : swarm.workers) {
        fmt::format_to(line, "{:<20} {:>8} {:>10} {:>5.1f}% {:>10} {:>10} {:>9.0f} us{}{}\n",
                       printable(worker.id, 20), worker.experts_held, worker.pairs,
                       share(worker.pairs, pairs),
                       format_bytes(static_cast<double>(worker.bytes_out)),
                       format_bytes(static_cast<double>(worker.bytes_in)), worker.compute_us_p50,
                       worker.exact ? "" : "  approximate", worker.connected ? "" : "  lost");
    }
    fmt::format_to(line, "{:<20} {:>8} {:>10} {:>5.1f}%\n", "backbone", "all", swarm.pairs_local,
                   share(swarm.pairs_local, pairs));
    fmt::format_to(line, "added per layer: {:.0f} us p50, {:.0f} us p99 over {} layers{}\n",
                   swarm.overhead_us_p50, swarm.overhead_us_p99, swarm.layers,
                   swarm.retries == 0 ? "" : fmt::format(", {} computed again", swarm.retries));
    fmt::format_to(line, "on the wire: {} per token\n",
                   format_bytes(wire_bytes_per_token(swarm, tokens)));
}

}  // namespace

double wire_bytes_per_token(const backbone::Report& swarm, uint64_t tokens) {
    uint64_t bytes = 0;
    for (const backbone::WorkerReport& worker : swarm.workers)
        bytes += worker.bytes_in + worker.bytes_out;
    return tokens == 0 ? 0 : static_cast<double>(bytes) / static_cast<double>(tokens);
}

bool all_exact(const backbone::Report& swarm) {
    return swarm.exact &&
           std::all_of(swarm.workers.begin(), swarm.workers.end(),
                       [](const auto& worker) { return worker.exact || worker.pairs == 0; });
}

std::string to_json(const RunOutcome& outcome) {
    const generate::Generation& generation = outcome.generation;
    Json out;
    out["mode"] = outcome.swarm ? "swarm" : "monolithic";
    out["text"] = generation.text;
    out["tokens"] = generation.tokens;
    out["stopped_at_end"] = generation.stopped_at_end;
    out["logits_sha256"] = to_hex(generation.logits_sha256);
    out["prompt_tokens"] = generation.prompt_tokens;
    out["prompt_tok_s"] = generation.prompt_tok_s();
    out["gen_tok_s"] = generation.gen_tok_s();
    out["longest_step_us"] = microseconds(generation.longest_step());
    out["threads"] = outcome.threads;
    add_swarm(out, outcome.swarm.value_or(backbone::Report{}), tokens_evaluated(generation));
    if (outcome.bit_exact) out["bit_exact"] = *outcome.bit_exact;
    if (const auto& apart = outcome.difference) {
        out["difference"] = {{"max_abs", apart->max_abs},
                             {"mean_abs", apart->mean_abs},
                             {"other_likeliest", apart->other_likeliest},
                             {"rows", apart->rows},
                             {"perplexity", apart->perplexity},
                             {"perplexity_reference", apart->perplexity_reference}};
    }
    return out.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string to_table(const RunOutcome& outcome) {
    const generate::Generation& generation = outcome.generation;
    std::string out;
    if (outcome.swarm) append_swarm(out, *outcome.swarm, tokens_evaluated(generation));
    fmt::format_to(std::back_inserter(out),
                   "prompt: {} tokens at {:.1f} tok/s; generated: {} tokens at {:.1f} tok/s; "
                   "longest step {:.1f} ms\n",
                   generation.prompt_tokens, generation.prompt_tok_s(), generation.tokens.size(),
                   generation.gen_tok_s(), microseconds(generation.longest_step()) / 1000);
    return out;
}

}  // namespace kvasir::apps
