#include "moe/file.hpp"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <ctime>
#include <filesystem>
#include <memory>
#include <random>
#include <system_error>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.hpp"

namespace kvasir::moe {

Fd::Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
Fd& Fd::operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
}
Fd::~Fd() {
    if (fd_ >= 0) ::close(fd_);
}
int Fd::release() {
    return std::exchange(fd_, -1);
}

Error system_error(Errc code, std::string_view path, std::string_view doing, int error_number) {
    std::string detail = printable(path) + ": " + std::string(doing) + " failed: ";
    switch (error_number) {
        case ENOSPC:
            detail += "the disk is full; free some space there or choose another folder";
            break;
        case EDQUOT:
            detail += "the disk quota is used up; free some space there or choose another folder";
            break;
        case EFBIG:
            detail +=
                "the file would exceed the largest size allowed (ulimit -f, or the file "
                "system's own limit); raise the limit or choose another folder";
            break;
        case EIO:
            detail += "the storage device reported an error; check the disk (dmesg) before a retry";
            break;
        case EROFS:
            detail += "the file system is read-only; choose another folder";
            break;
        case EACCES:
        case EPERM:
            detail += "permission denied; check the owner and mode of the file and its folder";
            break;
        case ENOENT:
            detail += "no such file or folder; check the path";
            break;
        default:
            detail += std::generic_category().message(error_number);
    }
    return Error{code, std::move(detail)};
}

Errc write_errc(int error_number) {
    const bool needs_room =
        error_number == ENOSPC || error_number == EDQUOT || error_number == EFBIG;
    return needs_room ? Errc::kNoSpace : Errc::kIo;
}

Result<Fd> open_for_reading(const std::string& path) {
    int fd = -1;
    do fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    while (fd < 0 && errno == EINTR);
    if (fd < 0) return tl::unexpected(system_error(Errc::kEnvironment, path, "opening", errno));
    return Fd(fd);
}

Result<Fd> open_unchanged(const std::string& path, uint64_t bytes) {
    auto fd = open_for_reading(path);
    if (!fd) return fd;
    struct stat info = {};
    if (::fstat(fd->get(), &info) != 0) {
        return tl::unexpected(system_error(Errc::kIo, path, "reading its size", errno));
    }
    if (static_cast<uint64_t>(info.st_size) == bytes) return fd;
    return fail(Errc::kBadInput, printable(path) +
                                     ": the file changed its size since it was opened; run again "
                                     "when nothing writes to it");
}

namespace {

tl::unexpected<Error> ends_early(std::string_view path, uint64_t offset) {
    return fail(Errc::kBadInput, printable(path) + ": the file ends before byte " +
                                     std::to_string(offset) +
                                     ", which its header says is there; get it again");
}

Status read_exactly(int fd, std::string_view path, uint64_t offset, std::span<uint8_t> out,
                    const CopyCalls& calls) {
    while (!out.empty()) {
        const ssize_t got = calls.read(fd, out.data(), out.size(), static_cast<off_t>(offset));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return tl::unexpected(system_error(Errc::kIo, path, "reading", errno));
        if (got == 0) return ends_early(path, offset + out.size());
        offset += static_cast<uint64_t>(got);
        out = out.subspan(static_cast<size_t>(got));
    }
    return {};
}

Status write_exactly(int fd, std::string_view path, uint64_t offset, std::span<const uint8_t> data,
                     const CopyCalls& calls) {
    while (!data.empty()) {
        const ssize_t put = calls.write(fd, data.data(), data.size(), static_cast<off_t>(offset));
        if (put < 0 && errno == EINTR) continue;
        // A write of nothing without an error would loop for ever: no file system should do it.
        const int error_number = put == 0 ? EIO : errno;
        if (put <= 0) {
            return tl::unexpected(
                system_error(write_errc(error_number), path, "writing", error_number));
        }
        offset += static_cast<uint64_t>(put);
        data = data.subspan(static_cast<size_t>(put));
    }
    return {};
}

Status copy_through_memory(CopyEnd from, CopyEnd to, uint64_t bytes, const CopyCalls& calls) {
    const auto buffer = std::make_unique_for_overwrite<uint8_t[]>(kCopyBufferBytes);
    while (bytes > 0) {
        const auto step = static_cast<size_t>(std::min<uint64_t>(bytes, kCopyBufferBytes));
        const std::span<uint8_t> piece(buffer.get(), step);
        if (auto status = read_exactly(from.fd, from.path, from.offset, piece, calls); !status) {
            return status;
        }
        if (auto status = write_exactly(to.fd, to.path, to.offset, piece, calls); !status) {
            return status;
        }
        from.offset += step;
        to.offset += step;
        bytes -= step;
    }
    return {};
}

// Errors of copy_file_range that say "not this way" rather than "this cannot be done". A genuine
// EPERM or EINVAL comes back from the read or write that follows.
bool copy_not_possible(int error_number) {
    return error_number == ENOSYS || error_number == EXDEV || error_number == EINVAL ||
           error_number == EOPNOTSUPP || error_number == EPERM || error_number == ETXTBSY ||
           error_number == EBADF;
}

}  // namespace

