// The file of a SQLite database, apart from SQLite: its lock, its mode, and whether the write-ahead
// log (-wal) beside it is its own.
//
// Used by Database. SQLite replays any -wal that lies beside a file, also one that was there before
// somebody put a copy in the file's place: what comes out is damaged. So each log is tied to its
// file: the first transaction in it sets the database's application_id to a hash of the file's
// header as it is then (link()), which a checkpoint later changes. The log of a file is one that
// has such a page, or one with the very header that the file has (a checkpoint was interrupted). A
// backup has another header, whenever it was made. A log in which no page has an id is of an older
// program, and kept.
// Locks are flock()s: of PATH.lock, and of the file itself, which finds a second name for it.
// SQLite's are fcntl() locks and know nothing of these, but closing any descriptor of the file
// drops them: a DatabaseFile lives longer than the connection. Thread: one at a time. Owns: two
// descriptors. Limits: none.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "base/result.hpp"

namespace kvasir::store {

class DatabaseFile {
public:
    // Makes the file if it is not there, and makes it private (0600) with what lies beside it. With
    // `is_locked` one DatabaseFile at a time. Errors: kEnvironment (also: another has it).
    static Result<std::unique_ptr<DatabaseFile>> open(const std::string& path, bool is_locked);
    ~DatabaseFile();
    DatabaseFile(const DatabaseFile&) = delete;
    DatabaseFile& operator=(const DatabaseFile&) = delete;

    // Without symbolic links: SQLite names its files after that one.
    const std::string& path() const { return path_; }
    // False once it was deleted, moved or replaced.
    bool has_name() const;
    // The application_id that ties a log which begins now to the file as it is now. Errors: kIo.
    Result<int32_t> link() const;
    // Before SQLite opens the file: a log that is not its own is moved to PATH-wal.old. Errors:
    // kEnvironment.
    Status put_foreign_log_aside() const;
    // Which -wal and -shm are ours, once SQLite has made them.
    void remember_log();
    // Deletes these, if the file has lost its name: SQLite then leaves them behind.
    void delete_log() const;
    uint64_t wal_bytes() const;

private:
    using Header = std::array<uint8_t, 100>;
    struct Id {
        dev_t device = 0;
        ino_t inode = 0;
        friend bool operator==(const Id&, const Id&) = default;
    };
    DatabaseFile() = default;
    static Id id_of(const std::string& path);  // zeros: it is not there
    Status lock(const std::string& shown, bool is_new);
    Status make_private() const;
    Result<Header> header() const;
    bool owns_log(int wal, const Header& header) const;

    std::string path_;
    int lock_ = -1, file_ = -1;
    Id id_, wal_, shm_;
};

}  // namespace kvasir::store
