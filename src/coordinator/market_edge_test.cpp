// What hostile, broken and simply unlucky callers, disks and files do to a market.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "base/task_thread.hpp"
#include "coordinator/market.hpp"
#include "coordinator/market_testing.hpp"
#include "coordinator/model_files.hpp"
#include "crypto/revocations.hpp"
#include "store/market_store.hpp"

namespace kvasir::coordinator {
namespace {

using namespace testing;

std::string bytes_range(uint64_t first, uint64_t last) {
    return "bytes=" + std::to_string(first) + "-" + std::to_string(last);
}

// ---- bytes ----

TEST_F(MarketTest, BytesOfLeasesAndNoOthers) {
    open();
    const auto invite = market_->make_invite(2, 1h);
    Node node(handler_), other(handler_);
    ASSERT_EQ(node.enroll(*invite).status, 200);
    ASSERT_EQ(other.enroll(*invite).status, 200);
    const moe::Model toy = model();
    const uint64_t expert = toy.banks.at(0).expert_bytes();
    const Json lease = node.ask(3 * expert).json.at("leases").at(0);
    const LayerKey layer{lease.at("layer"), lease.at("bank")};
    const uint32_t begin = lease.at("begin"), end = lease.at("end");
    const std::string id = to_hex(market_->model_id());
    uint64_t served = 0;
    for (const moe::SlabTensor& tensor : toy.find_bank(layer)->tensors) {
        const uint64_t first = tensor.offset + begin * tensor.slab_bytes;
        const uint64_t last = tensor.offset + end * tensor.slab_bytes - 1;
        const auto shard = moe::testing::read_file(toy.shards[tensor.shard].path);
        const std::string size = std::to_string(shard.size());
        const auto get = [&](uint64_t from, uint64_t to) {
            return node.data(id, std::to_string(tensor.shard), bytes_range(from, to));
        };
        const Reply all = get(first, last);
        ASSERT_EQ(all.status, 206) << all.body;
        EXPECT_TRUE(std::equal(all.body.begin(), all.body.end(), shard.begin() + first,
                               shard.begin() + last + 1,
                               [](char a, uint8_t b) { return static_cast<uint8_t>(a) == b; }));
        EXPECT_EQ(all.body.size(), last - first + 1);
        EXPECT_EQ(all.header("Content-Range"),
                  "bytes " + std::to_string(first) + "-" + std::to_string(last) + "/" + size);
        EXPECT_EQ(all.header("ETag").front(), '"');
        EXPECT_EQ(get(last, last).status, 206);
        served += all.body.size() + 1;
        // One byte more on either side, another node, another file, no range: nothing.
        for (const auto& [from, to] : {std::pair(first - 1, last), std::pair(first, last + 1),
                                       std::pair(first - 1, first - 1), std::pair(0UL, last)}) {
            const Reply denied = get(from, to);
            EXPECT_EQ(denied.status, 403) << from << "-" << to;
            EXPECT_NE(denied.message().find(std::to_string(from) + "-" + std::to_string(to)),
                      std::string::npos);
            EXPECT_FALSE(denied.response.file);
        }
        EXPECT_EQ(other.data(id, std::to_string(tensor.shard), bytes_range(first, last)).status,
                  403);
        EXPECT_EQ(node.data(id, std::to_string(tensor.shard), "").status, 400);
        EXPECT_EQ(get(shard.size(), shard.size() + 5).status, 416);
        EXPECT_EQ(get(shard.size(), shard.size() + 5).header("Content-Range"), "bytes */" + size);
        const std::string name =
            std::filesystem::path(toy.shards[tensor.shard].path).filename().string();
        EXPECT_EQ(node.data(id, name, bytes_range(first, first)).status, 206);
        served += 1;
    }
    EXPECT_EQ(node.data(id, "2", "bytes=0-1").status, 404);
    EXPECT_EQ(node.data(id, "-1", "bytes=0-1").status, 404);
    EXPECT_EQ(node.data(id, "toy", "bytes=0-1").status, 404);
    for (const char* bad : {"bytes=5-2", "bytes=0-1,3-4", "bytes=x", "lines=1-2", "bytes=-0"}) {
        EXPECT_GE(node.data(id, "0", bad).status, 400) << bad;
    }
    // What was sent is counted, and survives a restart.
    for (int restart = 0; restart < 2; ++restart) {
        const Reply rows = send("GET", "/api/v1/nodes", "", operator_secret());
        for (const Json& row : rows.json.at("nodes")) {
            EXPECT_EQ(row.at("bytes_served"), row.at("node") == node.id() ? served : 0);
        }
        open();
    }
    // A lease that is over opens nothing.
    clock_.pass(61s);
    const moe::SlabTensor& tensor = toy.find_bank(layer)->tensors.at(0);
    const uint64_t first = tensor.offset + begin * tensor.slab_bytes;
    EXPECT_EQ(node.data(id, std::to_string(tensor.shard), bytes_range(first, first)).status, 403);
}

// Ranges of leases against a plain bitmap of the file.
TEST_F(MarketTest, RangesAreTheSlabsOfTheSegments) {
    const auto files = ModelFiles::open(model_path_, folder_ / "cache", {});
    ASSERT_TRUE(files);
    const moe::Model& toy = (*files)->model();
    rc::check([&] {
        std::vector<std::vector<bool>> is_leased;
        for (const auto& shard : toy.shards) is_leased.emplace_back(shard.file_bytes);
        std::vector<Segment> segments;
        const auto count = *rc::gen::inRange(0, 5);
        for (int i = 0; i < count; ++i) {
            const auto& bank = toy.banks[*rc::gen::inRange<size_t>(0, toy.banks.size())];
            const auto begin = *rc::gen::inRange<uint32_t>(0, bank.experts);
            const auto end = *rc::gen::inRange<uint32_t>(begin + 1, bank.experts + 1);
            segments.push_back({bank.key, begin, end});
            for (const auto& tensor : bank.tensors) {
                auto& bits = is_leased[tensor.shard];
                const auto first = bits.begin() + static_cast<std::ptrdiff_t>(tensor.offset);
                std::fill(first + static_cast<std::ptrdiff_t>(begin * tensor.slab_bytes),
                          first + static_cast<std::ptrdiff_t>(end * tensor.slab_bytes), true);
            }
        }
        const auto ranges = (*files)->ranges_of(segments);
        std::vector<std::vector<bool>> is_open;
        for (const auto& shard : toy.shards) is_open.emplace_back(shard.file_bytes);
        for (const FileRange& range : ranges) {
            auto& bits = is_open[range.shard];
            const auto first = bits.begin() + static_cast<std::ptrdiff_t>(range.begin);
            const auto last = bits.begin() + static_cast<std::ptrdiff_t>(range.end);
            RC_ASSERT(std::find(first, last, true) == last);
            std::fill(first, last, true);
            // Merged: what touches is one.
            const auto& leased = is_leased[range.shard];
            const bool goes_on = range.end < leased.size() && leased[range.end];
            RC_ASSERT(!goes_on);
            RC_ASSERT(covers(ranges, {range.shard, range.begin, range.end}));
            RC_ASSERT(!covers(ranges, {range.shard, range.begin - 1, range.end}));
            RC_ASSERT(!covers(ranges, {range.shard, range.begin, range.end + 1}));
        }
        RC_ASSERT(is_open == is_leased);
    });
}

TEST_F(MarketTest, AnOriginGetsTheNodeAndNoToken) {
    options_.origin = "https://models.example/a b/{file}?x=1";
    EXPECT_TRUE(Market::open(options_));
    options_.origin = "https://models.example/toys";
    open();
    EXPECT_EQ(send("GET", "/api/v1/market").json.at("data").at("redirects"), true);
    Node node(handler_);
    ASSERT_EQ(node.enroll(*market_->make_invite(1, 1h)).status, 200);
    const std::string id = to_hex(market_->model_id());
    const moe::Model toy = model();
    const Json lease = node.ask(toy.banks[0].expert_bytes()).json.at("leases").at(0);
    const auto& tensor = toy.find_bank({lease.at("layer"), lease.at("bank")})->tensors[0];
    const uint64_t first = tensor.offset + lease.at("begin").get<uint64_t>() * tensor.slab_bytes;
    const Reply sent = node.data(id, std::to_string(tensor.shard), bytes_range(first, first + 3));
    ASSERT_EQ(sent.status, 307) << sent.body;
    const std::string name =
        std::filesystem::path(toy.shards[tensor.shard].path).filename().string();
    EXPECT_EQ(sent.header("Location"), "https://models.example/toys/" + name);
    for (const auto& [key, value] : sent.response.headers) {
        EXPECT_EQ(value.find(node.token), std::string::npos) << key;
    }
    EXPECT_EQ(node.data(id, std::to_string(tensor.shard), "bytes=0-3").status, 403);
}

TEST_F(MarketTest, AFileThatChangedIsNotServed) {
    open();
    Node node(handler_);
    ASSERT_EQ(node.enroll(*market_->make_invite(1, 1h)).status, 200);
    ASSERT_EQ(node.ask(model().bytes_experts()).status, 200);
    const moe::Model toy = model();
    const auto& tensor = toy.banks[0].tensors[0];
    const std::string id = to_hex(market_->model_id()), shard = std::to_string(tensor.shard);
    ASSERT_EQ(node.data(id, shard, bytes_range(tensor.offset, tensor.offset)).status, 206);
    const std::string path = toy.shards[tensor.shard].path;
    std::filesystem::last_write_time(
        path, std::filesystem::last_write_time(path) + std::chrono::hours(1));
    EXPECT_EQ(node.data(id, shard, bytes_range(tensor.offset, tensor.offset)).code(), "mismatch");
}

// ---- malformed requests ----

TEST_F(MarketTest, WrongFieldsAreNamed) {
    open();
    Node node(handler_);
    const auto invite = market_->make_invite(9, 1h);
    ASSERT_EQ(node.enroll(*invite).status, 200);
    const auto expect_bad = [&](const std::string& path, const std::string& body,
                                const std::string& word, const std::string& token) {
        const Reply reply = send("POST", path, body, token);
        EXPECT_EQ(reply.status, 400) << path << " " << body << " " << reply.body;
        EXPECT_EQ(reply.code(), "bad_input");
        EXPECT_NE(reply.message().find(word), std::string::npos) << reply.message();
    };
    const std::string leases = "/api/v1/leases";
    for (const char* text : {"", "x", "[1]", "3", "\"a\"", "{", "{\"a\": \"\xff\"}", "null"}) {
        expect_bad(leases, text, "body", node.token);
    }
    const std::pair<const char*, const char*> asks[] = {
        {"{}", "budget_bytes"},
        {R"({"budget_bytes": "5"})", "budget_bytes"},
        {R"({"budget_bytes": 5.0})", "budget_bytes"},
        {R"({"budget_bytes": 1e9})", "budget_bytes"},
        {R"({"budget_bytes": -1})", "budget_bytes"},
        {R"({"budget_bytes": true})", "budget_bytes"},
        {R"({"budget_bytes": 99999999999999999999})", "budget_bytes"},
        {R"({"budget_bytes": 9223372036854775808})", "budget_bytes"},
        {R"({"budget_bytes": 1000000, "threads": 4294967296})", "threads"},
        {R"({"budget_bytes": 1000000, "have": 1})", "have"},
        {R"({"budget_bytes": 1000000, "have": [1]})", "have[0]"},
        {R"({"budget_bytes": 1000000, "have": [{"layer": 0, "begin": 0, "end": 1}, {"layer": 0}]})",
         "have[1].begin"},
        {R"({"budget_bytes": 1000000, "begun": {}})", "begun"},
        {R"({"budget_bytes": 1000000, "begun": [{"layer": 0, "begin": 0, "end": "1"}]})",
         "begun[0].end"},
        {R"({"budget_bytes": 1000000, "have": [{"layer": 0, "begin": 5, "end": 4}]})",
         "have[0].end"},
        {R"({"budget_bytes": 1000000, "have": [{"layer": 0, "begin": 0, "end": 8},
             {"layer": 1, "begin": 2, "end": 9}]})",
         "have[1].end"},
    };
    for (const auto& [body, word] : asks) expect_bad(leases, body, word, node.token);
    std::string many = R"({"budget_bytes": 1, "have": [)";
    for (int i = 0; i < 4097; ++i) many += "{},";
    expect_bad(leases, many + "{}]}", "have", node.token);
    expect_bad("/api/v1/leases/progress", R"({"leases": [{"id": 1}]})", "leases[0].bytes_done",
               node.token);
    expect_bad("/api/v1/leases/prove", R"({"leases": []})", "leases", node.token);
    expect_bad("/api/v1/leases/prove", R"({"leases": ["1"]})", "leases", node.token);
    expect_bad("/api/v1/leases/prove", R"({"nonce": "00"})", "nonce", node.token);
    expect_bad("/api/v1/leases/prove",
               R"({"nonce": ")" + std::string(64, '0') + R"(", "answers": [7]})", "answers",
               node.token);
    expect_bad("/api/v1/heartbeat", R"({"serving": [1.5]})", "serving", node.token);
    expect_bad("/api/v1/admin/invites", R"({"uses": 0})", "uses", operator_secret());
    expect_bad("/api/v1/admin/invites", R"({"uses": 1, "role": "king"})", "role",
               operator_secret());
    expect_bad("/api/v1/admin/invites", R"({"valid_for_s": 99999999999})", "valid_for_s",
               operator_secret());
    expect_bad("/api/v1/admin/revoke", R"({"node": "abc"})", "node", operator_secret());
    for (const char* field : {"invite", "public_key", "challenge", "signature"}) {
        Json body = node.enroll_body(*invite, "x");
        body[field] = 7;
        expect_bad("/api/v1/nodes", body.dump(), field, "");
        body.erase(field);
        expect_bad("/api/v1/nodes", body.dump(), field, "");
        body[field] = "zz";
        expect_bad("/api/v1/nodes", body.dump(), field, "");
    }
    // All experts of a layer may be had, and a bank that is not leased here.
    EXPECT_EQ(send("POST", leases,
                   R"({"budget_bytes": 1000000000, "have": [{"layer": 0, "begin": 0, "end": 8},
                       {"layer": 77, "begin": 0, "end": 900}]})",
                   node.token)
                  .status,
              200);
    // Unknown fields are ignored; an error in `have` did not change anything.
    EXPECT_EQ(
        send("POST", leases, R"({"budget_bytes": 1000000000, "colour": {"x": [1.5]}})", node.token)
            .status,
        200);
}

