#include "worker/agent.hpp"

#include <algorithm>
#include <utility>

#include <malloc.h>
#include <unistd.h>

#include "base/check.hpp"
#include "base/log.hpp"
#include "base/units.hpp"
#include "worker/agent_serving.hpp"
#include "worker/code_pages.hpp"

namespace kvasir::worker {
namespace {

using Kind = AgentAction::Kind;
using std::chrono::duration_cast;
using std::chrono::milliseconds;

constexpr uint64_t kCacheSpare = 16'000'000;
constexpr AgentTime kSayAgain = std::chrono::minutes(1);

AgentTime now() {
    return duration_cast<AgentTime>(boot_time());
}

bool is_fetch_end(const AgentEvent& event) {
    if (std::holds_alternative<event::Fetched>(event)) return true;
    const auto* failed = std::get_if<event::Failed>(&event);
    return failed != nullptr && failed->step == AgentStep::kFetch;
}

}  // namespace

Result<std::unique_ptr<Agent>> Agent::make(AgentOptions options) {
    auto address = parse_market_url(options.market);
    if (!address) return tl::unexpected(address.error());
    auto invite = crypto::parse_invite(options.invite);
    if (!invite) return tl::unexpected(invite.error());
    if (Status ok = check_address(*address, *invite); !ok) return tl::unexpected(ok.error());
    if (options.cache_folder.empty()) {
        auto folder = default_cache_folder();
        if (!folder) return tl::unexpected(folder.error());
        options.cache_folder = *folder;
    }
    if (options.cache_bytes_max == 0)
        options.cache_bytes_max = 2 * options.budget_bytes + kCacheSpare;
    if (options.cache_bytes_max < options.budget_bytes) {
        return fail(Errc::kUsage,
                    "--cache-max is less than --budget: the cache must hold at least "
                    "the slice that is served");
    }
    if (options.name.empty()) {
        char host[256] = {};
        options.name = ::gethostname(host, sizeof(host) - 1) == 0 ? host : "worker";
    }
    auto cache = SliceCache::open(options.cache_folder, options.cache_bytes_max);
    if (!cache) return tl::unexpected(cache.error());
    auto key = crypto::load_or_make_key(cache->key_path());
    if (!key) return tl::unexpected(key.error());
    std::unique_ptr<Agent> agent(new Agent(std::move(options), std::move(*address), *invite,
                                           std::move(*cache), std::move(*key)));
    if (Status ok = agent->fresh_client(); !ok) return tl::unexpected(ok.error());
    return agent;
}

Agent::Agent(AgentOptions options, MarketAddress address, crypto::Invite invite, SliceCache cache,
             crypto::KeyPair key)
    : options_(std::move(options)),
      address_(std::move(address)),
      invite_(invite),
      key_(std::make_shared<const crypto::KeyPair>(std::move(key))),
      cache_(std::move(cache)),
      // Many nodes that lost the same market must not come back in step.
      rules_(options_.limits, static_cast<uint64_t>(boot_time().count()) ^
                                  key_->public_key().bytes[0] ^
                                  (uint64_t{key_->public_key().bytes[1]} << 8)) {
    trust_.pin = invite_.tls_pin;
    trust_.pin_url = address_.base;  // redirects lead to an origin with a key of its own
    trust_.ca_file = options_.ca_file;
    trust_.advice = kTrustAdvice;
    if (options_.cpu_percent < 100)
        throttle_ = std::make_unique<Throttle>(options_.cpu_percent, options_.threads);
}

Agent::~Agent() {
    KVASIR_CHECK(!fetcher_.joinable() && serving_ == nullptr);  // run() has ended, or never began
}

void Agent::stop() {
    const std::lock_guard lock(mu_);
    stop_asked_ = true;
    if (http_) http_->cancel();
    if (fetch_http_) fetch_http_->cancel();
    wake_.notify_all();
}

void Agent::post(AgentEvent event) {
    const std::lock_guard lock(mu_);
    events_.push_back(std::move(event));
    wake_.notify_all();
}

AgentEvent Agent::next_event() {
    const AgentTime from = now();
    const AgentTime pause = rules_.wake_at(from) - from;
    std::unique_lock lock(mu_);
    // A stop is told once; it goes first, since what was cancelled for it fails now.
    const bool told = rules_.state() == AgentState::kStopping;
    wake_.wait_for(lock, pause, [&] { return !events_.empty() || (stop_asked_ && !told); });
    if (stop_asked_ && !told) return event::StopAsked{};
    if (events_.empty()) return event::Tick{};
    AgentEvent event = std::move(events_.front());
    events_.pop_front();
    return event;
}

Status Agent::run() {
    // Three threads that allocate in turn need no heap each.
    ::mallopt(M_ARENA_MAX, 1);
    post(event::Tick{});
    for (;;) {
        const AgentState before = rules_.state();
        AgentEvent event = next_event();
        if (is_fetch_end(event)) end_fetch(std::holds_alternative<event::Fetched>(event));
        std::optional<std::pair<AgentStep, Error>> failure;
        if (const auto* failed = std::get_if<event::Failed>(&event))
            failure.emplace(failed->step, failed->error);
        if (const auto* ended = std::get_if<event::WorkerEnded>(&event)) {
            serving_->thread.join();
            serving_.reset();
            has_serving_failed_ = !ended->status;
            if (!ended->status) failure.emplace(AgentStep::kServe, ended->status.error());
        }
        const auto actions = rules_.on_event(event, now());
        const bool is_new = rules_.state() != before;
        const bool begins_to_stop = is_new && rules_.state() == AgentState::kStopping;
        // What ends all is run()'s own result: the caller says it.
        if (failure && !begins_to_stop) say_failure(failure->first, failure->second);
        if (is_new && rules_.state() == AgentState::kWaiting)
            say("no experts to hold for now; asking again from time to time");
        if (begins_to_stop && std::ranges::count(actions, Kind::kEnd, &AgentAction::kind) == 0)
            say("stopping: draining, then releasing the leases");
        for (const AgentAction& action : actions) {
            if (action.kind == Kind::kEnd) return action.status;
            act(action);
        }
    }
}

void Agent::act(const AgentAction& action) {
    switch (action.kind) {
        case Kind::kCall:
            return post(call(action));
        case Kind::kFetch:
            return begin_fetch(action.segments);
        case Kind::kCancelFetch: {
            fetch_cancelled_.store(true);
            const std::lock_guard lock(mu_);
            if (fetch_http_) fetch_http_->cancel();
            return;
        }
        case Kind::kServe:
            return begin_serving();
        case Kind::kStopServing: {
            const std::lock_guard lock(mu_);
            serving_->is_stopping = true;
            if (serving_->worker) serving_->worker->stop();
            if (throttle_ && rules_.state() == AgentState::kStopping) throttle_->stop();
            wake_.notify_all();
            return;
        }
        case Kind::kAllowAttach: {
            const std::lock_guard lock(mu_);
            may_attach_ = true;
            wake_.notify_all();
            return;
        }
        case Kind::kShowToken: {
            const std::lock_guard lock(mu_);
            if (serving_ && serving_->worker) serving_->worker->renew(token_);
            return;
        }
        case Kind::kEnd:
            return;
    }
}

void Agent::say(const std::string& line) {
    if (options_.on_line) return options_.on_line(line);
    log(LogLevel::kInfo, "worker", line);
}

// The same failure again and again is one line a minute.
void Agent::say_failure(AgentStep step, const Error& error) {
    if (error.code == Errc::kClosed) return;
    if (step == AgentStep::kRenew && error.code == Errc::kNotFound) return;  // a new node
    std::string line = std::string(to_string(step)) + ": " + error.detail;
    // The other steps write nothing here: it is the market whose disk is full.
    const bool is_our_disk = step == AgentStep::kFetch || step == AgentStep::kLookUp;
    const bool is_full = error.code == Errc::kNoSpace;
    if (is_full && is_our_disk) line = "disk full, trying again from time to time: " + line;
    if (step != AgentStep::kRelease &&
        (error.code == Errc::kIo || error.code == Errc::kTimeout || (is_full && !is_our_disk)))
        line += "; trying again from time to time";
    log(LogLevel::kDebug, "worker", line);
    const AgentTime at = now();
    if (line == said_ && at - said_at_ < kSayAgain) return;
    said_ = line;
    said_at_ = at;
    say(line);
}

// ---- fetching ----

void Agent::begin_fetch(const std::vector<Segment>& segments) {
    KVASIR_CHECK(!fetcher_.joinable());
    fetch_cancelled_.store(false);
    auto http = net::HttpClient::make(trust_, options_.secrets);
    if (!http) return post(event::Failed{AgentStep::kFetch, http.error()});
    fetch_path_ = cache_.slice_path(info_.model_id, segments);
    FetchTask task{segments, info_, {}, served_path_};
    task.target.path = fetch_path_;
    task.target.secret_headers = market_->bearer();
    net::HttpClient* client = http->get();
    {
        const std::lock_guard lock(mu_);
        fetch_http_ = std::move(*http);
        if (stop_asked_) client->cancel();
        progress_.clear();
        for (const NodeLease& lease : rules_.leases())
            progress_.push_back({lease.segment, {lease.id, 0}});
    }
    fetcher_ = std::thread([this, client, task = std::move(task)]() mutable {
        auto report = fetch(std::move(task), *client);
        bytes_pulled_ += client->counters().bytes_pulled;
        if (!report) return post(event::Failed{AgentStep::kFetch, report.error()});
        say("slice ready: " + std::to_string(report->bytes_fetched) + " bytes fetched in " +
            std::to_string(report->ranges) + " ranges (" + std::to_string(report->bytes_pulled) +
            " received), " + std::to_string(report->bytes_found) + " were there, " +
            std::to_string(report->bytes_copied) + " copied from other slices");
        post(event::Fetched{});
    });
}

void Agent::end_fetch(bool is_whole) {
    if (fetcher_.joinable()) fetcher_.join();
    if (is_whole) whole_path_ = fetch_path_;
    {
        const std::lock_guard lock(mu_);
        fetch_http_.reset();
    }
    ::malloc_trim(0);
}

// On the fetching thread.
Result<moe::SlicePlan> Agent::plan(FetchTask& task) const {
    auto outline = load_outline(task.info);
    if (!outline) return tl::unexpected(outline.error());
    auto plan = moe::plan_slice(*outline, task.segments);
    if (!plan) return plan;
    if (plan->file_bytes > options_.budget_bytes) {
        return fail(Errc::kLimit, "the slice would have " + std::to_string(plan->file_bytes) +
                                      " bytes, more than the budget");
    }
    for (uint32_t i = 0; i < outline->model.shards.size(); ++i) {
        task.target.shards.push_back(
            {data_url(address_, task.info, i), outline->model.shards[i].file_bytes});
    }
    return plan;
}

// On the fetching thread.
Result<FetchReport> Agent::fetch(FetchTask task, net::HttpClient& http) {
    auto plan = this->plan(task);
    if (!plan) return tl::unexpected(plan.error());
    ::malloc_trim(0);  // the outline was larger than all that is needed from now on
    FetchTarget& target = task.target;
    const std::vector<std::string> both = {target.path, task.served_path};
    const uint64_t there = cache_.bytes_of(target.path);
    const uint64_t more = plan->file_bytes > there ? plan->file_bytes - there : 0;
    if (!cache_.make_room(more, both)) {
        if (Status ok = cache_.make_room(more, {target.path}); !ok)
            return tl::unexpected(ok.error());
    }
    target.donors = cache_.donors(task.info.model_id, target.path);
    uint64_t done = 0;
    FetchOptions options;
    options.ranges = options_.ranges;
    options.cancelled = &fetch_cancelled_;
    if (throttle_) options.on_piece = [this] { throttle_->pause(); };
    options.on_slab = [&](const moe::SliceSlab& slab) {
        done += slab.bytes;
        count_slab(slab);
        if (options_.on_bytes) options_.on_bytes(done, plan->bytes_slabs);
    };
    auto report = fetch_slice(http, *plan, target, options);
    if (report || report.error().code != Errc::kNoSpace) return report;
    // The disk is full before the quota is: what no lease needs goes, also as a donor.
    if (cache_.remove_others(both) == 0) return report;
    target.donors = {};
    done = 0;
    {
        const std::lock_guard lock(mu_);
        for (auto& [segment, lease] : progress_) lease.bytes_done = 0;
    }
    return fetch_slice(http, *plan, target, options);
}

void Agent::count_slab(const moe::SliceSlab& slab) {
    const std::lock_guard lock(mu_);
    for (auto& [segment, lease] : progress_) {
        if (segment.layer == slab.expert.layer && segment.begin <= slab.expert.index &&
            slab.expert.index < segment.end)
            lease.bytes_done += slab.bytes;
    }
}

// ---- serving ----

void Agent::begin_serving() {
    KVASIR_CHECK(serving_ == nullptr);
    serving_ = std::make_unique<Serving>();
    serving_->is_next_try = has_serving_failed_ && served_path_ == whole_path_;
    served_path_ = whole_path_;
    cache_.touch(served_path_);
    serving_->path = served_path_;
    serving_->info = info_;
    serving_->thread = std::thread([this, &serving = *serving_] {
        Status status = serve(serving);
        post(event::WorkerEnded{std::move(status)});
    });
}

// On the serving thread.
Status Agent::serve(Serving& serving) {
    HoldingOptions holding_options;
    holding_options.slice_path = serving.path;
    holding_options.verify = false;  // every slab was, by fetch_slice()
    auto holding = Holding::open(holding_options);
    if (!holding) return tl::unexpected(holding.error());
    auto endpoint = relay_endpoint(serving.info, address_);
    if (!endpoint) return tl::unexpected(endpoint.error());
    auto route = this->route(*endpoint);
    if (!route) return tl::unexpected(route.error());
    AttachTarget target;
    target.route = *route;
    target.credentials = [this, &serving] { return credentials(serving); };
    WorkerOptions options;
    options.attach = std::move(target);
    options.name = options_.name;
    options.threads = options_.threads;
    options.device = options_.device;
    options.compute_with = options_.compute_with;
    options.sleep_max = options_.sleep_max;
    options.on_line = [this](const std::string& line) { say(line); };
    if (throttle_) options.before_answer = [this] { throttle_->pause(); };
    auto worker = Worker::make(**holding, options);
    if (!worker) return tl::unexpected(worker.error());
    // After a failure the reason stays the last word, until the worker says that it is attached.
    if (!serving.is_next_try) {
        say("serving " + std::to_string((*holding)->experts()) + " experts (" +
            format_bytes(static_cast<double>((*holding)->bytes())) + ") of " +
            serving.info.model_name);
    }
    (void)give_back_code_pages();
    {
        const std::lock_guard lock(mu_);
        if (serving.is_stopping) return {};
        serving.worker = worker->get();
    }
    Status status = (*worker)->run();
    log(LogLevel::kInfo, "worker",
        "computed " + std::to_string((*worker)->pairs_done()) + " pairs in " +
            std::to_string((*worker)->requests_done()) + " requests");
    const std::lock_guard lock(mu_);
    serving.worker = nullptr;
    return status;
}

// On the serving thread. Where a relay's MOVE led holds for the next worker, too, as long as the
// market names the same relay.
Result<std::shared_ptr<access::Route>> Agent::route(const net::Endpoint& relay) {
    if (route_ && route_->home().endpoint == relay) return route_;
    const auto tls_for = [this](const net::Endpoint& endpoint) {
        return net::TlsClient::make(relay_trust(trust_, endpoint, address_));
    };
    access::RelayAddress home{relay, nullptr};
    if (relay.tls) {
        auto tls = tls_for(relay);
        if (!tls) return tl::unexpected(tls.error());
        home.tls = *tls;
    }
    route_ = std::make_shared<access::Route>(std::move(home), tls_for);
    return route_;
}

// On the serving thread, before each connection: the rules may want to ask the market first.
access::Credentials Agent::credentials(Serving& serving) {
    std::unique_lock lock(mu_);
    may_attach_ = false;
    events_.push_back(event::AttachAsked{});
    wake_.notify_all();
    wake_.wait(lock, [&] { return may_attach_ || serving.is_stopping; });
    return {key_, token_, options_.name};
}

}  // namespace kvasir::worker
