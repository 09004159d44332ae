#include "store/database.hpp"

#include <algorithm>
#include <random>
#include <thread>
#include <utility>

#include <soci/soci.h>
#include <soci/sqlite3/soci-sqlite3.h>

#include "base/log.hpp"
#include "store/database_file.hpp"

namespace kvasir::store {
namespace {

using Clock = std::chrono::steady_clock;

// SQLite's primary result codes, as in sqlite3.h.
constexpr int kSqliteBusy = 5, kSqliteLocked = 6, kSqliteReadonly = 8, kSqliteIoErr = 10,
              kSqliteCorrupt = 11, kSqliteFull = 13, kSqliteCantOpen = 14, kSqliteNotADb = 26;

Errc errc_of(int code) {
    switch (code & 0xff) {
        case kSqliteBusy:
        case kSqliteLocked:
            return Errc::kBusy;
        case kSqliteFull:
            return Errc::kNoSpace;
        case kSqliteCorrupt:
        case kSqliteNotADb:
            return Errc::kBadInput;
        case kSqliteReadonly:
        case kSqliteCantOpen:
            return Errc::kEnvironment;
        case kSqliteIoErr:
        default:
            return Errc::kIo;
    }
}

bool is_disk(Errc code) {
    return code == Errc::kNoSpace || code == Errc::kIo || code == Errc::kEnvironment;
}

// The library's own words name its functions and the statement, which helps nobody here.
std::string words_of(const soci::sqlite3_soci_error& error) {
    switch (error.result() & 0xff) {
        case kSqliteFull:
            return "the disk is full";
        case kSqliteIoErr:
            return "the disk reports an error or has no room";
        default:
            return printable(error.what());
    }
}

std::string advice(Errc code) {
    switch (code) {
        case Errc::kBusy:
            return "; another program holds it: close it, or try again";
        case Errc::kNoSpace:
            return "; free some space";
        case Errc::kIo:
            return "; check the disk (dmesg) and the quota";
        case Errc::kBadInput:
            return "; it is no database of ours, or damaged: restore a backup";
        case Errc::kEnvironment:
            return "; may this user write the file and its folder?";
        default:
            return "";
    }
}

}  // namespace

struct Database::Impl {
    ~Impl() {
        if (!is_open) return;
        const bool has_name = file->has_name();
        // A file that was moved away gets what belongs to it.
        const bool is_whole = has_name || checkpoint();
        (void)guard([&]() -> Status {
            sql.close();
            return {};
        });
        if (!has_name && is_whole) file->delete_log();
    }

    std::unique_ptr<DatabaseFile> file;  // before `sql`: closed after it
    std::string path;
    std::string shown;  // in errors, which peers see: once it is open only the file's name
    DatabaseOptions options;
    soci::session sql;
    DatabaseCounters counters;
    std::minstd_rand jitter{std::random_device{}()};
    bool has_warned = false;
    bool is_open = false;
    bool is_failing = false;
    long long told_changes = 0;  // of rows, when tell() looked last
    bool is_linked = false;      // the log is tied to the file

    // Runs something of SOCI; its exceptions become errors.
    Status guard(const std::function<Status()>& work) {
        try {
            return work();
        } catch (const soci::sqlite3_soci_error& error) {
            const Errc code = errc_of(error.result());
            return fail(code,
                        "database " + printable(shown) + ": " + words_of(error) + advice(code));
        } catch (const std::exception& error) {
            return fail(Errc::kIo, "database " + printable(shown) + ": " + printable(error.what()));
        }
    }

    Status run(const std::string& statement) {
        return guard([&]() -> Status {
            sql << statement;
            return {};
        });
    }

    Status set_up() {
        return guard([&]() -> Status {
            sql.close();  // of an earlier try
            sql.open(*soci::factory_sqlite3(), "dbname=\"" + path + "\"");
            sql << "PRAGMA busy_timeout=" << options.busy_timeout.count();
            std::string mode;
            sql << "PRAGMA journal_mode=WAL", soci::into(mode);
            if (mode != "wal") {
                return fail(Errc::kEnvironment, "the database " + printable(path) +
                                                    " cannot use a write-ahead log (" +
                                                    printable(mode) + "): put it on a local disk");
            }
            sql << "PRAGMA synchronous=FULL";
            sql << "PRAGMA foreign_keys=ON";
            // After a checkpoint the log has to be tied to the file anew, so all are ours.
            sql << "PRAGMA wal_autocheckpoint=0";
            return {};
        });
    }

    void roll_back() {
        // Without a transaction (SQLite ended it itself) this fails, which is as good.
        (void)run("ROLLBACK");
    }

    // SQLite goes on with a file that has no name any more; what it commits then is lost at the
    // end.
    Status check_name() const {
        if (file->has_name()) return {};
        return fail(Errc::kIo, "database " + printable(shown) +
                                   ": it was deleted or replaced while this program had it open; "
                                   "stop the program, put a backup in its place, start it again");
    }

    Status attempt(const std::function<Status(soci::session&)>& work) {
        if (is_open) {
            if (Status ok = check_name(); !ok) return ok;
        }
        if (Status ok = run("BEGIN IMMEDIATE"); !ok) return ok;
        Status done = is_linked ? Status() : link();
        if (done) done = guard([&] { return work(sql); });
        if (done) done = run("COMMIT");
        if (!done) {
            roll_back();
            return done;
        }
        is_linked = true;
        return done;
    }

    Status set_id(int32_t id) { return run("PRAGMA application_id=" + std::to_string(id)); }

