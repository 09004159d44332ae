#include "crypto/revocations.hpp"

#include "base/bytes.hpp"
#include "base/check.hpp"
#include "crypto/signed_text.hpp"

namespace kvasir::crypto {
namespace {

constexpr SignedTextKind kText = {"kvr1.", "revocations", "revocations",
                                  "check the market's address and key", kRevocationsBytesMax};
constexpr uint8_t kVersion = 1;

}  // namespace

std::string issue_revocations(const KeyPair& market, const Revocations& list) {
    KVASIR_CHECK(list.serials.size() <= kRevokedMax);
    ByteWriter out;
    out.u8(kVersion);
    out.u64(static_cast<uint64_t>(list.issued.time_since_epoch().count()));
    out.u32(static_cast<uint32_t>(list.serials.size()));
    for (const uint64_t serial : list.serials) out.u64(serial);
    return sign_text(kText, market, out.data());
}

Result<Revocations> open_revocations(std::string_view text, const PublicKey& market) {
    const auto malformed = [](const std::string& how) {
        return fail(Errc::kDenied, "revocations: " + how);
    };
    const auto payload = open_signed_text(kText, text, market);
    if (!payload) return tl::unexpected(payload.error());
    ByteReader in(*payload);
    if (const uint8_t version = in.u8(); version != kVersion) {
        return malformed("version " + std::to_string(version) +
                         ", this program knows 1; update it");
    }
    Revocations list;
    const auto issued = static_cast<int64_t>(in.u64());
    const uint32_t count = in.u32();
    if (in.failed() || in.remaining() != uint64_t{count} * 8) {
        return malformed("the count is wrong");
    }
    if (count > kRevokedMax) return malformed("more than " + std::to_string(kRevokedMax));
    if (issued < 0 || issued > kSecondsMax) return malformed("issued at no time of this era");
    list.issued = WallTime(std::chrono::seconds(issued));
    list.serials.reserve(count);
    for (uint32_t i = 0; i < count; ++i) {
        const uint64_t serial = in.u64();
        if (!list.serials.empty() && serial <= list.serials.back()) {
            return malformed("the serials do not ascend");
        }
        list.serials.push_back(serial);
    }
    return list;
}

}  // namespace kvasir::crypto
