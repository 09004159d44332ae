// HttpClient: small calls here; downloads in range_download.cpp.
#include "net/client.hpp"

#include <algorithm>

#include "base/log.hpp"
#include "net/client_time.hpp"
#include "net/http_url.hpp"
#include "net/origin_headers.hpp"
#include "net/range_download.hpp"
#include "net/transfer.hpp"

namespace kvasir::net {
namespace {

using std::chrono::milliseconds;

constexpr uint32_t kCallRedirectsMax = 5;
constexpr size_t kSeenFilesMax = 4096;
constexpr milliseconds kCallWaitMax{1000};

std::string lower(std::string_view text) {
    std::string out(text);
    for (char& c : out) {
        if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    }
    return out;
}

bool has_header(const HeaderList& headers, std::string_view name) {
    return std::any_of(headers.begin(), headers.end(),
                       [&](const auto& header) { return lower(header.first) == name; });
}

// One call: a chain of requests until a reply that is no redirect.
class CallExchange final : public TransferSink {
public:
    CallExchange(Transfers& transfers, const TransferTrust& trust, const OriginHeaders& secrets,
                 const std::atomic<bool>& cancelled, const HttpCall& call)
        : transfers_(transfers),
          secrets_(secrets),
          cancelled_(cancelled),
          call_(call),
          transfer_(transfers, trust) {}

    Result<HttpReply> run();
    Take on_head(Transfer& transfer) override;
    Take on_body(Transfer& transfer, std::span<const uint8_t> data) override;

private:
    Status start();
    // Runs the request under way to its end.
    Status finish();
    Result<bool> follow();
    Error error(Errc code, const std::string& why) const { return {code, where_ + ": " + why}; }

    Transfers& transfers_;
    const OriginHeaders& secrets_;
    const std::atomic<bool>& cancelled_;
    const HttpCall& call_;
    Transfer transfer_;
    const ClientTime::Point deadline_ = std::chrono::steady_clock::now() + call_.timeout;
    HttpUrl first_;
    HttpUrl hop_;
    std::string where_;  // "GET https://host/path"
    std::string method_;
    Redactor redactor_;
    bool with_body_ = true;
    std::string body_;
    bool too_long_ = false;
};

Status CallExchange::start() {
    TransferRequest request;
    request.method = method_;
    request.url = &hop_;
    request.headers = call_.headers;
    if (with_body_) request.body = call_.body;
    if (!request.body.empty() && !has_header(call_.headers, "content-type")) {
        request.headers.emplace_back("Content-Type", "application/json");
    }
    secrets_.append(request.headers, hop_, first_, call_.secret_headers);
    request.connect_timeout = call_.timeout;
    body_.clear();
    return transfer_.start(request, *this);
}

Take CallExchange::on_head(Transfer&) {
    return Take::kMore;
}

Take CallExchange::on_body(Transfer&, std::span<const uint8_t> data) {
    if (cancelled_) return Take::kStop;
    if (data.size() > call_.reply_bytes_max - body_.size()) {
        too_long_ = true;
        return Take::kStop;
    }
    body_.append(reinterpret_cast<const char*>(data.data()), data.size());
    return Take::kMore;
}

Status CallExchange::finish() {
    CURLcode code = CURLE_OK;
    for (;;) {
        if (cancelled_) return tl::unexpected(error(Errc::kClosed, "cancelled"));
        if (auto turned = transfers_.turn(); !turned) return turned;
        if (transfers_.ended(code) == &transfer_) break;
        const auto left =
            std::chrono::ceil<milliseconds>(deadline_ - std::chrono::steady_clock::now());
        if (left <= milliseconds(0)) {
            return tl::unexpected(
                error(Errc::kTimeout,
                      "no whole reply within " + std::to_string(call_.timeout.count()) + " ms"));
        }
        transfers_.wait(std::min(left, kCallWaitMax));
    }
    if (cancelled_) return tl::unexpected(error(Errc::kClosed, "cancelled"));
    if (too_long_) {
        return tl::unexpected(
            error(Errc::kLimit,
                  "the reply has more than " + std::to_string(call_.reply_bytes_max) + " bytes"));
    }
    if (code == CURLE_OK) return {};
    const Error failure = transfer_.error(code);
    return tl::unexpected(error(failure.code, redactor_.hide(failure.detail)));
}

// Takes the next hop, if the reply is a redirect.
Result<bool> CallExchange::follow() {
    const ReplyHead& head = transfer_.head();
    const std::string* location = head.find("location");
    if (classify_status(head.status) != ReplyKind::kRedirect || location == nullptr) return false;
    Result<HttpUrl> next = hop_.follow(*location);
    if (!next) return tl::unexpected(error(next.error().code, next.error().detail));
    // As browsers do: 303 makes a GET of anything, 301 and 302 of a POST.
    const bool post = method_ == "POST" && (head.status == 301 || head.status == 302);
    if ((head.status == 303 || post) && method_ != "HEAD") {
        method_ = "GET";
        with_body_ = false;
    }
    if (with_body_ && !call_.body.empty() && next->origin() != first_.origin()) {
        return tl::unexpected(error(Errc::kDenied, "a redirect to " + printable(next->origin()) +
                                                       " would send the body to another server"));
    }
    hop_ = std::move(*next);
    redactor_.add_query(hop_.query());
    return true;
}

Result<HttpReply> CallExchange::run() {
    Result<HttpUrl> url = HttpUrl::parse(call_.url);
    if (!url) return tl::unexpected(url.error());
    for (const char* name : {"authorization", "cookie", "proxy-authorization"}) {
        if (has_header(call_.headers, name)) {
            return fail(Errc::kUsage, std::string(name) + " belongs into secret_headers");
        }
    }
    first_ = hop_ = std::move(*url);
    method_ = call_.method;
    where_ = printable(method_, 20) + " " + first_.shown();
    for (const auto& [name, value] : call_.secret_headers) redactor_.add_header_value(value);
    secrets_.hide_in(redactor_);
    redactor_.add_query(first_.query());
    for (uint32_t hops = 0;; ++hops) {
        if (hops > kCallRedirectsMax) {
            return tl::unexpected(
                error(Errc::kLimit,
                      "more than " + std::to_string(kCallRedirectsMax) + " redirects (a loop?)"));
        }
        if (auto started = start(); !started) {
            return tl::unexpected(error(started.error().code, started.error().detail));
        }
        if (auto ended = finish(); !ended) return tl::unexpected(ended.error());
        const Result<bool> again = follow();
        if (!again) return tl::unexpected(again.error());
        if (!*again) break;
    }
    if (auto plain = check_coding(transfer_.head()); !plain) {
        return tl::unexpected(error(plain.error().code, plain.error().detail));
    }
    return HttpReply{transfer_.head().status, std::move(body_), transfer_.head().headers};
}

class CurlClient final : public HttpClient {
public:
    CurlClient(std::unique_ptr<Transfers> transfers, TransferTrust trust, OriginHeaders secrets,
               std::shared_ptr<ClientTime> time)
        : transfers_(std::move(transfers)),
          trust_(std::move(trust)),
          secrets_(std::move(secrets)),
          time_(std::move(time)) {}