TEST_F(MarketTest, DeepAndLongBodiesCostLittle) {
    open();
    Node node(handler_);
    ASSERT_EQ(node.enroll(*market_->make_invite(1, 1h)).status, 200);
    const std::string deep = std::string(200000, '[') + std::string(200000, ']');
    EXPECT_EQ(send("POST", "/api/v1/leases", deep, node.token).status, 400);
    EXPECT_EQ(send("POST", "/api/v1/leases", "{\"x\": " + deep + "}", node.token).status, 400);
    EXPECT_EQ(
        send("POST", "/api/v1/leases", "{\"x\": " + std::string(400000, '['), node.token).status,
        400);
}

// One hostile set of texts in every field that a node or a file supplies.
TEST_F(MarketTest, TextOfOthersIsShownHarmless) {
    options_.name = "<b>market</b>\x1b[31m";
    open();
    const std::string hostile[] = {
        "<script>alert(1)</script>",
        "\"><img src=x onerror=alert(1)>",
        "'; DROP TABLE nodes; --",
        "\x1b[2J\x1b]0;owned\x07",
        "\xe2\x80\xae"
        "gnp.exe",
        "=cmd|' /C calc'!A0",
        std::string("a\0b", 3),
        "a\r\nSet-Cookie: x=1",
        std::string(3000, 'A'),
        "&lt;&amp;",
        "caf\xc3\xa9",
    };
    const auto expect_harmless = [](const std::string& body) {
        for (const char c : body) {
            const auto byte = static_cast<unsigned char>(c);
            EXPECT_TRUE((byte >= 32 && byte < 127) || c == '\n') << body;
            EXPECT_TRUE(c != '<' && c != '>' && c != '&') << body;
        }
        EXPECT_FALSE(Json::parse(body, nullptr, false).is_discarded()) << body;
    };
    expect_harmless(send("GET", "/api/v1/market").body);
    const auto invite = market_->make_invite(100, 1h);
    size_t rows = 0;
    for (const std::string& text : hostile) {
        Node node(handler_);
        const Reply enrolled = node.enroll(*invite, text);
        ASSERT_EQ(enrolled.status, 200) << enrolled.body;
        EXPECT_LE(market_->open_token(node.token)->name.size(), crypto::kNameBytesMax);
        ++rows;
        const Reply nodes = send("GET", "/api/v1/nodes", "", operator_secret());
        EXPECT_EQ(nodes.json.at("nodes").size(), rows);
        expect_harmless(nodes.body);
        Json body = node.enroll_body(*invite, "x");
        body["invite"] = text;
        for (const Reply& reply :
             {node.post("/api/v1/nodes", body), send("GET", "/api/v1/" + text),
              send("POST", "/api/v1/leases", "{}", text),
              send("POST", "/api/v1/leases", text, node.token),
              send("POST", "/api/v1/admin/revoke", Json{{"node", text}}.dump(), text),
              node.data(to_hex(market_->model_id()), text, "bytes=0-1"),
              node.data(to_hex(market_->model_id()), "0", text)}) {
            EXPECT_GE(reply.status, 400);
            const std::string message = reply.message();
            EXPECT_FALSE(message.empty()) << reply.body;
            for (const char c : message) EXPECT_TRUE(c >= 32 && c < 127) << message;
        }
    }
}

