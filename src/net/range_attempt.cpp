// One chain of requests for what is missing of one job: hops, heads, bodies. Also RangeFlow.
#include <algorithm>
#include <cmath>

#include "base/check.hpp"
#include "base/log.hpp"
#include "net/range_download.hpp"

namespace kvasir::net {
namespace {

constexpr uint64_t kExcuseBytes = 64 << 10;
constexpr size_t kTextBytesMax = 8 << 10;  // read of a reply without our bytes; more ends it
constexpr size_t kTextShownMax = 300;
constexpr std::chrono::milliseconds kConnectMax{15000};

std::string show_version(const Validators& version) {
    return printable(version.etag.empty() ? version.modified : version.etag, 80);
}

Errc code_of_status(int status) {
    switch (status) {
        case 401:
        case 402:
        case 403:
        case 407:
        case 451:
            return Errc::kDenied;
        case 404:
        case 410:
            return Errc::kNotFound;
        case 416:
            return Errc::kMismatch;
        default:
            return status / 100 == 2 ? Errc::kUnsupported : Errc::kIo;
    }
}

}  // namespace

// ---- RangeFlow ----

void RangeFlow::excuse(RangeJobState& state) {
    if (std::exchange(state.excused, true)) return;
    ++jobs_excused_;
}

bool RangeFlow::pulled(uint64_t bytes) {
    bytes_pulled_ += bytes;
    counters_.bytes_pulled += bytes;
    if (options_.bytes_per_second_max != 0) credit_ -= static_cast<double>(bytes);
    const double budget = static_cast<double>(bytes_wanted_) * (1 + options_.over_share) +
                          static_cast<double>(jobs_excused_ * kExcuseBytes);
    if (static_cast<double>(bytes_pulled_) <= budget) return true;
    end_with({Errc::kLimit, "pulled " + std::to_string(bytes_pulled_) + " bytes to get " +
                                std::to_string(bytes_wanted_) +
                                ": too many are wasted, the download is stopped"});
    return false;
}

bool RangeFlow::deliver(RangeJobState& state, std::span<const uint8_t> data) {
    if (data.empty()) return true;
    if (auto taken = on_data_(state.job, state.job.offset + state.delivered, data); !taken) {
        end_with(taken.error());
        return false;
    }
    state.delivered += data.size();
    state.fruitless = 0;
    counters_.bytes_wanted += data.size();
    return true;
}

void RangeFlow::refill() {
    const auto now = time_.now();
    const double rate = static_cast<double>(options_.bytes_per_second_max);
    if (refilled_ != ClientTime::Point{}) {
        credit_ += rate * std::chrono::duration<double>(now - refilled_).count();
    }
    refilled_ = now;
    credit_ = std::min(credit_, rate / 20);  // a burst of 50 ms
}

bool RangeFlow::may_take() {
    if (options_.bytes_per_second_max == 0) return true;
    refill();
    return credit_ >= 0;
}

std::chrono::milliseconds RangeFlow::until_may_take() {
    if (may_take()) return std::chrono::milliseconds(0);
    const double rate = static_cast<double>(options_.bytes_per_second_max);
    return std::chrono::milliseconds(static_cast<int64_t>(std::ceil(-credit_ / rate * 1000)));
}

void RangeFlow::end_with(Error error) {
    if (!failure_) failure_ = std::move(error);
}

// ---- RangeAttempt ----

Status RangeAttempt::start(RangeJobState& state) {
    KVASIR_CHECK(!busy());
    state_ = &state;
    hops_ = 0;
    gained_ = false;
    showed_secret_ = false;
    redirected_ = state.source->target.has_value();
    hop_ = redirected_ ? *state.source->target : state.source->url;
    redactor_ = {};
    for (const auto& [name, value] : state.source->secrets) redactor_.add_header_value(value);
    parts_.secrets.hide_in(redactor_);
    redactor_.add_query(state.source->url.query());
    if (redirected_) redactor_.add_query(hop_.query());
    retry_after_.reset();
    auto asked = ask();
    if (!asked) state_ = nullptr;
    return asked;
}

Status RangeAttempt::ask() {
    const RangeJob& job = state_->job;
    TransferRequest request;
    request.url = &hop_;
    request.connect_timeout = std::min(kConnectMax, options_.stall_max);
    request.headers.emplace_back("Range",
                                 "bytes=" + std::to_string(job.offset + state_->delivered) + "-" +
                                     std::to_string(job.offset + job.bytes - 1));
    // Judged anew at every hop: the exact origin the credentials were given for, and no other.
    parts_.secrets.append(request.headers, hop_, state_->source->url, state_->source->secrets);
    showed_secret_ = showed_secret_ || parts_.secrets.has(hop_);
    kind_ = ReplyKind::kFinal;
    missing_ = 0;
    whole_ = open_ended_ = text_cut_ = false;
    text_.clear();
    silent = silent.zero();
    ++parts_.counters.requests;
    return transfer_.start(request, *this);
}

void RangeAttempt::stop() {
    transfer_.stop();
    state_ = nullptr;
}

RangeJobState* RangeAttempt::release() {
    transfer_.stop();
    return std::exchange(state_, nullptr);
}

std::string RangeAttempt::where() const {
    const RangeJob& job = state_->job;
    std::string out = state_->source->url.shown() + " bytes " + std::to_string(job.offset) + "-" +
                      std::to_string(job.offset + job.bytes - 1);
    if (redirected_) out += " (redirected to " + printable(hop_.origin()) + ")";
    return out + ": ";
}

RangeAttempt::End RangeAttempt::failed(Errc code, const std::string& why) {
    error_ = {code, where() + why};
    return End::kFailed;
}

std::string RangeAttempt::server_text() const {
    // A web page is for browsers.
    const std::string* type = transfer_.head().find("content-type");
    const bool is_page = type != nullptr && type->starts_with("text/html");
    const std::string text =
        is_page ? std::string() : redactor_.clean(text_, kTextShownMax, text_cut_);
    std::string out = "HTTP " + std::to_string(transfer_.head().status);
    if (!text.empty()) out += ", the server says: " + text;
    return out + credentials_hint();
}

std::string RangeAttempt::credentials_hint() const {
    const int status = transfer_.head().status;
    const std::string& flag = parts_.secrets.flag();
    if (flag.empty() || (status != 401 && status != 403)) return {};
    const std::string how = flag + " " + printable(hop_.origin()) + "=FILE";
    if (parts_.secrets.has(hop_)) return "; what " + how + " gives is not accepted there";
    // Who made the link was asked with credentials, or this hop was (not known of a link that was
    // kept: it has expired, and the next answer tells): it is not for lack of them.
    const bool is_kept = redirected_ && hops_ == 0;
    const bool showed_own =
        !state_->source->secrets.empty() && hop_.origin() == state_->source->url.origin();
    if (showed_secret_ || showed_own || is_kept) return {};
    return "; if it wants credentials, give them with " + how;
}

bool RangeAttempt::same_version(const std::string& key, const Validators& now) {
    Validators& known = state_->source->seen->by_hop[key];
    const Validators before = known;
    if (known.agree(now)) return true;
    error_ = {Errc::kMismatch, where() + "the file changed: its version was " +
                                   show_version(before) + " and is now " + show_version(now) +
                                   "; plan the download anew"};
    flow_.end_with(error_);
    return false;
}

Take RangeAttempt::on_head(Transfer& transfer) {
    // One turn serves many transfers: what another has ended is ended for all.
    if (parts_.cancelled || flow_.failure()) return Take::kStop;
    const ReplyHead& head = transfer.head();
    kind_ = classify_status(head.status);
    if (kind_ == ReplyKind::kBytes) return accept_bytes(head);
    if (kind_ == ReplyKind::kRedirect) {
        // A hub that states the version of what it links to.
        if (const std::string* linked = head.find("x-linked-etag")) {
            ReplyHead target;
            target.headers.emplace_back("etag", *linked);
            if (!same_version("link at " + hop_.origin(), Validators::of(target))) {
                return Take::kStop;
            }
        }
    } else if (const std::string* later = head.find("retry-after")) {
        retry_after_ = parse_retry_after(*later, parts_.time.wall());
    }
    flow_.excuse(*state_);
    return Take::kMore;
}

Take RangeAttempt::accept_bytes(const ReplyHead& head) {
    SeenFile& seen = *state_->source->seen;
    const RangeJob& job = state_->job;
    const uint64_t done = state_->delivered;
    const AskedRange asked{job.offset + done, job.bytes - done, seen.file_bytes};
    const Result<AcceptedRange> accepted = accept_reply(head, asked);
    if (!accepted) {
        failed(accepted.error().code, accepted.error().detail);
        if (accepted.error().code == Errc::kUnsupported) {
            log(LogLevel::kWarn, "net",
                "origin " + printable(hop_.origin()) + ": " + error_.detail);
        }
        flow_.end_with(error_);
        return Take::kStop;
    }
    if (!same_version(hop_.origin(), Validators::of(head))) return Take::kStop;
    seen.file_bytes = accepted->file_bytes;
    missing_ = accepted->bytes;
    whole_ = accepted->ignores_ranges;
    open_ended_ =
        head.find("content-length") == nullptr && head.find("transfer-encoding") == nullptr;
    if (whole_ && !std::exchange(state_->source->ignores_ranges, true)) {
        flow_.excuse(*state_);
        log(LogLevel::kWarn, "net",
            "origin " + printable(hop_.origin()) + " ignores ranges: only the beginning of " +
                state_->source->url.shown() + " can be had from it");
    }
    if (redirected_) state_->source->target = hop_;
    return Take::kMore;
}

Take RangeAttempt::on_body(Transfer&, std::span<const uint8_t> data) {
    if (parts_.cancelled || flow_.failure()) return Take::kStop;
    if (!flow_.may_take()) return Take::kPause;
    if (!flow_.pulled(data.size())) return Take::kStop;
    if (kind_ == ReplyKind::kBytes) return take_bytes(data);
    const size_t room = kTextBytesMax - text_.size();
    text_.append(reinterpret_cast<const char*>(data.data()), std::min(room, data.size()));
    text_cut_ = data.size() >= room;
    return text_cut_ ? Take::kStop : Take::kMore;
}

Take RangeAttempt::take_bytes(std::span<const uint8_t> data) {
    const size_t wanted = static_cast<size_t>(std::min<uint64_t>(missing_, data.size()));
    if (!flow_.deliver(*state_, data.first(wanted))) return Take::kStop;
    missing_ -= wanted;
    gained_ = gained_ || wanted > 0;
    if (wanted < data.size() && !whole_) {
        failed(Errc::kMismatch, "more bytes came than the reply's head says");
        flow_.end_with(error_);
        return Take::kStop;
    }
    return missing_ == 0 && (whole_ || open_ended_) ? Take::kStop : Take::kMore;
}

RangeAttempt::End RangeAttempt::on_stalled() {
    transfer_.stop();
    if (state_->delivered == state_->job.bytes) return End::kComplete;
    error_ = {Errc::kTimeout,
              where() + "no byte for " + std::to_string(options_.stall_max.count()) + " ms"};
    return End::kAgain;
}

RangeAttempt::End RangeAttempt::on_ended(CURLcode result) {
    if (flow_.failure() || parts_.cancelled) return End::kFailed;
    if (state_->delivered == state_->job.bytes) return End::kComplete;
    if (transfer_.has_head()) {
        if (kind_ != ReplyKind::kBytes) return judge_reply();
        if (missing_ == 0) return End::kPartial;
    }
    if (result == CURLE_OK) {
        error_ = {Errc::kIo, where() + "the reply ended " + std::to_string(missing_) +
                                 " bytes before its end"};
        return End::kAgain;
    }
    const Error error = transfer_.error(result);
    error_ = {error.code, where() + redactor_.hide(error.detail)};
    return error.code == Errc::kIo || error.code == Errc::kTimeout ? End::kAgain : End::kFailed;
}

RangeAttempt::End RangeAttempt::judge_reply() {
    const int status = transfer_.head().status;
    switch (kind_) {
        case ReplyKind::kRedirect:
            return next_hop();
        case ReplyKind::kLater:
            error_ = {Errc::kIo, where() + server_text()};
            return End::kAgain;
        case ReplyKind::kRefused:
            if (redirected_) {
                error_ = {code_of_status(status), where() + server_text()};
                return End::kExpired;
            }
            break;
        default:
            break;
    }
    if (status == 416) {
        return failed(Errc::kMismatch,
                      "the file is shorter than asked for, or changed: " + server_text());
    }
    if (status / 100 == 2) {
        return failed(Errc::kUnsupported, "a reply without the bytes asked for: " + server_text());
    }
    return failed(code_of_status(status), server_text());
}

RangeAttempt::End RangeAttempt::next_hop() {
    const std::string* location = transfer_.head().find("location");
    if (location == nullptr) return failed(Errc::kUnsupported, "a redirect without Location");
    if (++hops_ > options_.redirects_max) {
        return failed(Errc::kLimit, "more than " + std::to_string(options_.redirects_max) +
                                        " redirects (a loop?)");
    }
    Result<HttpUrl> next = hop_.follow(*location);
    if (!next) return failed(next.error().code, next.error().detail);
    hop_ = std::move(*next);
    redirected_ = true;
    redactor_.add_query(hop_.query());
    if (auto asked = ask(); !asked) return failed(asked.error().code, asked.error().detail);
    return End::kNone;
}

}  // namespace kvasir::net