    Result<HttpReply> call(const HttpCall& call) override {
        return CallExchange(*transfers_, trust_, secrets_, cancelled_, call).run();
    }

    Status download(std::vector<RangeJob> jobs, const RangeOptions& options, const OnData& on_data,
                    const OnDone& on_done) override {
        if (seen_.size() > kSeenFilesMax) seen_.clear();
        RangeDownload download(
            {*transfers_, trust_, secrets_, cancelled_, counters_, seen_, *time_}, options, on_data,
            on_done);
        return download.run(std::move(jobs));
    }

    const RangeCounters& counters() const override { return counters_; }

    void cancel() override {
        cancelled_ = true;
        transfers_->wake();
    }

private:
    const std::unique_ptr<Transfers> transfers_;
    const TransferTrust trust_;
    const OriginHeaders secrets_;
    const std::shared_ptr<ClientTime> time_;
    std::atomic<bool> cancelled_{false};
    RangeCounters counters_;
    SeenFiles seen_;
};

}  // namespace

Result<std::unique_ptr<HttpClient>> make_http_client(const ClientTrust& trust,
                                                     std::shared_ptr<ClientTime> time,
                                                     const OriginSecrets& secrets) {
    Result<TransferTrust> settings = TransferTrust::make(trust);
    if (!settings) return tl::unexpected(settings.error());
    Result<OriginHeaders> headers = OriginHeaders::make(secrets);
    if (!headers) return tl::unexpected(headers.error());
    std::unique_ptr<Transfers> transfers = Transfers::make();
    if (transfers == nullptr) return fail(Errc::kEnvironment, "no memory for libcurl");
    return std::make_unique<CurlClient>(std::move(transfers), std::move(*settings),
                                        std::move(*headers), std::move(time));
}

Result<std::unique_ptr<HttpClient>> HttpClient::make(const ClientTrust& trust,
                                                     const OriginSecrets& secrets) {
    return make_http_client(trust, std::make_shared<ClientTime>(), secrets);
}

}  // namespace kvasir::net
