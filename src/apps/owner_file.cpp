#include "apps/owner_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "base/log.hpp"
#include "moe/file.hpp"

namespace kvasir::apps {

Status write_owner_file(const std::string& path, std::string_view text, const std::string& what) {
    const std::string fresh = path + ".new";
    const auto failed = [&](const std::string& doing) {
        return tl::unexpected(
            moe::system_error(moe::write_errc(errno), path, doing + " " + what, errno));
    };
    ::unlink(fresh.c_str());  // of a process that was killed
    const moe::Fd file(
        ::open(fresh.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (!file.is_open()) return failed("making");
    Status ok = moe::write_exactly(file.get(), fresh, 0,
                                   {reinterpret_cast<const uint8_t*>(text.data()), text.size()});
    if (ok && ::fsync(file.get()) != 0) ok = failed("syncing");
    if (ok && ::rename(fresh.c_str(), path.c_str()) != 0) ok = failed("renaming");
    if (!ok) ::unlink(fresh.c_str());
    return ok;
}

Result<std::optional<std::string>> read_owner_file(const std::string& path, size_t bytes_max) {
    // O_NONBLOCK: a FIFO must not hold us; fstat() then says what it is.
    const moe::Fd file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
    if (!file.is_open() && errno == ENOENT) return std::optional<std::string>();
    struct stat info = {};
    if (!file.is_open() || ::fstat(file.get(), &info) != 0)
        return tl::unexpected(moe::system_error(Errc::kEnvironment, path, "opening", errno));
    if (!S_ISREG(info.st_mode))
        return fail(Errc::kBadInput, printable(path) + ": is not a regular file; remove it");
    if ((info.st_mode & 077) != 0) {
        return fail(Errc::kEnvironment,
                    printable(path) + ": others than its owner may use it; run chmod 600 " +
                        printable(path) + ", or remove it if somebody may have changed it");
    }
    const auto bytes = static_cast<uint64_t>(info.st_size);
    if (bytes > bytes_max)
        return fail(Errc::kBadInput, printable(path) + ": is too long; remove it");
    std::string text(bytes, '\0');
    if (Status ok = moe::read_exactly(file.get(), path, 0,
                                      {reinterpret_cast<uint8_t*>(text.data()), text.size()});
        !ok) {
        return tl::unexpected(ok.error());
    }
    return std::optional<std::string>(std::move(text));
}

}  // namespace kvasir::apps
