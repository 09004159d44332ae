// Disks that run full or break while a program writes (tests/tools/bad_disk.cpp): errors that name
// the file and the reason, nothing half written under a final name, and afterwards it goes on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "disk_testing.hpp"
#include "network_testing.hpp"

namespace kvasir::e2e {
namespace {

namespace fs = std::filesystem;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

struct Fault {
    const char* what;
    const char* says;
};
constexpr const char* kFull = "the disk is full; free some space there or choose another folder";
constexpr const char* kBroken = "the storage device reported an error";

// ---- kvasir slice ----

std::vector<std::string> cutting(const std::string& out, const std::string& manifests) {
    return {"slice", demo_model(),  "--experts", "0-7:0-3", "-o",
            out,     "--cache-dir", manifests,   "--force"};
}

TEST(Disk, ASliceIsWholeOrNotThere) {
    const ScratchFolder scratch;
    const std::string folder = scratch.path("out");
    const std::string out = folder + "/s.gguf";
    fs::create_directory(folder);
    ASSERT_EQ(kvasir(cutting(out, scratch.path("m"))).exit_code, 0);
    const std::string whole = content(out);
    ASSERT_GT(whole.size(), 1'000'000u);
    const Fault faults[] = {
        {"write=ENOSPC@0", kFull},      {"write=ENOSPC@1", kFull},
        {"write=ENOSPC@500000", kFull}, {"write=EDQUOT@500000", "quota"},
        {"write=EIO@500000", kBroken},  {"fsync=EIO", kBroken},
        {"fsync=ENOSPC", kFull},        {"rename=ENOSPC", kFull},
        {"rename=EIO", kBroken},        {"create=ENOSPC", kFull},
    };
    for (const Fault& fault : faults) {
        for (const bool had_one : {false, true}) {
            SCOPED_TRACE(std::string(fault.what) + (had_one ? " over an older slice" : ""));
            fs::remove(out);
            if (had_one) put(out, "an older slice");
            const Outcome outcome =
                kvasir(cutting(out, scratch.path("m")), bad_disk(folder, fault.what));
            EXPECT_EQ(outcome.exit_code, 4) << outcome.err;
            EXPECT_THAT(outcome.err, HasSubstr("s.gguf"));
            EXPECT_THAT(outcome.err, HasSubstr(fault.says));
            EXPECT_THAT(outcome.out, IsEmpty());
            EXPECT_EQ(names_in(folder).size(), had_one ? 1u : 0u);
            if (had_one) {
                EXPECT_EQ(content(out), "an older slice");
            }
        }
    }
    const std::string size = std::to_string(whole.size());
    const Outcome fits =
        kvasir(cutting(out, scratch.path("m")), bad_disk(folder, "write=ENOSPC@" + size));
    EXPECT_EQ(fits.exit_code, 0) << "there is just enough room: " << fits.err;
    EXPECT_TRUE(content(out) == whole);
    fs::remove(out);
    EXPECT_EQ(kvasir(cutting(out, scratch.path("m")), bad_disk(folder, "write=short")).exit_code,
              0);
    EXPECT_TRUE(content(out) == whole) << "short writes";
    EXPECT_THAT(names_in(folder), UnorderedElementsAre("s.gguf"));
}

// ---- the manifest cache ----

TEST(Disk, AManifestThatCannotBeCachedIsNoFailure) {
    const ScratchFolder scratch;
    const std::string cache = scratch.path("cache");
    const std::string out = scratch.path("s.gguf");
    fs::create_directory(cache);
    const Fault faults[] = {
        {"write=ENOSPC@0", kFull}, {"write=EIO@100", kBroken}, {"fsync=EIO", kBroken},
        {"rename=ENOSPC", kFull},  {"create=ENOSPC", kFull},
    };
    for (const Fault& fault : faults) {
        SCOPED_TRACE(fault.what);
        const Outcome outcome = kvasir(cutting(out, cache), bad_disk(cache, fault.what));
        EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
        EXPECT_THAT(outcome.err, HasSubstr("the manifest is not cached"));
        EXPECT_THAT(outcome.err, HasSubstr(fault.says));
        EXPECT_THAT(names_in(cache), IsEmpty());
    }
    ASSERT_EQ(kvasir(cutting(out, cache), bad_disk(cache, "write=short")).exit_code, 0);
    EXPECT_EQ(names_in(cache, ".manifest").size(), 1u);
    // It is read again, and is good: nothing is to be written, and nobody complains.
    auto again = cutting(out, cache);
    again.insert(again.end(), {"--log-level", "info"});
    const Outcome cached = kvasir(again, bad_disk(cache, "write=EIO@0"));
    EXPECT_EQ(cached.exit_code, 0);
    EXPECT_THAT(cached.err, Not(HasSubstr("manifest")));
    // A market starts without it, too.
    const std::string state = scratch.path("state");
    auto options = bad_disk(scratch.path("home/kvasir"), "create=ENOSPC");
    options.environment.push_back("XDG_CACHE_HOME=" + scratch.path("home"));
    Program market({KVASIR_PROGRAM, "market", "-m", demo_model(), "--listen", "127.0.0.1:0",
                    "--state", state, "--plain"},
                   options);
    EXPECT_TRUE(market.wait_for("market: http")) << market.err();
    EXPECT_THAT(market.err(), HasSubstr("the manifest is not cached"));
    // Those who only read it do so without a cache as well.
    EXPECT_EQ(kvasir({"verify", out, "--model", demo_model(), "--cache-dir", scratch.path("none")},
                     bad_disk(scratch.path("none"), "create=ENOSPC"))
                  .exit_code,
              0);
}

// ---- kvasir worker --join ----

constexpr const char* kDiskFull = "disk full, trying again from time to time: fetching: ";

// A market, and one worker whose disk can be bad.
class Joined {
public:
    Joined() : market_(demo_model(), scratch_.path("state")) {}

