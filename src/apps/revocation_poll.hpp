// RevocationPoll: a relay that runs apart from its market asks it, every few seconds, which tokens
// were taken back.
//
// Used by `kvasir relay --market URL`. The list is signed by the market's key, so whoever carries
// it can only withhold it. While the market cannot be reached the last list stays, and the relay
// goes on: a market that restarts must not stop a swarm. Tokens end by themselves. Thread: its own,
// from start() on; RevokedSerials from any. Owns: the HTTP client. Limits: crypto::kRevokedMax
// tokens a list, kSerialsMax in all, kRevocationsBytesMax bytes an answer.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/result.hpp"
#include "crypto/keys.hpp"
#include "crypto/revocations.hpp"
#include "net/client.hpp"

namespace kvasir::apps {

// What the lists have named so far.
class RevokedSerials {
public:
    static constexpr size_t kSerialsMax = 1'000'000;  // beyond: the last list alone
    bool contains(uint64_t serial) const;
    // Returns what is new in it. Nothing is ever given back by a list, whichever is the older one:
    // dates are a clock's, which may have been wrong, and old lists may be played again.
    std::vector<uint64_t> take(std::vector<uint64_t> ascending);

private:
    mutable std::mutex mu_;
    std::vector<uint64_t> serials_;  // guarded by mu_; ascending
};

struct RevocationPollOptions {
    std::string market_url;  // https://HOST:PORT
    crypto::PublicKey market_key;
    net::ClientTrust trust;
    std::chrono::milliseconds every{10000};
    std::chrono::milliseconds timeout{5000};  // of a request
};

class RevocationPoll {
public:
    // Asks once, and waits for it at most `timeout`; a market that does not answer is told to the
    // log, not an error. Errors: kUsage (URL), those of HttpClient::make.
    static Result<std::unique_ptr<RevocationPoll>> make(RevocationPollOptions options);
    ~RevocationPoll();  // joins
    RevocationPoll(const RevocationPoll&) = delete;
    RevocationPoll& operator=(const RevocationPoll&) = delete;

    std::shared_ptr<const RevokedSerials> revoked() const { return revoked_; }
    // From now on, on its own thread; `on_revoked` for the tokens that are new in a list. Once.
    using OnRevoked = std::function<void(std::vector<uint64_t> serials)>;
    void start(OnRevoked on_revoked);

private:
    RevocationPoll(RevocationPollOptions options, std::string url,
                   std::unique_ptr<net::HttpClient> http);
    void run(const OnRevoked& on_revoked);
    // What is new. Errors: those of HttpClient::call, kIo (another status), kDenied (not signed by
    // the market).
    Result<std::vector<uint64_t>> ask();
    // Logs the first failure of a row, and the first success after it.
    std::vector<uint64_t> ask_and_tell();

    // Constant after construction.
    const RevocationPollOptions options_;
    const std::string url_;
    const std::unique_ptr<net::HttpClient> http_;
    const std::shared_ptr<RevokedSerials> revoked_ = std::make_shared<RevokedSerials>();
    // Of the asking thread: make()'s caller, then thread_.
    bool is_failing_ = false;
    // Guarded by mu_.
    std::mutex mu_;
    std::condition_variable wake_;
    bool is_stopping_ = false;
    std::thread thread_;
};

}  // namespace kvasir::apps
