#include "apps/revocation_poll.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/log.hpp"
#include "worker/market_client.hpp"

namespace kvasir::apps {

bool RevokedSerials::contains(uint64_t serial) const {
    const std::lock_guard lock(mu_);
    return std::ranges::binary_search(serials_, serial);
}

std::vector<uint64_t> RevokedSerials::take(std::vector<uint64_t> ascending) {
    const std::lock_guard lock(mu_);
    std::vector<uint64_t> fresh, all;
    std::ranges::set_difference(ascending, serials_, std::back_inserter(fresh));
    if (fresh.empty()) return fresh;
    std::ranges::set_union(ascending, serials_, std::back_inserter(all));
    serials_ = std::move(all.size() <= kSerialsMax ? all : ascending);
    return fresh;
}

Result<std::unique_ptr<RevocationPoll>> RevocationPoll::make(RevocationPollOptions options) {
    const auto market = worker::parse_market_url(options.market_url);
    if (!market) return tl::unexpected(market.error());
    auto http = net::HttpClient::make(options.trust);
    if (!http) return tl::unexpected(http.error());
    std::unique_ptr<RevocationPoll> poll(new RevocationPoll(
        std::move(options), market->base + "/api/v1/revocations", std::move(*http)));
    (void)poll->ask_and_tell();  // nobody is attached yet
    return poll;
}

RevocationPoll::RevocationPoll(RevocationPollOptions options, std::string url,
                               std::unique_ptr<net::HttpClient> http)
    : options_(std::move(options)), url_(std::move(url)), http_(std::move(http)) {}

RevocationPoll::~RevocationPoll() {
    {
        const std::lock_guard lock(mu_);
        is_stopping_ = true;
    }
    wake_.notify_all();
    http_->cancel();
    if (thread_.joinable()) thread_.join();
}

void RevocationPoll::start(OnRevoked on_revoked) {
    thread_ = std::thread([this, on_revoked = std::move(on_revoked)] { run(on_revoked); });
}

void RevocationPoll::run(const OnRevoked& on_revoked) {
    for (;;) {
        {
            std::unique_lock lock(mu_);
            if (wake_.wait_for(lock, options_.every, [this] { return is_stopping_; })) return;
        }
        if (auto fresh = ask_and_tell(); !fresh.empty()) on_revoked(std::move(fresh));
    }
}

Result<std::vector<uint64_t>> RevocationPoll::ask() {
    net::HttpCall call;
    call.url = url_;
    call.timeout = options_.timeout;
    call.reply_bytes_max = crypto::kRevocationsBytesMax;
    const auto reply = http_->call(call);
    if (!reply) return tl::unexpected(reply.error());
    if (reply->status != 200) {
        return fail(Errc::kIo, "the market answered with status " + std::to_string(reply->status));
    }
    auto list = crypto::open_revocations(reply->body, options_.market_key);
    if (!list) return tl::unexpected(list.error());
    return revoked_->take(std::move(list->serials));
}

std::vector<uint64_t> RevocationPoll::ask_and_tell() {
    auto fresh = ask();
    if (!fresh) {
        if (fresh.error().code != Errc::kClosed && !std::exchange(is_failing_, true)) {
            log(LogLevel::kWarn, "relay",
                "revoked tokens are not known, or only those of before: " + fresh.error().detail);
        }
        return {};
    }
    if (std::exchange(is_failing_, false)) {
        log(LogLevel::kInfo, "relay", "the market says again which tokens are revoked");
    }
    return std::move(*fresh);
}

}  // namespace kvasir::apps
