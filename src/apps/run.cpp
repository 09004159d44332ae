// `kvasir run`: generate text with the experts computed by workers, by the backbone, or by plain
// llama.cpp.
#include <fmt/core.h>

#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include <CLI/CLI.hpp>

#include "apps/commands.hpp"
#include "apps/console.hpp"
#include "apps/first_part.hpp"
#include "apps/flag_values.hpp"
#include "apps/generate_once.hpp"
#include "apps/join_url.hpp"
#include "apps/kernels_flag.hpp"
#include "apps/membership.hpp"
#include "apps/run_report.hpp"
#include "apps/swarm.hpp"
#include "apps/threads_flag.hpp"
#include "base/log.hpp"
#include "generate/backends.hpp"
#include "generate/session.hpp"

namespace kvasir::apps {
namespace {

struct RunFlags {
    generate::SessionOptions session;
    generate::Request request;
    std::string prompt_tokens;
    bool ignore_end = false;
    SwarmOptions swarm;
    std::string listen;
    MembershipOptions member;
    std::string coverage;  // empty: 100%
    std::string exact = "strict";
    bool monolithic = false;
    bool check = false;
    bool json = false;
    bool report = false;
    bool echo = false;
};

// The parts of the flags that CLI11 cannot check by itself.
Status complete(RunFlags& flags) {
    if (!flags.prompt_tokens.empty()) {
        auto tokens = parse_tokens(flags.prompt_tokens);
        if (!tokens) return tl::unexpected(tokens.error());
        flags.request.prompt_tokens = std::move(*tokens);
    }
    if (!flags.coverage.empty() && flags.listen.empty() && flags.member.url.empty()) {
        return fail(Errc::kUsage,
                    "--wait-coverage is about outside workers: it needs --listen or "
                    "--join");
    }
    const auto coverage = parse_share(flags.coverage.empty() ? "100%" : flags.coverage);
    if (!coverage) return tl::unexpected(coverage.error());
    flags.request.stop_at_end = !flags.ignore_end;
    flags.swarm.threads = flags.session.threads;
    flags.swarm.coverage = *coverage;
    flags.swarm.exact_strict = flags.exact == "strict";
    flags.swarm.wait_outside = !flags.listen.empty() || !flags.member.url.empty();
    if (!flags.listen.empty()) {
        flags.swarm.listen = flags.listen;
    } else if (!flags.member.url.empty() && flags.swarm.workers == 0) {
        flags.swarm.listen.clear();  // behind NAT nobody could come in
    }
    return {};
}

// As a member of a market that runs elsewhere.
Status join(RunFlags& flags) {
    flags.member.model_path = flags.session.model_path;
    auto relay = enroll_backbone(flags.member);
    if (!relay) return tl::unexpected(relay.error());
    flags.swarm.relays.push_back(std::move(*relay));
    return {};
}

// What a worker on another machine dials.
void tell_address(const std::string& listen, uint16_t port) {
    const auto endpoint = net::parse_listen(listen);
    if (!endpoint) return;  // nobody could listen there
    const JoinUrl chosen = join_url(*endpoint, port, "ws", net::own_addresses(), "");
    if (!chosen.hint.empty()) tell("kvasir: {}\n", chosen.hint);
    tell("listening on {}\n", chosen.url);
}

Result<RunOutcome> load_and_generate(const RunFlags& flags, Swarm* swarm) {
    auto session = open_ready(flags.session, flags.request);
    if (!session) return tl::unexpected(session.error());
    if (swarm != nullptr) {
        if (const Status ready = swarm->wait_ready(); !ready) return tl::unexpected(ready.error());
    }
    if (flags.echo && !flags.json) stream_text(flags.request.prompt);
    return generate_once(*session, flags.request, flags.session.threads, swarm,
                         flags.json ? Show::kJson : Show::kText);
}

void print_check(const RunOutcome& outcome, const generate::Generation& reference) {
    fmt::print("bit-exact with llama.cpp: {}\n", *outcome.bit_exact ? "yes" : "no");
    if (*outcome.bit_exact) return;
    const auto& tokens = outcome.generation.tokens;
    size_t same = 0;
    while (same < tokens.size() && same < reference.tokens.size() &&
           tokens[same] == reference.tokens[same]) {
        ++same;
    }
    fmt::print("the first {} of {} tokens are the same; logits {} here, {} with llama.cpp\n", same,
               tokens.size(), to_hex(outcome.generation.logits_sha256),
               to_hex(reference.logits_sha256));
    if (const auto& apart = outcome.difference) {
        fmt::print(
            "with the same tokens before them: logits differ by {:.4g} at most, {:.4g} on average; "
            "{} of {} likeliest tokens are others; perplexity {:.5f} here, {:.5f} with llama.cpp\n",
            apart->max_abs, apart->mean_abs, apart->other_likeliest, apart->rows, apart->perplexity,
            apart->perplexity_reference);
    }
}

// Plain llama.cpp given the tokens that the swarm chose: the same work, row by row.
Result<LogitsDifference> measure_difference(const generate::Generation& ours,
                                            generate::Request request,
                                            generate::Session& reference) {
    request.forced = ours.tokens;
    auto plain = reference.generate(request);
    if (!plain) return tl::unexpected(plain.error());
    return compare_logits(ours.logits, plain->logits, ours.tokens);
}

Result<bool> run(RunFlags& flags) {
    if (const Status valid = complete(flags); !valid) return tl::unexpected(valid.error());
    const auto first = first_part(flags.session.model_path);
    if (!first) return tl::unexpected(first.error());
    flags.session.model_path = flags.swarm.model_path = *first;
    if (!flags.member.url.empty()) {
        if (const Status joined = join(flags); !joined) return tl::unexpected(joined.error());
    }
    if (const Status loaded = generate::load_backends(); !loaded) {
        return tl::unexpected(loaded.error());
    }
    // The reference's context is made before the KVASIR device exists: it stays plain llama.cpp.
    std::optional<generate::Session> reference;
    if (flags.check) {
        auto session = open_ready(flags.session, flags.request);
        if (!session) return tl::unexpected(session.error());
        reference.emplace(std::move(*session));
    }
    flags.request.keep_logits = flags.check && flags.exact == "any";
    std::unique_ptr<Swarm> swarm;
    if (!flags.monolithic) {
        auto started = Swarm::start(flags.swarm);
        if (!started) return tl::unexpected(started.error());
        swarm = std::move(*started);
        if (!flags.listen.empty()) tell_address(flags.listen, swarm->port());
    }
    auto outcome = load_and_generate(flags, swarm.get());
    if (!outcome) return tl::unexpected(outcome.error());
    if (swarm != nullptr) swarm->stop();

    generate::Generation expected;
    if (reference) {
        auto plain = reference->generate(flags.request);
        if (!plain) return tl::unexpected(plain.error());
        expected = std::move(*plain);
        outcome->bit_exact = expected.logits_sha256 == outcome->generation.logits_sha256 &&
                             expected.tokens == outcome->generation.tokens;
        if (!*outcome->bit_exact && flags.request.keep_logits) {
            auto apart = measure_difference(outcome->generation, flags.request, *reference);
            if (!apart) return tl::unexpected(apart.error());
            outcome->difference = *apart;
        }
    }
    if (flags.json) fmt::print("{}\n", to_json(*outcome));
    if (!flags.json && flags.report) fmt::print("\n{}", to_table(*outcome));
    if (!flags.json && reference) print_check(*outcome, expected);
    if (const Status written = flush_output(); !written) return tl::unexpected(written.error());
    return outcome->bit_exact.value_or(true);
}

void add_flags(CLI::App& command, RunFlags& flags) {
    command
        .add_option("-m,--model", flags.session.model_path, "the model (GGUF; any part of a set)")
        ->required();
    auto* prompt = command.add_option("-p,--prompt", flags.request.prompt, "prompt as text");
    auto* tokens = command.add_option("--prompt-tokens", flags.prompt_tokens,
                                      "prompt as token numbers, e.g. 3,5,7");
    prompt->excludes(tokens);
    command.add_option("-n,--tokens", flags.request.tokens_max, "tokens to generate")
        ->capture_default_str();
    command
        .add_option("--temp", flags.request.temperature, "temperature; 0: the most likely token")
        ->check(CLI::Range(0.0, 100.0))
        ->capture_default_str();
    command.add_option("--seed", flags.request.seed, "seed of the sampler")->capture_default_str();
    command.add_flag("--ignore-eos", flags.ignore_end, "go on after an end-of-text token");
    check_threads(
        command.add_option("--threads", flags.session.threads, "threads of the backbone"));
    command
        .add_option("--ctx", flags.session.context_tokens,
                    "context size; 0: as large as prompt and -n need")
        ->capture_default_str();
    command.add_option("--batch", flags.session.batch_tokens, "tokens per batch")
        ->check(CLI::Range(1, 65536))
        ->capture_default_str();
    command.add_option("--ubatch", flags.session.ubatch_tokens, "tokens computed at once")
        ->check(CLI::Range(1, 65536))
        ->capture_default_str();

    auto* monolithic = command.add_flag("--monolithic", flags.monolithic,
                                        "plain llama.cpp (--no-repack), no swarm: the reference");
    auto* workers = command
                        .add_option("--workers", flags.swarm.workers,
                                    "local worker processes to start; 0: the backbone computes "
                                    "all experts through the backend")
                        ->check(CLI::Range(0, 1024))
                        ->capture_default_str();
    check_threads(command.add_option("--worker-threads", flags.swarm.worker_threads,
                                     "threads of each worker"));
    add_kernels_flag(command, flags.swarm.compute_with);
    auto* listen = command.add_option("--listen", flags.listen,
                                      "HOST:PORT where outside workers may join; wait for them");
    auto* join =
        command.add_option("--join", flags.member.url,
                           "https://HOST:PORT of a market; workers come through its relay");
    command
        .add_option("--invite", flags.member.invite,
                    "a backbone's invite code of that market; wanted the first time")
        ->needs(join);
    command
        .add_option("--state", flags.member.state_dir,
                    "folder of this backbone's key and of how it recognises the market")
        ->needs(join);
    command
        .add_option("--ca", flags.member.ca_file,
                    "PEM file of certificates to trust where no invite pins one: the market, a "
                    "relay elsewhere (default: the system's)")
        ->needs(join);
    command.add_option("--wait-coverage", flags.coverage,
                       "share of the experts that outside workers must hold before it starts "
                       "(default 100%)");
    command.add_option("--exact", flags.exact, "strict: only workers that give the same bits; any")
        ->check(CLI::IsMember({"strict", "any"}))
        ->capture_default_str();
    auto* check = command.add_flag("--check", flags.check,
                                   "compute it again with plain llama.cpp and compare the bits; "
                                   "with --exact any also how far the logits are apart");
    for (auto* other : {workers, listen, join, check}) monolithic->excludes(other);

    auto* json = command.add_flag("--json", flags.json, "one JSON object in place of the text");
    command.add_flag("--report", flags.report, "a table after the text")->excludes(json);
    command.add_flag("--echo", flags.echo, "print the prompt in front of the text")->excludes(json);
}

}  // namespace

void add_run(CLI::App& app, int& exit_code) {
    CLI::App* command = app.add_subcommand("run", "generate text with a model");
    auto flags = std::make_shared<RunFlags>();
    add_flags(*command, *flags);
    command->callback([command, flags, &exit_code] {
        if (command->count("--prompt") + command->count("--prompt-tokens") == 0) {
            throw CLI::RequiredError("-p TEXT or --prompt-tokens 3,5,7");
        }
        const Result<bool> done = run(*flags);
        exit_code = !done ? report_error(done.error()) : (*done ? 0 : 1);
    });
}

}  // namespace kvasir::apps
