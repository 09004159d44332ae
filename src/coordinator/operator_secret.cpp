#include "coordinator/operator_secret.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cerrno>
#include <cstring>

#include <array>

#include "base/encoding.hpp"
#include "base/log.hpp"
#include "crypto/hash.hpp"
#include "crypto/mac.hpp"
#include "moe/file.hpp"

namespace kvasir::coordinator {
namespace {

constexpr size_t kSecretBytes = 32;

tl::unexpected<Error> failed(const std::string& path, const std::string& doing) {
    return fail(Errc::kEnvironment, "cannot " + doing + " the operator's secret " +
                                        printable(path) + ": " + std::strerror(errno));
}

// False if there is a file of that name already.
Result<bool> make(const std::string& path) {
    const moe::Fd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (!file.is_open()) {
        if (errno == EEXIST) return false;
        return failed(path, "make");
    }
    std::array<uint8_t, kSecretBytes> secret = {};
    crypto::fill_random(secret);
    const std::string line = encode_hex(secret) + "\n";
    Status ok = moe::write_exactly(file.get(), path, 0,
                                   {reinterpret_cast<const uint8_t*>(line.data()), line.size()});
    if (ok && ::fsync(file.get()) != 0) ok = failed(path, "sync");
    if (!ok) {
        ::unlink(path.c_str());
        return tl::unexpected(ok.error());
    }
    return true;
}

}  // namespace

Result<std::string> load_or_make_operator_secret(const std::string& path) {
    if (auto made = make(path); !made) return tl::unexpected(made.error());
    const moe::Fd file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
    if (!file.is_open()) return failed(path, "open");
    struct stat info {};
    if (::fstat(file.get(), &info) != 0) return failed(path, "look at");
    if (!S_ISREG(info.st_mode) || (info.st_mode & 077) != 0) {
        return fail(Errc::kEnvironment, "the operator's secret " + printable(path) +
                                            " must be a file that only its owner may use: chmod "
                                            "600 it, or remove it and start again");
    }
    std::array<char, 2 * kSecretBytes + 2> text = {};
    const ssize_t got = ::read(file.get(), text.data(), text.size());
    if (got < 0) return failed(path, "read");
    std::string_view line(text.data(), static_cast<size_t>(got));
    if (line.ends_with('\n')) line.remove_suffix(1);
    if (!crypto::parse_hex(line)) {
        return fail(Errc::kBadInput, "the operator's secret " + printable(path) +
                                         " is not one line of 64 hex digits: remove it and start "
                                         "again");
    }
    return std::string(line);
}

}  // namespace kvasir::coordinator