    // `what` (empty: nothing) fails in its slices until mend().
    Program start(const std::string& what = {}, const std::string& like = ".gguf") {
        put(bad_, "");
        const std::vector<std::string> argv = {KVASIR_PROGRAM, "worker", "--join",   market_.url(),
                                               "--invite",     invite(), "--name",   "w",
                                               "--cache",      cache(),  "--budget", "12M",
                                               "--log-level",  "info"};
        return Program(argv, what.empty() ? ProgramOptions() : bad_disk(cache(), what, like, bad_));
    }
    void mend() const { fs::remove(bad_); }
    MarketProgram& market() { return market_; }
    std::string invite() const { return market_.worker_invite(); }
    std::string cache() const { return scratch_.path("w"); }
    std::string state() const { return scratch_.path("state"); }

    // Nothing of it is served or proven, and no slice has its final name.
    void expect_nothing_served() {
        Operator desk(market_.url(), state());
        const Json node = desk.node("w");
        ASSERT_FALSE(node.is_null());
        EXPECT_EQ(node["leases_serving"], 0);
        EXPECT_THAT(names_in(cache(), ".gguf"), IsEmpty());
    }
    // It serves, its slice is the model's bytes, and nothing else is left.
    void expect_good(Program& worker) {
        ASSERT_TRUE(worker.wait_for("worker: serving ")) << worker.err();
        const Outcome verified = kvasir({"verify", slice_in(cache()), "--model", demo_model(),
                                         "--cache-dir", scratch_.path("none")});
        EXPECT_EQ(verified.exit_code, 0) << verified.err;
        EXPECT_THAT(names_in(cache(), ".part"), IsEmpty());
        EXPECT_THAT(names_in(cache(), ".tmp"), IsEmpty());
        end(worker);
    }
    static void end(Program& worker) {
        worker.signal(SIGTERM);
        EXPECT_EQ(worker.wait(60).exit_code, 0) << worker.err();
    }

private:
    const ScratchFolder scratch_;
    const std::string bad_ = scratch_.path("the-disk-is-bad");
    MarketProgram market_;
};

uint64_t number_after(const Program& program, const char* before) {
    return std::stoull("0" + program.word_after(before));
}

TEST(Disk, AWorkersDiskRunsFullInTheMiddleOfASlice) {
    Joined joined;
    Program full = joined.start("fallocate=EOPNOTSUPP,write=ENOSPC@6000000");
    ASSERT_TRUE(full.wait_for(kDiskFull)) << full.err();
    EXPECT_THAT(full.err(), HasSubstr(kFull));
    EXPECT_THAT(full.err(), HasSubstr(".gguf.part: writing failed"));
    joined.expect_nothing_served();
    EXPECT_EQ(names_in(joined.cache(), ".part").size(), 1u) << "what is good is kept";
    full.signal(SIGKILL);  // so that it keeps its leases
    full.wait();
    Program again = joined.start();
    ASSERT_TRUE(again.wait_for("slice ready: ")) << again.err();
    EXPECT_GT(number_after(again, "received), "), 4'000'000u) << again.err();
    EXPECT_GT(number_after(again, "slice ready: "), 1'000'000u);
    EXPECT_LT(number_after(again, "slice ready: "), 8'000'000u) << "only what was not there";
    joined.expect_good(again);
}

// A disk that says beforehand that it has no room keeps nothing of the try.
TEST(Disk, AWorkersDiskHasNoRoomForASlice) {
    Joined joined;
    for (const char* what : {"fallocate=ENOSPC", "fallocate=EDQUOT", "ftruncate=ENOSPC"}) {
        Program full = joined.start(what);
        ASSERT_TRUE(full.wait_for(kDiskFull)) << what << full.err();
        EXPECT_THAT(full.err(), HasSubstr("making room failed: the disk"));
        joined.expect_nothing_served();
        EXPECT_THAT(names_in(joined.cache(), ".part"), IsEmpty());
        Joined::end(full);
    }
    Program again = joined.start();
    joined.expect_good(again);
}

// The same process goes on by itself when the disk is good again.
TEST(Disk, AWorkersDiskBreaksAndIsMended) {
    for (const char* what : {"write=EIO@4000000", "fsync=EIO", "rename=EIO"}) {
        SCOPED_TRACE(what);
        Joined joined;
        Program worker = joined.start(what);
        ASSERT_TRUE(worker.wait_for(kBroken)) << worker.err();
        EXPECT_THAT(worker.err(), HasSubstr("trying again from time to time"));
        EXPECT_THAT(worker.err(), HasSubstr(".gguf.part: "));
        joined.expect_nothing_served();
        joined.mend();
        joined.expect_good(worker);
    }
}

// After a failed fsync the cache shows bytes that the disk does not have: they come again.
TEST(Disk, WhatAFailedSyncLostIsFetchedAgain) {
    Joined joined;
    Program worker = joined.start("fsync=lost");
    ASSERT_TRUE(worker.wait_for(".gguf.part: syncing failed")) << worker.err();
    joined.expect_good(worker);
    const uint64_t fetched = number_after(worker, "slice ready: ");
    EXPECT_GT(fetched, 0u);
    EXPECT_LT(fetched, 1'000'000u) << "only what was lost: " << worker.err();
}

TEST(Disk, AWorkersShortWritesMakeAWholeSlice) {
    Joined joined;
    Program worker = joined.start("write=short", "");
    joined.expect_good(worker);
}

// What a worker needs besides slices: its key, the model's outline.
TEST(Disk, AWorkersOtherFiles) {
    Joined joined;
    for (const char* what : {"create=ENOSPC", "write=ENOSPC@20"}) {
        const Outcome outcome = joined.start(what, "/key").wait(60);
        EXPECT_EQ(outcome.exit_code, 4) << what << outcome.err;
        EXPECT_THAT(outcome.err, HasSubstr("the disk or quota is full"));
        EXPECT_THAT(names_in(joined.cache()), UnorderedElementsAre("lock"));
    }
    Program worker = joined.start("write=ENOSPC@100", "outline");
    ASSERT_TRUE(worker.wait_for("disk full, trying again from time to time: looking up the market"))
        << worker.err();
    EXPECT_THAT(worker.err(), HasSubstr("outline."));
    EXPECT_THAT(names_in(joined.cache()), UnorderedElementsAre("lock", "key"));
    joined.mend();
    joined.expect_good(worker);
}

// ---- kvasir market ----

// A market whose database is on a disk that can be bad.
class BadMarket {
public:
    explicit BadMarket(const std::string& what)
        : program_({KVASIR_PROGRAM, "market", "-m", demo_model(), "--listen", "127.0.0.1:0",
                    "--state", state_, "--dev-tls", "--print-invite", "worker"},
                   bad_disk(state_, what, "market.db", bad_)) {
        EXPECT_TRUE(program_.wait_for("invite worker: ")) << program_.err();
        url_ = program_.word_after("market: ");
        invite_ = program_.word_after("invite worker: ");
        net::ClientTrust trust;
        trust.ca_file = state_ + "/dev-cert.pem";
        auto client = net::HttpClient::make(trust);
        EXPECT_TRUE(client) << client.error().detail;
        client_ = std::move(*client);
        std::ifstream(state_ + "/operator.secret") >> secret_;
    }
    void spoil() const { put(bad_, ""); }
    void mend() const { fs::remove(bad_); }
    Program& program() { return program_; }
    // The status of an answer, and its body's JSON.
    std::pair<int, Json> call(const std::string& method, const std::string& path) {
        net::HttpCall call;
        call.method = method;
        call.url = url_ + path;
        call.secret_headers = {{"Authorization", "Bearer " + secret_}};
        if (method == "POST") call.body = "{}";
        const auto reply = client_->call(call);
        if (!reply) {
            ADD_FAILURE() << reply.error().detail;
            return {};
        }
        return {reply->status, Json::parse(reply->body, nullptr, false)};
    }
    Program worker(const std::string& name) { return worker_with(invite_, name); }
    Program worker_with(const std::string& invite, const std::string& name) {
        return join_worker(url_, invite, name, scratch_.path(name));
    }
    void kill() {
        program_.signal(SIGKILL);
        program_.wait();
    }
    // Makes of the database what a power cut would have left; the number of lost pages.
    size_t lose_unsynced(LostPages which) const {
        fs::remove(state_ + "/market.db-shm");
        return e2e::lose_unsynced(state_ + "/market.db", which) +
               e2e::lose_unsynced(state_ + "/market.db-wal", which);
    }
    // Another one on a good disk, at another port.
    void restart() {
        program_ = Program({KVASIR_PROGRAM, "market", "-m", demo_model(), "--listen", "127.0.0.1:0",
                            "--state", state_, "--dev-tls"});
        EXPECT_TRUE(program_.wait_for("market: https")) << program_.err();
        url_ = program_.word_after("market: ");
    }

private:
    const ScratchFolder scratch_;
    const std::string state_ = scratch_.path("state");
    const std::string bad_ = scratch_.path("the-disk-is-bad");
    Program program_;
    std::string url_, invite_, secret_;
    std::unique_ptr<net::HttpClient> client_;
};

TEST(Disk, AMarketOnABadDiskAnswersSoAndGoesOn) {
    const struct {
        const char* what;
        int status;
        const char* code;
    } faults[] = {
        {"write=ENOSPC@0", 507, "no_space"},
        {"write=EDQUOT@0", 502, "io"},
        {"write=EIO@0", 502, "io"},
        {"fsync=EIO", 502, "io"},
    };
    for (const auto& fault : faults) {
        SCOPED_TRACE(fault.what);
        BadMarket market(fault.what);
        Program first = market.worker("first");
        ASSERT_TRUE(first.wait_for("worker: serving ")) << first.err();
        market.spoil();
        for (int i = 0; i < 3; ++i) {
            const auto [status, json] = market.call("POST", "/api/v1/admin/invites");
            EXPECT_EQ(status, fault.status) << json;
            ASSERT_TRUE(json.contains("error")) << json;
            EXPECT_EQ(json["error"]["code"], fault.code);
            EXPECT_THAT(json["error"]["message"].get<std::string>(), HasSubstr("market.db"));
        }
        // What needs no writing is there as before.
        EXPECT_EQ(market.call("GET", "/api/v1/coverage").first, 200);
        EXPECT_EQ(market.call("GET", "/api/v1/nodes").first, 200);
        // A node that comes now is told, and waits.
        Program second = market.worker("second");
        ASSERT_TRUE(second.wait_for("the market says to /api/v1/nodes: ")) << second.err();
        EXPECT_TRUE(second.wait_for("trying again from time to time")) << second.err();
        EXPECT_THAT(second.err(), Not(HasSubstr("disk full, trying")));
        EXPECT_THAT(market.program().err(), HasSubstr("market.db cannot be written"));
        market.mend();
        EXPECT_TRUE(second.wait_for("worker: serving ")) << second.err();
        EXPECT_THAT(market.program().err(), HasSubstr("market.db is written again"));
        EXPECT_EQ(market.call("POST", "/api/v1/admin/invites").first, 200);
        EXPECT_TRUE(first.running()) << first.err();
        for (Program* worker : {&first, &second}) Joined::end(*worker);
        market.program().signal(SIGTERM);
        EXPECT_EQ(market.program().wait(60).exit_code, 0) << market.program().err();
    }
}

// L2: what was answered before the disk went bad is there after a crash (or a power cut, which
// takes pages that were not synced), and nothing half done.
TEST(Disk, AMarketKilledOnABadDiskKeepsWhatItAnswered) {
    const struct {
        std::string what;
        LostPages lost = LostPages::kNone;
    } crashes[] = {
        {"write=ENOSPC@0"},
        {"write=ENOSPC@5000"},
        {"write=short"},
        {"fsync=EIO"},
        {"fsync=EIO,copies", LostPages::kAll},
        {"fsync=EIO,copies", LostPages::kEven},
        {"fsync=EIO,copies", LostPages::kOdd},
    };
    for (const auto& [what, lost] : crashes) {
        SCOPED_TRACE(what + " " + std::to_string(static_cast<int>(lost)));
        BadMarket market(what);
        Program first = market.worker("first");
        ASSERT_TRUE(first.wait_for("worker: serving ")) << first.err();
        auto answered = market.call("POST", "/api/v1/admin/invites");
        ASSERT_EQ(answered.first, 200);
        market.spoil();
        int refused = 0;
        for (int i = 0; i < 3; ++i) {
            auto now = market.call("POST", "/api/v1/admin/invites");
            refused += now.first != 200 ? 1 : 0;
            if (now.first == 200) answered = now;
        }
        EXPECT_EQ(refused, what == "write=short" ? 0 : 3);
        market.kill();
        if (lost != LostPages::kNone) {
            EXPECT_GT(market.lose_unsynced(lost), 0u) << "all was synced, nothing is shown";
        }
        market.restart();
        const auto [shown, nodes] = market.call("GET", "/api/v1/nodes");
        ASSERT_EQ(shown, 200);
        ASSERT_EQ(nodes["nodes"].size(), 1u);
        EXPECT_EQ(nodes["nodes"][0]["name"], "first");
        EXPECT_GT(nodes["nodes"][0]["leases_serving"], 0);
        // Invites are good whose making was answered, before the fault or in spite of it.
        Program second = market.worker("second");
        EXPECT_TRUE(second.wait_for("worker: serving ")) << second.err();
        Program third = market.worker_with(answered.second["invite"], "third");
        EXPECT_TRUE(third.wait_for("worker: serving ")) << third.err();
    }
}

// Whatever a start cannot write, the next one is not hindered by what is left of it.
TEST(Disk, AMarketStartsOnceThereIsRoom) {
    const ScratchFolder scratch;
    const std::string cache = "XDG_CACHE_HOME=" + scratch.path("cache");
    const auto start = [&](const char* like, const char* what) {
        auto options = bad_disk(scratch.path("state"), what, like);
        options.environment.push_back(cache);
        return Program({KVASIR_PROGRAM, "market", "-m", demo_model(), "--listen", "127.0.0.1:0",
                        "--state", scratch.path("state"), "--dev-tls"},
                       options);
    };
    for (const char* like : {"dev-key", "dev-cert", "market.db", "market.key", "operator.secret"}) {
        fs::remove_all(scratch.path("state"));
        for (const char* what : {"create=ENOSPC", "write=ENOSPC@10", "write=EIO@0"}) {
            SCOPED_TRACE(std::string(like) + " " + what);
            const Outcome outcome = start(like, what).wait(60);
            EXPECT_EQ(outcome.exit_code, 4) << outcome.err;
            EXPECT_THAT(outcome.err, HasSubstr(like));
            EXPECT_THAT(outcome.err, AnyOf(HasSubstr("full"), HasSubstr("No space"),
                                           HasSubstr("error"), HasSubstr("I/O")));
        }
        Program good = start(like, "write=short");
        ASSERT_TRUE(good.wait_for("market: ")) << good.err();
        good.signal(SIGTERM);
        EXPECT_EQ(good.wait(60).exit_code, 0);
        if (like == std::string("market.db")) continue;
        Program again = start(like, "write=EIO@0,create=EIO");
        EXPECT_TRUE(again.wait_for("market: ")) << "it is whole, only read: " << again.err();
    }
}

}  // namespace
}  // namespace kvasir::e2e
