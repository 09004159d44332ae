// A SQLite database and its transactions: the one place that knows how SQLite fails.
//
// Used by the stores of this module. WAL, synchronous=FULL (a commit that was acknowledged survives
// a power loss), the write lock taken at BEGIN (a transaction that reads and then writes can never
// be refused for a stale snapshot), the whole transaction done again when another program holds the
// lock, all statements finished inside it. A write-ahead log that was left behind by another file
// is not used (see database_file.hpp): a copy may be put in the file's place while no market runs;
// other programs may read meanwhile (`sqlite3 DB ".backup FILE"`). The schema
// is versioned by PRAGMA user_version and brought up by migrations.
// Thread: one at a time. Owns: the connection. Limits: DatabaseOptions.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "base/result.hpp"

namespace soci {
class session;
}

namespace kvasir::store {

struct DatabaseOptions {
    std::chrono::milliseconds busy_timeout{1000};  // one wait for the lock, inside SQLite
    std::chrono::milliseconds retry_max{10000};    // all tries of a transaction together
    std::chrono::milliseconds pause_first{5};      // between tries; doubled, with jitter
    std::chrono::milliseconds pause_max{200};
    // The write-ahead log is written back and cut when it is longer; a reader of another program
    // that keeps a statement open may hold it up, which is a warning in the log.
    uint64_t wal_bytes_max = uint64_t{4} << 20;
    // Two such connections to one file, whatever its name, do not go together.
    bool is_locked = false;
};

// Statements, each run when the database's version is its position or below.
using Migrations = std::span<const char* const>;

struct DatabaseCounters {
    uint64_t commits = 0;
    uint64_t retries = 0;      // transactions begun again
    uint64_t checkpoints = 0;  // forced ones
};

class Database {
public:
    // The file is made (mode 0600) if it is not there. Errors: kEnvironment (folder, permissions,
    // a file system without shared memory, another has it locked), kBadInput (not a database),
    // kVersion (made by a newer version), kBusy.
    static Result<std::unique_ptr<Database>> open(const std::string& path, Migrations migrations,
                                                  const DatabaseOptions& options = {});
    ~Database();

    // Runs `work` between BEGIN IMMEDIATE and COMMIT. It may run more than once, so it must set its
    // results anew each time; its error, or an exception of SOCI, rolls back. Errors: those of
    // `work`; kBusy, kNoSpace, kIo (also for a file that has lost its name), kBadInput (damaged
    // file).
    Status transact(const std::function<Status(soci::session&)>& work);

    const DatabaseCounters& counters() const;
    uint64_t wal_bytes() const;

private:
    struct Impl;
    explicit Database(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

}  // namespace kvasir::store
