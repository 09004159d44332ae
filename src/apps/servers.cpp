#include "apps/servers.hpp"

#include <poll.h>

#include <cstdio>
#include <utility>

#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include "apps/console.hpp"
#include "apps/join_url.hpp"
#include "apps/membership.hpp"
#include "apps/progress.hpp"
#include "base/log.hpp"
#include "net/origin.hpp"
#include "worker/market_client.hpp"

namespace kvasir::apps {
namespace {

using std::chrono::milliseconds;

crypto::WallTime wall_now() {
    return std::chrono::floor<std::chrono::seconds>(std::chrono::system_clock::now());
}

bool has_cert(const ServerFlags& flags) {
    return !flags.tls_cert.empty();
}

// Also what is made when nothing is said: what nodes dial out to is never open by omission.
bool is_self_signed(const ServerFlags& flags) {
    return !has_cert(flags) && !flags.plain;
}

// What a certificate of ours must name.
std::vector<std::string> hosts_of(const ServerFlags& flags, const net::Endpoint& listen) {
    std::vector<std::string> hosts;
    if (!is_any_address(listen.host)) hosts.push_back(listen.host);
    const auto named = worker::parse_market_url(flags.public_url);
    if (!flags.public_url.empty() && named && named->tls) {
        // "https://HOST:PORT" as the address of a relay, which is parsed into its parts.
        if (const auto url = net::parse_url("wss" + named->base.substr(5)))
            hosts.push_back(url->host);
    }
    return hosts;
}

Result<std::shared_ptr<const net::TlsServer>> make_tls(const ServerFlags& flags,
                                                       const net::Endpoint& listen,
                                                       const std::string& state) {
    const bool files = has_cert(flags);
    const int ways = int{files} + int{flags.dev_tls} + int{flags.plain};
    if (ways > 1) {
        return fail(Errc::kUsage, "choose one of --tls-cert with --tls-key, --dev-tls and --plain");
    }
    if (flags.plain) return std::shared_ptr<const net::TlsServer>();
    if (files) return net::TlsServer::load(flags.tls_cert, flags.tls_key);
    if (!flags.dev_tls) {
        tell(
            "kvasir: no certificate given (--tls-cert with --tls-key): the port has a self-signed "
            "one, and invite codes carry its hash (--dev-tls says so without this line)\n");
    }
    return net::TlsServer::self_signed(state, hosts_of(flags, listen));
}

net::HttpLimits http_limits(const ServerFlags& flags) {
    net::HttpLimits limits;
    limits.body_bytes_max = coordinator::ServiceLimits().body_bytes_max;
    limits.connections_per_address_max = flags.per_address_max;
    return limits;
}

// What a node on another machine dials.
std::string choose_url(const ServerFlags& flags, const net::Endpoint& listen, uint16_t port) {
    if (!flags.public_url.empty()) return flags.public_url;
    const JoinUrl chosen = join_url(listen, port, flags.plain ? "http" : "https",
                                    net::own_addresses(), "--public-url");
    if (!chosen.hint.empty()) tell("kvasir: {}\n", chosen.hint);
    return chosen.url;
}

// What others are told to dial.
Status check_urls(const ServerFlags& flags) {
    if (!flags.public_url.empty()) {
        if (const auto url = worker::parse_market_url(flags.public_url); !url)
            return fail(Errc::kUsage, "--public-url: " + url.error().detail);
    }
    const std::string& relay = flags.relay_url;
    if (!relay.empty() && !relay.starts_with("ws://") && !relay.starts_with("wss://"))
        return fail(Errc::kUsage, "--relay-url: " + printable(relay) + " is no wss://HOST:PORT");
    if (const auto url = net::parse_url(relay); !relay.empty() && !url)
        return fail(Errc::kUsage, "--relay-url: " + url.error().detail);
    return {};
}

// Where nodes are sent for the model's bytes. These are checked whatever the line does, but no node
// follows from a port with TLS to one without, on this machine either; and on a plain line
// everybody in between reads who holds what.
Status check_origin(const ServerFlags& flags) {
    if (flags.origin.empty()) return {};
    std::string url = flags.origin;
    const std::string mark = "{file}";
    if (const size_t at = url.find(mark); at != url.npos) url.replace(at, mark.size(), "file");
    const auto origin = net::parse_origin(url);
    if (!origin) return fail(Errc::kUsage, "--origin: " + origin.error().detail);
    if (!origin->is_secure && !flags.plain) {
        return fail(Errc::kUsage, "--origin: " + printable(origin->text) +
                                      " has no TLS, and no node follows there from a port that "
                                      "has it; give https://HOST/FOLDER (http:// is taken with "
                                      "--plain)");
    }
    if (origin->has_query) {
        tell(
            "kvasir: what stands in --origin reaches every node, also after the question "
            "mark: a signature or token there is no secret from them (nodes can have "
            "credentials of their own: worker --origin-auth)\n");
    }
    return {};
}

}  // namespace

uint64_t relay_generation_now() {
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(
                                     std::chrono::system_clock::now().time_since_epoch())
                                     .count());
}

