// The scheduler of a download: which job is asked when, and what becomes of how it ended.
#include "net/range_download.hpp"

#include <algorithm>

#include "base/check.hpp"
#include "base/log.hpp"

namespace kvasir::net {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kWaitMax{1000};
constexpr int kRetryAfterPauses = 10;  // Retry-After may be that many times pause_max
constexpr uint32_t kParallelMax = 256;

// Headers that this client sets itself.
bool is_reserved(std::string_view name) {
    std::string lower(name);
    for (char& c : lower) {
        if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    }
    return lower == "range" || lower == "accept-encoding" || lower == "host";
}

milliseconds round_up(steady_clock::duration time) {
    return std::chrono::ceil<milliseconds>(std::max(time, time.zero()));
}

}  // namespace

RangeDownload::RangeDownload(DownloadParts parts, const RangeOptions& options,
                             const HttpClient::OnData& on_data, const HttpClient::OnDone& on_done)
    : parts_(parts),
      options_(options),
      on_done_(on_done),
      flow_(options, on_data, parts.counters, parts.time),
      random_(std::random_device()()) {}

// ---- jobs ----

Result<RangeSource*> RangeDownload::source_of(const RangeJob& job) {
    std::string key = job.url;
    for (const auto& [name, value] : job.secret_headers) {
        if (is_reserved(name)) {
            return fail(Errc::kUsage, "not a header for credentials: " + printable(name));
        }
        key += "\n" + name + "\n" + value;
    }
    auto& source = sources_[key];
    if (source == nullptr) {
        Result<HttpUrl> url = HttpUrl::parse(job.url);
        if (!url) return tl::unexpected(url.error());
        source = std::make_unique<RangeSource>();
        source->url = std::move(*url);
        source->secrets = job.secret_headers;
        source->seen = &parts_.seen[source->url.text()];
    }
    return source.get();
}

// The size that the caller states is what replies must say. A size other than what an earlier
// download saw means a new plan, which starts without memory.
Status RangeDownload::remember(RangeSource& source, const RangeJob& job) {
    if (job.file_bytes == 0) return {};
    SeenFile& seen = *source.seen;
    if (seen.file_bytes == job.file_bytes) return {};
    const bool stated = std::any_of(jobs_.begin(), jobs_.end(), [&](const RangeJobState& other) {
        return other.source->seen == &seen && other.job.file_bytes != 0;
    });
    if (stated)
        return fail(Errc::kUsage, source.url.shown() + ": jobs state two sizes of the file");
    seen = {};
    seen.file_bytes = job.file_bytes;
    return {};
}

Status RangeDownload::take_jobs(std::vector<RangeJob> jobs) {
    for (RangeJob& job : jobs) {
        Result<RangeSource*> source = source_of(job);
        if (!source) return tl::unexpected(source.error());
        if (job.bytes > UINT64_MAX / 2 || job.offset > UINT64_MAX / 2 ||
            (job.file_bytes != 0 && job.offset + job.bytes > job.file_bytes)) {
            return fail(Errc::kUsage, (*source)->url.shown() + ": bytes " +
                                          std::to_string(job.offset) + " + " +
                                          std::to_string(job.bytes) + " are not in the file");
        }
        if (auto known = remember(**source, job); !known) return known;
        flow_.expect(job.bytes);
        jobs_.push_back({std::move(job), *source, 0, 0, false});
    }
    open_jobs_ = jobs_.size();
    for (RangeJobState& state : jobs_) {
        if (state.job.bytes == 0) {
            complete(state);
        } else {
            ready_.push_back(&state);
        }
    }
    return {};
}

void RangeDownload::complete(RangeJobState& state) {
    --open_jobs_;
    if (auto done = on_done_(state.job); !done) flow_.end_with(done.error());
}

// ---- the loop ----

Status RangeDownload::run(std::vector<RangeJob> jobs) {
    if (options_.parallel == 0 || options_.parallel > kParallelMax || options_.attempts_max == 0) {
        return fail(Errc::kUsage, "download: parallel must be 1 to 256, attempts_max at least 1");
    }
    if (auto taken = take_jobs(std::move(jobs)); !taken) return taken;
    const size_t count = std::min<size_t>(options_.parallel, ready_.size());
    for (size_t i = 0; i < count; ++i) attempts_.emplace_back(parts_, flow_, options_);
    parts_.transfers.keep_connections(2 * options_.parallel + 4);
    start_attempts();
    steady_clock::duration waited{0};
    while (open_jobs_ > 0 && !flow_.failure() && !parts_.cancelled) {
        if (auto turned = parts_.transfers.turn(); !turned) flow_.end_with(turned.error());
        collect_ended();
        watch_attempts(waited);
        start_attempts();
        if (open_jobs_ == 0 || flow_.failure()) break;
        const milliseconds longest = wait_time();
        const Point before = parts_.time.now();
        parts_.transfers.wait(longest);
        waited = parts_.time.now() - before;
    }
    for (RangeAttempt& attempt : attempts_) attempt.stop();
    return result();
}

Status RangeDownload::result() {
    const std::optional<Error>& failure = flow_.failure();
    if (!failure) {
        if (open_jobs_ == 0) return {};
        return fail(Errc::kClosed, "the download was cancelled");
    }
    // Another version: the plan is void, and what is remembered of the old one with it.
    if (failure->code == Errc::kMismatch) {
        for (auto& [key, source] : sources_) *source->seen = {};
    }
    return tl::unexpected(*failure);
}

RangeAttempt* RangeDownload::idle_attempt() {
    for (RangeAttempt& attempt : attempts_) {
        if (!attempt.busy()) return &attempt;
    }
    return nullptr;
}

