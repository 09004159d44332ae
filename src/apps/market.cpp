// `kvasir market`: who may join, who holds what, the model's bytes; and, unless one runs elsewhere,
// a relay on the same port. No backbone: those dial in.
#include <csignal>
#include <ctime>

#include <memory>
#include <string>

#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include "apps/commands.hpp"
#include "apps/console.hpp"
#include "apps/end_at_signal.hpp"
#include "apps/servers.hpp"
#include "base/encoding.hpp"

namespace kvasir::apps {
namespace {

struct MarketFlags {
    ServerFlags server;
    std::vector<std::string> invites;  // roles
    uint32_t uses = 1000;
    uint32_t valid_h = 24;
    uint32_t drain_s = 5;
};

Status serve(const MarketFlags& flags) {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // of the threads to come, too
    auto end_at_signal = EndAtSignal::make();         // hashing a model takes minutes
    if (!end_at_signal) return tl::unexpected(end_at_signal.error());
    auto servers = Servers::start(flags.server, false);
    end_at_signal->reset();
    if (!servers) return tl::unexpected(servers.error());
    fmt::print("market: {}\n", (*servers)->url());
    if (!flags.server.relay_url.empty()) {
        const auto& pin = (*servers)->tls_pin();
        fmt::print("relay: kvasir relay --market-key {} --market {}{}\n",
                   crypto::to_hex((*servers)->market().key()), (*servers)->url(),
                   pin ? " --market-pin " + encode_hex(*pin) : std::string());
    }
    for (const std::string& role : flags.invites) {
        const uint8_t bits = role == "backbone" ? crypto::kRoleBackbone : crypto::kRoleWorker;
        auto invite =
            (*servers)->market().make_invite(flags.uses, std::chrono::hours(flags.valid_h), bits);
        if (!invite) return tl::unexpected(invite.error());
        fmt::print("invite {}: {}\n", role, crypto::to_string(*invite));
        if (role == "worker") fmt::print("{}\n", (*servers)->join_line(*invite));
    }
    std::fflush(stdout);
    while (::sigwaitinfo(&signals, nullptr) <= 0) {
    }
    ::pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);  // the second one ends at once
    tell("market: telling nodes to come again, ends in {} s (again: at once)\n", flags.drain_s + 1);
    (*servers)->drain(std::chrono::seconds(flags.drain_s));
    return {};
}

}  // namespace

void add_market(CLI::App& app, int& exit_code) {
    CLI::App* command = app.add_subcommand(
        "market",
        "register nodes, lease experts, serve their bytes; with a relay on the same port");
    auto flags = std::make_shared<MarketFlags>();
    add_server_flags(*command, flags->server);
    command->add_option("--relay-url", flags->server.relay_url,
                        "a relay elsewhere, wss://HOST:PORT; then none is started here");
    command
        ->add_option("--print-invite", flags->invites,
                     "print an invite code for this role (worker, backbone), and the line that "
                     "starts a worker with it; may be repeated")
        ->check(CLI::IsMember({"worker", "backbone"}));
    command->add_option("--uses", flags->uses, "how many nodes an invite printed is good for")
        ->check(CLI::Range(1, 1000000))
        ->capture_default_str();
    command->add_option("--valid-h", flags->valid_h, "for how many hours")
        ->check(CLI::Range(1, 8760))
        ->capture_default_str();
    command->add_option("--drain-s", flags->drain_s, "seconds that nodes get to leave at the end")
        ->capture_default_str();
    command->callback([flags, &exit_code] {
        const Status ok = serve(*flags);
        exit_code = ok ? 0 : report_error(ok.error());
    });
}

}  // namespace kvasir::apps
