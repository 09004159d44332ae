#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <csignal>
#include <cstdlib>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>
#include <set>
#include <thread>

#include <gtest/gtest.h>
#include <soci/soci.h>
#include <soci/sqlite3/soci-sqlite3.h>

#include "base/check.hpp"
#include "base/log.hpp"
#include "base/log_testing.hpp"
#include "store/database.hpp"
#include "store/market_store.hpp"

namespace kvasir::store {
namespace {

using namespace std::chrono_literals;
using market::LeaseDelta;
using market::LeaseRow;
using market::LeaseState;
using market::Registration;
using market::Storage;
using soci::into;
using soci::use;

// On the disk where there is one: synchronous commits should cost what they cost.
class Folder {
public:
    Folder() {
        std::string name = (std::filesystem::temp_directory_path() / "kvasir-XXXXXX").string();
        KVASIR_CHECK(::mkdtemp(name.data()) != nullptr);
        path_ = name;
    }
    ~Folder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    std::string operator/(const std::string& name) const { return path_ + "/" + name; }

private:
    std::string path_;
};

constexpr const char* kTable[] = {"CREATE TABLE t (k BIGINT PRIMARY KEY, v BIGINT NOT NULL)",
                                  "INSERT INTO t VALUES (1, 0)"};

std::unique_ptr<Database> open_database(const std::string& path, DatabaseOptions options = {}) {
    auto database = Database::open(path, kTable, options);
    if (!database) ADD_FAILURE() << database.error().detail;
    return std::move(*database);
}

std::unique_ptr<Storage> open_store(const std::string& path, StoreOptions options = {}) {
    auto store = open_market_store(path, options);
    if (!store) ADD_FAILURE() << store.error().detail;
    return std::move(*store);
}

Sha256 digest(uint8_t number) {
    Sha256 out = {};
    out[0] = number;
    return out;
}

std::string node(int number) {
    std::string text = std::to_string(number);
    return std::string(64 - text.size(), 'a') + text;
}

Registration registration(int number, uint8_t invite, int64_t now = 1000) {
    return {node(number), "node " + std::to_string(number), digest(invite), now, now + 3600};
}

LeaseRow lease(uint64_t id, int owner, uint32_t begin, LeaseState state) {
    return {id, node(owner), {{3, 1}, begin, begin + 4}, 4000000000000, state};
}

TEST(MarketStore, EverythingIsThereAfterReopening) {
    Folder folder;
    const std::string path = folder / "a market.db";
    {
        auto store = open_store(path);
        ASSERT_TRUE(store->load(digest(9), 1000));
        ASSERT_TRUE(store->add_invite({digest(1), 2, 5000, 1}));
        const auto first = store->register_node(registration(1, 1));
        const auto second = store->register_node(registration(2, 1));
        ASSERT_TRUE(first && second);
        EXPECT_TRUE(first->is_new);
        EXPECT_NE(first->token.serial, second->token.serial);
        ASSERT_TRUE(store->write_leases(
            {{lease(1, 1, 0, LeaseState::kLoading), lease(2, 2, 4, LeaseState::kLoading),
              lease(7, 2, 8, LeaseState::kLoading)},
             {}}));
        ASSERT_TRUE(store->write_leases({{lease(2, 2, 4, LeaseState::kServing)}, {7, 99}}));
        ASSERT_TRUE(store->add_bytes_served({{node(1), 10}, {node(2), 5}}));
        ASSERT_TRUE(store->add_bytes_served({{node(1), uint64_t{1} << 40}}));
    }
    auto store = open_store(path);
    const auto state = store->load(digest(9), 1000);
    ASSERT_TRUE(state);
    ASSERT_EQ(state->nodes.size(), 2U);
    EXPECT_EQ(state->nodes[0].node, node(1));
    EXPECT_EQ(state->nodes[0].name, "node 1");
    EXPECT_EQ(state->nodes[0].bytes_served, (uint64_t{1} << 40) + 10);
    EXPECT_FALSE(state->nodes[0].is_revoked);
    ASSERT_EQ(state->leases.size(), 2U);
    EXPECT_EQ(state->leases[1].id, 2U);
    EXPECT_EQ(state->leases[1].state, LeaseState::kServing);
    EXPECT_EQ(state->leases[1].segment, (Segment{{3, 1}, 4, 8}));
    EXPECT_EQ(state->leases[1].bytes, 4000000000000U);
    EXPECT_EQ(state->lease_id_next, 8U);  // 7 is gone, but was given
    struct stat info {};
    for (const char* suffix : {"", "-wal", "-shm"}) {
        ASSERT_EQ(::stat((path + suffix).c_str(), &info), 0) << suffix;
        EXPECT_EQ(info.st_mode & 0777, 0600U) << suffix;
    }
    // With another model the old leases are of no use to anybody.
    EXPECT_TRUE(store->load(digest(8), 1000)->leases.empty());
}

TEST(MarketStore, ATokenAskedForAgainAtOnceIsTheSame) {
    Folder folder;
    auto store = open_store(folder / "db");
    ASSERT_TRUE(store->load(digest(9), 1000));
    ASSERT_TRUE(store->add_invite({digest(1), 2, 5000, 1}));
    ASSERT_TRUE(store->register_node(registration(1, 1)));
    ASSERT_TRUE(store->register_node(registration(2, 1)));
    const auto first = store->add_token(node(1), 2000, 2000 + 3600);
    ASSERT_TRUE(first);
    EXPECT_EQ(first->expires, 5600);
    const auto soon = store->add_token(node(1), 2180, 2180 + 3600);
    EXPECT_EQ(soon->serial, first->serial);
    EXPECT_EQ(soon->expires, 5600);  // as the row says
    EXPECT_NE(store->add_token(node(2), 2180, 2180 + 3600)->serial, first->serial);
    const auto later = store->add_token(node(1), 2181, 2181 + 3600);
    EXPECT_GT(later->serial, first->serial);
    EXPECT_EQ(later->expires, 5781);
    // Of a short life, too. One that lasts longer than is wanted now is not given.
    const auto brief = store->add_token(node(1), 3000, 3000 + 100);
    EXPECT_GT(brief->serial, later->serial);
    EXPECT_EQ(store->add_token(node(1), 3005, 3005 + 100)->serial, brief->serial);
    EXPECT_GT(store->add_token(node(1), 3006, 3006 + 100)->serial, brief->serial);
}

TEST(MarketStore, AnInviteIsUsedOncePerNode) {
    Folder folder;
    auto store = open_store(folder / "db");
    ASSERT_TRUE(store->add_invite({digest(1), 1, 2000, 1}));
    const auto first = store->register_node(registration(1, 1));
    ASSERT_TRUE(first);
    const auto again = store->register_node(registration(1, 1));
    ASSERT_TRUE(again);
    EXPECT_FALSE(again->is_new);
    EXPECT_EQ(again->token.serial, first->token.serial);
    // Long after, with the invite over: the node is known, and that is enough.
    const auto later = store->register_node(registration(1, 1, 9999));
    ASSERT_TRUE(later);
    EXPECT_GT(later->token.serial, first->token.serial);
    const auto expect_denied = [&](const Registration& asked, const char* word) {
        const auto denied = store->register_node(asked);
        ASSERT_FALSE(denied);
        EXPECT_EQ(denied.error().code, Errc::kDenied);
        EXPECT_NE(denied.error().detail.find(word), std::string::npos) << denied.error().detail;
    };
    expect_denied(registration(2, 1), "used up");
    expect_denied(registration(2, 5), "does not know");
    ASSERT_TRUE(store->add_invite({digest(2), 1, 2000, 1}));
    expect_denied(registration(2, 2, 2000), "expired");
    EXPECT_TRUE(store->register_node(registration(2, 2, 1999)));
    EXPECT_FALSE(store->add_invite({digest(2), 1, 2000, 1}));  // the same secret twice
    // A further role is worth a use; what a node may do already is not.
    ASSERT_TRUE(store->add_invite({digest(3), 1, 5000, 2}));
    EXPECT_EQ(store->register_node(registration(1, 3))->roles, 3);
    EXPECT_EQ(store->register_node(registration(1, 3))->roles, 3);
    expect_denied(registration(4, 3), "used up");
    EXPECT_EQ(store->load(digest(9), 1000)->nodes.at(0).roles, 3);
}

TEST(MarketStore, AnInviteOfAnotherRoleIsRefusedAndNotUsed) {
    Folder folder;
    auto store = open_store(folder / "db");
    ASSERT_TRUE(store->load(digest(9), 1000));
    ASSERT_TRUE(store->add_invite({digest(1), 1, 5000, 2}));
    ASSERT_TRUE(store->add_invite({digest(2), 2, 5000, 1}));
    const auto asking = [&](int number, uint8_t invite, uint8_t role) {
        Registration asked = registration(number, invite);
        asked.role_wanted = role;
        return store->register_node(asked);
    };
    const auto expect_refused = [](const Result<market::Registered>& refused) {
        ASSERT_FALSE(refused);
        EXPECT_EQ(refused.error().code, Errc::kDenied);
        EXPECT_NE(refused.error().detail.find("backbone"), std::string::npos);
        EXPECT_NE(refused.error().detail.find("worker"), std::string::npos);
    };
    expect_refused(asking(1, 1, 1));
    EXPECT_TRUE(store->load(digest(9), 1000)->nodes.empty());
    EXPECT_EQ(asking(1, 2, 1)->roles, 1);
    // A node that has the role comes in with any invite, and uses none.
    EXPECT_EQ(asking(1, 1, 1)->roles, 1);
    // One that is there and lacks it is refused too, and the invite still makes a backbone.
    expect_refused(asking(1, 2, 2));
    EXPECT_EQ(asking(1, 1, 2)->roles, 3);
    EXPECT_NE(asking(3, 1, 2).error().detail.find("used up"), std::string::npos);
}

TEST(MarketStore, RevokedStaysRevoked) {
    Folder folder;
    const std::string path = folder / "db";
    uint64_t serial = 0;
    {
        auto store = open_store(path);
        ASSERT_TRUE(store->load(digest(9), 1000));
        ASSERT_TRUE(store->add_invite({digest(1), 5, 9000, 1}));
        serial = store->register_node(registration(1, 1))->token.serial;
        const auto renewed = store->add_token(node(1), 2000, 5600);
        ASSERT_TRUE(renewed);
        ASSERT_TRUE(store->register_node(registration(2, 1)));
        ASSERT_TRUE(store->write_leases({{lease(1, 1, 0, LeaseState::kServing)}, {}}));
        const auto tokens = store->revoke_node(node(1));
        ASSERT_TRUE(tokens);
        ASSERT_EQ(tokens->size(), 2U);
        EXPECT_EQ(tokens->at(0).serial, serial);
        EXPECT_EQ(tokens->at(1).serial, renewed->serial);
        EXPECT_EQ(tokens->at(1).expires, 5600);
        EXPECT_EQ(store->revoke_node(node(3)).error().code, Errc::kNotFound);
    }
    auto store = open_store(path);
    EXPECT_EQ(store->register_node(registration(1, 1)).error().code, Errc::kRevoked);
    EXPECT_EQ(store->add_token(node(1), 1000, 2000).error().code, Errc::kRevoked);
    EXPECT_EQ(store->add_token(node(3), 1000, 2000).error().code, Errc::kNotFound);
    const auto state = store->load(digest(9), 1000);
    ASSERT_TRUE(state);
    EXPECT_TRUE(state->nodes.at(0).is_revoked);
    EXPECT_FALSE(state->nodes.at(1).is_revoked);
    EXPECT_TRUE(state->leases.empty());
    ASSERT_EQ(state->tokens_revoked.size(), 2U);
    EXPECT_EQ(state->tokens_revoked[0].serial, serial);
    // Tokens that ran out are no longer of interest.
    EXPECT_TRUE(store->load(digest(9), 5601 + 7 * 86400)->tokens_revoked.empty());
}

TEST(MarketStore, AFullQueueIsBusyAndNothingIsHalfDone) {
    Folder folder;
    StoreOptions options;
    options.calls_max = 1;
    options.database.retry_max = 20s;
    auto store = open_store(folder / "db", options);
    ASSERT_TRUE(store->add_invite({digest(1), 100, 9000, 1}));
    // Somebody else holds the write lock; one call runs into it, one waits, the rest is refused.
    soci::session other(*soci::factory_sqlite3(), "dbname=\"" + (folder / "db") + "\"");
    other << "BEGIN IMMEDIATE";
    std::atomic<int> done{0}, busy{0};
    std::vector<std::thread> callers;
    for (int i = 0; i < 6; ++i) {
        callers.emplace_back([&, i] {
            const auto made = store->register_node(registration(i, 1));
            if (made) ++done;
            if (!made && made.error().code == Errc::kBusy) ++busy;
        });
    }
    // (Whether two or one are in, depends on when the thread takes its first from the queue.)
    const auto deadline = std::chrono::steady_clock::now() + 20s;
    while (busy < 4 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    other << "COMMIT";
    for (auto& caller : callers) caller.join();
    EXPECT_GE(busy, 4);
    EXPECT_GE(done, 1);
    EXPECT_EQ(done + busy, 6);
    EXPECT_EQ(store->load(digest(9), 1000)->nodes.size(), static_cast<size_t>(done.load()));
}

TEST(Database, RefusesWhatItCannotUse) {
    Folder folder;
    const std::string path = folder / "db";
    { open_database(path); }
    constexpr const char* kOlder[] = {kTable[0]};
    auto older = Database::open(path, kOlder);
    ASSERT_FALSE(older);
    EXPECT_EQ(older.error().code, Errc::kVersion);
    std::ofstream(folder / "text") << std::string(4096, 'x');
    const auto text = Database::open(folder / "text", kTable);
    ASSERT_FALSE(text);
    EXPECT_EQ(text.error().code, Errc::kBadInput) << text.error().detail;
    EXPECT_NE(text.error().detail.find("text"), std::string::npos);
    EXPECT_EQ(Database::open(folder / "none/db", kTable).error().code, Errc::kEnvironment);
    EXPECT_EQ(Database::open(folder / "a\"b", kTable).error().code, Errc::kUsage);
}

TEST(Database, MigratesWhatAnOlderVersionLeft) {
    Folder folder;
    const std::string path = folder / "db";
    {
        auto database = open_database(path);
        ASSERT_TRUE(database->transact([](soci::session& sql) -> Status {
            sql << "UPDATE t SET v = 42";
            return {};
        }));
    }
    constexpr const char* kNewer[] = {kTable[0], kTable[1],
                                      "ALTER TABLE t ADD COLUMN w BIGINT NOT NULL DEFAULT 7"};
    for (int round = 0; round < 2; ++round) {
        auto database = Database::open(path, kNewer);
        ASSERT_TRUE(database) << database.error().detail;
        int v = 0, w = 0;
        ASSERT_TRUE((*database)->transact([&](soci::session& sql) -> Status {
            sql << "SELECT v, w FROM t WHERE k = 1", into(v), into(w);
            return {};
        }));
        EXPECT_EQ(v, 42);
        EXPECT_EQ(w, 7);
    }
    // A migration that fails leaves the version it found.
    constexpr const char* kBroken[] = {kNewer[0], kNewer[1], kNewer[2], "CREATE TABLE u (a INT)",
                                       "NOT SQL"};
    EXPECT_FALSE(Database::open(path, kBroken));
    EXPECT_TRUE(Database::open(path, kNewer));
}

std::vector<std::string>& log_lines() {
    static std::vector<std::string> lines;
    return lines;
}

// The caller, who may be a peer, learns no path; the operator's log has it, once.
TEST(Database, AFullDiskIsToldToTheLogOnce) {
    Folder folder;
    auto database = open_database(folder / "market.db");
    const auto fill = [&] {
        return database->transact([](soci::session& sql) -> Status {
            int pages = 0;
            sql << "PRAGMA max_page_count=8", into(pages);
            for (int i = 2; i < 100000; ++i) sql << "INSERT INTO t VALUES (:i, 0)", use(i);
            return {};
        });
    };
    const auto write = [&] {
        return database->transact([](soci::session& sql) -> Status {
            sql << "UPDATE t SET v = v + 1";
            return {};
        });
    };
    log_lines().clear();
    set_log_sink(
        [](LogLevel, std::string_view, std::string_view line) { log_lines().emplace_back(line); },
        LogLevel::kWarn);
    for (int i = 0; i < 3; ++i) {
        const Status full = fill();
        ASSERT_FALSE(full);
        EXPECT_EQ(full.error().code, Errc::kNoSpace);
        EXPECT_EQ(full.error().detail, "database market.db: the disk is full; free some space");
    }
    EXPECT_TRUE(write());
    EXPECT_TRUE(write());
    set_log_sink(nullptr, LogLevel::kError);
    ASSERT_EQ(log_lines().size(), 2U);
    EXPECT_NE(log_lines()[0].find(folder / "market.db"), std::string::npos);
    EXPECT_NE(log_lines()[0].find("cannot be written"), std::string::npos);
    EXPECT_NE(log_lines()[1].find("is written again"), std::string::npos);
}

TEST(Database, AFileThatLostItsNameIsNotWrittenOn) {
    for (const bool is_replaced : {false, true}) {
        Folder folder;
        const std::string path = folder / "market.db";
        auto store = open_store(path);
        ASSERT_TRUE(store->load(digest(9), 1000));
        ASSERT_TRUE(store->add_invite({digest(1), 9, 5000, 1}));
        for (const char* suffix : {"", "-wal", "-shm"}) std::filesystem::remove(path + suffix);
        if (is_replaced) std::ofstream(path) << "";
        const auto lost = store->register_node(registration(1, 1));
        ASSERT_FALSE(lost);
        EXPECT_EQ(lost.error().code, Errc::kIo);
        EXPECT_NE(lost.error().detail.find("deleted or replaced"), std::string::npos);
        EXPECT_EQ(lost.error().detail.find(folder / ""), std::string::npos);
    }
}

Status set_value(Database& database, int value) {
    return database.transact([&](soci::session& sql) -> Status {
        sql << "UPDATE t SET v = :v WHERE k = 1", use(value);
        return {};
    });
}

// What t has, of a file that is whole; -1 otherwise.
int value_of(const std::string& path) {
    auto database = open_database(path);
    int value = -1;
    std::string verdict;
    if (!database) return -1;
    const Status ok = database->transact([&](soci::session& sql) -> Status {
        sql << "SELECT v FROM t WHERE k = 1", into(value);
        sql << "PRAGMA integrity_check", into(verdict);
        return {};
    });
    EXPECT_TRUE(ok) << ok.error().detail;
    EXPECT_EQ(verdict, "ok");
    return verdict == "ok" ? value : -1;
}

void back_up(const std::string& path, const std::string& copy) {
    soci::session other(*soci::factory_sqlite3(), "dbname=\"" + path + "\"");
    other << "VACUUM INTO '" + copy + "'";
}

// A program that sets 1, is backed up, grows, sets 2, and is killed.
void be_killed(const std::string& path, const std::string& copy, uint64_t wal_bytes_max) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
        DatabaseOptions options;
        options.wal_bytes_max = wal_bytes_max;
        auto database = Database::open(path, kTable, options);
        if (!database || !set_value(**database, 1)) std::_Exit(2);
        back_up(path, copy);
        for (int i = 2; i < 400; ++i) {
            const Status grown = (*database)->transact([&](soci::session& sql) -> Status {
                sql << "INSERT INTO t VALUES (:i, 7)", use(i);
                return {};
            });
            if (!grown) std::_Exit(3);
        }
        std::_Exit(set_value(**database, 2) ? 0 : 4);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_EQ(status, 0);
    ASSERT_GT(std::filesystem::file_size(path + "-wal"), 0U);
}

constexpr uint64_t kWalSizes[] = {100 << 10, 4 << 20};  // with checkpoints between, and without

// To restore is to put the copy where the file was: what its predecessor left beside it is not
// replayed into it.
TEST(Database, ACopyPutInThePlaceOfAKilledOnesFileIsUsedAsItIs) {
    for (const uint64_t wal_bytes_max : kWalSizes) {
        for (const bool is_deleted : {false, true}) {
            Folder folder;
            const std::string path = folder / "db", copy = folder / "copy";
            ASSERT_NO_FATAL_FAILURE(be_killed(path, copy, wal_bytes_max));
            if (is_deleted) std::filesystem::remove(path);  // else it keeps its inode
            std::filesystem::copy_file(copy, path,
                                       std::filesystem::copy_options::overwrite_existing);
            const kvasir::testing::LogCapture lines;
            EXPECT_EQ(value_of(path), 1) << wal_bytes_max << " " << is_deleted;
            EXPECT_EQ(lines.with("put in the place of another database").size(), 1U);
            EXPECT_TRUE(std::filesystem::exists(path + "-wal.old"));
            EXPECT_EQ(value_of(path), 1);
            EXPECT_EQ(lines.with("put in the place of another database").size(), 1U);
        }
    }
}

TEST(Database, AKilledOnesOwnLogIsReplayed) {
    for (const uint64_t wal_bytes_max : kWalSizes) {
        Folder folder;
        const std::string path = folder / "db", moved = folder / "moved", copy = folder / "copy";
        ASSERT_NO_FATAL_FAILURE(be_killed(path, copy, wal_bytes_max));
        const kvasir::testing::LogCapture lines;
        for (const char* suffix : {"", "-wal"})
            std::filesystem::copy_file(path + suffix, moved + suffix);
        EXPECT_EQ(value_of(moved), 2) << "in another place, by another inode";
        EXPECT_FALSE(std::filesystem::exists(moved + "-wal"));
        // Killed when a checkpoint had written the file and not yet cut the log.
        {
            soci::session other(*soci::factory_sqlite3(), "dbname=\"" + path + "\"");
            int busy = 1, pages = 0, done = 0;
            std::filesystem::copy_file(path + "-wal", folder / "wal");
            other << "PRAGMA wal_checkpoint(TRUNCATE)", into(busy), into(pages), into(done);
            ASSERT_EQ(busy, 0);
        }
        std::filesystem::copy_file(folder / "wal", path + "-wal");
        EXPECT_EQ(value_of(path), 2);
        EXPECT_TRUE(lines.with("another database").empty());
    }
}

// A log in which nothing says whose it is: as of old, it is taken.
TEST(Database, TheLogOfAnOlderProgramIsReplayed) {
    Folder folder;
    const std::string path = folder / "db";
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
        soci::session sql(*soci::factory_sqlite3(), "dbname=\"" + path + "\"");
        std::string mode;
        sql << "PRAGMA journal_mode=WAL", into(mode);
        for (const char* statement : kTable) sql << statement;
        sql << "PRAGMA user_version=2";
        sql << "UPDATE t SET v = 2";
        std::_Exit(0);
    }
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_EQ(status, 0);
    ASSERT_GT(std::filesystem::file_size(path + "-wal"), 0U);
    const kvasir::testing::LogCapture lines;
    EXPECT_EQ(value_of(path), 2);
    EXPECT_TRUE(lines.with("another database").empty());
}

// Deleted under a program that runs: that one takes its log with it when it ends, in order.
TEST(Database, AFileThatLostItsNameLeavesNoLogBehind) {
    for (const bool is_replaced : {false, true}) {
        Folder folder;
        const std::string path = folder / "db", copy = folder / "copy", kept = folder / "kept";
        auto database = open_database(path);
        ASSERT_TRUE(set_value(*database, 1));
        back_up(path, copy);
        ASSERT_TRUE(set_value(*database, 2));
        std::filesystem::rename(path, kept);
        if (is_replaced) std::filesystem::copy_file(copy, path);
        EXPECT_FALSE(set_value(*database, 3));
        database.reset();
        EXPECT_FALSE(std::filesystem::exists(path + "-wal"));
        EXPECT_FALSE(std::filesystem::exists(path + "-shm"));
        if (!is_replaced) std::filesystem::copy_file(copy, path);
        EXPECT_EQ(value_of(path), 1);
        EXPECT_FALSE(std::filesystem::exists(path + "-wal.old"));
        EXPECT_EQ(value_of(kept), 2) << "moved away, it has all that was committed";
    }
}

TEST(Database, ACopyThatOthersCouldReadIsMadePrivate) {
    Folder folder;
    const std::string path = folder / "db", copy = folder / "copy";
    ASSERT_NO_FATAL_FAILURE(be_killed(path, copy, 4 << 20));
    for (const char* suffix : {"", "-wal", "-shm"})
        ASSERT_EQ(::chmod((path + suffix).c_str(), 0644), 0) << suffix;
    const kvasir::testing::LogCapture lines;
    auto database = open_database(path);
    for (const char* suffix : {"", "-wal", "-shm"}) {
        struct stat info {};
        ASSERT_EQ(::stat((path + suffix).c_str(), &info), 0) << suffix;
        EXPECT_EQ(info.st_mode & 0777, 0600U) << suffix;
    }
    EXPECT_EQ(lines.with("could be used by others").size(), 3U);
}

TEST(Database, AnErrorOrAFullDiskRollsBack) {
    Folder folder;
    auto database = open_database(folder / "db");
    const auto value = [&] {
        long long v = -1;
        EXPECT_TRUE(database->transact([&](soci::session& sql) -> Status {
            sql << "SELECT sum(v) FROM t", into(v);
            return {};
        }));
        return v;
    };
    const Status refused = database->transact([](soci::session& sql) -> Status {
        sql << "UPDATE t SET v = 5";
        return fail(Errc::kDenied, "no");
    });
    EXPECT_EQ(refused.error().code, Errc::kDenied);
    EXPECT_EQ(value(), 0);
    const Status full = database->transact([](soci::session& sql) -> Status {
        sql << "UPDATE t SET v = 5";
        int pages = 0;
        sql << "PRAGMA max_page_count=8", into(pages);
        for (int i = 2; i < 100000; ++i) sql << "INSERT INTO t VALUES (:i, 0)", use(i);
        return {};
    });
    ASSERT_FALSE(full);
    EXPECT_EQ(full.error().code, Errc::kNoSpace) << full.error().detail;
    EXPECT_EQ(value(), 0);
    EXPECT_TRUE(database->transact([](soci::session& sql) -> Status {
        sql << "UPDATE t SET v = 6";
        return {};
    }));
    EXPECT_EQ(value(), 6);
}

// Read, another connection commits, write: with a lock that begins with the transaction the other
// commit has to wait, and both happen, once each.
TEST(Database, ReadThenWriteIsNeverStale) {
    Folder folder;
    auto a = open_database(folder / "db");
    auto b = open_database(folder / "db");
    std::promise<void> a_has_read, b_has_begun;
    std::atomic<bool> b_is_done{false};
    int a_runs = 0, b_runs = 0;
    std::thread other([&] {
        a_has_read.get_future().wait();
        b_has_begun.set_value();
        EXPECT_TRUE(b->transact([&](soci::session& sql) -> Status {
            ++b_runs;
            sql << "UPDATE t SET v = v + 100 WHERE k = 1";
            return {};
        }));
        b_is_done = true;
    });
    EXPECT_TRUE(a->transact([&](soci::session& sql) -> Status {
        long long v = 0;
        sql << "SELECT v FROM t WHERE k = 1", into(v);
        if (++a_runs == 1) a_has_read.set_value();
        if (a_runs == 1) b_has_begun.get_future().wait();
        EXPECT_FALSE(b_is_done);
        ++v;
        sql << "UPDATE t SET v = :v WHERE k = 1", use(v);
        return {};
    }));
    other.join();
    EXPECT_EQ(a_runs, 1);
    EXPECT_EQ(b_runs, 1);
    long long v = 0;
    ASSERT_TRUE(a->transact([&](soci::session& sql) -> Status {
        sql << "SELECT v FROM t WHERE k = 1", into(v);
        return {};
    }));
    EXPECT_EQ(v, 101);
}

// A lock that outlasts the busy timeout: the whole transaction is done again, and counts once.
TEST(Database, TheWholeTransactionIsTriedAgain) {
    Folder folder;
    DatabaseOptions options;
    options.busy_timeout = 2ms;
    options.retry_max = 20s;
    auto database = open_database(folder / "db", options);
    soci::session other(*soci::factory_sqlite3(), "dbname=\"" + (folder / "db") + "\"");
    other << "BEGIN IMMEDIATE";
    other << "UPDATE t SET v = v + 100 WHERE k = 1";
    std::thread writer([&] {
        EXPECT_TRUE(database->transact([](soci::session& sql) -> Status {
            long long v = 0;
            sql << "SELECT v FROM t WHERE k = 1", into(v);
            ++v;
            sql << "UPDATE t SET v = :v WHERE k = 1", use(v);
            return {};
        }));
    });
    // tidy: sleep, the lock has to outlast several busy timeouts, which nothing announces
    std::this_thread::sleep_for(100ms);
    other << "COMMIT";
    writer.join();
    EXPECT_GE(database->counters().retries, 1U);
    long long v = 0;
    other << "SELECT v FROM t WHERE k = 1", into(v);
    EXPECT_EQ(v, 101);
    // And it ends: a lock that is never given back is kBusy, with a hint.
    options.retry_max = 30ms;
    auto impatient = open_database(folder / "db", options);
    other << "BEGIN IMMEDIATE";
    int runs = 0;
    const Status busy = impatient->transact([&](soci::session&) -> Status {
        ++runs;
        return {};
    });
    other << "ROLLBACK";
    ASSERT_FALSE(busy);
    EXPECT_EQ(busy.error().code, Errc::kBusy);
    EXPECT_EQ(runs, 0);
}

uint64_t file_bytes(const std::string& path) {
    std::error_code missing;
    const auto bytes = std::filesystem::file_size(path, missing);
    return missing ? 0 : bytes;
}

// 16 writers, a poller of the store, and another program that polls and keeps a query open: nothing
// fails, and the log is short again as soon as that query ends.
TEST(MarketStore, ManyWritersAndReadersKeepTheLogShort) {
    Folder folder;
    const std::string path = folder / "db";
    StoreOptions options;
    options.database.wal_bytes_max = 256 << 10;
    auto store = open_store(path, options);
    ASSERT_TRUE(store->load(digest(9), 1000));
    ASSERT_TRUE(store->add_invite({digest(1), 1000, 9000, 1}));
    constexpr int kWriters = 16;
    for (int i = 0; i < kWriters; ++i) ASSERT_TRUE(store->register_node(registration(i, 1)));
    std::atomic<bool> is_over{false};
    std::atomic<int> failures{0}, commits{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < kWriters; ++i) {
        threads.emplace_back([&, i] {
            for (uint64_t n = 1; !is_over; ++n) {
                const uint64_t id = n * kWriters + static_cast<uint64_t>(i);
                LeaseDelta delta{{lease(id, i, 0, LeaseState::kServing)}, {id - kWriters}};
                failures += !store->write_leases(delta);
                failures += !store->add_bytes_served({{node(i), 1}});
                commits += 2;
            }
        });
    }
    threads.emplace_back([&] {
        while (!is_over) failures += !store->load(digest(9), 1000);
    });
    // Readers of another program: short ones, then an export that stays open.
    soci::session other(*soci::factory_sqlite3(), "dbname=\"" + path + "\" timeout=5");
    const auto wait_for = [&](int count) {
        const auto deadline = std::chrono::steady_clock::now() + 60s;
        while (commits < count && std::chrono::steady_clock::now() < deadline) {
            long long leases = 0;
            other << "SELECT count(*) FROM leases", into(leases);
            EXPECT_LE(leases, kWriters + 16);
        }
        EXPECT_GE(commits, count);
    };
    wait_for(400);
    EXPECT_LT(file_bytes(path + "-wal"), options.database.wal_bytes_max * 2);
    {
        std::string name;
        soci::statement open_export = (other.prepare << "SELECT node FROM nodes", into(name));
        open_export.execute();
        ASSERT_TRUE(open_export.fetch());
        const int before = commits;
        const auto deadline = std::chrono::steady_clock::now() + 60s;
        while (commits < before + 500 && std::chrono::steady_clock::now() < deadline) {
            std::this_thread::yield();
        }
        EXPECT_GT(file_bytes(path + "-wal"), options.database.wal_bytes_max);
    }
    wait_for(commits + 100);
    is_over = true;
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(failures, 0);
    EXPECT_LE(file_bytes(path + "-wal"), options.database.wal_bytes_max * 2);
    uint64_t served = 0;
    const auto state = store->load(digest(9), 1000);
    for (const auto& row : state->nodes) served += row.bytes_served;
    EXPECT_EQ(served, static_cast<uint64_t>(commits.load()) / 2);
}

// The child of the next test: commits without end, and says so after each.
[[noreturn]] void commit_for_ever(const std::string& path, int pipe_fd) {
    StoreOptions options;
    options.database.wal_bytes_max = 100 << 10;  // so that it dies in checkpoints too
    auto store = open_market_store(path, options);
    if (!store || !(*store)->load(digest(9), 1000)) std::_Exit(2);
    auto state = (*store)->load(digest(9), 1000);
    for (uint64_t n = state->lease_id_next;; n += 8) {
        // Eight leases that are there together or not at all.
        LeaseDelta delta;
        for (uint64_t i = 0; i < 8; ++i) {
            delta.upserts.push_back(
                lease(n + i, 1, static_cast<uint32_t>(n), LeaseState::kServing));
        }
        if (!(*store)->write_leases(delta)) std::_Exit(3);
        const uint64_t last = n + 7;
        if (::write(pipe_fd, &last, sizeof(last)) != sizeof(last)) std::_Exit(4);
    }
}

TEST(MarketStore, KilledInMidCommitKeepsWhatWasAcknowledged) {
    Folder folder;
    const std::string path = folder / "db";
    {
        auto store = open_store(path);
        ASSERT_TRUE(store->add_invite({digest(1), 1, 9000, 1}));
        ASSERT_TRUE(store->register_node(registration(1, 1)));
    }
    for (int round = 0; round < 12; ++round) {
        int ends[2];
        ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
        const pid_t child = ::fork();
        ASSERT_GE(child, 0);
        if (child == 0) commit_for_ever(path, ends[1]);
        ::close(ends[1]);
        uint64_t acknowledged = 0, value = 0;
        for (int i = 0; i <= round * 3; ++i) {
            if (::read(ends[0], &value, sizeof(value)) == sizeof(value)) acknowledged = value;
        }
        EXPECT_GT(acknowledged, 0U);
        ::kill(child, SIGKILL);
        int status = 0;
        ::waitpid(child, &status, 0);
        EXPECT_TRUE(WIFSIGNALED(status));
        // What it still said before it died counts too.
        while (::read(ends[0], &value, sizeof(value)) == sizeof(value)) acknowledged = value;
        ::close(ends[0]);
        auto store = open_store(path);
        const auto state = store->load(digest(9), 1000);
        ASSERT_TRUE(state);
        ASSERT_GE(state->lease_id_next, acknowledged + 1);
        EXPECT_EQ(state->leases.size(), state->lease_id_next - 1);
        EXPECT_EQ(state->leases.size() % 8, 0U);
        soci::session check(*soci::factory_sqlite3(), "dbname=\"" + path + "\" timeout=5");
        std::string verdict;
        check << "PRAGMA integrity_check", into(verdict);
        EXPECT_EQ(verdict, "ok");
    }
}

}  // namespace
}  // namespace kvasir::store