// ---- the operator ----

TEST_F(MarketTest, OnlyTheOperatorOperates) {
    open();
    Node node(handler_);
    ASSERT_EQ(node.enroll(*market_->make_invite(1, 1h)).status, 200);
    const std::string secret = operator_secret();
    for (const std::string& wrong :
         {std::string(), node.token, secret.substr(1), secret + "0", std::string(64, '0')}) {
        EXPECT_EQ(send("GET", "/api/v1/nodes", "", wrong).status, 403);
        EXPECT_EQ(send("POST", "/api/v1/admin/invites", "{}", wrong).status, 403);
        EXPECT_EQ(send("POST", "/api/v1/admin/revoke", "{}", wrong).status, 403);
    }
    EXPECT_EQ(send("POST", "/api/v1/leases", "{}", secret).status, 403);  // it is no node
    const Reply made = send("POST", "/api/v1/admin/invites", "{}", secret);
    ASSERT_EQ(made.status, 200);
    EXPECT_EQ(made.json.at("uses"), 1);
    EXPECT_EQ(made.json.at("expires_in_s"), 86400);
    Node invited(handler_);
    ASSERT_EQ(
        invited.enroll(*crypto::parse_invite(made.json.at("invite").get<std::string>())).status,
        200);
    const auto revocations = [this] {
        const Reply reply = send("GET", "/api/v1/revocations");
        EXPECT_EQ(reply.status, 200);
        return crypto::open_revocations(reply.body, market_->key());
    };
    EXPECT_TRUE(revocations()->serials.empty());
    const uint64_t serial = market_->open_token(invited.token)->serial;
    const Reply revoked =
        send("POST", "/api/v1/admin/revoke", Json{{"node", invited.id()}}.dump(), secret);
    EXPECT_EQ(revoked.json.at("tokens_revoked"), 1);
    EXPECT_EQ(revocations()->serials, std::vector<uint64_t>{serial});  // at once
    EXPECT_EQ(invited.heartbeat({}).code(), "revoked");
    EXPECT_EQ(node.heartbeat({}).status, 200);
    // Neither secret is in the database.
    const auto invite = crypto::parse_invite(made.json.at("invite").get<std::string>());
    market_.reset();
    const auto bytes = moe::testing::read_file(options_.db_path);
    const std::string db(bytes.begin(), bytes.end());
    EXPECT_NE(db.find(invited.id()), std::string::npos);
    EXPECT_EQ(db.find(std::string(invite->secret.begin(), invite->secret.end())),
              std::string::npos);
    EXPECT_EQ(db.find(encode_hex(invite->secret)), std::string::npos);
    EXPECT_EQ(db.find(secret), std::string::npos);
}

