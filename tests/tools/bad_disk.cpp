// A disk that fails: preloaded into a program, it makes calls fail that change files of a folder.
//
// Used by the end-to-end tests of full and broken disks. The environment says what happens:
//   KVASIR_BAD_DISK_UNDER   only files whose path begins with this (a folder)
//   KVASIR_BAD_DISK_LIKE    optional: and has this in it
//   KVASIR_BAD_DISK_WHILE   optional: only while this file exists
//   KVASIR_BAD_DISK         what fails, joined by commas:
//     write=ERROR@BYTES       after BYTES bytes of all files together; the write that reaches them
//                             is short, as a disk's that runs full
//     write=short             every write takes only half of what it is given
//     CALL=ERROR              fsync (and fdatasync), ftruncate, fallocate (and posix_fallocate),
//                             rename (and link), create (open with O_CREAT of a new file)
//     fsync=lost              the first fsync fails with EIO, and 4096 bytes in the middle of that
//                             file never reached the disk: the cache shows them until it is
//                             dropped (posix_fadvise) or the file gets another name
//     copies                  every fsync that succeeds leaves a copy of the file beside it, named
//                             FILE.synced: what is there after a power cut (always, whatever
//                             KVASIR_BAD_DISK_WHILE says)
//   ERROR is ENOSPC, EIO, EDQUOT or EOPNOTSUPP. For example
//   write=ENOSPC@100000,fallocate=EOPNOTSUPP
// Thread: any. Limits: writes through stdio are not seen (glibc does not call itself by name).
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

namespace {

constexpr int kShort = -1;
constexpr int kLost = -2;
constexpr off_t kLostBytes = 4096;

int error_of(std::string_view name) {
    if (name == "ENOSPC") return ENOSPC;
    if (name == "EIO") return EIO;
    if (name == "EDQUOT") return EDQUOT;
    if (name == "EOPNOTSUPP") return EOPNOTSUPP;
    if (name == "short") return kShort;
    if (name == "lost") return kLost;
    std::abort();  // a misspelt test would test nothing
}

// What the environment asks for.
struct Plan {
    std::string under, like, during;
    int write = 0, fsync = 0, ftruncate = 0, fallocate = 0, rename = 0, create = 0;
    long long room = 0;
    bool copies = false;

