// Fuzz target: what a stranger hands over before it is let in: node tokens, invite codes, the
// frames of attaching.
//
// The first byte chooses; the rest is, read as text, a token, a list of revocations or an invite
// code; or the payload of one of the first two that the market signed (so that mutations get past
// the signature); or a whole message.
// What is accepted must come out of the encoder again as it went in.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/encoding.hpp"
#include "crypto/revocations.hpp"
#include "crypto/token.hpp"
#include "wire/attach.hpp"

namespace {

using namespace kvasir;

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "token_fuzz: %s\n", what);
    std::abort();
}

const crypto::KeyPair& market() {
    static const crypto::KeyPair pair = [] {
        std::array<uint8_t, 32> seed;
        seed.fill(7);
        return crypto::KeyPair::from_seed(seed).value();
    }();
    return pair;
}

void check_token(std::string_view text) {
    const auto claims = crypto::open_token(text, market().public_key());
    if (!claims) {
        require(claims.error().code == Errc::kDenied && !claims.error().detail.empty(), "error");
        return;
    }
    require(claims->name.size() <= crypto::kNameBytesMax, "name");
    require(crypto::issue_token(market(), *claims) == text, "a token with two spellings");
    for (const int64_t now : {int64_t{0}, int64_t{1750000000}, INT64_MAX, INT64_MIN}) {
        const auto at = crypto::WallTime(std::chrono::seconds(now));
        const Status status = crypto::check_time(*claims, at, std::chrono::seconds(120));
        require(status || !status.error().detail.empty(), "an error without words");
    }
}

void check_signed(std::span<const uint8_t> payload) {
    check_token("kvt1." + encode_base64url(payload) + "." +
                encode_base64url(market().sign("node-token", payload)));
}

void check_revocations(std::string_view text) {
    const auto list = crypto::open_revocations(text, market().public_key());
    if (!list) {
        require(list.error().code == Errc::kDenied && !list.error().detail.empty(), "error");
        return;
    }
    require(list->serials.size() <= crypto::kRevokedMax, "count");
    require(crypto::issue_revocations(market(), *list) == text, "a list with two spellings");
}

void check_signed_revocations(std::span<const uint8_t> payload) {
    check_revocations("kvr1." + encode_base64url(payload) + "." +
                      encode_base64url(market().sign("revocations", payload)));
}

void check_invite(std::string_view text) {
    const auto invite = crypto::parse_invite(text);
    if (!invite) {
        require(invite.error().code == Errc::kUsage, "code");
        return;
    }
    require(text.find(crypto::to_string(*invite)) != text.npos, "an invite with two spellings");
}

void same(const std::vector<uint8_t>& encoded, std::span<const uint8_t> payload) {
    require(std::ranges::equal(std::span(encoded).subspan(wire::kFrameHeaderBytes), payload),
            "encoded bytes differ");
}

void check_payload(std::span<const uint8_t> payload) {
    if (const auto value = wire::decode_nonce(payload)) same(wire::encode_nonce(*value), payload);
    if (const auto value = wire::decode_attach(payload);
        value && value->minor <= wire::kProtocolMinor) {
        same(wire::encode_attach(*value), payload);
        const auto statement = wire::attach_statement({}, wire::Role::kWorker, *value);
        require(statement.size() == 32 + 1 + 4 + 32 + 2 + value->token.size(), "statement");
    }
    if (const auto value = wire::decode_attached(payload);
        value && value->minor <= wire::kProtocolMinor) {
        same(wire::encode_attached(*value), payload);
    }
    if (const auto value = wire::decode_peer_up(payload)) {
        same(wire::encode_peer_up(*value), payload);
    }
    if (const auto value = wire::decode_peer_down(payload)) {
        same(wire::encode_peer_down(*value), payload);
    }
    if (const auto value = wire::decode_move(payload)) same(wire::encode_move(*value), payload);
    if (const auto value = wire::decode_renew(payload)) {
        same(wire::encode_renew(*value, 1), payload);
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size == 0) return 0;
    const std::span<const uint8_t> rest(data + 1, size - 1);
    const std::string_view text(reinterpret_cast<const char*>(rest.data()), rest.size());
    switch (data[0]) {
        case 't':
            check_token(text);
            break;
        case 's':
            check_signed(rest);
            break;
        case 'r':
            check_revocations(text);
            break;
        case 'l':
            check_signed_revocations(rest);
            break;
        case 'i':
            check_invite(text);
            break;
        default:
            check_payload(rest);
            break;
    }
    return 0;
}
