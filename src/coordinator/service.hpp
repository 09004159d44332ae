// The market's answers: a function from HTTP request to HTTP response over rules and storage.
//
// Used by Market, which gives it a thread. answer_at_once() is for what never changes or needs no
// rules (facts, outline, challenges); everything else belongs to the market's thread, where
// storage may make it wait. Only the bytes of proofs are read elsewhere, on the disk's thread.
// Thread: answer() and all below on the market's; answer_at_once() any. Owns: lease book, proofs
// under way. Limits: ServiceLimits.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "base/task_thread.hpp"
#include "coordinator/challenge.hpp"
#include "coordinator/clocks.hpp"
#include "coordinator/messages.hpp"
#include "coordinator/model_files.hpp"
#include "coordinator/registry.hpp"
#include "crypto/keys.hpp"
#include "market/leases.hpp"
#include "market/storage.hpp"
#include "net/http.hpp"

namespace kvasir::coordinator {

struct ServiceLimits {
    uint32_t body_bytes_max = 512 << 10;
    size_t stranger_body_bytes_max = 8 << 10;  // where no token is asked for
    uint32_t probes_per_lease_max = 8;
    uint32_t probes_max = 2048;             // of one proof, unless it names more leases
    std::chrono::seconds proof_valid{600};  // a slow node hashes 8 MiB in that
    std::chrono::seconds bytes_saved_every{30};
};

struct ServiceConfig {
    std::string name;
    std::string origin;  // of the model's files; empty: we serve them
    std::string relay_url;
    std::string operator_secret;
    std::optional<Sha256> tls_pin;
    market::LeaseRules rules;
    ServiceLimits limits;
    Clocks clocks;
};

class Service {
public:
    // All references outlive the service. `post` puts a task on the market's thread.
    struct Parts {
        const crypto::KeyPair& key;
        const ModelFiles& files;
        Registry& registry;
        market::Storage& storage;
        TaskThread& disk;
        std::function<Status(std::function<void()>)> post;
        std::function<void(const crypto::PublicKey&, const std::vector<uint64_t>&)> on_revoked;
    };
    Service(ServiceConfig config, Parts parts);
    void restore(const market::StoredState& state);

    std::optional<net::HttpResponse> answer_at_once(const net::HttpRequest& request) const;
    void answer(const net::HttpRequest& request, const net::Respond& respond);

    // What the operator's routes do, for the same process.
    Result<crypto::Invite> make_invite(const InviteBody& terms);
    Result<std::vector<uint64_t>> revoke(const crypto::PublicKey& node);
    market::CoverageMap coverage();
    // Writes what is not in storage yet. Errors: those of storage.
    Status save();

private:
    struct Proof {
        Nonce nonce = {};
        std::vector<market::Probe> probes;
        std::vector<LayerKey> layers;  // of each probe
        TimePoint expires;
    };
    using Answer = Result<net::HttpResponse>;
    using Call = Answer (Service::*)(const net::HttpRequest&, const crypto::PublicKey&);
    struct Route {
        const char* method;
        const char* path;
        Call call;
        enum class For { kAll, kNodes, kOperator } who;
    };
    static const std::vector<Route>& routes();
    std::optional<net::HttpResponse> answer_route(const net::HttpRequest& request,
                                                  const net::Respond& respond);

    Answer enroll(const net::HttpRequest& request, const crypto::PublicKey&);
    Answer renew(const net::HttpRequest& request, const crypto::PublicKey&);
    Answer ask(const net::HttpRequest& request, const crypto::PublicKey& node);
    Answer progress(const net::HttpRequest& request, const crypto::PublicKey& node);
    Answer heartbeat(const net::HttpRequest& request, const crypto::PublicKey& node);
    Answer release(const net::HttpRequest& request, const crypto::PublicKey& node);
    Answer show_coverage(const net::HttpRequest&, const crypto::PublicKey&);
    Answer show_nodes(const net::HttpRequest&, const crypto::PublicKey&);
    Answer add_invite(const net::HttpRequest& request, const crypto::PublicKey&);
    Answer revoke_node(const net::HttpRequest& request, const crypto::PublicKey&);
    Answer show_revocations(const net::HttpRequest&, const crypto::PublicKey&);

    // In service_proof.cpp. prove() answers later.
    Answer ask_probes(const std::vector<uint64_t>& leases, const crypto::PublicKey& node);
    void prove(const net::HttpRequest& request, const crypto::PublicKey& node,
               const net::Respond& respond);
    void check_answers(const ProveBody& body, const crypto::PublicKey& node,
                       const net::Respond& respond);
    Answer judge(const crypto::PublicKey& node, const std::map<uint64_t, bool>& verdicts);
    // In service_data.cpp.
    Answer data(const net::HttpRequest& request, const crypto::PublicKey& node);

    Result<crypto::TokenClaims> authenticate(const net::HttpRequest& request);
    Status check_operator(const net::HttpRequest& request) const;
    Status save_leases();
    std::chrono::seconds heartbeat_every() const;
    TimePoint now() const { return config_.clocks.steady(); }

    // Constant after construction.
    const ServiceConfig config_;
    const Parts parts_;
    const Challenges challenges_;
    std::string market_text_;
    std::string outline_path_;
    std::string outline_signature_;
    std::string data_prefix_;  // "/models/ID/data/"
    // Market's thread only.
    market::LeaseBook book_;
    market::LeaseChanges unsaved_;
    std::map<crypto::PublicKey, Proof> proofs_;
    std::mt19937_64 random_;
    TimePoint bytes_saved_;
};

// 200 with a JSON body that no browser takes for anything else.
net::HttpResponse json_response(std::string body);

}  // namespace kvasir::coordinator
