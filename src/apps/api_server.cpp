#include "apps/api_server.hpp"

#include <unistd.h>
#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <functional>
#include <memory>
#include <string_view>
#include <system_error>
#include <utility>

#include <fmt/core.h>

#include "apps/child_process.hpp"
#include "apps/console.hpp"
#include "apps/membership.hpp"
#include "apps/owner_file.hpp"
#include "apps/plugin_path.hpp"
#include "base/log.hpp"
#include "engine/runtime.hpp"

namespace kvasir::apps {
namespace {

constexpr int kTokensPerLife = 6;  // the plugin reads the newest when it needs one
constexpr auto kStopTime = std::chrono::seconds(5);
constexpr time_t kLookSeconds = 1;

bool is_program(const std::filesystem::path& path) {
    std::error_code error;
    return std::filesystem::is_regular_file(path, error) && ::access(path.c_str(), X_OK) == 0;
}

// Only one of the same llama.cpp gives the bits that workers are checked against; the one beside
// libllama is.
Result<std::string> find_llama_server(const std::string& wanted) {
    if (!wanted.empty() && is_program(wanted)) return wanted;
    if (!wanted.empty()) {
        return fail(Errc::kEnvironment,
                    "--llama-server " + printable(wanted) + ": not a program that can be run");
    }
    const auto beside = std::filesystem::path(engine::ggml_folder()) / "llama-server";
    if (is_program(beside)) return beside.string();
    const char* path = std::getenv("PATH");
    std::string folders = path != nullptr ? path : "";
    while (!folders.empty()) {
        const size_t colon = folders.find(':');
        const auto candidate = std::filesystem::path(folders.substr(0, colon)) / "llama-server";
        if (is_program(candidate)) return candidate.string();
        folders = colon == std::string::npos ? "" : folders.substr(colon + 1);
    }
    return fail(Errc::kEnvironment,
                "no llama-server is in " + beside.parent_path().string() +
                    " or in PATH: make it there with `tools/llama.sh build extra` (and the "
                    "KVASIR_CACHE that the build had, if it had one), or name one of llama.cpp "
                    "v0.5.0 with --llama-server");
}

// Of HOST:PORT, as it may stand in an address; nothing is everywhere.
std::string shown_host(const std::string& address) {
    const std::string host = address.substr(0, address.rfind(':'));
    return host.empty() ? "0.0.0.0" : host;
}

// Tells where the API is once llama-server says that it listens: it may have chosen the port.
std::function<void(std::string_view)> announce(const std::string& host) {
    return [host, told = false](std::string_view line) mutable {
        const size_t at = line.find("listening on http://");
        const size_t colon = line.rfind(':');
        if (told || at == std::string_view::npos || colon == std::string_view::npos) return;
        const std::string_view port = line.substr(colon + 1);
        const size_t digits = std::min(port.find_first_not_of("0123456789"), port.size());
        if (digits == 0) return;
        told = true;
        tell("api: http://{}:{}/v1\n", host, port.substr(0, digits));
    };
}

}  // namespace

Result<ApiServerParts> find_api_server(const std::string& program, const std::string& address) {
    auto found = find_llama_server(program);
    if (!found) return tl::unexpected(found.error());
    auto plugin = find_plugin();
    if (!plugin) return tl::unexpected(plugin.error());
    auto listen = net::parse_listen(address);
    if (!listen) return tl::unexpected(listen.error());
    return ApiServerParts{std::move(*found), std::move(*plugin), std::move(*listen)};
}

Status run_api_server(const ApiServerOptions& options, Servers& servers) {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
    const auto state = make_state_dir(options.state_dir);
    if (!state) return tl::unexpected(state.error());
    const std::string key_path = *state + "/backbone.key";
    auto made = crypto::load_or_make_key(key_path);
    if (!made) return tl::unexpected(made.error());
    const auto key = std::make_shared<const crypto::KeyPair>(std::move(*made));
    const std::string token_path = *state + "/backbone.token";
    const auto write_token = [&] {
        return write_owner_file(token_path, servers.backbone_credentials(key).token,
                                "llama-server's token");
    };
    if (Status ok = write_token(); !ok) return ok;

    const net::Endpoint& listen = options.parts.listen;
    ChildOptions child;
    child.program = options.parts.program;
    child.label = "llama-server";
    child.arguments = {"-m",
                       options.model_path,
                       "--no-repack",
                       "-t",
                       std::to_string(options.threads),
                       "--host",
                       listen.host.empty() ? "0.0.0.0" : listen.host,
                       "--port",
                       std::to_string(listen.port)};
    child.environment = {
        "GGML_BACKEND_PATH=" + options.parts.plugin,
        "KVASIR_MODEL=" + options.model_path,
        "KVASIR_LISTEN=",
        "KVASIR_RELAY=ws://127.0.0.1:" + std::to_string(servers.local_port()),
        "KVASIR_KEY_FILE=" + key_path,
        "KVASIR_TOKEN_FILE=" + token_path,
        "KVASIR_EXACT=" + options.exact,
    };
    child.on_line = announce(shown_host(options.address));
    auto process = ChildProcess::start(child);
    if (!process) return tl::unexpected(process.error());
    const auto token_every = std::chrono::milliseconds(servers.token_life()) / kTokensPerLife;
    auto next_token = net::Clock::now() + token_every;
    const timespec look = {kLookSeconds, 0};
    while (::sigtimedwait(&signals, nullptr, &look) <= 0) {
        if (const auto ended = process->poll()) {
            return fail(Errc::kClosed, "llama-server ended with " + ended->describe() + ": " +
                                           process->last_words());
        }
        if (net::Clock::now() < next_token) continue;
        next_token = net::Clock::now() + token_every;
        if (Status ok = write_token(); !ok) {
            log(LogLevel::kWarn, "up", ok.error().detail);
        }
    }
    tell("up: ending llama-server and telling nodes to come again\n");
    process->stop(kStopTime);
    servers.drain(kStopTime);
    return {};
}

}  // namespace kvasir::apps
