#include "apps/market_pins.hpp"

#include <algorithm>
#include <string_view>

#include "apps/owner_file.hpp"
#include "base/log.hpp"
#include "crypto/hash.hpp"
#include "net/origin.hpp"

namespace kvasir::apps {
namespace {

constexpr size_t kMarketsMax = 256;
constexpr size_t kFileBytesMax = kMarketsMax * 512;

// Empty: no TLS, nothing to recognise.
std::string origin_of(const std::string& url) {
    const auto origin = net::parse_origin(url);
    return origin && origin->is_secure ? origin->text : std::string();
}

}  // namespace

Result<MarketPins> MarketPins::load(const std::string& state_dir) {
    MarketPins out(state_dir + "/market.pins");
    const auto file = read_owner_file(out.path_, kFileBytesMax);
    if (!file) return tl::unexpected(file.error());
    std::string_view text = *file ? std::string_view(**file) : std::string_view();
    while (!text.empty()) {
        const std::string_view line = text.substr(0, text.find('\n'));
        text.remove_prefix(std::min(line.size() + 1, text.size()));
        const size_t space = line.find(' ');
        const std::string url(line.substr(0, space));
        const auto pin =
            space == line.npos ? std::nullopt : crypto::parse_hex(line.substr(space + 1));
        if (!pin || url.empty() || origin_of(url) != url) {
            return fail(Errc::kBadInput,
                        printable(out.path_) +
                            ": is not what was written there; remove it, and give --invite again");
        }
        out.pins_.emplace_back(url, *pin);
    }
    return out;
}

std::optional<Sha256> MarketPins::find(const std::string& url) const {
    const std::string origin = origin_of(url);
    const auto at = std::ranges::find(pins_, origin, &std::pair<std::string, Sha256>::first);
    return at == pins_.end() ? std::nullopt : std::optional<Sha256>(at->second);
}

Status MarketPins::keep(const std::string& url, const std::optional<Sha256>& pin) {
    const std::string origin = origin_of(url);
    if (origin.empty() || find(url) == pin) return {};
    std::erase_if(pins_, [&origin](const auto& known) { return known.first == origin; });
    if (pin) pins_.emplace_back(origin, *pin);
    if (pins_.size() > kMarketsMax) pins_.erase(pins_.begin());
    std::string text;
    for (const auto& [known, its_pin] : pins_) text += known + " " + to_hex(its_pin) + "\n";
    return write_owner_file(path_, text, "the markets' pins");
}

}  // namespace kvasir::apps
