// `kvasir up`: everything that a swarm needs in one process: market, relay, backbone; then a
// prompt, one answer, or llama-server's API.
#include <poll.h>
#include <unistd.h>
#include <csignal>

#include <atomic>
#include <iostream>
#include <memory>
#include <string>

#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include "apps/api_server.hpp"
#include "apps/commands.hpp"
#include "apps/console.hpp"
#include "apps/end_at_signal.hpp"
#include "apps/first_part.hpp"
#include "apps/flag_values.hpp"
#include "apps/generate_once.hpp"
#include "apps/membership.hpp"
#include "apps/servers.hpp"
#include "apps/state_lock.hpp"
#include "apps/swarm.hpp"
#include "apps/threads_flag.hpp"
#include "generate/backends.hpp"

namespace kvasir::apps {
namespace {

constexpr auto kDrainTime = std::chrono::seconds(2);

struct UpFlags {
    ServerFlags server;
    generate::SessionOptions session;
    generate::Request request;
    std::string coverage;
    std::string exact = "strict";
    std::string api;
    std::string llama_server;
    uint32_t uses = 1000;
    uint32_t valid_h = 24 * 7;
    bool json = false;
    bool report = false;
    std::atomic<bool> is_ending = false;  // by a signal
};

bool has_prompt(const UpFlags& flags) {
    return !flags.request.prompt.empty();
}

Result<std::unique_ptr<Swarm>> start_swarm(const UpFlags& flags, const Servers& servers,
                                           double coverage) {
    auto state = make_state_dir(flags.server.state_dir);
    if (!state) return tl::unexpected(state.error());
    auto key = crypto::load_or_make_key(*state + "/backbone.key");
    if (!key) return tl::unexpected(key.error());
    const auto shared = std::make_shared<const crypto::KeyPair>(std::move(*key));
    backbone::UplinkOptions uplink;
    uplink.endpoint.host = "127.0.0.1";
    uplink.endpoint.port = servers.local_port();
    uplink.here = servers.relay_here();
    uplink.credentials = [&servers, shared] { return servers.backbone_credentials(shared); };
    uplink.is_ending = [&flags] { return flags.is_ending.load(); };
    SwarmOptions options;
    options.model_path = flags.session.model_path;
    options.threads = flags.session.threads;
    options.listen.clear();
    options.wait_outside = true;
    options.relays.push_back(std::move(uplink));
    options.coverage = coverage;
    options.exact_strict = flags.exact == "strict";
    return Swarm::start(options);
}

Status answer(const generate::Request& request, const UpFlags& flags, generate::Session& session,
              Swarm& swarm) {
    auto outcome = generate_once(session, request, flags.session.threads, &swarm,
                                 flags.json ? Show::kJson : Show::kText);
    if (!outcome) return tl::unexpected(outcome.error());
    if (flags.json) fmt::print("{}\n", to_json(*outcome));
    if (flags.report && !flags.json) fmt::print("\n{}", to_table(*outcome));
    return flush_output();
}

// A line, a text, until the end of the input. What goes wrong with one prompt is told, and the next
// is taken.
Status converse(const UpFlags& flags, generate::Session& session, Swarm& swarm) {
    const bool terminal = ::isatty(STDIN_FILENO) == 1;
    generate::Request request = flags.request;  // a signal's thread reads whether that has a prompt
    std::string line;
    for (;;) {
        if (terminal) {
            fmt::print("> ");
            std::fflush(stdout);
        }
        if (!std::getline(std::cin, line)) {
            tell("up: the input has ended\n");
            return {};
        }
        if (line.empty()) continue;
        request.prompt = line;
        if (const Status ok = answer(request, flags, session, swarm); !ok) {
            if (ok.error().code == Errc::kIo || flags.is_ending) return ok;
            report_error(ok.error());
        }
    }
}

Status generate_here(const UpFlags& flags, const Servers& servers, double coverage) {
    if (const Status loaded = generate::load_backends(); !loaded) return loaded;
    auto swarm = start_swarm(flags, servers, coverage);
    if (!swarm) return tl::unexpected(swarm.error());
    generate::Request first = flags.request;
    if (!has_prompt(flags)) first.prompt = "a";  // any: the context's size comes from --ctx
    auto session = open_ready(flags.session, first);
    if (!session) return tl::unexpected(session.error());
    if (const Status ready = (*swarm)->wait_ready(); !ready) return ready;
    const Status ok = has_prompt(flags) ? answer(flags.request, flags, *session, **swarm)
                                        : converse(flags, *session, **swarm);
    (*swarm)->stop();
    return ok;
}

Status up(UpFlags& flags) {
    double coverage = has_prompt(flags) ? 1 : 0;
    if (!flags.coverage.empty()) {
        const auto share = parse_share(flags.coverage);
        if (!share) return tl::unexpected(share.error());
        coverage = *share;
    }
    ApiServerOptions api;
    if (!flags.api.empty()) {
        auto parts = find_api_server(flags.llama_server, flags.api);
        if (!parts) return tl::unexpected(parts.error());
        api.parts = std::move(*parts);
    }
    const auto first = first_part(flags.server.model_path);
    if (!first) return tl::unexpected(first.error());
    flags.server.model_path = flags.session.model_path = *first;
    const auto state = make_state_dir(flags.server.state_dir);
    if (!state) return tl::unexpected(state.error());
    const auto lock = lock_backbone(*state);
    if (!lock) return tl::unexpected(lock.error());
    flags.request.is_cancelled = [&flags] { return flags.is_ending.load(); };
    std::unique_ptr<Servers> servers;
    auto end_at_signal = EndAtSignal::make();
    if (!end_at_signal) return tl::unexpected(end_at_signal.error());
    auto started = Servers::start(flags.server, true);
    if (!started) return tl::unexpected(started.error());
    servers = std::move(*started);
    (*end_at_signal)->say_first([&servers, &flags](int signal) {
        flags.is_ending = true;  // no more text
        tell("up: telling nodes to come again, ends in {} s (again: at once)\n",
             kDrainTime.count() + 1);
        servers->drain(kDrainTime);
        (void)servers->market().save();
        return has_prompt(flags) ? 128 + signal : 0;  // without its answer, or as it was told to
    });
    auto invite = servers->market().make_invite(flags.uses, std::chrono::hours(flags.valid_h));
    if (!invite) return tl::unexpected(invite.error());
    tell("{}\n", servers->join_line(*invite));
    if (!flags.api.empty()) {
        api.address = flags.api;
        api.model_path = flags.session.model_path;
        api.state_dir = flags.server.state_dir;
        api.threads = flags.session.threads;
        api.exact = flags.exact;
        end_at_signal->reset();  // the API's server sees to that itself
        return run_api_server(api, *servers);
    }
    const Status ok = generate_here(flags, *servers, coverage);
    servers->drain(kDrainTime);
    return ok;
}

}  // namespace

void add_up(CLI::App& app, int& exit_code) {
    CLI::App* command = app.add_subcommand(
        "up", "a whole swarm's middle: market, relay and backbone; prints the line to join with");
    auto flags = std::make_shared<UpFlags>();
    add_server_flags(*command, flags->server);
    auto* prompt = command->add_option("-p,--prompt", flags->request.prompt,
                                       "answer this and end (default: prompts from the input)");
    command->add_option("-n,--tokens", flags->request.tokens_max, "tokens to generate")
        ->capture_default_str();
    command->add_option("--temp", flags->request.temperature, "temperature")
        ->check(CLI::Range(0.0, 100.0));
    command->add_option("--seed", flags->request.seed, "seed of the sampler");
    command->add_option("--ctx", flags->session.context_tokens, "context size");
    check_threads(
        command->add_option("--threads", flags->session.threads, "threads of the backbone"));
    command->add_option("--min-coverage", flags->coverage,
                        "share of the experts that workers must hold before the first answer "
                        "(default: 100% with -p, else 0%)");
    command
        ->add_option("--exact", flags->exact, "strict: only workers that give the same bits; any")
        ->check(CLI::IsMember({"strict", "any"}))
        ->capture_default_str();
    auto* api = command->add_option("--api", flags->api,
                                    "HOST:PORT for the OpenAI API: llama-server behind the plugin");
    command
        ->add_option("--llama-server", flags->llama_server,
                     "that program (default: found beside libllama, where `tools/llama.sh build "
                     "extra` makes it, else in PATH)")
        ->needs(api);
    api->excludes(prompt);
    command->add_option("--uses", flags->uses, "how many nodes the invite is good for")
        ->check(CLI::Range(1, 1000000))
        ->capture_default_str();
    command->add_option("--valid-h", flags->valid_h, "for how many hours")
        ->check(CLI::Range(1, 8760))
        ->capture_default_str();
    auto* json = command->add_flag("--json", flags->json, "one JSON object a text");
    command->add_flag("--report", flags->report, "a table after the text")->excludes(json);
    command->callback([flags, &exit_code] {
        const Status ok = up(*flags);
        exit_code = ok ? 0 : report_error(ok.error());
    });
}

}  // namespace kvasir::apps
