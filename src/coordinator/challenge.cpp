#include "coordinator/challenge.hpp"

#include "base/bytes.hpp"
#include "crypto/mac.hpp"

namespace kvasir::coordinator {
namespace {

constexpr size_t kMacBytes = 32;

std::chrono::milliseconds since_start(market::TimePoint now) {
    return std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch());
}

}  // namespace

Challenges::Challenges() {
    crypto::fill_random(key_);
}

std::vector<uint8_t> Challenges::make(market::TimePoint now) const {
    ByteWriter out;
    out.u64(static_cast<uint64_t>(since_start(now).count()));
    crypto::fill_random(out.reserve(kBytes - 8 - kMacBytes));
    out.bytes(crypto::hmac_sha256(key_, out.data()));
    return out.take();
}

Status Challenges::check(std::span<const uint8_t> challenge, market::TimePoint now) const {
    const auto is_ours = [&] {
        if (challenge.size() != kBytes) return false;
        const auto mac = crypto::hmac_sha256(key_, challenge.first(kBytes - kMacBytes));
        return crypto::equal_constant_time(mac, challenge.last(kMacBytes));
    };
    if (!is_ours()) {
        return fail(Errc::kDenied,
                    "this market did not make that challenge (or has restarted since): ask for a "
                    "new one");
    }
    ByteReader in(challenge);
    const std::chrono::milliseconds age =
        since_start(now) - std::chrono::milliseconds(static_cast<int64_t>(in.u64()));
    if (age > kValid) return fail(Errc::kExpired, "the challenge is too old: ask for a new one");
    return {};
}

}  // namespace kvasir::coordinator