// A relay's clock may be an hour behind; for as long, it would let an expired token in.
TEST_F(MarketTest, ARevokedTokenIsListedForAnHourAfterItExpired) {
    open();
    Node node(handler_);
    ASSERT_EQ(node.enroll(*market_->make_invite(1, 1h)).status, 200);
    const uint64_t serial = market_->open_token(node.token)->serial;
    ASSERT_TRUE(market_->revoke(node.key().public_key()));
    const auto listed = [this] {
        const Reply reply = send("GET", "/api/v1/revocations");
        const auto list = crypto::open_revocations(reply.body, market_->key());
        EXPECT_TRUE(list);
        return list ? list->serials : std::vector<uint64_t>{};
    };
    clock_.pass(options_.token_life + 59min);
    EXPECT_EQ(listed(), std::vector<uint64_t>{serial});
    clock_.pass(2min);
    EXPECT_TRUE(listed().empty());
    clock_.steady_ms += 2000;
    clock_.wall_s -= 600;  // set back: nothing was forgotten
    EXPECT_EQ(listed(), std::vector<uint64_t>{serial});
}

TEST_F(MarketTest, InvitesCarryThePinOfTheServer) {
    Sha256 pin = {};
    pin[5] = 7;
    options_.tls_pin = pin;
    open();
    EXPECT_EQ(market_->make_invite(1, 1h)->tls_pin, pin);
}

