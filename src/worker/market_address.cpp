// The parts of the market client that need no JSON: addresses, and whose an outline is.
#include <algorithm>
#include <string_view>

#include "base/log.hpp"
#include "crypto/hash.hpp"
#include "worker/market_client.hpp"

namespace kvasir::worker {

Result<MarketAddress> parse_market_url(const std::string& url) {
    const bool is_http = url.rfind("http://", 0) == 0;
    if (!is_http && url.rfind("https://", 0) != 0) {
        return fail(Errc::kUsage, "'" + printable(url) +
                                      "' is no market's address: give https://HOST:PORT as the "
                                      "join line has it");
    }
    auto endpoint = net::parse_url(url);
    if (!endpoint) return tl::unexpected(endpoint.error());
    MarketAddress address;
    address.tls = !is_http;
    const size_t host = url.find("://") + 3;
    const size_t path = url.find('/', host);
    if (path != std::string::npos && path + 1 != url.size()) {
        return fail(Errc::kUsage, "'" + printable(url) + "': a market's address has no path");
    }
    address.base = url.substr(0, path);
    return address;
}

Status check_address(const MarketAddress& address, const crypto::Invite& invite) {
    if (!invite.tls_pin || address.tls) return {};
    return fail(Errc::kUsage,
                "the invite code is for a market behind TLS: give its address "
                "as https://HOST:PORT");
}

Result<net::Endpoint> relay_endpoint(const MarketInfo& info, const MarketAddress& market) {
    std::string url = info.relay_url;
    if (url.empty()) url = market.base;
    if (url.front() == '/') url = market.base + url;
    auto endpoint = net::parse_url(url);
    if (endpoint) return endpoint;
    return fail(Errc::kProtocol,
                "the market names no usable relay: " + printable(endpoint.error().detail));
}

net::ClientTrust relay_trust(net::ClientTrust trust, const net::Endpoint& relay,
                             const MarketAddress& market) {
    const auto own = net::parse_url(market.base);
    const bool is_same =
        own && own->host == relay.host && own->port == relay.port && own->tls == relay.tls;
    if (!is_same) trust.pin.reset();
    return trust;
}

std::string data_url(const MarketAddress& address, const MarketInfo& info, uint32_t shard) {
    constexpr std::string_view kMark = "{shard}";
    std::string path = info.data_path;
    path.replace(path.find(kMark), kMark.size(), std::to_string(shard));
    return address.base + path;
}

Status check_outline(std::span<const uint8_t> signed_outline, const MarketInfo& info,
                     const crypto::PublicKey& market_key) {
    crypto::Signature signature = {};
    if (signed_outline.size() < signature.size())
        return fail(Errc::kMismatch, "the model's outline is cut off");
    std::copy_n(signed_outline.begin(), signature.size(), signature.begin());
    const auto outline = signed_outline.subspan(signature.size());
    if (!crypto::verify(market_key, "outline", outline, signature)) {
        return fail(Errc::kDenied,
                    "the model's outline is not signed by the market of the invite code: somebody "
                    "else answers in its place");
    }
    if (outline.size() != info.outline_bytes || crypto::sha256(outline) != info.outline_sha256)
        return fail(Errc::kMismatch, "the model's outline is not the one that the market names");
    return {};
}

}  // namespace kvasir::worker
