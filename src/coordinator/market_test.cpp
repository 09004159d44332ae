#include "coordinator/market.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "base/log_testing.hpp"
#include "coordinator/market_testing.hpp"
#include "coordinator/model_files.hpp"
#include "moe/outline.hpp"

namespace kvasir::coordinator {
namespace {

using namespace testing;
using ::testing::HasSubstr;

// ---- facts ----

TEST_F(MarketTest, FactsAndOutlineAreSigned) {
    options_.relay_url = "wss://relay.example:443";
    open();
    const Reply market = send("GET", "/api/v1/market");
    ASSERT_EQ(market.status, 200);
    EXPECT_EQ(market.header("X-Content-Type-Options"), "nosniff");
    const Json& facts = market.json;
    EXPECT_EQ(facts.at("name"), "a market");
    EXPECT_EQ(facts.at("market_key"), crypto::to_hex(market_->key()));
    EXPECT_EQ(facts.at("model").at("id"), to_hex(market_->model_id()));
    EXPECT_EQ(facts.at("model").at("experts"), 16);
    EXPECT_EQ(facts.at("model").at("bytes_experts"), model().bytes_experts());
    EXPECT_EQ(facts.at("relay").at("url"), "wss://relay.example:443");
    const Reply outline = send("GET", facts.at("outline").at("path"));
    ASSERT_EQ(outline.status, 200);
    EXPECT_EQ(outline.body.size(), facts.at("outline").at("bytes"));
    const std::vector<uint8_t> bytes(outline.body.begin(), outline.body.end());
    EXPECT_EQ(to_hex(crypto::sha256(bytes)), facts.at("outline").at("sha256"));
    crypto::Signature signature = {};
    const auto signed_hex = decode_hex(outline.header("Kvasir-Signature"));
    ASSERT_TRUE(signed_hex && signed_hex->size() == signature.size());
    std::copy(signed_hex->begin(), signed_hex->end(), signature.begin());
    EXPECT_TRUE(crypto::verify(market_->key(), "outline", bytes, signature));
    const auto decoded = moe::decode_outline(bytes);
    ASSERT_TRUE(decoded) << decoded.error().detail;
    EXPECT_EQ(decoded->manifest.model_id, market_->model_id());
}

TEST_F(MarketTest, WrongPathsAndMethodsAreNamed) {
    open();
    EXPECT_EQ(send("GET", "/nothing/<script>").status, 404);
    EXPECT_EQ(send("POST", "/api/v1/market").status, 405);
    EXPECT_EQ(send("GET", "/api/v1/challenge").status, 405);
    EXPECT_EQ(send("PUT", "/api/v1/leases").status, 405);
    EXPECT_EQ(send("GET", "/api/v1/leases/prove").status, 405);
    EXPECT_EQ(send("GET", "/models/" + std::string(64, '0') + "/data/0").status, 404);
    EXPECT_EQ(send("POST", "/api/v1/leases", "{}").status, 403);
    EXPECT_EQ(send("POST", "/api/v1/leases", std::string(600 << 10, ' ')).status, 413);
    EXPECT_EQ(send("POST", "/api/v1/nodes", std::string(9 << 10, ' ')).status, 413);
}

TEST_F(MarketTest, RefusesWhatIsNoWholeModel) {
    options_.origin = "ftp://x";
    EXPECT_EQ(Market::open(options_).error().code, Errc::kUsage);
    options_.origin = "https://user:secret@x/";
    EXPECT_EQ(Market::open(options_).error().code, Errc::kUsage);
    options_.origin = "";
    options_.model_path = folder_ / "none.gguf";
    EXPECT_EQ(Market::open(options_).error().code, Errc::kEnvironment);
    options_.model_path = model_path_;
    open();
    // Two markets over one database would give away the same gaps.
    const auto second = Market::open(options_);
    ASSERT_FALSE(second);
    EXPECT_EQ(second.error().code, Errc::kEnvironment);
    EXPECT_NE(second.error().detail.find("another market"), std::string::npos);
    // The operator's secret is nobody else's.
    market_.reset();
    std::filesystem::permissions(options_.db_path + ".operator",
                                 std::filesystem::perms::others_read,
                                 std::filesystem::perm_options::add);
    EXPECT_EQ(Market::open(options_).error().code, Errc::kEnvironment);
}

// The database's file by another name, or with its lock removed, is the same database.
TEST_F(MarketTest, ASecondNameOfTheDatabaseIsTheSameDatabase) {
    open();
    namespace fs = std::filesystem;
    const std::string real = options_.db_path;
    fs::create_symlink(real, folder_ / "symlink.db");
    fs::create_hard_link(real, folder_ / "hardlink.db");
    const auto expect_refused = [&](const std::string& path) {
        options_.db_path = path;
        options_.operator_path = real + ".operator";
        const auto second = Market::open(options_);
        ASSERT_FALSE(second) << path;
        EXPECT_EQ(second.error().code, Errc::kEnvironment);
        EXPECT_EQ(second.error().detail, "another market uses the database " + path +
                                             ": stop it, or give this one a database of its own");
    };
    expect_refused(folder_ / "symlink.db");
    expect_refused(folder_ / "hardlink.db");
    fs::remove(real + ".lock");
    expect_refused(real);
    // The first one goes on, and once it is gone each name will do.
    EXPECT_TRUE(market_->make_invite(1, 1h));
    options_.db_path = folder_ / "symlink.db";
    open();
    EXPECT_TRUE(market_->make_invite(1, 1h));
}

TEST_F(MarketTest, AnotherKeyThanTheDatabasesIsTold) {
    const auto told = [&] {
        market_.reset();
        const kvasir::testing::LogCapture lines;
        open();
        return lines.with("tokens and invites of before are void").size();
    };
    const auto lose_key = [&] {
        market_.reset();
        ASSERT_TRUE(std::filesystem::remove(options_.key_path));
    };
    EXPECT_EQ(told(), 0u);
    lose_key();
    EXPECT_EQ(told(), 0u) << "nobody has anything of the old one";
    ASSERT_TRUE(market_->make_invite(1, 1h));
    EXPECT_EQ(told(), 0u);
    lose_key();
    EXPECT_EQ(told(), 1u);
    EXPECT_EQ(told(), 0u) << "once";
}

// ---- nodes ----

TEST_F(MarketTest, AnInviteOfAnotherRoleStaysGood) {
    open();
    const auto invite = market_->make_invite(1, 1h, crypto::kRoleBackbone);
    ASSERT_TRUE(invite);
    Node worker(handler_), backbone(handler_), other(handler_);
    const auto enroll = [&](Node& node, const Json& role) {
        Json body = node.enroll_body(*invite, "node");
        body["role"] = role;
        return node.post("/api/v1/nodes", body);
    };
    const Reply refused = enroll(worker, "worker");
    EXPECT_EQ(refused.status, 403);
    EXPECT_EQ(refused.code(), "denied");
    EXPECT_NE(refused.message().find("role worker"), std::string::npos) << refused.message();
    EXPECT_EQ(enroll(worker, "king").status, 400);
    EXPECT_EQ(enroll(worker, 1).status, 400);
    EXPECT_EQ(enroll(backbone, "backbone").status, 200);
    EXPECT_NE(enroll(other, "backbone").message().find("used up"), std::string::npos);
}

TEST_F(MarketTest, ANodeRegistersOnceHoweverOften) {
    open();
    const auto invite = market_->make_invite(1, 1h);
    ASSERT_TRUE(invite);
    Node node(handler_), other(handler_);
    const Reply first = node.enroll(*invite);
    ASSERT_EQ(first.status, 200) << first.body;
    EXPECT_EQ(first.json.at("node"), node.id());
    EXPECT_EQ(first.json.at("expires_in_s"), 3600);
    EXPECT_EQ(first.json.at("renew_in_s"), 2400);
    const auto claims = market_->open_token(node.token);
    ASSERT_TRUE(claims);
    EXPECT_EQ(claims->node, node.key().public_key());
    EXPECT_EQ(claims->model_id, market_->model_id());
    EXPECT_EQ(claims->roles, crypto::kRoleWorker);
    EXPECT_EQ(node.enroll(*invite).status, 200);
    EXPECT_EQ(market_->open_token(node.token)->serial, claims->serial);  // at once: the same
    clock_.pass(181s);
    EXPECT_EQ(node.enroll(*invite).status, 200);
    EXPECT_NE(market_->open_token(node.token)->serial, claims->serial);
    const Reply refused = other.enroll(*invite);
    EXPECT_EQ(refused.status, 403);
    EXPECT_NE(refused.message().find("used up"), std::string::npos);
    clock_.pass(2h);
    EXPECT_EQ(node.enroll(*invite).status, 200);  // the invite is over, the node is known
    EXPECT_EQ(send("GET", "/api/v1/nodes", "", operator_secret()).json.at("nodes").size(), 1U);
}

TEST_F(MarketTest, OnlyTheKeyItselfRegistersAndRenews) {
    open();
    const auto invite = market_->make_invite(9, 1h);
    Node node(handler_), thief(handler_);
    const auto expect_denied = [&](const std::string& path, Json body, const char* field) {
        const Reply reply = thief.post(path, body);
        EXPECT_EQ(reply.status, 403) << reply.body;
        EXPECT_EQ(reply.code(), "denied");
        EXPECT_NE(reply.message().find(field), std::string::npos) << reply.message();
    };
    Json body = node.enroll_body(*invite, "x");
    body["public_key"] = thief.id();
    expect_denied("/api/v1/nodes", body, "signature");
    body = node.enroll_body(*invite, "x");
    body["signature"] = node.renew_body()["signature"];  // of another kind
    expect_denied("/api/v1/nodes", body, "signature");
    auto other = *invite;
    other.secret[3] ^= 1;
    expect_denied("/api/v1/nodes", node.enroll_body(other, "x"), "does not know");
    other = *invite;
    other.market = node.key().public_key();
    expect_denied("/api/v1/nodes", node.enroll_body(other, "x"), "another market");
    EXPECT_EQ(node.renew().status, 404);  // never registered
    ASSERT_EQ(node.enroll(*invite).status, 200);
    body = node.renew_body();
    body["public_key"] = thief.id();
    expect_denied("/api/v1/nodes/renew", body, "signature");
    // A challenge is the server's own, and young.
    body = node.renew_body();
    body["challenge"] = std::string(112, '0');
    expect_denied("/api/v1/nodes/renew", body, "did not make");
    body = node.renew_body();
    clock_.steady_ms += 60000;
    EXPECT_EQ(node.post("/api/v1/nodes/renew", body).status, 200);
    clock_.steady_ms += 1;
    EXPECT_EQ(node.post("/api/v1/nodes/renew", body).code(), "expired");
    body = node.renew_body();
    open();  // another run, another key of challenges
    expect_denied("/api/v1/nodes/renew", body, "did not make");
}

TEST_F(MarketTest, RolesComeFromInvites) {
    open();
    Node node(handler_);
    ASSERT_EQ(node.enroll(*market_->make_invite(1, 1h)).status, 200);
    const Reply made =
        send("POST", "/api/v1/admin/invites",
             R"({"uses": 1, "valid_for_s": 60, "role": "backbone"})", operator_secret());
    ASSERT_EQ(made.status, 200) << made.body;
    const auto invite = crypto::parse_invite(made.json.at("invite").get<std::string>());
    ASSERT_TRUE(invite);
    ASSERT_EQ(node.enroll(*invite).status, 200);
    EXPECT_EQ(market_->open_token(node.token)->roles, crypto::kRoleWorker | crypto::kRoleBackbone);
    Node late(handler_);
    EXPECT_EQ(late.enroll(*invite).status, 403);
}

TEST_F(MarketTest, LeasesAreForWorkers) {
    open();
    Node node(handler_);
    ASSERT_EQ(node.enroll(*market_->make_invite(1, 1h, crypto::kRoleBackbone)).status, 200);
    const uint64_t expert = model().banks.at(0).expert_bytes();
    const Reply refused = node.ask(5 * expert);
    EXPECT_EQ(refused.status, 403);
    EXPECT_EQ(refused.code(), "denied");
    EXPECT_NE(refused.body.find("no worker"), std::string::npos) << refused.body;
    EXPECT_EQ(send("GET", "/api/v1/coverage").json.at("experts_promised"), 0);
    ASSERT_EQ(node.enroll(*market_->make_invite(1, 1h)).status, 200);
    EXPECT_EQ(node.ask(5 * expert).status, 200);
}

// ---- leases ----

TEST_F(MarketTest, FromBudgetToServing) {
    open();
    const auto invite = market_->make_invite(2, 1h);
    Node node(handler_);
    ASSERT_EQ(node.enroll(*invite).status, 200);
    const uint64_t expert = model().banks.at(0).expert_bytes();
    EXPECT_EQ(node.ask(expert - 1).status, 400);
    const Reply asked = node.ask(5 * expert + 17);
    ASSERT_EQ(asked.status, 200) << asked.body;
    EXPECT_EQ(asked.json.at("heartbeat_every_s"), 20);
    const Json leases = asked.json.at("leases");
    ASSERT_EQ(leases.size(), 1U);
    EXPECT_EQ(leases[0].at("bytes"), 5 * expert);
    EXPECT_EQ(leases[0].at("state"), "loading");
    EXPECT_EQ(leases[0].at("expires_in_s"), 60);
    Json coverage = send("GET", "/api/v1/coverage").json;
    EXPECT_EQ(coverage.at("experts"), 16);
    EXPECT_EQ(coverage.at("experts_serving"), 0);
    EXPECT_EQ(coverage.at("experts_promised"), 5);
    // Reports keep the promise, a heartbeat does not.
    const auto ids = ids_of(leases);
    clock_.pass(50s);
    EXPECT_EQ(node.heartbeat(ids).json.at("leases")[0].at("expires_in_s"), 10);
    const Json report = {{{"id", ids[0]}, {"bytes_done", 100}}, {{"id", 999}, {"bytes_done", 1}}};
    const Reply progress = node.post("/api/v1/leases/progress", {{"leases", report}});
    ASSERT_EQ(progress.status, 200) << progress.body;
    EXPECT_EQ(progress.json.at("leases")[0].at("expires_in_s"), 60);
    EXPECT_EQ(progress.json.at("lost"), Json({999}));
    const Reply proved = node.prove(ids, leases, model());
    ASSERT_EQ(proved.status, 200) << proved.body;
    EXPECT_EQ(proved.json.at("leases")[0].at("state"), "serving");
    EXPECT_EQ(send("GET", "/api/v1/coverage").json.at("experts_serving"), 5);
    clock_.pass(59s);
    const Reply beat = node.heartbeat(ids);
    EXPECT_EQ(beat.json.at("leases")[0].at("expires_in_s"), 60);
    EXPECT_EQ(beat.json.at("ask"), false);
    clock_.pass(60s);
    EXPECT_EQ(send("GET", "/api/v1/coverage").json.at("experts_serving"), 0);
    EXPECT_EQ(node.heartbeat(ids).json.at("lost"), Json(ids));
    EXPECT_EQ(node.heartbeat({}).json.at("ask"), true);  // there is a gap, and room
    ASSERT_EQ(node.ask(5 * expert).status, 200);
    EXPECT_EQ(node.post("/api/v1/leases", Json::object(), "DELETE").json.at("released"), 1);
    EXPECT_EQ(send("GET", "/api/v1/coverage").json.at("experts_promised"), 0);
}

TEST_F(MarketTest, WrongBytesDoNotServe) {
    open();
    Node node(handler_), other(handler_);
    const auto invite = market_->make_invite(2, 1h);
    ASSERT_EQ(node.enroll(*invite).status, 200);
    ASSERT_EQ(other.enroll(*invite).status, 200);
    const Json leases = node.ask(model().bytes_experts()).json.at("leases");
    const auto ids = ids_of(leases);
    ASSERT_EQ(ids.size(), 2U);
    for (int round = 1; round <= 3; ++round) {
        const Reply wrong = node.prove(ids, leases, model(), ids[1]);
        EXPECT_EQ(wrong.status, 403) << wrong.body;
        EXPECT_EQ(wrong.json.at("error").at("wrong"), Json({ids[1]}));
        EXPECT_NE(wrong.message().find(std::to_string(ids[1])), std::string::npos);
        EXPECT_EQ(wrong.json.at("error").at("released").size(), round == 3 ? 1U : 0U);
        EXPECT_EQ(send("GET", "/api/v1/coverage").json.at("experts_serving"), 8);
    }
    EXPECT_EQ(node.heartbeat(ids).json.at("lost"), Json({ids[1]}));
    EXPECT_EQ(node.prove(ids, leases, model()).code(), "not_held");
    // Only the node itself, only with its own nonce, only once.
    EXPECT_EQ(other.prove({ids[0]}, leases, model()).code(), "not_held");
    const Reply asked = node.post("/api/v1/leases/prove", {{"leases", {ids[0]}}});
    ASSERT_EQ(asked.status, 200);
    const Json answer = {{"nonce", asked.json.at("nonce")}, {"answers", Json::array()}};
    EXPECT_EQ(other.post("/api/v1/leases/prove", answer).code(), "expired");
    EXPECT_EQ(node.post("/api/v1/leases/prove", answer).code(), "bad_input");
    clock_.pass(601s);
    EXPECT_EQ(node.post("/api/v1/leases/prove", answer).code(), "expired");
}

// Bytes that are not those that were hashed are nobody's fault but the market's.
TEST_F(MarketTest, AModelFileThatWasChangedServesAndProvesNothing) {
    open();
    Node node(handler_);
    ASSERT_EQ(node.enroll(*market_->make_invite(1, 1h)).status, 200);
    const Json leases = node.ask(model().bytes_experts()).json.at("leases");
    const auto ids = ids_of(leases);
    const std::string id = to_hex(market_->model_id());
    const moe::Model before = model();
    for (const moe::GgufHeader& shard : before.shards) {  // in place: the same file, other bytes
        std::fstream file(shard.path, std::ios::in | std::ios::out | std::ios::binary);
        file.seekp(static_cast<std::streamoff>(shard.file_bytes) - 4096);
        file << std::string(4096, '\x5a');
    }
    // Whether the answers are those of the file as it is or as it was.
    for (int round = 0; round < 4; ++round) {
        const Reply proved = node.prove(ids, leases, before);
        EXPECT_EQ(proved.status, 409) << proved.body;
        EXPECT_EQ(proved.code(), "mismatch");
        EXPECT_THAT(proved.message(), HasSubstr("was changed"));
        EXPECT_EQ(proved.body.find('/'), std::string::npos) << proved.body;  // no path of ours
    }
    const auto& tensor = before.banks.at(0).tensors.at(0);
    const std::string range =
        "bytes=" + std::to_string(tensor.offset) + "-" + std::to_string(tensor.offset + 9);
    EXPECT_EQ(node.data(id, std::to_string(tensor.shard), range).code(), "mismatch");
    for (const moe::GgufHeader& shard : before.shards)
        std::filesystem::resize_file(shard.path, shard.file_bytes / 2);
    const Reply asked = node.post("/api/v1/leases/prove", {{"leases", ids}});
    ASSERT_EQ(asked.status, 200);
    const Json answers(asked.json.at("probes").size(), to_hex(Sha256{}));
    const Reply cut = node.post("/api/v1/leases/prove",
                                {{"nonce", asked.json.at("nonce")}, {"answers", answers}});
    EXPECT_EQ(cut.code(), "mismatch") << cut.body;
    // The node is not to blame, however often.
    EXPECT_EQ(send("GET", "/api/v1/coverage").json.at("experts_promised"), 16);
}

// Restarts of the node, of the market, of both: one row, the same leases, no ghosts.
TEST_F(MarketTest, RestartsKeepIdentityAndLeases) {
    open();
    const auto invite = market_->make_invite(3, 100h);
    std::vector<std::unique_ptr<Node>> nodes;
    Json leases;
    for (int i = 0; i < 3; ++i) {
        nodes.push_back(std::make_unique<Node>(handler_));
        ASSERT_EQ(nodes.back()->enroll(*invite).status, 200);
        leases = nodes.back()->ask(model().bytes_experts() / 4).json.at("leases");
        ASSERT_EQ(nodes.back()->prove(ids_of(leases), leases, model()).status, 200);
    }
    const Json before = send("GET", "/api/v1/coverage").json;
    EXPECT_EQ(before.at("experts_serving"), 12);
    Node& restarted = *nodes.back();
    for (int i = 0; i < 20; ++i) {
        clock_.pass(1s);
        if (i % 4 == 3) open();
        ASSERT_EQ(restarted.enroll(*invite).status, 200);
        const Reply again = restarted.ask(model().bytes_experts() / 4, leases);
        ASSERT_EQ(ids_of(again.json.at("leases")), ids_of(leases)) << again.body;
        EXPECT_EQ(again.json.at("leases")[0].at("state"), "serving");
        EXPECT_EQ(send("GET", "/api/v1/coverage").json, before);
    }
    const Reply rows = send("GET", "/api/v1/nodes", "", operator_secret());
    ASSERT_EQ(rows.json.at("nodes").size(), 3U);
    for (const Json& row : rows.json.at("nodes")) {
        EXPECT_EQ(row.at("leases_serving"), 1);
        EXPECT_EQ(row.at("bytes_leased"), model().bytes_experts() / 4);
    }
    // The others were silent since the market's last start: one lease time from then, not more.
    clock_.pass(59s);
    EXPECT_EQ(send("GET", "/api/v1/coverage").json, before);
    EXPECT_EQ(restarted.heartbeat(ids_of(leases)).status, 200);
    clock_.pass(1s);
    EXPECT_EQ(send("GET", "/api/v1/coverage").json.at("experts_serving"), 4);
    EXPECT_EQ(send("GET", "/api/v1/nodes", "", operator_secret()).json.at("nodes").size(), 3U);
}

// ---- clocks and tokens ----

TEST_F(MarketTest, TokensExpireAndAreRenewed) {
    open();
    Node node(handler_);
    ASSERT_EQ(node.enroll(*market_->make_invite(1, 1h)).status, 200);
    const uint64_t expert = model().banks.at(0).expert_bytes();
    ASSERT_EQ(node.ask(expert).status, 200);
    EXPECT_FALSE(node.heartbeat({}).json.contains("token"));
    clock_.pass(2399s);
    EXPECT_FALSE(node.heartbeat({}).json.contains("token"));
    clock_.pass(2s);  // less than a third is left
    const Reply beat = node.heartbeat({});
    ASSERT_TRUE(beat.json.contains("token"));
    const std::string old = node.token;
    node.token = beat.json.at("token").at("token");
    EXPECT_EQ(beat.json.at("token").at("expires_in_s"), 3600);
    EXPECT_TRUE(market_->open_token(old));  // beside the new one
    clock_.pass(1199s);
    EXPECT_EQ(market_->open_token(old).error().code, Errc::kExpired);
    EXPECT_EQ(node.heartbeat({}).status, 200);
    clock_.pass(1h);
    const Reply expired = node.heartbeat({});
    EXPECT_EQ(expired.status, 401);
    EXPECT_EQ(expired.code(), "expired");
    EXPECT_EQ(expired.json.at("error").at("retryable"), true);
    ASSERT_EQ(node.renew().status, 200);
    EXPECT_EQ(node.heartbeat({}).status, 200);
}

// The wall clock of the market jumps by -1 day .. +1 day in mid-session: no lease ends or is
// prolonged; a token may look expired, and a renewal mends that. Clocks of nodes do not matter at
// all: no request has a time in it.
TEST_F(MarketTest, JumpsOfTheWallClockTouchNoLease) {
    open();
    Node node(handler_);
    ASSERT_EQ(node.enroll(*market_->make_invite(1, 100h)).status, 200);
    const Json leases = node.ask(model().bytes_experts()).json.at("leases");
    const auto ids = ids_of(leases);
    ASSERT_EQ(node.prove(ids, leases, model()).status, 200);
    for (const int64_t jump : {-86400, -301, -300, -1, 1, 300, 86400}) {
        const int64_t wall = clock_.wall_s;
        clock_.wall_s += jump;
        Reply beat = node.heartbeat(ids);
        // Its token is from the future by more than the leeway, or has expired.
        EXPECT_EQ(beat.status != 200, std::abs(jump) > crypto::kClockLeeway.count()) << jump;
        if (beat.status != 200) {
            EXPECT_EQ(beat.code(), "expired");
            ASSERT_EQ(node.renew().status, 200);
            beat = node.heartbeat(ids);
        }
        ASSERT_EQ(beat.status, 200) << beat.body;
        EXPECT_EQ(beat.json.at("leases")[0].at("expires_in_s"), 60);
        clock_.steady_ms += 59000;
        EXPECT_EQ(send("GET", "/api/v1/coverage").json.at("experts_serving"), 16);
        clock_.wall_s = wall;
        if (node.heartbeat(ids).status != 200) {
            ASSERT_EQ(node.renew().status, 200);
        }
        ASSERT_EQ(node.heartbeat(ids).status, 200);
    }
    clock_.steady_ms += 60000;
    EXPECT_EQ(send("GET", "/api/v1/coverage").json.at("experts_serving"), 0);
}

TEST_F(MarketTest, RevokedNodesAreOut) {
    open();
    const auto invite = market_->make_invite(5, 1h);
    Node node(handler_), other(handler_);
    ASSERT_EQ(node.enroll(*invite).status, 200);
    ASSERT_EQ(other.enroll(*invite).status, 200);
    const Json leases = node.ask(model().bytes_experts()).json.at("leases");
    ASSERT_EQ(node.prove(ids_of(leases), leases, model()).status, 200);
    std::vector<std::pair<crypto::PublicKey, std::vector<uint64_t>>> told;
    market_->on_revoked([&](const crypto::PublicKey& key, const std::vector<uint64_t>& serials) {
        told.emplace_back(key, serials);
    });
    const uint64_t serial = market_->open_token(node.token)->serial;
    for (int i = 0; i < 5; ++i) {
        clock_.pass(40s);
        ASSERT_EQ(node.heartbeat(ids_of(leases)).status, 200);
    }
    ASSERT_EQ(node.renew().status, 200);
    const std::string id = to_hex(market_->model_id());
    const moe::Model toy = model();
    const auto& tensor = toy.banks.at(0).tensors.at(0);
    const std::string range =
        "bytes=" + std::to_string(tensor.offset) + "-" + std::to_string(tensor.offset + 9);
    // One request is under way.
    const Reply under_way = node.data(id, std::to_string(tensor.shard), range);
    ASSERT_EQ(under_way.status, 206);
    EXPECT_EQ(send("POST", "/api/v1/admin/revoke", R"({"node": ")" + node.id() + R"("})").status,
              403);  // not the operator
    EXPECT_EQ(market_->revoke(crypto::PublicKey{}).error().code, Errc::kNotFound);
    ASSERT_TRUE(market_->revoke(node.key().public_key()));
    EXPECT_EQ(read_body(*under_way.response.file).size(), 10U);  // it may finish
    ASSERT_EQ(told.size(), 1U);
    EXPECT_EQ(told[0].first, node.key().public_key());
    EXPECT_EQ(told[0].second.size(), 2U);
    EXPECT_TRUE(market_->is_revoked(serial));
    EXPECT_FALSE(market_->is_revoked(market_->open_token(other.token)->serial));
    EXPECT_EQ(send("GET", "/api/v1/coverage").json.at("experts_promised"), 0);
    for (int restart = 0; restart < 2; ++restart) {
        EXPECT_EQ(node.data(id, "0", "bytes=0-9").code(), "revoked");
        EXPECT_EQ(node.heartbeat({}).code(), "revoked");
        EXPECT_EQ(node.ask(1 << 30).status, 403);
        EXPECT_EQ(node.renew().code(), "revoked");
        EXPECT_EQ(node.enroll(*invite).code(), "revoked");
        EXPECT_EQ(node.renew().json.at("error").at("retryable"), false);
        EXPECT_EQ(market_->open_token(node.token).error().code, Errc::kRevoked);
        EXPECT_TRUE(market_->is_revoked(serial));
        EXPECT_EQ(other.heartbeat({}).status, 200);
        open();
    }
}

TEST_F(MarketTest, TokensOfOthersAreNoTokens) {
    open();
    Node node(handler_);
    ASSERT_EQ(node.enroll(*market_->make_invite(1, 1h)).status, 200);
    const std::string good = node.token;
    for (const std::string& bad :
         {std::string("x"), good.substr(0, good.size() - 2), good + "A", "kvt1." + good}) {
        node.token = bad;
        EXPECT_EQ(node.heartbeat({}).code(), "denied") << bad;
    }
    auto foreign = crypto::KeyPair::generate();
    crypto::TokenClaims claims = *market_->open_token(good);
    node.token = crypto::issue_token(*foreign, claims);
    EXPECT_EQ(node.heartbeat({}).code(), "denied");
    // Ours, but of when the market had another model: renewed, it is good again.
    claims.model_id[0] ^= 1;
    node.token = crypto::issue_token(*crypto::load_or_make_key(options_.key_path), claims);
    const Reply other_model = node.heartbeat({});
    EXPECT_EQ(other_model.code(), "mismatch") << other_model.body;
    for (const Sha256& id : {claims.model_id, market_->model_id()}) {
        EXPECT_NE(other_model.message().find(to_hex(id).substr(0, 16)), std::string::npos)
            << other_model.message();
    }
    EXPECT_EQ(node.renew().status, 200);
    EXPECT_EQ(node.heartbeat({}).status, 200);
    // Ours, but for a node that the database does not know (it was restored from a backup).
    node.token = good;
    market_.reset();
    std::filesystem::remove(options_.db_path);
    open();
    EXPECT_EQ(node.heartbeat({}).code(), "denied");
    EXPECT_NE(node.heartbeat({}).message().find("register"), std::string::npos);
}

}  // namespace
}  // namespace kvasir::coordinator
