// `kvasir relay`: one port where workers and backbones meet.
#include <malloc.h>
#include <csignal>
#include <ctime>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include "apps/commands.hpp"
#include "apps/console.hpp"
#include "apps/join_url.hpp"
#include "apps/revocation_poll.hpp"
#include "apps/servers.hpp"
#include "base/encoding.hpp"
#include "base/log.hpp"
#include "relay/relay.hpp"

namespace kvasir::apps {
namespace {

struct RelayFlags {
    std::string listen;
    std::string tls_cert, tls_key, dev_tls;
    std::vector<std::string> dev_names;
    std::string market_key;
    std::string market_url, market_pin, ca_file;
    uint32_t revoked_every_s = 10;
    bool open = false;
    uint32_t ping_s = 20;
    uint32_t silence_s = 60;
    uint32_t drain_s = 20;
    std::string move_url;
    uint32_t connections_max = 20000;
    uint32_t per_address_max = 1024;
    uint32_t queue_mib = 8;
    uint32_t buffers_mib = 1024;
};

// 64 hex digits, or a file whose first line has them.
Result<crypto::PublicKey> read_market_key(const std::string& text) {
    if (const auto key = crypto::parse_public_key(text)) return *key;
    std::ifstream file(text);
    if (!file) {
        return fail(Errc::kUsage, "--market-key " + printable(text) +
                                      ": neither 64 hex digits nor a file that can be read");
    }
    std::string line;
    std::getline(file, line);
    while (!line.empty() && (line.back() == '\r' || line.back() == ' ')) line.pop_back();
    auto key = crypto::parse_public_key(line);
    if (key) return key;
    return fail(Errc::kBadInput, printable(text) + ": its first line is not a public key in hex: " +
                                     key.error().detail);
}

Result<std::shared_ptr<const net::TlsServer>> load_tls(const RelayFlags& flags,
                                                       const net::Endpoint& listen) {
    if (!flags.dev_tls.empty()) {
        std::vector<std::string> hosts = flags.dev_names;
        if (!is_any_address(listen.host)) hosts.push_back(listen.host);
        return net::TlsServer::self_signed(flags.dev_tls, hosts);
    }
    if (flags.tls_cert.empty()) return std::shared_ptr<const net::TlsServer>();
    return net::TlsServer::load(flags.tls_cert, flags.tls_key);
}

// Null without --market.
Result<std::unique_ptr<RevocationPoll>> make_poll(const RelayFlags& flags,
                                                  const std::optional<crypto::PublicKey>& key) {
    if (flags.market_url.empty() || !key) return std::unique_ptr<RevocationPoll>();
    RevocationPollOptions options;
    options.market_url = flags.market_url;
    options.market_key = *key;
    options.trust.ca_file = flags.ca_file;
    options.trust.advice =
        "if it is the right one, trust it with --ca FILE (its CA's certificate) or --market-pin (a "
        "market with --dev-tls prints it)";
    options.trust.pin_advice =
        "check the address and --market-pin; the market prints both when it starts";
    options.every = std::chrono::seconds(flags.revoked_every_s);
    if (!flags.market_pin.empty()) {
        const auto pin = decode_hex(flags.market_pin);
        options.trust.pin.emplace();
        if (!pin || pin->size() != options.trust.pin->size()) {
            return fail(Errc::kUsage, "--market-pin wants 64 hex digits, lower case");
        }
        std::ranges::copy(*pin, options.trust.pin->begin());
    }
    return RevocationPoll::make(std::move(options));
}

Result<relay::RelayOptions> make_options(const RelayFlags& flags, const net::Endpoint& listen) {
    if (flags.market_key.empty() == !flags.open) {
        return fail(Errc::kUsage,
                    "give --market-key (who may attach is said by that market's tokens), or --open "
                    "(anybody may)");
    }
    if (flags.silence_s <= flags.ping_s) {
        return fail(Errc::kUsage, "--silence-s must be longer than --ping-s");
    }
    if (!flags.move_url.empty()) {
        const auto url = net::parse_url(flags.move_url);
        if (!url) return fail(Errc::kUsage, "--move-url " + url.error().detail);
        if (!url->tls && !(flags.tls_cert.empty() && flags.dev_tls.empty())) {
            return fail(Errc::kUsage,
                        "--move-url must be wss://: nodes that came with TLS go nowhere without");
        }
    }
    relay::RelayOptions options;
    if (!flags.open) {
        const auto key = read_market_key(flags.market_key);
        if (!key) return tl::unexpected(key.error());
        options.gate.market = *key;
    }
    auto tls = load_tls(flags, listen);
    if (!tls) return tl::unexpected(tls.error());
    options.tls = std::move(*tls);
    auto& rules = options.switchboard;
    rules.ping_interval = std::chrono::seconds(flags.ping_s);
    rules.silence_max = std::chrono::seconds(flags.silence_s);
    rules.connections_max = flags.connections_max;
    rules.connections_per_address_max = flags.per_address_max;
    options.http_limits.connections_per_address_max = flags.per_address_max;
    options.http_limits.body_bytes_max = 4 << 10;  // nothing here looks at one
    rules.queue_bytes_max = uint64_t{flags.queue_mib} << 20;
    rules.queue_total_max = uint64_t{flags.buffers_mib} << 20;
    options.receive_total_max = uint64_t{flags.buffers_mib} << 20;
    rules.generation_first = relay_generation_now();
    return options;
}

// Until a signal, or at most that long: its number, or 0.
int wait_for_signal(const sigset_t& signals, const timespec* time) {
    const int got = time != nullptr ? ::sigtimedwait(&signals, nullptr, time)
                                    : ::sigwaitinfo(&signals, nullptr);
    return got > 0 ? got : 0;
}

Status serve(const RelayFlags& flags) {
    ::mallopt(M_MMAP_THRESHOLD, 128 << 10);  // receive buffers given back leave the process
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // of the threads to come, too
    const auto listen = net::parse_listen(flags.listen);
    if (!listen) return tl::unexpected(listen.error());
    auto options = make_options(flags, *listen);
    if (!options) return tl::unexpected(options.error());
    const auto tls = options->tls;
    auto made = make_poll(flags, options->gate.market);
    if (!made) return tl::unexpected(made.error());
    if (*made) {
        options->gate.is_revoked = [revoked = (*made)->revoked()](uint64_t serial,
                                                                  const crypto::PublicKey&) {
            return revoked->contains(serial);
        };
    }
    auto relay = relay::Relay::start(*listen, std::move(*options));
    if (!relay) return tl::unexpected(relay.error());
    const std::unique_ptr<RevocationPoll> poll = std::move(*made);  // ends before the relay
    if (poll) {
        poll->start(
            [&relay](std::vector<uint64_t> serials) { (*relay)->revoke(std::move(serials)); });
    }
    const JoinUrl url =
        join_url(*listen, (*relay)->port(), tls ? "wss" : "ws", net::own_addresses(), "");
    if (!url.hint.empty()) tell("kvasir: {}\n", url.hint);
    fmt::print("relay: listening on {}{}\n", url.url,
               tls ? " pin " + encode_hex(tls->pin()) : std::string());
    std::fflush(stdout);

    while (wait_for_signal(signals, nullptr) == 0) {
    }
    tell("relay: telling nodes to move, ends in {} s at the latest (again: at once)\n",
         flags.drain_s + 5);
    (*relay)->drain(std::chrono::seconds(flags.drain_s), flags.move_url);
    const timespec look = {0, 50'000'000};
    while (!(*relay)->drained() && wait_for_signal(signals, &look) == 0) {
    }
    return {};
}

}  // namespace

void add_relay(CLI::App& app, int& exit_code) {
    CLI::App* command =
        app.add_subcommand("relay", "one port where workers and backbones behind NAT meet");
    auto flags = std::make_shared<RelayFlags>();
    command->add_option("--listen", flags->listen, "HOST:PORT or :PORT; port 0: any free one")
        ->required();
    auto* cert = command->add_option("--tls-cert", flags->tls_cert, "certificate chain (PEM)");
    auto* key = command->add_option("--tls-key", flags->tls_key, "its key (PEM)");
    cert->needs(key);
    key->needs(cert);
    auto* dev = command->add_option("--dev-tls", flags->dev_tls,
                                    "make a self-signed certificate in this folder; clients need "
                                    "--ca FOLDER/dev-cert.pem");
    dev->excludes(cert);
    command
        ->add_option("--dev-name", flags->dev_names,
                     "a name or address that --dev-tls' certificate is for, besides this machine's "
                     "own; may be repeated")
        ->needs(dev);
    auto* market = command->add_option("--market-key", flags->market_key,
                                       "public key of the market whose tokens count: hex or file");
    command->add_flag("--open", flags->open, "anybody may attach, without a token")
        ->excludes(market);
    auto* url = command->add_option("--market", flags->market_url,
                                    "https://HOST:PORT of that market: asked which tokens it took "
                                    "back (else they are good until they expire)");
    url->needs(market);
    auto* pin = command->add_option("--market-pin", flags->market_pin,
                                    "SHA-256 of the market's TLS key, if no CA vouches for it");
    pin->needs(url);
    command->add_option("--ca", flags->ca_file, "certificates (PEM) that vouch for the market")
        ->needs(url)
        ->excludes(pin);
    command->add_option("--revoked-every-s", flags->revoked_every_s, "seconds between asking")
        ->needs(url)
        ->check(CLI::Range(1, 3600))
        ->capture_default_str();
    command->add_option("--ping-s", flags->ping_s, "seconds between pings, both ways")
        ->check(CLI::Range(1, 3600))
        ->capture_default_str();
    command->add_option("--silence-s", flags->silence_s, "a node silent for so long is gone")
        ->check(CLI::Range(2, 7200))
        ->capture_default_str();
    command->add_option("--drain-s", flags->drain_s, "at SIGTERM, nodes move within this time")
        ->check(CLI::Range(0, 3600))
        ->capture_default_str();
    command->add_option("--move-url", flags->move_url, "where they go (default: this address)");
    command->add_option("--max-connections", flags->connections_max, "in all")
        ->check(CLI::Range(1, 60000))
        ->capture_default_str();
    command
        ->add_option("--per-address", flags->per_address_max,
                     "connections of one address (behind a reverse proxy: all of them)")
        ->check(CLI::Range(1, 60000))
        ->capture_default_str();
    command->add_option("--queue", flags->queue_mib, "MiB queued for one receiver")
        ->check(CLI::Range(1, 4096))
        ->capture_default_str();
    command->add_option("--buffers", flags->buffers_mib, "MiB queued, and half received, in all")
        ->check(CLI::Range(16, 1 << 20))
        ->capture_default_str();
    command->callback([flags, &exit_code] {
        const Status ok = serve(*flags);
        exit_code = ok ? 0 : report_error(ok.error());
    });
}

}  // namespace kvasir::apps
