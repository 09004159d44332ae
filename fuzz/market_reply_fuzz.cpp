// Fuzz target: what a market answers to a node, which it may be hostile to.
//
// Input: a byte that chooses the call, 2 bytes status (little-endian), then the reply's body; for
// an outline, up to the first newline, the value of its signature's header first. Checked: numbers
// and counts within the limits of market_client.hpp, texts for people printable, URLs still the
// market's own, errors with words that a terminal can show.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/encoding.hpp"
#include "base/log.hpp"
#include "worker/market_client.hpp"

namespace {

using namespace kvasir;

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "market_reply_fuzz: %s\n", what);
    std::abort();
}

// Answers everything with one reply; a challenge only if it is what is tested.
class OneReply final : public net::HttpClient {
public:
    net::HttpReply reply;
    bool gives_challenge = true;

    Result<net::HttpReply> call(const net::HttpCall& call) override {
        require(call.url.starts_with("https://market.example:1/"), "a call to somebody else");
        const bool is_challenge = call.url.ends_with("/challenge");
        if (is_challenge && gives_challenge)
            return net::HttpReply{200, R"({"challenge":"00ff"})", {}};
        if (reply.body.size() > call.reply_bytes_max) return fail(Errc::kLimit, "too long");
        return reply;
    }
    Status download(std::vector<net::RangeJob>, const net::RangeOptions&, const OnData&,
                    const OnDone&) override {
        return fail(Errc::kUnsupported, "no downloads");
    }
    const net::RangeCounters& counters() const override { return counters_; }
    void cancel() override {}

private:
    net::RangeCounters counters_;
};

bool is_shown(const std::string& text, size_t most) {
    return text.size() <= most + 16 && printable(text, text.size()) == text;
}

template <class T>
bool is_good(const Result<T>& result) {
    if (result) return true;
    require(!result.error().detail.empty(), "an error without words");
    require(is_shown(result.error().detail, 4096), "an error that no terminal can show");
    return false;
}

void check_time(std::chrono::seconds time) {
    require(time.count() >= 0 && time <= std::chrono::hours(24 * 3650), "a time that is none");
}

void check_grant(const worker::Grant& grant) {
    require(is_shown(grant.node, 100), "node");
    require(!grant.token.empty() && is_shown(grant.token, crypto::kTokenBytesMax), "token");
    check_time(grant.expires_in);
    check_time(grant.renew_in);
}

void check_news(const worker::LeaseNews& news) {
    require(news.leases.size() <= worker::kLeasesMax, "leases");
    require(news.lost.size() <= worker::kLeasesMax, "lost");
    for (const worker::LeaseLife& lease : news.leases) check_time(lease.expires_in);
}

void check_info(const worker::MarketInfo& info, const worker::MarketAddress& address) {
    require(is_shown(info.name, 64) && is_shown(info.model_name, 64), "names");
    for (const std::string& path : {info.outline_path, info.data_path}) {
        require(path.starts_with('/') && !path.starts_with("//"), "a path to somebody else");
        require(path.find_first_of(" \r\n\t") == path.npos, "a path in two");
    }
    require(worker::data_url(address, info, 4294967295u).starts_with(address.base + "/"), "data");
    const auto relay = worker::relay_endpoint(info, address);
    if (is_good(relay)) require(!relay->host.empty() && relay->port != 0, "relay");
}

void check_leases(const worker::LeaseReply& reply) {
    require(reply.leases.size() <= worker::kLeasesMax, "leases");
    require(reply.heartbeat_every >= std::chrono::seconds(1), "heartbeats without a pause");
    require(reply.heartbeat_every <= std::chrono::hours(1), "heartbeats never");
    for (const worker::NodeLease& lease : reply.leases) {
        require(lease.segment.begin < lease.segment.end, "an empty lease");
        require(lease.bytes <= INT64_MAX, "bytes");
        check_time(lease.expires_in);
    }
}

void check_task(const worker::ProofTask& task) {
    require(!task.nonce.empty() && encode_hex(task.nonce) == task.nonce_hex, "nonce");
    require(task.probes.size() <= worker::kProbesMax, "probes");
    for (const worker::ByteProbe& probe : task.probes) {
        require(probe.bytes <= worker::kProbeBytesMax && probe.offset <= INT64_MAX, "probe");
    }
}

void check_outline(worker::MarketClient& market, const crypto::KeyPair& key, std::string& body,
                   net::HttpReply& reply) {
    const size_t line = body.find('\n');
    if (line == body.npos) return;
    reply.headers = {{"kvasir-signature", body.substr(0, line)}};
    reply.body = body.substr(line + 1);
    worker::MarketInfo info;
    info.outline_path = "/outline";
    info.outline_bytes = reply.body.size();
    const auto outline = market.outline(info, key.public_key());
    require(!is_good(outline), "an outline that nobody signed");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const crypto::KeyPair key = [] {
        std::array<uint8_t, 32> seed;
        seed.fill(7);
        return crypto::KeyPair::from_seed(seed).value();
    }();
    static const worker::MarketAddress address{"https://market.example:1", true};
    if (size < 3) return 0;
    OneReply http;
    http.reply.status = data[1] | data[2] << 8;
    http.reply.body.assign(reinterpret_cast<const char*>(data) + 3, size - 3);
    worker::MarketClient market(http, address);
    market.set_token("kvt1.token");
    switch (data[0]) {
        case 'm': {
            const auto info = market.look_up();
            if (is_good(info)) check_info(*info, address);
            break;
        }
        case 'c':
            http.gives_challenge = false;
            (void)is_good(market.renew(key));
            break;
        case 'e': {
            crypto::Invite invite;
            invite.market = key.public_key();
            const auto grant = market.enroll(invite, key, "node", "worker");
            if (is_good(grant)) check_grant(*grant);
            break;
        }
        case 'r': {
            const auto grant = market.renew(key);
            if (is_good(grant)) check_grant(*grant);
            break;
        }
        case 'l': {
            const auto reply = market.lease(1 << 20, {}, {}, 1);
            if (is_good(reply)) check_leases(*reply);
            break;
        }
        case 'p': {
            const auto task = market.ask_proof({1});
            if (!is_good(task)) break;
            check_task(*task);
            if (const auto news = market.prove(*task, {}); is_good(news)) check_news(*news);
            break;
        }
        case 'n': {
            const auto news = market.progress({{1, 2}});
            if (is_good(news)) check_news(*news);
            break;
        }
        case 'b': {
            const auto beat = market.heartbeat({1});
            if (!is_good(beat)) break;
            check_news(beat->news);
            if (beat->grant) check_grant(*beat->grant);
            break;
        }
        case 'o':
            check_outline(market, key, http.reply.body, http.reply);
            break;
        default:
            (void)market.release({});
            break;
    }
    return 0;
}