// ---- storage ----

// A storage whose disk is full while `is_full`.
class FullDisk final : public market::Storage {
public:
    FullDisk(std::unique_ptr<market::Storage> inner, const std::atomic<bool>& is_full)
        : inner_(std::move(inner)), is_full_(is_full) {}
    Result<market::StoredState> load(const Sha256& id, int64_t now) override {
        return inner_->load(id, now);
    }
    Result<bool> set_market_key(const std::string& key) override {
        return inner_->set_market_key(key);
    }
    Status add_invite(const market::InviteRow& row) override {
        return is_full_ ? full() : inner_->add_invite(row);
    }
    Result<market::Registered> register_node(const market::Registration& asked) override {
        if (is_full_) return full();
        return inner_->register_node(asked);
    }
    Result<market::TokenMade> add_token(const std::string& node, int64_t now,
                                        int64_t expires) override {
        if (is_full_) return full();
        return inner_->add_token(node, now, expires);
    }
    Result<std::vector<market::TokenRow>> revoke_node(const std::string& node) override {
        if (is_full_) return full();
        return inner_->revoke_node(node);
    }
    Status write_leases(const market::LeaseDelta& delta) override {
        return is_full_ ? full() : inner_->write_leases(delta);
    }
    Status add_bytes_served(const std::vector<market::BytesServed>& served) override {
        return is_full_ ? full() : inner_->add_bytes_served(served);
    }

private:
    static tl::unexpected<Error> full() { return fail(Errc::kNoSpace, "the disk is full"); }
    std::unique_ptr<market::Storage> inner_;
    const std::atomic<bool>& is_full_;
};

