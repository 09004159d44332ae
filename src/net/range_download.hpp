// RangeDownload: one HttpClient::download(), from its jobs to their bytes.
//
// Private to net/. The scheduler (range_download.cpp) starts attempts, judges how they ended,
// pauses and asks again; an attempt (range_attempt.cpp) is one chain of requests for what is
// missing of one job. Thread: the caller's. Limits: `parallel` attempts; RangeOptions.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "net/client.hpp"
#include "net/client_time.hpp"
#include "net/http_url.hpp"
#include "net/origin_headers.hpp"
#include "net/range_reply.hpp"
#include "net/transfer.hpp"

namespace kvasir::net {

// What a client remembers of a file between requests and downloads: which version it saw.
struct SeenFile {
    uint64_t file_bytes = 0;                   // 0: not known
    std::map<std::string, Validators> by_hop;  // key: origin of who answered
};
using SeenFiles = std::map<std::string, SeenFile>;  // key: the URL as asked

// The client's parts that a download uses.
struct DownloadParts {
    Transfers& transfers;
    const TransferTrust& trust;
    const OriginHeaders& secrets;
    const std::atomic<bool>& cancelled;
    RangeCounters& counters;
    SeenFiles& seen;
    ClientTime& time;
};

// One URL with its credentials.
struct RangeSource {
    HttpUrl url;
    HeaderList secrets;
    SeenFile* seen = nullptr;
    std::optional<HttpUrl> target;  // where its redirects led, until that is refused
    bool ignores_ranges = false;
};

struct RangeJobState {
    RangeJob job;
    RangeSource* source = nullptr;
    uint64_t delivered = 0;
    uint32_t fruitless = 0;  // attempts since the last new byte
    bool excused = false;    // has 64 KiB of the budget for what went wrong
};

// What attempts share: budget, speed, the sink, and the error that ends the download.
class RangeFlow final {
public:
    RangeFlow(const RangeOptions& options, const HttpClient::OnData& on_data,
              RangeCounters& counters, ClientTime& time)
        : options_(options), on_data_(on_data), counters_(counters), time_(time) {}

    void expect(uint64_t bytes) { bytes_wanted_ += bytes; }
    void excuse(RangeJobState& state);
    // Counts a piece of a body. false: over the budget, and the download has failed.
    bool pulled(uint64_t bytes);
    bool deliver(RangeJobState& state, std::span<const uint8_t> data);

    // May bytes be taken now? Else when.
    bool may_take();
    std::chrono::milliseconds until_may_take();

    // The first error counts.
    void end_with(Error error);
    const std::optional<Error>& failure() const { return failure_; }

private:
    void refill();

    const RangeOptions& options_;
    const HttpClient::OnData& on_data_;
    RangeCounters& counters_;
    ClientTime& time_;
    uint64_t bytes_wanted_ = 0;
    uint64_t bytes_pulled_ = 0;
    uint64_t jobs_excused_ = 0;
    double credit_ = 0;  // bytes that may be taken; below zero: wait
    ClientTime::Point refilled_{};
    std::optional<Error> failure_;
};

class RangeAttempt final : public TransferSink {
public:
    enum class End {
        kNone,      // goes on: the next hop was asked
        kComplete,  // the job has all its bytes
        kPartial,   // what was promised came, but more is missing: ask on at once
        kAgain,     // see error() and retry_after()
        kExpired,   // the target of a redirect refused: final if fresh(), else ask for a new link
        kFailed,    // see error(): no use asking again
    };

    RangeAttempt(DownloadParts& parts, RangeFlow& flow, const RangeOptions& options)
        : parts_(parts), flow_(flow), options_(options), transfer_(parts.transfers, parts.trust) {}

    // Errors: those of Transfer::start.
    Status start(RangeJobState& state);
    End on_ended(CURLcode result);
    End on_stalled();
    void stop();

    bool busy() const { return state_ != nullptr; }
    RangeJobState* release();
    Transfer& transfer() { return transfer_; }
    const Error& error() const { return error_; }
    std::optional<std::chrono::seconds> retry_after() const { return retry_after_; }
    bool fresh() const { return hops_ > 0; }
    bool gained() const { return gained_; }
    const HttpUrl& hop() const { return hop_; }
    std::chrono::steady_clock::duration silent{0};  // without a byte; the scheduler's

    Take on_head(Transfer& transfer) override;
    Take on_body(Transfer& transfer, std::span<const uint8_t> data) override;

private:
    Status ask();
    Take accept_bytes(const ReplyHead& head);
    Take take_bytes(std::span<const uint8_t> data);
    bool same_version(const std::string& key, const Validators& now);
    End next_hop();
    End judge_reply();
    End failed(Errc code, const std::string& why);
    // "URL bytes 0-99 (from https://cdn:443): "
    std::string where() const;
    std::string server_text() const;
    // After a 401 or 403: with which flag credentials are given.
    std::string credentials_hint() const;

    DownloadParts& parts_;
    RangeFlow& flow_;
    const RangeOptions& options_;
    Transfer transfer_;
    // Of the attempt under way
    RangeJobState* state_ = nullptr;
    HttpUrl hop_;
    Redactor redactor_;
    uint32_t hops_ = 0;  // redirects followed in this attempt
    bool redirected_ = false;
    bool showed_secret_ = false;  // of an origin, in this chain
    bool gained_ = false;
    Error error_;
    std::optional<std::chrono::seconds> retry_after_;
    // Of the request under way
    ReplyKind kind_ = ReplyKind::kFinal;
    uint64_t missing_ = 0;     // of what this reply promises
    bool whole_ = false;       // a 200: more may come than is wanted
    bool open_ended_ = false;  // the body's end is the connection's
    std::string text_;         // the body of a reply without our bytes
    bool text_cut_ = false;
};

class RangeDownload final {
public:
    RangeDownload(DownloadParts parts, const RangeOptions& options,
                  const HttpClient::OnData& on_data, const HttpClient::OnDone& on_done);
    Status run(std::vector<RangeJob> jobs);

private:
    using Point = ClientTime::Point;

    Status take_jobs(std::vector<RangeJob> jobs);
    Result<RangeSource*> source_of(const RangeJob& job);
    Status remember(RangeSource& source, const RangeJob& job);
    void complete(RangeJobState& state);
    void start_attempts();
    RangeAttempt* idle_attempt();
    void collect_ended();
    void on_end(RangeAttempt& attempt, RangeAttempt::End end);
    void again(RangeAttempt& attempt, RangeJobState& state, bool at_once);
    void watch_attempts(std::chrono::steady_clock::duration waited);
    std::chrono::milliseconds wait_time();
    std::chrono::milliseconds pause_after(uint32_t failures);
    Status result();

    DownloadParts parts_;
    const RangeOptions& options_;
    const HttpClient::OnDone& on_done_;
    RangeFlow flow_;
    std::map<std::string, std::unique_ptr<RangeSource>> sources_;
    std::deque<RangeJobState> jobs_;
    std::deque<RangeJobState*> ready_;
    std::multimap<Point, RangeJobState*> waiting_;
    std::map<std::string, Point> holds_;  // by origin: Retry-After
    std::deque<RangeAttempt> attempts_;
    uint64_t open_jobs_ = 0;
    std::minstd_rand random_;
};

}  // namespace kvasir::net
