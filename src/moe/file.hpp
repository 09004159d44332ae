// Files as the slice cutter and the manifest cache need them: exact reads, kernel-side copies, and
// an output that appears under its name only when it is whole.
//
// Used by hash_ranges, manifest, slice and verify, and by synth. Every call loops over short counts
// and EINTR and works with 64-bit offsets; every error names the file and says what to do about it.
// Thread: values, one thread at a time each. Owns: descriptors; AtomicFile also its temporary file.
// Limits: none of its own; a copy asks the kernel for at most kCopyChunkBytes at once.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <sys/types.h>

#include "base/result.hpp"

namespace kvasir::moe {

constexpr uint64_t kCopyChunkBytes = uint64_t{64} << 20;
constexpr size_t kCopyBufferBytes = size_t{1} << 20;  // of the read/write fall-back

// A file descriptor that closes itself.
class Fd {
public:
    Fd() = default;
    explicit Fd(int fd) : fd_(fd) {}
    Fd(Fd&& other) noexcept;
    Fd& operator=(Fd&& other) noexcept;
    ~Fd();
    int get() const { return fd_; }
    bool is_open() const { return fd_ >= 0; }
    int release();  // the caller closes it

private:
    int fd_ = -1;
};

// What a failed system call means for the person who gave `path`. `doing` reads like "writing".
// A write that finds no room (disk, quota, file size limit) says so and what to free.
Error system_error(Errc code, std::string_view path, std::string_view doing, int error_number);

// Of a write that failed so: kNoSpace where room would mend it (disk, quota, file size), else kIo.
Errc write_errc(int error_number);

// Errors: kEnvironment.
Result<Fd> open_for_reading(const std::string& path);
// The same for a file whose size was `bytes` when it was first looked at. Errors: kEnvironment,
// kIo, kBadInput (another size now).
Result<Fd> open_unchanged(const std::string& path, uint64_t bytes);

// Fills `out` from `offset`. Errors: kIo; kBadInput when the file ends before that.
Status read_exactly(int fd, std::string_view path, uint64_t offset, std::span<uint8_t> out);

// Writes all of `data` from `offset`. Errors: kNoSpace, kIo.
Status write_exactly(int fd, std::string_view path, uint64_t offset, std::span<const uint8_t> data);

// The system calls of a copy, replaceable so that tests can make them short, fail or go missing.
struct CopyCalls {
    ssize_t (*copy)(int in, off_t* in_offset, int out, off_t* out_offset, size_t bytes);
    ssize_t (*read)(int fd, void* data, size_t bytes, off_t offset);
    ssize_t (*write)(int fd, const void* data, size_t bytes, off_t offset);
};
const CopyCalls& kernel_calls();

struct CopyEnd {
    int fd = -1;
    std::string_view path;  // for errors
    uint64_t offset = 0;
};
// Copies `bytes` bytes with copy_file_range; where the kernel or the file systems cannot, with
// pread/pwrite. Errors: kNoSpace, kIo, kBadInput (the source ends early).
Status copy_bytes(const CopyEnd& from, const CopyEnd& to, uint64_t bytes,
                  const CopyCalls& calls = kernel_calls());

// A file being written under a temporary name "<name>.<8 hex>.tmp" in the folder of its final name.
// Destroyed without commit(), it leaves nothing. A process killed in between leaves the temporary,
// which the next writer of the same name removes: a live writer holds a lock on its own.
class AtomicFile {
public:
    // `path` may be a symlink to a regular file: that file is the one replaced. Errors: kUsage (the
    // name is taken by something that is not a regular file), kNoSpace, kIo; so of all below.
    static Result<AtomicFile> create(const std::string& path);
    AtomicFile(AtomicFile&& other) noexcept;
    AtomicFile& operator=(AtomicFile&&) = delete;
    ~AtomicFile();

    int fd() const { return fd_.get(); }
    const std::string& path() const { return path_; }  // the final one
    Status write(uint64_t offset, std::span<const uint8_t> data);
    // Lets the disk begin with these bytes while more are being copied; commit() then waits less.
    void begin_writeback(uint64_t offset, uint64_t bytes) const;
    // Ends the file at `bytes`; what was not written reads as zeros and takes no space.
    Status resize(uint64_t bytes);
    // For a set of files that shall appear together: closes this one (with `sync` it is on the
    // disk) so that a thousand do not need a thousand descriptors. It is not locked from then on,
    // so a second writer of the same name may remove it; commit() then fails.
    Status close(bool sync);
    // fsync unless closed already, rename, fsync of the folder. Without `replace` an existing file
    // is kept: kUsage.
    Status commit(bool replace);

private:
    AtomicFile(Fd fd, std::string path, std::string temporary);
    Status sync();
    Status rename(bool replace);

    Fd fd_;
    std::string path_;
    std::string temporary_;  // empty: nothing to remove
};

// While alive, a write beyond RLIMIT_FSIZE is the error EFBIG in this thread, not a deadly SIGXFSZ.
class FileSizeSignalGuard {
public:
    FileSizeSignalGuard();
    ~FileSizeSignalGuard();
    FileSizeSignalGuard(const FileSizeSignalGuard&) = delete;
    FileSizeSignalGuard& operator=(const FileSizeSignalGuard&) = delete;

private:
    bool was_blocked_ = false;
};

}  // namespace kvasir::moe
