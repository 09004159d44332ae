// libggml-kvasir.so: what ggml looks up when it loads the module (GGML_BACKEND_PATH).
//
// Configuration by environment, because an unmodified llama.cpp program has no flags of ours:
// KVASIR_MODEL: the GGUF that the program runs (any part of a set); unset: no workers.
// KVASIR_LISTEN: HOST:PORT where workers may join (default 127.0.0.1:8377); empty: nobody may.
// KVASIR_RELAY: ws://HOST:PORT or wss://HOST:PORT of a relay that more workers come through, with
//   KVASIR_KEY_FILE and KVASIR_TOKEN_FILE (this backbone's key, and its token: read again at every
//   attempt to attach, and before it ends) and, for wss, KVASIR_CA_FILE (PEM; default: the system's
//   roots).
// KVASIR_EXACT: strict (default) or any.
// KVASIR_KERNELS: on (default), or off: ggml computes what is computed here.
// KVASIR_LOG: debug, info, warn (default), error or off: lines on stderr.
// The hub is ready before the model loads; workers are checked as soon as the graphs are known.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "backbone/backbone.hpp"
#include "base/log.hpp"
#include "crypto/keys.hpp"
#include "ggml-backend-impl.h"
#include "plugin/device.hpp"

namespace {

using namespace kvasir;

std::string environment(const char* name, const char* fallback) {
    const char* value = std::getenv(name);
    return value != nullptr ? value : fallback;
}

void print_line(LogLevel level, std::string_view component, std::string_view line) {
    constexpr std::string_view kNames[] = {"debug", "info", "warn", "error"};
    const std::string_view name = kNames[static_cast<size_t>(level)];
    std::fprintf(stderr, "kvasir %.*s: %.*s: %.*s\n", static_cast<int>(name.size()), name.data(),
                 static_cast<int>(component.size()), component.data(),
                 static_cast<int>(line.size()), line.data());
}

void install_log() {
    const std::string level = environment("KVASIR_LOG", "warn");
    if (level == "off") return;
    const LogLevel lowest = level == "debug"   ? LogLevel::kDebug
                            : level == "info"  ? LogLevel::kInfo
                            : level == "error" ? LogLevel::kError
                                               : LogLevel::kWarn;
    set_log_sink(print_line, lowest);
}

std::string first_line(const std::string& path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    return line;
}

// Errors: kUsage (address), kEnvironment (files).
Result<backbone::UplinkOptions> relay_from_environment(const std::string& url) {
    auto endpoint = net::parse_url(url);
    if (!endpoint) return tl::unexpected(endpoint.error());
    const std::string key_path = environment("KVASIR_KEY_FILE", "");
    const std::string token_path = environment("KVASIR_TOKEN_FILE", "");
    if (key_path.empty() || token_path.empty()) {
        return fail(Errc::kUsage, "KVASIR_RELAY needs KVASIR_KEY_FILE and KVASIR_TOKEN_FILE");
    }
    auto key = crypto::load_or_make_key(key_path);
    if (!key) return tl::unexpected(key.error());
    net::ClientTrust trust;
    trust.ca_file = environment("KVASIR_CA_FILE", "");
    trust.advice = "KVASIR_CA_FILE names the file of its CA's certificate";
    auto tls = net::TlsClient::make(trust);
    if (!tls) return tl::unexpected(tls.error());
    backbone::UplinkOptions uplink;
    uplink.endpoint = *endpoint;
    uplink.tls = *tls;
    uplink.tls_for = [tls = *tls](const net::Endpoint&) {
        return Result<std::shared_ptr<const net::TlsClient>>(tls);
    };
    uplink.credentials = [key = std::make_shared<const crypto::KeyPair>(std::move(*key)),
                          token_path] {
        return access::Credentials{key, first_line(token_path), "llama.cpp"};
    };
    return uplink;
}

// Null when there is nothing to connect to; the program then runs as if alone.
backbone::Backbone* start_backbone() {
    backbone::Options options;
    options.model_path = environment("KVASIR_MODEL", "");
    options.listen = environment("KVASIR_LISTEN", "127.0.0.1:8377");
    options.exact_strict = environment("KVASIR_EXACT", "strict") != "any";
    if (environment("KVASIR_KERNELS", "on") == "off")
        options.compute_with = engine::ComputeWith::kGraph;
    if (options.model_path.empty()) {
        log(LogLevel::kWarn, "plugin",
            "KVASIR_MODEL is not set: no worker can join, experts are computed here");
        return nullptr;
    }
    if (const std::string url = environment("KVASIR_RELAY", ""); !url.empty()) {
        auto relay = relay_from_environment(url);
        if (relay) {
            options.relays.push_back(std::move(*relay));
        } else {
            log(LogLevel::kError, "plugin", relay.error().detail);
        }
    }
    auto backbone = backbone::Backbone::start(options);
    if (!backbone) {
        log(LogLevel::kError, "plugin", backbone.error().detail + "; experts are computed here");
        return nullptr;
    }
    if ((*backbone)->port() != 0) {
        log(LogLevel::kInfo, "plugin",
            "workers may join on port " + std::to_string((*backbone)->port()));
    }
    // Lives as long as the process: contexts may outlive every destructor that could run here.
    return backbone->release();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init() {
    try {
        install_log();
        return plugin::make_registry(start_backbone());
    } catch (const std::exception& error) {
        std::fprintf(stderr, "kvasir error: plugin: %s\n", error.what());
        return plugin::make_registry(nullptr);
    }
}
