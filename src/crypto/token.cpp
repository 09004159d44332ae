#include "crypto/token.hpp"

#include <algorithm>
#include <ctime>

#include "base/bytes.hpp"
#include "base/encoding.hpp"
#include "base/log.hpp"
#include "crypto/hash.hpp"
#include "crypto/signed_text.hpp"

namespace kvasir::crypto {
namespace {

constexpr SignedTextKind kTokenText = {"kvt1.", "node-token", "node token",
                                       "join again for a new one", kTokenBytesMax};
constexpr uint8_t kTokenVersion = 1;

constexpr std::string_view kInvitePrefix = "kvi1-";
constexpr uint8_t kFlagPin = 1;
constexpr size_t kChecksumBytes = 4;

template <size_t N>
bool read_array(ByteReader& in, std::array<uint8_t, N>& out) {
    const auto view = in.bytes(N);
    if (view.size() != N) return false;
    std::ranges::copy(view, out.begin());
    return true;
}

// "2026-07-01 12:00:00 UTC"
std::string time_text(int64_t seconds) {
    const auto at = static_cast<std::time_t>(std::clamp<int64_t>(seconds, 0, kSecondsMax));
    std::tm parts = {};
    ::gmtime_r(&at, &parts);
    char text[32] = {};
    std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", &parts);
    return text;
}

// "90 s", "5 min", "3 h", "2 days": the largest unit of which there are at least two.
std::string span_text(int64_t seconds) {
    if (seconds >= 2 * 86400) return std::to_string(seconds / 86400) + " days";
    if (seconds >= 2 * 3600) return std::to_string(seconds / 3600) + " h";
    if (seconds >= 2 * 60) return std::to_string(seconds / 60) + " min";
    return std::to_string(seconds) + " s";
}

int64_t seconds_of(WallTime time) {
    return std::clamp<int64_t>(time.time_since_epoch().count(), 0, kSecondsMax);
}

Result<TokenClaims> decode_claims(std::span<const uint8_t> payload) {
    const auto malformed = [](std::string_view what) {
        return fail(Errc::kDenied, "node token: " + std::string(what));
    };
    ByteReader in(payload);
    if (const uint8_t version = in.u8(); version != kTokenVersion) {
        return malformed("version " + std::to_string(version) +
                         ", this program knows 1; update it");
    }
    TokenClaims claims;
    claims.roles = in.u8();
    const uint16_t name_bytes = in.u16();
    if (name_bytes > kNameBytesMax) return malformed("the name is longer than 64 bytes");
    claims.name = in.text(name_bytes);
    read_array(in, claims.node.bytes);
    claims.serial = in.u64();
    const auto issued = static_cast<int64_t>(in.u64());
    const auto expires = static_cast<int64_t>(in.u64());
    read_array(in, claims.model_id);
    if (in.failed()) return malformed("the payload is cut off");
    if (!in.finished()) return malformed("the payload has bytes left over");
    if (issued < 0 || issued > kSecondsMax) return malformed("issued at no time of this era");
    if (expires < 0 || expires > kSecondsMax) return malformed("expires at no time of this era");
    claims.issued = WallTime(std::chrono::seconds(issued));
    claims.expires = WallTime(std::chrono::seconds(expires));
    return claims;
}

std::string_view trim(std::string_view text) {
    constexpr std::string_view kSpace = " \t\r\n";
    const size_t first = text.find_first_not_of(kSpace);
    if (first == std::string_view::npos) return {};
    return text.substr(first, text.find_last_not_of(kSpace) - first + 1);
}

}  // namespace

std::string issue_token(const KeyPair& market, const TokenClaims& claims) {
    const std::string_view name = std::string_view(claims.name).substr(0, kNameBytesMax);
    ByteWriter out;
    out.u8(kTokenVersion);
    out.u8(claims.roles);
    out.u16(static_cast<uint16_t>(name.size()));
    // One by one: g++ 12 warns of a bulk insert into a buffer whose size it thinks it knows.
    for (const char c : name) out.u8(static_cast<uint8_t>(c));
    out.bytes(claims.node.bytes);
    out.u64(claims.serial);
    out.u64(static_cast<uint64_t>(seconds_of(claims.issued)));
    out.u64(static_cast<uint64_t>(seconds_of(claims.expires)));
    out.bytes(claims.model_id);
    return sign_text(kTokenText, market, out.data());
}

Result<TokenClaims> open_token(std::string_view text, const PublicKey& market) {
    const auto payload = open_signed_text(kTokenText, text, market);
    if (!payload) return tl::unexpected(payload.error());
    return decode_claims(*payload);
}

Status check_time(const TokenClaims& claims, WallTime now, std::chrono::seconds leeway) {
    const int64_t issued = seconds_of(claims.issued);
    const int64_t expires = seconds_of(claims.expires);
    const int64_t clock = seconds_of(now);
    const int64_t allowed = std::clamp<int64_t>(leeway.count(), 0, kSecondsMax);
    if (issued - clock > allowed) {
        return fail(Errc::kDenied, "node token: issued " + span_text(issued - clock) +
                                       " in the future by this machine's clock (" +
                                       time_text(clock) + "); set its clock");
    }
    if (clock >= expires) {
        return fail(Errc::kExpired, "node token: expired at " + time_text(expires) + ", " +
                                        span_text(clock - expires) + " ago; renew it");
    }
    return {};
}

std::string to_string(const Invite& invite) {
    ByteWriter out;
    out.u8(invite.tls_pin ? kFlagPin : 0);
    out.bytes(invite.secret);
    out.bytes(invite.market.bytes);
    if (invite.tls_pin) out.bytes(*invite.tls_pin);
    out.bytes(std::span<const uint8_t>(sha256(out.data())).first(kChecksumBytes));
    return std::string(kInvitePrefix) + encode_base64url(out.data());
}

Result<Invite> parse_invite(std::string_view text) {
    const auto refuse = [](std::string_view what) {
        return fail(Errc::kUsage, "invite code: " + std::string(what) + "; copy the whole of it");
    };
    text = trim(text);
    if (!text.starts_with(kInvitePrefix)) return refuse("an invite code begins with 'kvi1-'");
    const auto data = decode_base64url(text.substr(kInvitePrefix.size()));
    Invite invite;
    const size_t bytes_plain =
        1 + invite.secret.size() + invite.market.bytes.size() + kChecksumBytes;
    if (text.size() > 2 * (bytes_plain + sizeof(Sha256))) return refuse("longer than one can be");
    if (!data) return refuse("it is cut off, or a letter is wrong");
    if (data->size() < bytes_plain) return refuse("it is cut off");
    const auto body = std::span<const uint8_t>(*data).first(data->size() - kChecksumBytes);
    const auto checksum = std::span<const uint8_t>(*data).last(kChecksumBytes);
    const Sha256 digest = sha256(body);
    if (!std::ranges::equal(checksum, std::span<const uint8_t>(digest).first(kChecksumBytes))) {
        return refuse("it is cut off, or a letter is wrong");
    }
    ByteReader in(body);
    const uint8_t flags = in.u8();
    if ((flags & ~kFlagPin) != 0) {
        return fail(Errc::kUsage, "invite code: made by a newer version; update this program");
    }
    read_array(in, invite.secret);
    read_array(in, invite.market.bytes);
    if ((flags & kFlagPin) != 0 && !read_array(in, invite.tls_pin.emplace())) {
        return refuse("it is cut off");
    }
    if (!in.finished()) return refuse("it has bytes left over");
    return invite;
}

}  // namespace kvasir::crypto
