// Market: the market server's role. An HTTP handler over the rules of leases, the registry of nodes
// and the database; a Listener of net gives it a port.
//
// Used by the program (`kvasir market`, `kvasir up`) and, in the same process, by a relay that asks
// it about tokens. docs/market-api.md describes the HTTP API.
// Thread: all methods and the handler from any thread; the callbacks come on the market's own
// thread and must not call back. Owns: three threads (rules, database, file reads), the model's
// files, a lock on the database (one market per database). Limits: ServiceLimits; queue_max
// requests waiting, more are answered kBusy.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "coordinator/clocks.hpp"
#include "coordinator/service.hpp"
#include "crypto/keys.hpp"
#include "crypto/token.hpp"
#include "market/leases.hpp"
#include "market/storage.hpp"
#include "moe/hash_ranges.hpp"
#include "net/http.hpp"

namespace kvasir::coordinator {

struct MarketOptions {
    std::string model_path;     // any part of a split model
    std::string db_path;        // made if it is not there
    std::string key_path;       // the market's key; made if it is not there
    std::string operator_path;  // the operator's secret, made if not there; empty: db_path.operator
    std::string name;           // for people
    // Where the model's files are instead of here: "https://HOST/FOLDER", to which the file's name
    // is added, or a URL with "{file}" in it. Nodes are sent there, without any credentials of
    // ours.
    std::string origin;
    std::string relay_url;          // empty: the same address
    std::optional<Sha256> tls_pin;  // put into invites
    std::string cache_dir;          // of manifests; empty: the user's
    moe::Progress progress;         // while the manifest is computed
    std::chrono::seconds token_life{3600};
    market::LeaseRules rules;
    ServiceLimits limits;
    size_t queue_max = 1024;  // requests waiting for the market's thread
    Clocks clocks;
};

class Market {
public:
    // Errors: those of the model (moe::open_model), key and database; kEnvironment (another market
    // uses this database), kUsage (origin).
    static Result<std::unique_ptr<Market>> open(MarketOptions options);
    // The same over a storage that is open already (tests of failing disks).
    static Result<std::unique_ptr<Market>> open_over(MarketOptions options,
                                                     std::unique_ptr<market::Storage> storage);
    ~Market();  // finishes what is queued

    // May be called after the market is gone: then it answers kClosed.
    net::HttpHandler handler();

    const crypto::PublicKey& key() const;
    const Sha256& model_id() const;
    // Errors: those of storage.
    Result<crypto::Invite> make_invite(uint32_t uses, std::chrono::seconds valid_for,
                                       uint8_t roles = crypto::kRoleWorker);
    // Takes back the node's tokens and leases. Errors: kNotFound, those of storage.
    Status revoke(const crypto::PublicKey& node);
    // A token that this market gave, still good. Errors: kDenied, kExpired, kRevoked, kMismatch.
    Result<crypto::TokenClaims> open_token(std::string_view text) const;
    bool is_revoked(uint64_t serial) const;
    using OnRevoked =
        std::function<void(const crypto::PublicKey& node, const std::vector<uint64_t>& serials)>;
    void on_revoked(OnRevoked callback);
    // Errors: kBusy, kClosed.
    Result<market::CoverageMap> coverage();
    // Writes what the database does not have yet, as the destructor does: for a process that ends
    // without one. Errors: kBusy, kClosed, those of storage.
    Status save();

private:
    struct Impl;
    explicit Market(std::shared_ptr<Impl> impl);
    std::shared_ptr<Impl> impl_;
};

}  // namespace kvasir::coordinator