TEST_F(MarketTest, AFullDiskIsToldAndMended) {
    std::atomic<bool> is_full{false};
    const auto open_full = [&] {
        market_.reset();
        auto storage = store::open_market_store(options_.db_path);
        ASSERT_TRUE(storage);
        auto market =
            Market::open_over(options_, std::make_unique<FullDisk>(std::move(*storage), is_full));
        ASSERT_TRUE(market) << market.error().detail;
        market_ = std::move(*market);
        handler_ = market_->handler();
    };
    open_full();
    const auto invite = market_->make_invite(2, 1h);
    Node node(handler_), late(handler_);
    ASSERT_EQ(node.enroll(*invite).status, 200);
    is_full = true;
    EXPECT_FALSE(market_->make_invite(1, 1h));
    EXPECT_EQ(late.enroll(*invite).status, 507);
    EXPECT_EQ(market_->revoke(node.key().public_key()).error().code, Errc::kNoSpace);
    const uint64_t budget = model().bytes_experts();
    const Reply full = node.ask(budget);
    EXPECT_EQ(full.status, 507) << full.body;
    EXPECT_EQ(full.code(), "no_space");
    EXPECT_EQ(node.heartbeat({}).status, 200);  // needs no disk
    is_full = false;
    const Json leases = node.ask(budget).json.at("leases");
    ASSERT_EQ(leases.size(), 2U);
    is_full = true;
    EXPECT_EQ(node.prove(ids_of(leases), leases, model()).status, 507);
    is_full = false;
    ASSERT_EQ(node.prove(ids_of(leases), leases, model()).status, 200);
    EXPECT_EQ(late.enroll(*invite).status, 200);  // the failed try used nothing
    open_full();
    EXPECT_EQ(send("GET", "/api/v1/coverage").json.at("experts_serving"), 16);
}