    // In the first transaction of a log.
    Status link() {
        const auto id = file->link();
        if (!id) return tl::unexpected(id.error());
        return set_id(*id);
    }

    // Writes the log back and empties it, if nobody is in the way: false. The file's header is then
    // one that it never had before, nor has any copy of before.
    bool checkpoint() {
        if (is_linked) {
            const auto id = static_cast<int32_t>(std::random_device{}() | 1U);
            if (!set_id(id)) return false;
        }
        int busy = 1, pages = 0, done = 0;
        const Status ok = guard([&]() -> Status {
            sql << "PRAGMA wal_checkpoint(TRUNCATE)", soci::into(busy), soci::into(pages),
                soci::into(done);
            return {};
        });
        // Also when it was held up: once all is in the file, SQLite may begin the log anew without
        // a word, and the transaction that it begins with must name the file as it is then.
        is_linked = false;
        return ok && busy == 0;
    }

    // Since it was opened, what was rolled back included.
    long long rows_changed() {
        long long count = 0;
        (void)guard([&]() -> Status {
            sql << "SELECT total_changes()", soci::into(count);
            return {};
        });
        return count;
    }

    // Whoever keeps the disk learns it once, and that it is over.
    void tell(const Status& done) {
        if (!is_open) return;
        const bool fails = !done && is_disk(done.error().code);
        if (fails && !is_failing) {
            log(LogLevel::kError, "store",
                printable(path) +
                    " cannot be written, and who asks for that is refused: " + done.error().detail);
        }
        is_failing = is_failing || fails;
        if (!is_failing) return;
        // A transaction that changed nothing wrote nothing.
        const long long changes = rows_changed();
        if (done && changes != told_changes) {
            log(LogLevel::kWarn, "store", printable(path) + " is written again");
            is_failing = false;
        }
        told_changes = changes;
    }

    void checkpoint_at_once() {
        (void)run("PRAGMA busy_timeout=0");
        (void)checkpoint();
        (void)run("PRAGMA busy_timeout=" + std::to_string(options.busy_timeout.count()));
    }

    // Readers may be in the way; then this tries after every commit, without waiting for them.
    void bound_wal() {
        if (file->wal_bytes() <= options.wal_bytes_max) {
            has_warned = false;
            return;
        }
        ++counters.checkpoints;
        checkpoint_at_once();
        if (const uint64_t bytes = file->wal_bytes();
            bytes > options.wal_bytes_max && !has_warned) {
            has_warned = true;
            log(LogLevel::kWarn, "store",
                "the log of " + printable(path) + " has grown to " + std::to_string(bytes) +
                    " bytes: another program keeps a query open");
        }
    }
};

Database::Database(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Database::~Database() = default;

Result<std::unique_ptr<Database>> Database::open(const std::string& path, Migrations migrations,
                                                 const DatabaseOptions& options) {
    if (path.find('"') != path.npos) {
        return fail(Errc::kUsage, "the database's path must not contain a quotation mark");
    }
    auto file = DatabaseFile::open(path, options.is_locked);
    if (!file) return tl::unexpected(file.error());
    if (Status ok = (*file)->put_foreign_log_aside(); !ok) return tl::unexpected(ok.error());
    auto impl = std::make_unique<Impl>();
    impl->file = std::move(*file);
    impl->path = impl->file->path();
    impl->shown = path;
    impl->options = options;
    // Two programs that open a new file at once wait for each other here.
    const auto deadline = Clock::now() + options.retry_max;
    Status ok = impl->set_up();
    while (!ok && ok.error().code == Errc::kBusy && Clock::now() < deadline) {
        std::this_thread::sleep_for(options.pause_max);
        ok = impl->set_up();
    }
    if (!ok) return tl::unexpected(ok.error());
    std::unique_ptr<Database> database(new Database(std::move(impl)));
    ok = database->transact([&](soci::session& sql) -> Status {
        int version = 0;
        sql << "PRAGMA user_version", soci::into(version);
        const int known = static_cast<int>(migrations.size());
        if (version > known) {
            return fail(Errc::kVersion, "the database " + printable(path) + " has version " +
                                            std::to_string(version) + ", this program knows " +
                                            std::to_string(known) + ": use the newer program");
        }
        for (int i = std::max(version, 0); i < known; ++i) {
            sql << migrations[static_cast<size_t>(i)];
        }
        if (version < known) sql << "PRAGMA user_version=" << known;
        return {};
    });
    if (!ok) return tl::unexpected(ok.error());
    database->impl_->checkpoint_at_once();
    database->impl_->file->remember_log();
    database->impl_->is_open = true;
    database->impl_->shown = path.substr(path.rfind('/') + 1);
    return database;
}

Status Database::transact(const std::function<Status(soci::session&)>& work) {
    const auto deadline = Clock::now() + impl_->options.retry_max;
    auto pause = impl_->options.pause_first;
    for (;;) {
        Status done = impl_->attempt(work);
        impl_->tell(done);
        if (done) {
            ++impl_->counters.commits;
            impl_->bound_wal();
            return done;
        }
        if (done.error().code != Errc::kBusy || Clock::now() >= deadline) return done;
        ++impl_->counters.retries;
        std::uniform_int_distribution<int64_t> share(pause.count() / 2, pause.count());
        std::this_thread::sleep_for(std::chrono::milliseconds(share(impl_->jitter)));
        pause = std::min(pause * 2, impl_->options.pause_max);
    }
}

const DatabaseCounters& Database::counters() const {
    return impl_->counters;
}
uint64_t Database::wal_bytes() const {
    return impl_->file->wal_bytes();
}

}  // namespace kvasir::store
