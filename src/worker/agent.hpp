// Agent: a worker that joined through a market: key, token, leases, slice, proof, serving.
//
// Used by `kvasir worker --join`. The rules are AgentRules; here is what carries them out: calls to
// the market (the thread of run()), one thread that fetches, one that serves (Worker). Everything
// that those two and stop() say goes through a queue of events.
// Thread: run() on one thread; stop() from any (not from a signal handler). Owns: cache, key,
// threads, connections. Limits: AgentOptions, AgentLimits.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/result.hpp"
#include "crypto/keys.hpp"
#include "crypto/token.hpp"
#include "engine/expert_engine.hpp"
#include "net/client.hpp"
#include "worker/agent_rules.hpp"
#include "worker/cache.hpp"
#include "worker/fetch.hpp"
#include "worker/market_client.hpp"
#include "worker/throttle.hpp"
#include "worker/worker.hpp"

namespace kvasir::worker {

struct AgentOptions {
    std::string market;  // https://HOST:PORT
    std::string invite;
    uint64_t budget_bytes = 0;
    std::string cache_folder;      // empty: default_cache_folder()
    uint64_t cache_bytes_max = 0;  // 0: twice the budget and 16 MB
    std::string ca_file;           // for a market without pin; empty: the system's roots
    net::OriginSecrets secrets;    // of origins that the market's data may come from
    std::string name;              // empty: the host's name
    uint32_t threads = 1;
    unsigned cpu_percent = 100;  // of `threads` cores
    std::string device;          // ggml device; empty: CPU
    engine::ComputeWith compute_with = engine::ComputeWith::kKernels;
    std::chrono::milliseconds sleep_max{8000};
    AgentLimits limits;
    net::RangeOptions ranges;
    // What people see: a line, from any thread; bytes of the slice, from the fetching one.
    std::function<void(const std::string& line)> on_line;
    std::function<void(uint64_t bytes_done, uint64_t bytes_total)> on_bytes;
};

class Agent {
public:
    // Errors: kUsage (address, invite, budget, cache folder in use), kEnvironment, kNoSpace,
    // kBadInput (key or CA file).
    static Result<std::unique_ptr<Agent>> make(AgentOptions options);
    ~Agent();

    // Until stop(), or what no retry can mend (kRevoked, kVersion, kDenied invite, ...). Drains the
    // worker and releases the leases.
    Status run();
    void stop();
    uint64_t bytes_pulled() const { return bytes_pulled_.load(); }
    const crypto::PublicKey& public_key() const { return key_->public_key(); }

private:
    struct Serving;

    Agent(AgentOptions options, MarketAddress address, crypto::Invite invite, SliceCache cache,
          crypto::KeyPair key);

    void post(AgentEvent event);
    AgentEvent next_event();
    void act(const AgentAction& action);
    void say(const std::string& line);
    void say_failure(AgentStep step, const Error& error);

    // Calls to the market: the event that says what became of it.
    AgentEvent call(const AgentAction& action);
    Result<AgentEvent> try_call(const AgentAction& action);
    Result<AgentEvent> look_up();
    Result<AgentEvent> lease();
    Result<AgentEvent> prove(const std::vector<uint64_t>& ids);
    Result<Sha256> answer(const ProofTask& task, const ByteProbe& probe, const moe::Model& slice,
                          int fd) const;
    Result<AgentEvent> release();
    Status fresh_client();
    void take_token(const std::string& token);
    // Reads the outline in the cache. Thread: any.
    Result<moe::Outline> load_outline(const MarketInfo& info) const;

    // Work of other threads.
    void begin_fetch(const std::vector<Segment>& segments);
    void end_fetch(bool is_whole);
    void count_slab(const moe::SliceSlab& slab);
    struct FetchTask {  // what the fetching thread needs of the agent's
        std::vector<Segment> segments;
        MarketInfo info;
        FetchTarget target;
        std::string served_path;  // stays as long as there is room
    };
    Result<FetchReport> fetch(FetchTask task, net::HttpClient& http);
    Result<moe::SlicePlan> plan(FetchTask& task) const;
    void begin_serving();
    Status serve(Serving& serving);
    Result<std::shared_ptr<access::Route>> route(const net::Endpoint& relay);
    access::Credentials credentials(Serving& serving);

    // Constant after construction.
    const AgentOptions options_;
    const MarketAddress address_;
    const crypto::Invite invite_;
    const std::shared_ptr<const crypto::KeyPair> key_;
    net::ClientTrust trust_;
    std::unique_ptr<Throttle> throttle_;  // null: no limit

    // Agent's thread only.
    SliceCache cache_;
    AgentRules rules_;
    std::unique_ptr<MarketClient> market_;
    MarketInfo info_;
    std::thread fetcher_;
    std::string fetch_path_;   // of the fetch under way
    std::string whole_path_;   // of the last one that ended well
    std::string served_path_;  // of what is served
    std::unique_ptr<Serving> serving_;
    std::string said_;  // of failures
    AgentTime said_at_{0};
    bool has_serving_failed_ = false;

    // The serving thread's, one after the other.
    std::shared_ptr<access::Route> route_;

    // The fetching thread's, between begin_fetch() and its event.
    std::atomic<bool> fetch_cancelled_{false};
    std::atomic<uint64_t> bytes_pulled_{0};

    // Guarded by mu_.
    std::mutex mu_;
    std::condition_variable wake_;
    std::deque<AgentEvent> events_;
    bool stop_asked_ = false;
    bool may_attach_ = false;
    std::string token_;
    std::unique_ptr<net::HttpClient> http_;        // the market's
    std::unique_ptr<net::HttpClient> fetch_http_;  // of the fetch under way
    std::vector<std::pair<Segment, LeaseProgress>> progress_;
};

}  // namespace kvasir::worker