void add_server_flags(CLI::App& command, ServerFlags& flags) {
    command.add_option("-m,--model", flags.model_path, "the model (GGUF; any part of a set)")
        ->required();
    command.add_option("--listen", flags.listen, "HOST:PORT for market and relay")
        ->capture_default_str();
    command.add_option("--state", flags.state_dir,
                       "folder of database, keys and certificate (default: the user's)");
    command.add_option("--db", flags.db_path, "the database file (default: in --state)");
    auto* cert = command.add_option("--tls-cert", flags.tls_cert, "certificate chain (PEM)");
    auto* key = command.add_option("--tls-key", flags.tls_key, "its key (PEM)");
    cert->needs(key);
    key->needs(cert);
    command.add_flag("--dev-tls", flags.dev_tls,
                     "a self-signed certificate (the default); invite codes carry its hash");
    command.add_flag("--plain", flags.plain, "no TLS: one machine or a trusted LAN only");
    command.add_option("--public-url", flags.public_url,
                       "how nodes reach this port, if not as --listen");
    command.add_option("--origin", flags.origin,
                       "where nodes fetch the model's files instead of here: https://HOST/FOLDER "
                       "(every node sees it whole)");
    command.add_option("--name", flags.name, "of this market, for people");
    command.add_option("--replicas", flags.target_replicas, "copies of each expert to aim for")
        ->check(CLI::Range(1, 64))
        ->capture_default_str();
    command
        .add_option("--token-life", flags.token_life_s,
                    "seconds that a node's token is good for; nodes renew theirs in time")
        ->check(CLI::Range(5, 30 * 86400))
        ->capture_default_str();
    command
        .add_option("--lease-life", flags.lease_life_s,
                    "seconds after which what a silent worker held is given to others")
        ->check(CLI::Range(3, 86400))
        ->capture_default_str();
    command
        .add_option("--per-address", flags.per_address_max,
                    "connections of one address, of nodes and of HTTP each (behind a reverse "
                    "proxy: all of them)")
        ->check(CLI::Range(1, 60000))
        ->capture_default_str();
}

