// The bodies of the market's HTTP API, as values: requests decoded, replies encoded. The JSON
// itself stays in requests_json.cpp and replies_json.cpp; docs/market-api.md describes it.
//
// Used by the coordinator's service. Unknown fields are ignored; a field that is missing, of
// another type or out of range is kBadInput and named. Text of nodes and files passes printable(),
// and replies have no '<', '>' or '&' in them (they are \u escapes), so that no page or terminal
// can take them for markup.
// Thread: pure. Limits: the constants; the caller bounds the body.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "coordinator/registry.hpp"
#include "crypto/keys.hpp"
#include "crypto/token.hpp"
#include "market/leases.hpp"
#include "market/proof.hpp"

namespace kvasir::coordinator {

constexpr size_t kIdsMax = 4096;       // leases named in one request
constexpr size_t kSegmentsMax = 4096;  // of `have`, and of `begun`
constexpr size_t kAnswersMax = 4096;
constexpr uint32_t kInviteUsesMax = 1000000;
constexpr std::chrono::seconds kInviteLifeMax{366 * 86400};

using Nonce = std::array<uint8_t, 32>;

struct EnrollBody {
    crypto::Invite invite;
    crypto::PublicKey key;
    std::string name;
    uint8_t role_wanted = 0;  // 0: not said
    std::vector<uint8_t> challenge;
    crypto::Signature signature = {};
};
struct RenewBody {
    crypto::PublicKey key;
    std::vector<uint8_t> challenge;
    crypto::Signature signature = {};
};
struct AskBody {
    uint64_t budget_bytes = 0;
    std::vector<Segment> have, begun;
    uint32_t threads = 0;
};
struct ProveBody {  // either leases, or nonce and answers
    std::vector<uint64_t> leases;
    std::optional<Nonce> nonce;
    std::vector<Sha256> answers;
};
struct InviteBody {
    uint32_t uses = 1;
    std::chrono::seconds valid_for{86400};
    uint8_t roles = crypto::kRoleWorker;
};

// All errors: kBadInput.
Result<EnrollBody> decode_enroll(std::string_view body);
Result<RenewBody> decode_renew(std::string_view body);
Result<AskBody> decode_ask(std::string_view body);
Result<std::vector<market::Progress>> decode_progress(std::string_view body);
Result<ProveBody> decode_prove(std::string_view body);
Result<std::vector<uint64_t>> decode_heartbeat(std::string_view body);
// nullopt: all leases of the node (an empty body, or one that names none).
Result<std::optional<std::vector<uint64_t>>> decode_release(std::string_view body);
Result<InviteBody> decode_invite(std::string_view body);
Result<crypto::PublicKey> decode_revoke(std::string_view body);

struct MarketFacts {
    std::string name;
    crypto::PublicKey market_key;
    Sha256 model_id = {};
    std::string model_name;
    std::string arch;
    uint64_t bytes = 0;
    uint64_t experts = 0;
    uint64_t bytes_experts = 0;
    std::string relay_url;
    uint64_t outline_bytes = 0;
    Sha256 outline_sha256 = {};
    bool has_origin = false;
};
std::string encode_market(const MarketFacts& facts);
std::string encode_challenge(const std::vector<uint8_t>& challenge);
std::string encode_grant(const Grant& grant);
std::string encode_leases(const std::vector<market::Lease>& leases, market::TimePoint now,
                          std::chrono::seconds heartbeat_every);
std::string encode_renewal(const market::Renewal& renewal, market::TimePoint now);
std::string encode_probes(const Nonce& nonce, const std::vector<market::Probe>& probes);
std::string encode_proved(const market::Renewal& proved, market::TimePoint now,
                          std::chrono::seconds heartbeat_every);
struct BeatReply {
    market::Renewal renewal;
    std::optional<Grant> grant;
    bool has_gap = false;  // asking again would bring something that is needed
};
std::string encode_heartbeat(const BeatReply& reply, market::TimePoint now);
std::string encode_released(size_t count);
std::string encode_coverage(const market::CoverageMap& map, const Sha256& model_id);

struct NodeReport {
    NodeView node;
    uint64_t leases_loading = 0;
    uint64_t leases_serving = 0;
    uint64_t bytes_leased = 0;
};
std::string encode_nodes(const std::vector<NodeReport>& nodes, market::TimePoint now);
std::string encode_invite(const crypto::Invite& invite, const InviteBody& terms);
std::string encode_revoked(const crypto::PublicKey& node, size_t tokens);
// As net::error_response() writes errors, with the leases concerned.
std::string encode_proof_error(const Error& error, const std::vector<uint64_t>& wrong,
                               const std::vector<uint64_t>& released);

}  // namespace kvasir::coordinator
