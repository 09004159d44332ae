#include "synth/output_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/check.hpp"
#include "base/log.hpp"

namespace kvasir::synth {
namespace {

constexpr size_t kBufferBytes = 4 << 20;

std::string reason(int error) {
    std::string text = std::strerror(error);
    if (error == ENOSPC || error == EDQUOT) text += "; free some space or write elsewhere";
    if (error == EFBIG)
        text += "; the file system or a limit (ulimit -f) does not take a file this large";
    return text;
}

}  // namespace

Result<OutputFile> OutputFile::create(const std::string& path) {
    struct stat info = {};
    if (::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
        return fail(Errc::kUsage, printable(path) + " is not a regular file; name a file to write");
    }
    std::string temporary = path + "." + std::to_string(::getpid()) + ".tmp";
    const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) {
        return fail(Errc::kEnvironment,
                    "cannot create " + printable(temporary) + ": " + reason(errno));
    }
    return OutputFile(path, std::move(temporary), fd);
}

OutputFile::OutputFile(std::string path, std::string temporary, int fd)
    : path_(std::move(path)), temporary_(std::move(temporary)), fd_(fd) {
    buffer_.reserve(kBufferBytes);
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, {})),
      fd_(std::exchange(other.fd_, -1)),
      offset_(other.offset_),
      buffer_(std::move(other.buffer_)) {}

OutputFile::~OutputFile() {
    if (fd_ >= 0) ::close(fd_);
    if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

tl::unexpected<Error> OutputFile::broken(const char* what) const {
    const int error = errno;
    return fail(
        error == ENOSPC || error == EDQUOT || error == EFBIG ? Errc::kEnvironment : Errc::kIo,
        std::string("cannot ") + what + " " + printable(path_) + " at byte " +
            std::to_string(offset_) + ": " + reason(error));
}

Status OutputFile::flush() {
    size_t done = 0;
    while (done < buffer_.size()) {
        const ssize_t count = ::write(fd_, buffer_.data() + done, buffer_.size() - done);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return broken("write");
        done += static_cast<size_t>(count);
    }
    buffer_.clear();
    return {};
}

Status OutputFile::write(std::span<const uint8_t> data) {
    while (!data.empty()) {
        const size_t count = std::min(data.size(), kBufferBytes - buffer_.size());
        buffer_.insert(buffer_.end(), data.begin(), data.begin() + static_cast<ptrdiff_t>(count));
        offset_ += count;
        data = data.subspan(count);
        if (buffer_.size() < kBufferBytes) continue;
        if (auto ok = flush(); !ok) return ok;
    }
    return {};
}

Status OutputFile::pad_to(uint64_t offset, uint8_t value) {
    KVASIR_CHECK(offset >= offset_);
    const std::vector<uint8_t> padding(static_cast<size_t>(offset - offset_), value);
    return write(padding);
}

Status OutputFile::leave_hole_to(uint64_t bytes) {
    KVASIR_CHECK(bytes >= offset_);
    if (auto ok = flush(); !ok) return ok;
    if (::ftruncate(fd_, static_cast<off_t>(bytes)) != 0) return broken("extend");
    offset_ = bytes;
    return {};
}

Status OutputFile::finish(bool sync) {
    if (auto ok = flush(); !ok) return ok;
    if (sync && ::fsync(fd_) != 0) return broken("write");
    const int fd = std::exchange(fd_, -1);
    if (::close(fd) != 0) return broken("close");
    return {};
}

Status OutputFile::commit() {
    KVASIR_CHECK(fd_ < 0 && !temporary_.empty());
    if (std::rename(temporary_.c_str(), path_.c_str()) != 0)
        return broken("rename the new file to");
    temporary_.clear();
    // The name itself lives in the folder. Not every file system can sync one: not an error.
    const size_t slash = path_.rfind('/');
    const std::string folder = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
    const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        (void)::fsync(fd);
        ::close(fd);
    }
    return {};
}

}  // namespace kvasir::synth