Status read_exactly(int fd, std::string_view path, uint64_t offset, std::span<uint8_t> out) {
    return read_exactly(fd, path, offset, out, kernel_calls());
}

Status write_exactly(int fd, std::string_view path, uint64_t offset,
                     std::span<const uint8_t> data) {
    return write_exactly(fd, path, offset, data, kernel_calls());
}

const CopyCalls& kernel_calls() {
    static constexpr CopyCalls kCalls = {
        [](int in, off_t* in_offset, int out, off_t* out_offset, size_t bytes) {
            return ::copy_file_range(in, in_offset, out, out_offset, bytes, 0);
        },
        ::pread,
        ::pwrite,
    };
    return kCalls;
}

Status copy_bytes(const CopyEnd& from, const CopyEnd& to, uint64_t bytes, const CopyCalls& calls) {
    auto in_offset = static_cast<off_t>(from.offset);
    auto out_offset = static_cast<off_t>(to.offset);
    while (bytes > 0) {
        const auto step = static_cast<size_t>(std::min(bytes, kCopyChunkBytes));
        const ssize_t moved = calls.copy(from.fd, &in_offset, to.fd, &out_offset, step);
        if (moved < 0 && errno == EINTR) continue;
        // Some kernels report 0 for files they cannot copy (procfs, some network file systems), so
        // an early end is only believed from read().
        if (moved == 0 || (moved < 0 && copy_not_possible(errno))) {
            return copy_through_memory({from.fd, from.path, static_cast<uint64_t>(in_offset)},
                                       {to.fd, to.path, static_cast<uint64_t>(out_offset)}, bytes,
                                       calls);
        }
        if (moved < 0) {
            const int error_number = errno;
            return tl::unexpected(system_error(write_errc(error_number), to.path,
                                               "copying from " + printable(from.path),
                                               error_number));
        }
        bytes -= static_cast<uint64_t>(moved);
    }
    return {};
}

// ---- AtomicFile ----

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kTemporaryEnd = ".tmp";
constexpr size_t kRandomDigits = 8;

std::string random_digits() {
    static constexpr char kDigits[] = "0123456789abcdef";
    std::random_device random;
    std::string digits;
    for (size_t i = 0; i < kRandomDigits; ++i) digits.push_back(kDigits[random() & 15]);
    return digits;
}

bool is_temporary_of(std::string_view name, std::string_view final_name) {
    if (name.size() != final_name.size() + 1 + kRandomDigits + kTemporaryEnd.size()) return false;
    const auto digits = name.substr(final_name.size() + 1, kRandomDigits);
    return name.starts_with(final_name) && name[final_name.size()] == '.' &&
           name.ends_with(kTemporaryEnd) &&
           digits.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

// Removes temporaries of `path` whose writers are gone. Best effort: what cannot be locked stays.
void remove_leftovers(const fs::path& path) {
    std::error_code error;
    const std::string name = path.filename().string();
    for (fs::directory_iterator it(path.parent_path(), error), end; !error && it != end;
         it.increment(error)) {
        if (!is_temporary_of(it->path().filename().string(), name)) continue;
        const Fd fd(::open(it->path().c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
        struct stat info = {};
        if (!fd.is_open() || ::fstat(fd.get(), &info) != 0 || !S_ISREG(info.st_mode)) continue;
        if (::flock(fd.get(), LOCK_EX | LOCK_NB) == 0) ::unlink(it->path().c_str());
    }
}

// The absolute path that will be replaced, symlinks to regular files followed.
Result<std::string> final_path(const std::string& path) {
    std::error_code error;
    const fs::file_status own = fs::symlink_status(path, error);
    if (fs::exists(own) && !fs::is_regular_file(fs::status(path, error))) {
        return fail(Errc::kUsage, printable(path) +
                                      ": is not a regular file (a folder, a device or a dangling "
                                      "link); name a file to write");
    }
    const fs::path resolved =
        fs::is_symlink(own) ? fs::canonical(path, error) : fs::absolute(path, error);
    if (error || !resolved.has_filename()) {
        return fail(Errc::kUsage, printable(path) + ": is not a name a file can be written under");
    }
    return resolved.string();
}

// A locked, still linked temporary; -1 with errno 0 when a sweeper was faster: try another name.
Fd open_temporary(const std::string& name, int& error_number) {
    Fd fd(::open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666));
    error_number = fd.is_open() ? 0 : errno;
    if (!fd.is_open()) return fd;
    // File systems without locks: the sweeper cannot lock either, and leaves the file alone.
    if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return Fd();
    struct stat info = {};
    if (::fstat(fd.get(), &info) == 0 && info.st_nlink == 0) return Fd();
    return fd;
}

}  // namespace

AtomicFile::AtomicFile(Fd fd, std::string path, std::string temporary)
    : fd_(std::move(fd)), path_(std::move(path)), temporary_(std::move(temporary)) {}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : fd_(std::move(other.fd_)),
      path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, {})) {}

