// The market behind a real port with TLS, asked by the real HTTP client: from invite to proof.
#include <gtest/gtest.h>

#include <filesystem>

#include "coordinator/market_testing.hpp"
#include "moe/outline.hpp"
#include "net/client.hpp"
#include "net/upgrade.hpp"

namespace kvasir::coordinator {
namespace {

using namespace testing;

class MarketSocketTest : public MarketTest {
protected:
    void listen() {
        auto tls = net::TlsServer::self_signed(folder_ / "tls");
        ASSERT_TRUE(tls) << tls.error().detail;
        options_.tls_pin = (*tls)->pin();
        open();
        net::ListenerOptions options;
        options.tls = *tls;
        options.http = market_->handler();
        net::Endpoint endpoint;
        endpoint.host = "127.0.0.1";
        auto listener = net::Listener::make(
            endpoint, [](net::MessageStream, const std::string&) {}, std::move(options));
        ASSERT_TRUE(listener) << listener.error().detail;
        listener_ = std::move(*listener);
        base_ = "https://127.0.0.1:" + std::to_string(listener_->port());
    }
    net::HttpReply fetch(const std::string& method, const std::string& path,
                         const std::string& body = "", const net::HeaderList& secret = {}) {
        net::HttpCall request;
        request.method = method;
        request.url = base_ + path;
        request.body = body;
        request.secret_headers = secret;
        auto reply = client_->call(request);
        EXPECT_TRUE(reply) << reply.error().detail;
        return reply ? *reply : net::HttpReply{};
    }
    std::unique_ptr<net::Listener> listener_;
    std::unique_ptr<net::HttpClient> client_;
    std::string base_;
};

TEST_F(MarketSocketTest, ANodeDownloadsItsLeasesAndNothingElse) {
    ASSERT_TRUE(std::filesystem::create_directory(folder_ / "tls"));
    listen();
    const auto invite = market_->make_invite(1, 1h);
    ASSERT_TRUE(invite && invite->tls_pin);
    net::ClientTrust trust;
    trust.pin = invite->tls_pin;
    auto client = net::HttpClient::make(trust);
    ASSERT_TRUE(client);
    client_ = std::move(*client);

    const Json facts = Json::parse(fetch("GET", "/api/v1/market").body);
    const std::string outline_text = fetch("GET", facts.at("outline").at("path")).body;
    const auto outline = moe::decode_outline(
        {reinterpret_cast<const uint8_t*>(outline_text.data()), outline_text.size()});
    ASSERT_TRUE(outline) << outline.error().detail;

    // In process what is about keys, over the socket what is about bytes.
    Node node(handler_);
    ASSERT_EQ(node.enroll(*invite).status, 200);
    const net::HeaderList secret = {{"Authorization", "Bearer " + node.token}};
    const uint64_t budget = outline->model.bytes_experts() / 3;
    const Json asked = Json::parse(
        fetch("POST", "/api/v1/leases", Json{{"budget_bytes", budget}}.dump(), secret).body);
    const Json leases = asked.at("leases");
    ASSERT_FALSE(leases.empty());
    std::vector<Segment> segments;
    for (const Json& lease : leases) {
        segments.push_back({{lease.at("layer"), lease.at("bank")},
                            lease.at("begin").get<uint32_t>(),
                            lease.at("end").get<uint32_t>()});
    }
    const auto plan = moe::plan_slice(*outline, segments);
    ASSERT_TRUE(plan);
    std::vector<net::RangeJob> jobs;
    for (const moe::SliceRange& range : plan->ranges) {
        std::string path = facts.at("data").at("path");
        path.replace(path.find("{shard}"), 7, std::to_string(range.shard));
        net::RangeJob job;
        job.url = base_ + path;
        job.secret_headers = secret;
        job.offset = range.from;
        job.bytes = range.bytes;
        job.file_bytes = outline->model.shards[range.shard].file_bytes;
        job.tag = range.to;
        jobs.push_back(job);
    }
    std::vector<uint8_t> slice(plan->file_bytes);
    const auto on_data = [&](const net::RangeJob& job, uint64_t offset,
                             std::span<const uint8_t> data) -> Status {
        std::ranges::copy(
            data, slice.begin() + static_cast<std::ptrdiff_t>(job.tag + (offset - job.offset)));
        return {};
    };
    const auto on_done = [](const net::RangeJob&) -> Status { return {}; };
    const Status done = client_->download(jobs, {}, on_data, on_done);
    ASSERT_TRUE(done) << done.error().detail;
    for (const moe::SliceSlab& slab : plan->slabs) {
        EXPECT_EQ(crypto::sha256(std::span<const uint8_t>(slice).subspan(slab.to, slab.bytes)),
                  slab.digest);
    }
    EXPECT_EQ(client_->counters().bytes_pulled, plan->bytes_slabs);
    EXPECT_LE(plan->bytes_slabs, budget);
    ASSERT_EQ(node.prove(ids_of(leases), leases, model()).status, 200);

    // A neighbour's bytes: refused, whatever is tried, with the range in the message.
    jobs.resize(1);
    jobs[0].bytes += 1;
    const Status refused = client_->download(jobs, {}, on_data, on_done);
    ASSERT_FALSE(refused);
    EXPECT_NE(refused.error().detail.find("not within your leases"), std::string::npos)
        << refused.error().detail;
    // The market's own count is what arrived, as soon as that is acknowledged.
    uint64_t served = 0;
    for (const auto end = net::Clock::now() + std::chrono::seconds(10);
         served != plan->bytes_slabs && net::Clock::now() < end;) {
        const Json rows = send("GET", "/api/v1/nodes", "", operator_secret()).json;
        served = rows.at("nodes").at(0).at("bytes_served").get<uint64_t>();
        ASSERT_LE(served, plan->bytes_slabs);
    }
    EXPECT_EQ(served, plan->bytes_slabs);

    const net::HttpReply unknown = fetch("GET", "/api/v1/none");
    EXPECT_EQ(unknown.status, 404);
    market_.reset();
    EXPECT_EQ(fetch("GET", "/api/v1/market").status, 503);
}

}  // namespace
}  // namespace kvasir::coordinator