void RangeDownload::start_attempts() {
    const Point now = parts_.time.now();
    while (!waiting_.empty() && waiting_.begin()->first <= now) {
        ready_.push_back(waiting_.begin()->second);
        waiting_.erase(waiting_.begin());
    }
    RangeAttempt* attempt = nullptr;
    while (!flow_.failure() && !ready_.empty() && (attempt = idle_attempt()) != nullptr) {
        RangeJobState* state = ready_.front();
        ready_.pop_front();
        const RangeSource& source = *state->source;
        const auto hold = holds_.find((source.target ? *source.target : source.url).origin());
        if (hold != holds_.end() && hold->second > now) {
            waiting_.emplace(hold->second, state);
        } else if (auto started = attempt->start(*state); !started) {
            flow_.end_with(started.error());
        }
    }
}

void RangeDownload::collect_ended() {
    CURLcode code = CURLE_OK;
    while (Transfer* transfer = parts_.transfers.ended(code)) {
        for (RangeAttempt& attempt : attempts_) {
            if (&attempt.transfer() != transfer || !attempt.busy()) continue;
            on_end(attempt, attempt.on_ended(code));
            break;
        }
    }
}

void RangeDownload::on_end(RangeAttempt& attempt, RangeAttempt::End end) {
    if (end == RangeAttempt::End::kNone) return;
    RangeJobState& state = *attempt.release();
    switch (end) {
        case RangeAttempt::End::kNone:
            break;
        case RangeAttempt::End::kComplete:
            complete(state);
            break;
        case RangeAttempt::End::kPartial:
            ready_.push_front(&state);
            break;
        case RangeAttempt::End::kAgain:
            again(attempt, state, false);
            break;
        case RangeAttempt::End::kExpired: {
            auto& target = state.source->target;
            if (target && target->text() == attempt.hop().text()) target.reset();
            // A link that was just given is not refused for its age: another would be, too.
            if (attempt.fresh()) {
                flow_.end_with(attempt.error());
                break;
            }
            log(LogLevel::kInfo, "net", "asking for a new link: " + attempt.error().detail);
            again(attempt, state, true);
            break;
        }
        case RangeAttempt::End::kFailed:
            if (!parts_.cancelled) flow_.end_with(attempt.error());
            break;
    }
}

// `state` failed in a way that may pass.
void RangeDownload::again(RangeAttempt& attempt, RangeJobState& state, bool at_once) {
    const Error& error = attempt.error();
    flow_.excuse(state);
    if (!attempt.gained() && ++state.fruitless >= options_.attempts_max) {
        flow_.end_with({error.code, error.detail + " (after " + std::to_string(state.fruitless) +
                                        " attempts without a new byte)"});
        return;
    }
    // Whoever does not answer may be only one of many that the original URL leads to.
    auto& target = state.source->target;
    if (!attempt.retry_after() && target && target->text() == attempt.hop().text()) target.reset();
    ++parts_.counters.retries;
    const Point now = parts_.time.now();
    milliseconds pause = at_once ? milliseconds(0) : pause_after(state.fruitless);
    if (const auto later = attempt.retry_after()) {
        if (*later > kRetryAfterPauses * options_.pause_max) {
            flow_.end_with({Errc::kBusy, error.detail + " (asks to come again in " +
                                             std::to_string(later->count()) + " s)"});
            return;
        }
        pause = std::max<milliseconds>(pause, *later);
        Point& hold = holds_[attempt.hop().origin()];
        hold = std::max(hold, now + *later);
    }
    log(LogLevel::kInfo, "net",
        error.detail + "; again in " + std::to_string(pause.count()) + " ms");
    waiting_.emplace(now + pause, &state);
}

milliseconds RangeDownload::pause_after(uint32_t failures) {
    milliseconds pause = options_.pause_first;
    for (uint32_t i = 1; i < failures && pause < options_.pause_max; ++i) pause *= 2;
    pause = std::min(pause, options_.pause_max);
    // Half to all of it, so that many clients do not come back together.
    std::uniform_int_distribution<int64_t> jitter(pause.count() / 2, pause.count());
    return milliseconds(jitter(random_));
}

// ---- time ----

// Silence is counted in time spent waiting: a sink that blocks us is nobody's stall.
void RangeDownload::watch_attempts(steady_clock::duration waited) {
    const bool may_take = flow_.may_take();
    for (RangeAttempt& attempt : attempts_) {
        if (!attempt.busy() || flow_.failure()) continue;
        Transfer& transfer = attempt.transfer();
        if (transfer.take_progress() || transfer.paused()) {
            attempt.silent = attempt.silent.zero();
        } else {
            attempt.silent += waited;
        }
        if (transfer.paused() && may_take && !transfer.resume()) {
            on_end(attempt, attempt.on_ended(CURLE_WRITE_ERROR));
        } else if (attempt.silent >= options_.stall_max) {
            on_end(attempt, attempt.on_stalled());
        }
    }
}

milliseconds RangeDownload::wait_time() {
    milliseconds wait = kWaitMax;
    bool active = false;
    for (RangeAttempt& attempt : attempts_) {
        if (!attempt.busy()) continue;
        active = true;
        wait = std::min(wait, attempt.transfer().paused()
                                  ? flow_.until_may_take()
                                  : round_up(options_.stall_max - attempt.silent));
    }
    if (!active && !waiting_.empty()) parts_.time.idle_until(waiting_.begin()->first);
    if (!waiting_.empty()) {
        wait = std::min(wait, round_up(waiting_.begin()->first - parts_.time.now()));
    }
    return wait;
}

}  // namespace kvasir::net