Result<std::unique_ptr<Servers>> Servers::start(const ServerFlags& flags, bool local_port) {
    if (Status ok = check_urls(flags); !ok) return tl::unexpected(ok.error());
    if (Status ok = check_origin(flags); !ok) return tl::unexpected(ok.error());
    auto listen = net::parse_listen(flags.listen);
    if (!listen) return tl::unexpected(listen.error());
    auto state = make_state_dir(flags.state_dir);
    if (!state) return tl::unexpected(state.error());
    auto tls = make_tls(flags, *listen, *state);
    if (!tls) return tl::unexpected(tls.error());

    std::unique_ptr<Servers> servers(new Servers);
    coordinator::MarketOptions market;
    market.model_path = flags.model_path;
    market.db_path = flags.db_path.empty() ? *state + "/market.db" : flags.db_path;
    market.key_path = *state + "/market.key";
    market.operator_path = *state + "/operator.secret";
    market.name = flags.name;
    market.origin = flags.origin;
    market.relay_url = flags.relay_url;
    market.token_life = servers->token_life_ = std::chrono::seconds(flags.token_life_s);
    market.rules.replicas_target = flags.target_replicas;
    market.rules.serving = std::chrono::seconds(flags.lease_life_s);
    if (is_self_signed(flags)) market.tls_pin = servers->tls_pin_ = (*tls)->pin();
    auto line = std::make_shared<ProgressLine>("hashing the model (once)");
    market.progress = [line](uint64_t done, uint64_t total) { line->show(done, total); };
    line.reset();  // the line ends with the options
    auto opened = coordinator::Market::open(std::move(market));
    if (!opened) return tl::unexpected(opened.error());
    servers->market_ = std::move(*opened);
    auto key = crypto::load_or_make_key(*state + "/market.key");
    if (!key) return tl::unexpected(key.error());
    servers->market_key_ = std::make_shared<crypto::KeyPair>(std::move(*key));

    uint16_t port = 0;
    coordinator::Market* of = servers->market_.get();
    if (flags.relay_url.empty()) {
        relay::RelayOptions options;
        options.tls = *tls;
        options.local_port = local_port;
        options.gate.market = of->key();
        options.gate.is_revoked = [of](uint64_t serial, const crypto::PublicKey&) {
            return of->is_revoked(serial);
        };
        options.http = of->handler();
        options.switchboard.generation_first = relay_generation_now();
        options.switchboard.connections_per_address_max = flags.per_address_max;
        options.http_limits = http_limits(flags);
        auto relay = relay::Relay::start(*listen, std::move(options));
        if (!relay) return tl::unexpected(relay.error());
        servers->relay_ = std::move(*relay);
        port = servers->relay_->port();
        of->on_revoked([relay = servers->relay_.get()](const crypto::PublicKey&,
                                                       const std::vector<uint64_t>& serials) {
            relay->revoke(serials);
        });
    } else {
        net::raise_descriptor_limit();
        net::ListenerOptions options;
        options.tls = *tls;
        options.http = of->handler();
        options.http_limits = http_limits(flags);
        auto made = net::Listener::make(
            *listen, [](net::MessageStream, const std::string&) {}, std::move(options));
        if (!made) return tl::unexpected(made.error());
        servers->listener_ = std::move(*made);
        port = servers->listener_->port();
    }
    servers->url_ = choose_url(flags, *listen, port);
    return servers;
}

Servers::~Servers() {
    if (market_) market_->on_revoked({});
    listener_.reset();
    relay_.reset();
}

std::optional<backbone::RelayHere> Servers::relay_here() const {
    if (!relay_) return std::nullopt;
    return backbone::RelayHere{relay_->event_fd(),
                               [relay = relay_.get()] { return relay->serve_ready(); }};
}

uint16_t Servers::local_port() const {
    return relay_ ? relay_->local_port() : uint16_t{0};
}

std::string Servers::join_line(const crypto::Invite& invite) const {
    return "join: kvasir worker --join " + url_ + " --invite " + crypto::to_string(invite) +
           " --budget 340M";
}

access::Credentials Servers::backbone_credentials(
    std::shared_ptr<const crypto::KeyPair> key) const {
    crypto::TokenClaims claims;
    claims.roles = crypto::kRoleBackbone;
    claims.name = "backbone";
    claims.node = key->public_key();
    claims.issued = wall_now();
    claims.expires = claims.issued + token_life_;
    claims.model_id = market_->model_id();
    std::string token = crypto::issue_token(*market_key_, claims);
    return {std::move(key), std::move(token), claims.name};
}

void Servers::drain(milliseconds within) {
    if (!relay_) return;
    relay_->drain(within, "");
    const auto end = net::Clock::now() + within + milliseconds(500);
    while (!relay_->drained() && net::Clock::now() < end) ::poll(nullptr, 0, 50);
}

}  // namespace kvasir::apps
