#include "store/database_file.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>

#include <algorithm>
#include <span>

#include "base/log.hpp"

namespace kvasir::store {
namespace {

// As in SQLite's file format: big-endian, the application_id in the header of page 1, and of the
// log a header and frames of a header and a page.
constexpr size_t kApplicationId = 68;
constexpr size_t kWalHeader = 32, kFrameHeader = 24;
constexpr uint32_t kWalMagic = 0x377f0682;  // or one more

uint32_t read_u32(std::span<const uint8_t> bytes, size_t at) {
    return uint32_t{bytes[at]} << 24 | uint32_t{bytes[at + 1]} << 16 |
           uint32_t{bytes[at + 2]} << 8 | uint32_t{bytes[at + 3]};
}

// FNV-1a: against accidents. Never 0, which is what a file without an id has.
uint32_t hash_of(std::span<const uint8_t> bytes) {
    uint32_t hash = 2166136261;
    for (const uint8_t byte : bytes) hash = (hash ^ byte) * 16777619;
    return hash == 0 ? 1 : hash;
}

bool read_whole(int fd, uint64_t offset, std::span<uint8_t> out) {
    return ::pread(fd, out.data(), out.size(), static_cast<off_t>(offset)) ==
           static_cast<ssize_t>(out.size());
}

tl::unexpected<Error> cannot(const std::string& doing, const std::string& path) {
    const int number = errno;
    return fail(Errc::kEnvironment,
                "cannot " + doing + " " + printable(path) + ": " + std::strerror(number));
}

std::string real_path(const std::string& path) {
    char* const found = ::realpath(path.c_str(), nullptr);
    if (found == nullptr) return "";
    std::string out = found;
    std::free(found);
    return out;
}

Status lock_descriptor(int fd, const std::string& path, const std::string& shown) {
    if (::flock(fd, LOCK_EX | LOCK_NB) == 0) return {};
    if (errno != EWOULDBLOCK) return cannot("lock", path);
    return fail(Errc::kEnvironment, "another market uses the database " + printable(shown) +
                                        ": stop it, or give this one a database of its own");
}

}  // namespace

DatabaseFile::~DatabaseFile() {
    if (file_ >= 0) ::close(file_);
    if (lock_ >= 0) ::close(lock_);
}

DatabaseFile::Id DatabaseFile::id_of(const std::string& path) {
    struct stat info {};
    if (::stat(path.c_str(), &info) != 0) return {};
    return {info.st_dev, info.st_ino};
}

Result<std::unique_ptr<DatabaseFile>> DatabaseFile::open(const std::string& path, bool is_locked) {
    std::unique_ptr<DatabaseFile> out(new DatabaseFile);
    const auto open_file = [&]() -> Status {
        out->file_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (out->file_ < 0) return cannot("open the database", path);
        return {};
    };
    // The lock that has a name comes first: who is refused for it has not touched the file.
    out->path_ = real_path(path);
    if (out->path_.empty()) {
        if (Status ok = open_file(); !ok) return tl::unexpected(ok.error());
        out->path_ = real_path(path);
        if (out->path_.empty()) return cannot("look at the database", path);
    }
    if (is_locked) {
        const std::string name = out->path_ + ".lock";
        out->lock_ = ::open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (out->lock_ < 0) return cannot("open", name);
        if (Status ok = lock_descriptor(out->lock_, name, path); !ok)
            return tl::unexpected(ok.error());
    }
    if (out->file_ < 0) {
        if (Status ok = open_file(); !ok) return tl::unexpected(ok.error());
    }
    if (is_locked) {
        if (Status ok = lock_descriptor(out->file_, path, path); !ok)
            return tl::unexpected(ok.error());
    }
    struct stat info {};
    if (::fstat(out->file_, &info) != 0) return cannot("look at the database", path);
    out->id_ = {info.st_dev, info.st_ino};
    if (Status ok = out->make_private(); !ok) return tl::unexpected(ok.error());
    return out;
}

// SQLite gives the files that it makes the mode of the database's.
Status DatabaseFile::make_private() const {
    for (const char* suffix : {"", "-wal", "-shm"}) {
        const std::string path = path_ + suffix;
        struct stat info {};
        if (::stat(path.c_str(), &info) != 0 || (info.st_mode & 0077) == 0) continue;
        if (::chmod(path.c_str(), 0600) != 0) {
            return fail(Errc::kEnvironment, printable(path) +
                                                " can be read by others, and its mode cannot be "
                                                "changed: " +
                                                std::strerror(errno));
        }
        log(LogLevel::kWarn, "store",
            printable(path) + " could be used by others: its mode is 0600 now");
    }
    return {};
}

bool DatabaseFile::has_name() const {
    return id_of(path_) == id_;
}

Result<DatabaseFile::Header> DatabaseFile::header() const {
    Header out{};  // of a new file: zeros
    if (::pread(file_, out.data(), out.size(), 0) < 0) {
        return fail(Errc::kIo, "cannot read " + printable(path_) + ": " + std::strerror(errno));
    }
    return out;
}

Result<int32_t> DatabaseFile::link() const {
    const auto now = header();
    if (!now) return tl::unexpected(now.error());
    return static_cast<int32_t>(hash_of(*now));
}

// Frames beyond the last transaction count as well: they were written to this log.
bool DatabaseFile::owns_log(int wal, const Header& header) const {
    std::array<uint8_t, kWalHeader> start{};
    // Without a header of its own SQLite does not use it.
    if (!read_whole(wal, 0, start) || (read_u32(start, 0) & ~uint32_t{1}) != kWalMagic) return true;
    const uint32_t page_bytes = read_u32(start, 8);
    if (page_bytes < 512 || page_bytes > 65536) return true;
    const uint32_t link = hash_of(header);
    bool has_id = false;
    std::array<uint8_t, kFrameHeader + std::tuple_size_v<Header>> frame{};
    for (uint64_t at = kWalHeader; read_whole(wal, at, frame); at += kFrameHeader + page_bytes) {
        // What follows was there before the log began anew.
        if (!std::equal(start.begin() + 16, start.begin() + 24, frame.begin() + 8)) break;
        if (read_u32(frame, 0) != 1) continue;
        const auto page = std::span(frame).subspan(kFrameHeader);
        const uint32_t id = read_u32(page, kApplicationId);
        if (id == link || std::ranges::equal(page, header)) return true;
        has_id = has_id || id != 0;
    }
    return !has_id;
}

Status DatabaseFile::put_foreign_log_aside() const {
    const std::string wal = path_ + "-wal";
    const int fd = ::open(wal.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return errno == ENOENT ? Status() : cannot("read", wal);
    const auto now = header();
    const bool is_ours = now && owns_log(fd, *now);
    ::close(fd);
    if (!now) return tl::unexpected(now.error());
    if (is_ours) return {};
    const std::string aside = wal + ".old";
    if (::rename(wal.c_str(), aside.c_str()) != 0) return cannot("move away", wal);
    if (::unlink((path_ + "-shm").c_str()) != 0 && errno != ENOENT)
        return cannot("delete", path_ + "-shm");
    log(LogLevel::kWarn, "store",
        printable(path_) +
            " was put in the place of another database: what that one had not written back yet is "
            "now in " +
            printable(aside) + ", and not used");
    return {};
}

void DatabaseFile::remember_log() {
    wal_ = id_of(path_ + "-wal");
    shm_ = id_of(path_ + "-shm");
}

void DatabaseFile::delete_log() const {
    if (has_name()) return;
    if (wal_ != Id() && id_of(path_ + "-wal") == wal_) ::unlink((path_ + "-wal").c_str());
    if (shm_ != Id() && id_of(path_ + "-shm") == shm_) ::unlink((path_ + "-shm").c_str());
}

uint64_t DatabaseFile::wal_bytes() const {
    struct stat info {};
    return ::stat((path_ + "-wal").c_str(), &info) == 0 ? static_cast<uint64_t>(info.st_size) : 0;
}

}  // namespace kvasir::store