    Plan() {
        const char* folder = std::getenv("KVASIR_BAD_DISK_UNDER");
        const char* what = std::getenv("KVASIR_BAD_DISK");
        if (folder == nullptr || what == nullptr) return;
        under = folder;
        if (const char* part = std::getenv("KVASIR_BAD_DISK_LIKE")) like = part;
        if (const char* file = std::getenv("KVASIR_BAD_DISK_WHILE")) during = file;
        for (std::string_view rest = what; !rest.empty();) {
            const size_t comma = std::min(rest.find(','), rest.size());
            take(rest.substr(0, comma));
            rest.remove_prefix(std::min(comma + 1, rest.size()));
        }
    }
    void take(std::string_view item) {
        if (item == "copies") {
            copies = true;
            return;
        }
        const size_t is = item.find('=');
        if (is == item.npos) std::abort();
        const std::string_view call = item.substr(0, is);
        std::string_view error = item.substr(is + 1);
        if (const size_t at = error.find('@'); at != error.npos) {
            room = std::atoll(std::string(error.substr(at + 1)).c_str());
            error = error.substr(0, at);
        }
        int* const which = call == "write"       ? &write
                           : call == "fsync"     ? &fsync
                           : call == "ftruncate" ? &ftruncate
                           : call == "fallocate" ? &fallocate
                           : call == "rename"    ? &rename
                           : call == "create"    ? &create
                                                 : nullptr;
        if (which == nullptr) std::abort();
        *which = error_of(error);
    }
};

const Plan& plan() {
    static const Plan kPlan;
    return kPlan;
}
std::atomic<long long> g_written{0};
// The one file that fsync=lost is about; inode 0: none.
std::atomic<ino_t> g_lost{0};

// The function behind ours.
template <class Function>
Function* next(const char* name) {
    return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

bool is_meant(std::string_view path) {
    const Plan& now = plan();
    return !now.under.empty() && path.substr(0, now.under.size()) == now.under &&
           path.find(now.like) != path.npos;
}

bool is_bad(std::string_view path) {
    if (!is_meant(path)) return false;
    return plan().during.empty() || ::access(plan().during.c_str(), F_OK) == 0;
}

// Empty if it has none.
std::string path_of(int fd) {
    char path[PATH_MAX];
    const std::string link = "/proc/self/fd/" + std::to_string(fd);
    const ssize_t size = ::readlink(link.c_str(), path, sizeof(path));
    return size > 0 ? std::string(path, static_cast<size_t>(size)) : std::string();
}

bool is_bad(int fd) {
    if (plan().under.empty()) return false;
    const int errno_before = errno;
    const bool bad = is_bad(path_of(fd));
    errno = errno_before;
    return bad;
}

int failing(int error) {
    errno = error;
    return -1;
}

// How much of a write of `bytes` bytes is done; -1 with errno: nothing, it fails.
ssize_t allowed(size_t bytes) {
    const Plan& now = plan();
    if (now.write == 0 || bytes == 0) return static_cast<ssize_t>(bytes);
    if (now.write == kShort) return static_cast<ssize_t>((bytes + 1) / 2);
    const long long left = now.room - g_written.load();
    if (left <= 0) return failing(now.write);
    return std::min<ssize_t>(static_cast<ssize_t>(bytes), left);
}

// Runs `write(bytes)` as far as the disk lets it.
template <class Write>
ssize_t write_some(int fd, size_t bytes, const Write& write) {
    if (!is_bad(fd)) return write(bytes);
    const ssize_t some = allowed(bytes);
    if (some < 0) return some;
    const ssize_t done = write(static_cast<size_t>(some));
    if (done > 0) g_written += done;
    return done;
}

// Several pieces, as one that has the first piece's bytes: short, but of the right kind.
template <class Write>
ssize_t write_pieces(int fd, const iovec* pieces, int count, const Write& write) {
    if (!is_bad(fd) || count < 1) return write(pieces, count);
    iovec one = pieces[0];
    const ssize_t some = allowed(one.iov_len);
    if (some < 0) return some;
    one.iov_len = static_cast<size_t>(some);
    const ssize_t done = write(&one, 1);
    if (done > 0) g_written += done;
    return done;
}

// What the cache hid comes to light: those bytes were never written.
void lose(int fd) {
    static const char kZeros[kLostBytes] = {};
    struct stat info = {};
    if (::fstat(fd, &info) != 0 || info.st_ino != g_lost.load()) return;
    g_lost = 0;
    (void)!::syscall(SYS_pwrite64, fd, kZeros, sizeof(kZeros), info.st_size / 2);
}

// Copies some of the bytes at `at`: how many; 0 where the file ends, -1 if that fails.
ssize_t copy_some(int from, int to, off_t at, off_t bytes) {
    off64_t from_at = at, to_at = at;
    const auto size = static_cast<size_t>(bytes);
    const auto done = ::syscall(SYS_copy_file_range, from, &from_at, to, &to_at, size, 0);
    if (done > 0) return done;
    char some[65536];  // not every file system has that call
    const auto read = ::syscall(SYS_pread64, from, some, std::min(size, sizeof(some)), at);
    return read > 0 ? ::syscall(SYS_pwrite64, to, some, read, at) : read;
}

// The file as it is now, under another name at once. By system calls, which nothing here sees.
void copy_synced(int fd) {
    const std::string path = path_of(fd);
    if (!is_meant(path)) return;
    const std::string part = path + ".syncing", whole = path + ".synced";
    const int from =
        static_cast<int>(::syscall(SYS_openat, AT_FDCWD, path.c_str(), O_RDONLY | O_CLOEXEC));
    if (from < 0 && errno == ENOENT)
        return;  // unlinked while open: a power cut leaves nothing of it
    const int to = static_cast<int>(::syscall(SYS_openat, AT_FDCWD, part.c_str(),
                                              O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    struct stat info = {};
    if (from < 0 || to < 0 || ::fstat(from, &info) != 0) std::abort();
    for (off_t at = 0; at < info.st_size;) {
        const ssize_t done = copy_some(from, to, at, info.st_size - at);
        if (done < 0) std::abort();
        if (done == 0) break;
        at += done;
    }
    ::close(from);
    ::close(to);
    if (::syscall(SYS_renameat2, AT_FDCWD, part.c_str(), AT_FDCWD, whole.c_str(), 0) != 0)
        std::abort();
}

int sync_file(int fd, const char* call) {
    if (plan().fsync == 0 || !is_bad(fd)) {
        const int result = next<int(int)>(call)(fd);
        if (result == 0 && plan().copies) copy_synced(fd);
        return result;
    }
    if (plan().fsync != kLost) return failing(plan().fsync);
    struct stat info = {};
    static std::atomic<bool> has_failed{false};
    if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) || has_failed.exchange(true))
        return next<int(int)>(call)(fd);
    g_lost = info.st_ino;
    return failing(EIO);
}

int change(int error, bool bad, const auto& otherwise) {
    return error != 0 && bad ? failing(error) : otherwise();
}

bool is_creating(const char* path, int flags) {
    return plan().create != 0 && (flags & O_CREAT) != 0 && is_bad(path) &&
           ::access(path, F_OK) != 0;
}

mode_t mode_of(int flags, va_list arguments) {
    const bool has_mode = (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE;
    return has_mode ? va_arg(arguments, mode_t) : 0;
}

int rename_file(const char* from, const char* to, const auto& otherwise) {
    if (g_lost.load() != 0 && is_bad(from)) {
        const int fd = static_cast<int>(::syscall(SYS_openat, AT_FDCWD, from, O_RDWR | O_CLOEXEC));
        if (fd >= 0) lose(fd), ::close(fd);
    }
    return change(plan().rename, is_bad(to), otherwise);
}

}  // namespace

extern "C" {

ssize_t write(int fd, const void* data, size_t bytes) {
    return write_some(fd, bytes, [&](size_t some) {
        return next<ssize_t(int, const void*, size_t)>("write")(fd, data, some);
    });
}
ssize_t pwrite(int fd, const void* data, size_t bytes, off_t at) {
    return write_some(fd, bytes, [&](size_t some) {
        return next<ssize_t(int, const void*, size_t, off_t)>("pwrite")(fd, data, some, at);
    });
}
ssize_t pwrite64(int fd, const void* data, size_t bytes, off64_t at) {
    return pwrite(fd, data, bytes, at);
}
ssize_t writev(int fd, const iovec* pieces, int count) {
    return write_pieces(fd, pieces, count, [&](const iovec* some, int n) {
        return next<ssize_t(int, const iovec*, int)>("writev")(fd, some, n);
    });
}
ssize_t pwritev(int fd, const iovec* pieces, int count, off_t at) {
    return write_pieces(fd, pieces, count, [&](const iovec* some, int n) {
        return next<ssize_t(int, const iovec*, int, off_t)>("pwritev")(fd, some, n, at);
    });
}
ssize_t pwritev64(int fd, const iovec* pieces, int count, off64_t at) {
    return pwritev(fd, pieces, count, at);
}
ssize_t copy_file_range(int in, off64_t* in_at, int out, off64_t* out_at, size_t bytes,
                        unsigned flags) {
    return write_some(out, bytes, [&](size_t some) {
        return next<ssize_t(int, off64_t*, int, off64_t*, size_t, unsigned)>("copy_file_range")(
            in, in_at, out, out_at, some, flags);
    });
}
ssize_t sendfile(int out, int in, off_t* at, size_t bytes) {
    return write_some(out, bytes, [&](size_t some) {
        return next<ssize_t(int, int, off_t*, size_t)>("sendfile")(out, in, at, some);
    });
}
ssize_t sendfile64(int out, int in, off64_t* at, size_t bytes) {
    return sendfile(out, in, at, bytes);
}
int fsync(int fd) {
    return sync_file(fd, "fsync");
}
int fdatasync(int fd) {
    return sync_file(fd, "fdatasync");
}
int posix_fadvise(int fd, off_t at, off_t bytes, int advice) {
    if (advice == POSIX_FADV_DONTNEED && g_lost.load() != 0) lose(fd);
    return next<int(int, off_t, off_t, int)>("posix_fadvise")(fd, at, bytes, advice);
}
int posix_fadvise64(int fd, off64_t at, off64_t bytes, int advice) {
    return posix_fadvise(fd, at, bytes, advice);
}
int ftruncate(int fd, off_t bytes) {
    return change(plan().ftruncate, plan().ftruncate != 0 && is_bad(fd),
                  [&] { return next<int(int, off_t)>("ftruncate")(fd, bytes); });
}
int ftruncate64(int fd, off64_t bytes) {
    return ftruncate(fd, bytes);
}
int fallocate(int fd, int mode, off_t at, off_t bytes) {
    return change(plan().fallocate, plan().fallocate != 0 && is_bad(fd), [&] {
        return next<int(int, int, off_t, off_t)>("fallocate")(fd, mode, at, bytes);
    });
}
int fallocate64(int fd, int mode, off64_t at, off64_t bytes) {
    return fallocate(fd, mode, at, bytes);
}
// Returns its error instead of setting errno.
int posix_fallocate(int fd, off_t at, off_t bytes) {
    if (plan().fallocate != 0 && is_bad(fd)) return plan().fallocate;
    return next<int(int, off_t, off_t)>("posix_fallocate")(fd, at, bytes);
}
int posix_fallocate64(int fd, off64_t at, off64_t bytes) {
    return posix_fallocate(fd, at, bytes);
}
int rename(const char* from, const char* to) noexcept {
    return rename_file(from, to,
                       [&] { return next<int(const char*, const char*)>("rename")(from, to); });
}
int renameat2(int from_fd, const char* from, int to_fd, const char* to, unsigned flags) noexcept {
    return rename_file(from, to, [&] {
        return next<int(int, const char*, int, const char*, unsigned)>("renameat2")(
            from_fd, from, to_fd, to, flags);
    });
}
int link(const char* from, const char* to) noexcept {
    return change(plan().rename, is_bad(to),
                  [&] { return next<int(const char*, const char*)>("link")(from, to); });
}
int open(const char* path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    const mode_t mode = mode_of(flags, arguments);
    va_end(arguments);
    if (is_creating(path, flags)) return failing(plan().create);
    return next<int(const char*, int, ...)>("open")(path, flags, mode);
}
int open64(const char* path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    const mode_t mode = mode_of(flags, arguments);
    va_end(arguments);
    if (is_creating(path, flags)) return failing(plan().create);
    return next<int(const char*, int, ...)>("open64")(path, flags, mode);
}

}  // extern "C"
