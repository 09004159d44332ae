// MarketClient: the market's HTTP API as typed calls.
//
// Used by the agent and its tests. The market is believed only as far as it proves itself: the
// connection by certificate or pin (HttpClient), market key and outline by the invite. Every text
// and number of an answer is checked; texts for people pass printable(). Thread: one at a time.
// Owns: nothing, the HttpClient is the caller's. Limits: the constants below.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "crypto/keys.hpp"
#include "crypto/token.hpp"
#include "net/client.hpp"
#include "net/upgrade.hpp"

namespace kvasir::worker {

constexpr size_t kLeasesMax = 4096;
constexpr size_t kProbesMax = 4096;
constexpr uint64_t kProbeBytesMax = 1 << 20;

struct MarketInfo {
    std::string name;
    crypto::PublicKey market_key;
    Sha256 model_id = {};
    std::string model_name;
    uint64_t model_bytes = 0;
    std::string relay_url;  // as the market wrote it; empty: the market's own port
    std::string outline_path;
    uint64_t outline_bytes = 0;
    Sha256 outline_sha256 = {};
    std::string data_path;  // with "{shard}" in it
};

struct Grant {
    std::string node;  // for people
    std::string token;
    std::chrono::seconds expires_in{0};
    std::chrono::seconds renew_in{0};
};

struct NodeLease {
    uint64_t id = 0;
    Segment segment;
    uint64_t bytes = 0;
    std::chrono::seconds expires_in{0};
};
struct LeaseReply {
    std::vector<NodeLease> leases;
    std::chrono::seconds heartbeat_every{20};
};

struct LeaseProgress {
    uint64_t id = 0;
    uint64_t bytes_done = 0;
};
struct LeaseLife {
    uint64_t id = 0;
    std::chrono::seconds expires_in{0};
};
// What became of the leases that were named.
struct LeaseNews {
    std::vector<LeaseLife> leases;
    std::vector<uint64_t> lost;  // no longer ours
};
struct BeatReply {
    LeaseNews news;
    std::optional<Grant> grant;  // a newer token, sometimes
    bool has_more = false;       // asking for leases would bring some that are needed
};

struct ByteProbe {
    uint64_t lease = 0;
    uint32_t expert = 0;  // global id
    uint32_t tensor = 0;  // index into ExpertBank::tensors
    uint64_t offset = 0;  // in the slab
    uint64_t bytes = 0;
};
struct ProofTask {
    std::string nonce_hex;
    std::vector<uint8_t> nonce;
    std::vector<ByteProbe> probes;
};

// Where a market is: "https://HOST:PORT" or "http://HOST:PORT" (for tests and LANs).
struct MarketAddress {
    std::string base;  // scheme, host and port, no slash at the end
    bool tls = false;
};
// Errors: kUsage.
Result<MarketAddress> parse_market_url(const std::string& url);

// Errors: kUsage (an invite that pins a key, and an address without TLS).
Status check_address(const MarketAddress& address, const crypto::Invite& invite);

// Where the relay is: a URL, a path on the market's port, or (empty) that port. Errors: kProtocol.
Result<net::Endpoint> relay_endpoint(const MarketInfo& info, const MarketAddress& market);
// ClientTrust::advice of programs that join a market (worker, run).
constexpr const char* kTrustAdvice =
    "if it is the right one, trust it with --ca FILE (its CA's certificate) or, where it is the "
    "market's own, with --invite and a code that pins it (of a market with --dev-tls)";
// How the relay's certificate is judged by a node that trusts the market so: the pin is the key of
// the market's own port; a relay elsewhere has a certificate of its own, for the CAs to vouch for.
net::ClientTrust relay_trust(net::ClientTrust trust, const net::Endpoint& relay,
                             const MarketAddress& market);

// The URL of a shard's bytes; its credentials are MarketClient::bearer().
std::string data_url(const MarketAddress& address, const MarketInfo& info, uint32_t shard);

// A signed outline is kSignatureBytes of signature, then the outline. Errors: kDenied when the
// market of the invite has not signed it, kMismatch when it is not the one that `info` names.
constexpr size_t kSignatureBytes = sizeof(crypto::Signature);
Status check_outline(std::span<const uint8_t> signed_outline, const MarketInfo& info,
                     const crypto::PublicKey& market_key);

class MarketClient {
public:
    MarketClient(net::HttpClient& http, MarketAddress address)
        : http_(http), address_(std::move(address)) {}

    // All errors are those of HttpClient::call(), what the market says (its code and message;
    // kBusy for 429 and 503, kExpired for 401, kRevoked, ...), or kProtocol for an answer that is
    // not what the API says.
    Result<MarketInfo> look_up();
    // A signed outline that check_outline() accepts.
    Result<std::vector<uint8_t>> outline(const MarketInfo& info,
                                         const crypto::PublicKey& market_key);
    // `role`: what the node wants to be ("worker", "backbone"); an invite that does not make it one
    // is refused (kDenied) and stays unused.
    Result<Grant> enroll(const crypto::Invite& invite, const crypto::KeyPair& key,
                         const std::string& name, const std::string& role);
    Result<Grant> renew(const crypto::KeyPair& key);
    Result<LeaseReply> lease(uint64_t budget_bytes, const std::vector<Segment>& have,
                             const std::vector<Segment>& begun, uint32_t threads);
    Result<LeaseNews> progress(const std::vector<LeaseProgress>& leases);
    Result<ProofTask> ask_proof(const std::vector<uint64_t>& leases);
    // kMismatch: some bytes were wrong.
    Result<LeaseNews> prove(const ProofTask& task, const std::vector<Sha256>& answers);
    Result<BeatReply> heartbeat(const std::vector<uint64_t>& serving);
    Status release(const std::vector<uint64_t>& leases);  // empty: all

    void set_token(std::string token) { token_ = std::move(token); }
    const std::string& token() const { return token_; }
    net::HeaderList bearer() const;
    void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

private:
    Result<std::string> send(const std::string& method, const std::string& path,
                             const std::string& body, bool with_token);
    Result<std::string> challenge();

    net::HttpClient& http_;
    const MarketAddress address_;
    std::string token_;
    std::chrono::milliseconds timeout_{15000};
};

}  // namespace kvasir::worker
