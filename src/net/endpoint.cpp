// parse_url and parse_listen: text from a command line to an Endpoint.
#include <algorithm>
#include <charconv>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

#include "base/log.hpp"
#include "net/upgrade.hpp"

namespace kvasir::net {
namespace {

constexpr size_t kHostBytesMax = 253;

std::string quoted(std::string_view text) {
    return "\"" + printable(text) + "\"";
}

// Only characters that belong in a request line and a Host header: no spaces, no control bytes.
bool plain(std::string_view text) {
    for (const char c : text) {
        if (c <= ' ' || c > '~') return false;
    }
    return true;
}

Result<uint16_t> parse_port(std::string_view text, std::string_view whole) {
    unsigned value = 0;
    const auto [end, ec] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (text.empty() || ec != std::errc() || end != text.data() + text.size() || value > 65535) {
        return fail(
            Errc::kUsage,
            quoted(whole) + ": the port must be a number from 0 to 65535, not " + quoted(text));
    }
    return static_cast<uint16_t>(value);
}

struct HostPort {
    std::string host;
    std::string_view port;
};

// "HOST:PORT" or "[V6]:PORT", split; the host without brackets.
Result<HostPort> split(std::string_view text, std::string_view whole) {
    if (text.starts_with('[')) {
        const size_t close = text.find(']');
        if (close == std::string_view::npos || close + 1 >= text.size() || text[close + 1] != ':') {
            return fail(Errc::kUsage, quoted(whole) + ": write an IPv6 address as [ADDRESS]:PORT");
        }
        if (close == 1) return fail(Errc::kUsage, quoted(whole) + ": empty brackets");
        return HostPort{std::string(text.substr(1, close - 1)), text.substr(close + 2)};
    }
    const size_t colon = text.find(':');
    if (colon == std::string_view::npos) {
        return fail(Errc::kUsage, quoted(whole) + ": the port is missing, write HOST:PORT");
    }
    if (text.find(':', colon + 1) != std::string_view::npos) {
        return fail(Errc::kUsage,
                    quoted(whole) + ": more than one colon, write an IPv6 address in brackets");
    }
    return HostPort{std::string(text.substr(0, colon)), text.substr(colon + 1)};
}

Result<Endpoint> parse_host_port(std::string_view text, std::string_view whole) {
    auto parts = split(text, whole);
    if (!parts) return tl::unexpected(std::move(parts.error()));
    if (!plain(parts->host) || parts->host.size() > kHostBytesMax) {
        return fail(Errc::kUsage, quoted(whole) + ": that is not a host name");
    }
    auto port = parse_port(parts->port, whole);
    if (!port) return tl::unexpected(std::move(port.error()));
    Endpoint endpoint;
    endpoint.host = std::move(parts->host);
    endpoint.port = *port;
    return endpoint;
}

}  // namespace

Result<Endpoint> parse_url(const std::string& url) {
    constexpr std::pair<std::string_view, bool> kSchemes[] = {
        {"ws://", false}, {"wss://", true}, {"http://", false}, {"https://", true}};
    const auto scheme = std::find_if(std::begin(kSchemes), std::end(kSchemes), [&url](auto& entry) {
        return std::string_view(url).starts_with(entry.first);
    });
    if (scheme == std::end(kSchemes)) {
        return fail(Errc::kUsage,
                    quoted(url) + ": must start with ws:// or wss://, as in ws://HOST:PORT");
    }
    std::string_view rest = url;
    rest.remove_prefix(scheme->first.size());
    const size_t end = std::min(rest.find_first_of("/?#"), rest.size());
    const std::string_view path = rest.substr(end);
    std::string authority(rest.substr(0, end));
    if (authority.find('@') != std::string::npos) {
        return fail(Errc::kUsage, quoted(url) + ": user names do not belong into an address");
    }
    const bool has_port = authority.starts_with('[') ? authority.find(']') != authority.size() - 1
                                                     : authority.find(':') != std::string::npos;
    if (!has_port) authority += scheme->second ? ":443" : ":80";
    auto endpoint = parse_host_port(authority, url);
    if (!endpoint) return endpoint;
    endpoint->tls = scheme->second;
    if (endpoint->host.empty()) return fail(Errc::kUsage, quoted(url) + ": the host is missing");
    if (endpoint->port == 0) return fail(Errc::kUsage, quoted(url) + ": port 0 cannot be dialed");
    if (!plain(path) || path.find('#') != std::string_view::npos) {
        return fail(Errc::kUsage, quoted(url) + ": the path has illegal characters");
    }
    if (path.starts_with('?')) {
        return fail(Errc::kUsage, quoted(url) + ": write the path before the question mark");
    }
    if (path.size() > 1) endpoint->path = std::string(path);
    return endpoint;
}

Result<Endpoint> parse_listen(const std::string& address) {
    if (address.find('/') != std::string::npos) {
        return fail(Errc::kUsage,
                    quoted(address) + ": write HOST:PORT or :PORT, without a scheme and path");
    }
    return parse_host_port(address, address);
}

}  // namespace kvasir::net