// ---- many at once ----

TEST_F(MarketTest, AFullQueueIsBusyAndAClosedMarketSaysSo) {
    options_.queue_max = 1;
    open();
    Node node(handler_);
    ASSERT_EQ(node.enroll(*market_->make_invite(1, 1h)).status, 200);
    // The market's own thread stands still in an answer: one more may wait.
    std::promise<void> entered, leave;
    handler_(make_request("GET", "/api/v1/coverage"), [&](net::HttpResponse) {
        entered.set_value();
        leave.get_future().wait();
    });
    entered.get_future().wait();
    std::atomic<int> answered{0};
    const auto count = [&](net::HttpResponse) { ++answered; };
    handler_(make_request("GET", "/api/v1/coverage"), count);
    const Reply busy = send("GET", "/api/v1/coverage");
    EXPECT_EQ(busy.status, 503);
    EXPECT_EQ(busy.code(), "busy");
    EXPECT_EQ(busy.json.at("error").at("retryable"), true);
    EXPECT_EQ(send("GET", "/api/v1/market").status, 200);  // needs no rules
    EXPECT_EQ(node.challenge().size(), Challenges::kBytes);
    leave.set_value();
    market_.reset();  // finishes what was queued
    EXPECT_EQ(answered, 1);
    EXPECT_EQ(send("GET", "/api/v1/market").code(), "closed");
}

TEST_F(MarketTest, CallsFromManyThreads) {
    open();
    const auto invite = market_->make_invite(100, 1h);
    const std::string id = to_hex(market_->model_id());
    const moe::Model toy = model();
    std::atomic<int> revoked{0};
    market_->on_revoked([&](const crypto::PublicKey&, const auto&) { ++revoked; });
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&, t] {
            Node node(handler_);
            EXPECT_EQ(node.enroll(*invite).status, 200);
            for (int i = 0; i < 6; ++i) {
                const Json leases = node.ask(toy.bytes_experts() / 3).json.at("leases");
                const auto ids = ids_of(leases);
                EXPECT_EQ(node.prove(ids, leases, toy).status, 200);
                EXPECT_EQ(node.heartbeat(ids).json.at("lost").size(), 0U);
                const auto claims = market_->open_token(node.token);
                EXPECT_TRUE(claims && !market_->is_revoked(claims->serial));
                EXPECT_TRUE(market_->coverage());
                if (i % 2 == 0) node.post("/api/v1/leases", Json::object(), "DELETE");
            }
            if (t % 2 == 0) {
                EXPECT_TRUE(market_->revoke(node.key().public_key()));
                EXPECT_EQ(node.heartbeat({}).code(), "revoked");
            }
        });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(revoked, 2);
    // Of the two that are left.
    size_t leases = 0;
    const Reply rows = send("GET", "/api/v1/nodes", "", operator_secret());
    for (const Json& row : rows.json.at("nodes")) {
        leases += row.at("leases_serving").get<size_t>();
    }
    EXPECT_GE(leases, 2U);
}

}  // namespace
}  // namespace kvasir::coordinator