AtomicFile::~AtomicFile() {
    if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

Result<AtomicFile> AtomicFile::create(const std::string& path) {
    auto target = final_path(path);
    if (!target) return tl::unexpected(target.error());
    remove_leftovers(*target);
    constexpr int kTries = 16;
    int error_number = 0;
    for (int i = 0; i < kTries; ++i) {
        std::string temporary = *target + "." + random_digits() + std::string(kTemporaryEnd);
        Fd fd = open_temporary(temporary, error_number);
        if (fd.is_open()) return AtomicFile(std::move(fd), *target, std::move(temporary));
        if (error_number != 0 && error_number != EEXIST && error_number != EINTR) break;
    }
    if (error_number == 0) error_number = EEXIST;
    return tl::unexpected(system_error(write_errc(error_number), path,
                                       "creating a temporary file beside it", error_number));
}

Status AtomicFile::write(uint64_t offset, std::span<const uint8_t> data) {
    return write_exactly(fd_.get(), path_, offset, data);
}

void AtomicFile::begin_writeback(uint64_t offset, uint64_t bytes) const {
    // A hint: where it is not supported, fsync does all the work.
    (void)::sync_file_range(fd_.get(), static_cast<off_t>(offset), static_cast<off_t>(bytes),
                            SYNC_FILE_RANGE_WRITE);
}

Status AtomicFile::rename(bool replace) {
    int failed = 0;
    if (replace) {
        failed = ::rename(temporary_.c_str(), path_.c_str());
    } else {
        failed =
            ::renameat2(AT_FDCWD, temporary_.c_str(), AT_FDCWD, path_.c_str(), RENAME_NOREPLACE);
        if (failed != 0 && (errno == EINVAL || errno == ENOSYS)) {
            // link() refuses an existing name too; the destructor then removes the other name.
            failed = ::link(temporary_.c_str(), path_.c_str());
            if (failed == 0) ::unlink(temporary_.c_str());
        }
    }
    if (failed == 0) return {};
    if (errno == EEXIST && !replace) {
        return fail(Errc::kUsage,
                    printable(path_) + ": exists; pass --force to replace it, or another name");
    }
    return tl::unexpected(
        system_error(write_errc(errno), path_, "renaming the finished file", errno));
}

Status AtomicFile::resize(uint64_t bytes) {
    if (::ftruncate(fd_.get(), static_cast<off_t>(bytes)) == 0) return {};
    return tl::unexpected(system_error(write_errc(errno), path_, "setting its size", errno));
}

Status AtomicFile::sync() {
    int failed = 0;
    do failed = ::fsync(fd_.get());
    while (failed != 0 && errno == EINTR);
    if (failed == 0) return {};
    return tl::unexpected(system_error(write_errc(errno), path_, "flushing it to the disk", errno));
}

Status AtomicFile::close(bool sync) {
    if (sync) {
        if (auto status = this->sync(); !status) return status;
    }
    const int fd = fd_.release();
    // The descriptor is gone whatever close() says; EINTR is no news about the data.
    if (::close(fd) == 0 || errno == EINTR) return {};
    return tl::unexpected(system_error(write_errc(errno), path_, "closing it", errno));
}

Status AtomicFile::commit(bool replace) {
    if (fd_.is_open()) {
        if (auto status = sync(); !status) return status;
    }
    if (auto status = rename(replace); !status) return status;
    temporary_.clear();
    // The file is whole and in place; only the durability of its name is left. Some file systems
    // cannot flush a folder.
    const Fd folder(
        ::open(fs::path(path_).parent_path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!folder.is_open() || (::fsync(folder.get()) != 0 && errno != EINVAL)) {
        log(LogLevel::kWarn, "moe",
            printable(path_) + ": written, but its folder could not be flushed: " +
                std::generic_category().message(errno));
    }
    return {};
}

// ---- FileSizeSignalGuard ----

FileSizeSignalGuard::FileSizeSignalGuard() {
    sigset_t wanted;
    sigset_t before;
    sigemptyset(&wanted);
    sigaddset(&wanted, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &wanted, &before);
    was_blocked_ = sigismember(&before, SIGXFSZ) == 1;
}

FileSizeSignalGuard::~FileSizeSignalGuard() {
    if (was_blocked_) return;
    sigset_t wanted;
    sigemptyset(&wanted);
    sigaddset(&wanted, SIGXFSZ);
    const timespec now = {};
    while (sigtimedwait(&wanted, nullptr, &now) > 0) {
    }  // take what our writes raised
    pthread_sigmask(SIG_UNBLOCK, &wanted, nullptr);
}

}  // namespace kvasir::moe
