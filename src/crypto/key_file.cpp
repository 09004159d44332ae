#include "crypto/key_file.hpp"

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <system_error>

#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/rand.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/encoding.hpp"
#include "base/log.hpp"

namespace kvasir::crypto {
namespace {

constexpr std::string_view kPrefix = "kvasir-key-1 ";
constexpr size_t kSeedBytes = 32;
constexpr size_t kLineBytes = kPrefix.size() + 2 * kSeedBytes + 1;
constexpr int kAttemptsMax = 3;  // somebody may remove the file between two steps

// Text that holds a secret.
struct SecretText {
    std::string text;
    ~SecretText() { OPENSSL_cleanse(text.data(), text.size()); }
};

class Descriptor {
public:
    explicit Descriptor(int fd) : fd_(fd) {}
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    ~Descriptor() {
        if (fd_ >= 0) ::close(fd_);
    }
    int get() const { return fd_; }

private:
    int fd_;
};

int open_retrying(const char* path, int flags, mode_t mode = 0) {
    int fd = -1;
    do fd = ::open(path, flags | O_CLOEXEC, mode);
    while (fd < 0 && errno == EINTR);
    return fd;
}

tl::unexpected<Error> system_failure(const std::string& path, std::string_view doing,
                                     int error_number) {
    const std::string where = "key file " + printable(path) + ": " + std::string(doing) + ": ";
    switch (error_number) {
        case ENOSPC:
        case EDQUOT:
            return fail(
                Errc::kNoSpace,
                where + "the disk or quota is full; free some space or choose another path");
        case EACCES:
        case EPERM:
            return fail(Errc::kEnvironment,
                        where + "permission denied; check the owner and mode of it and its folder");
        case ENOENT:
        case ENOTDIR:
            return fail(Errc::kEnvironment, where + "its folder does not exist; make it first");
        case EROFS:
            return fail(Errc::kEnvironment,
                        where + "the file system is read-only; choose another path");
        default:
            return fail(Errc::kEnvironment, where + std::generic_category().message(error_number));
    }
}

Result<KeyPair> parse_key_file(const std::string& path, std::string_view text) {
    const auto malformed = [&](std::string_view what) {
        return fail(Errc::kBadInput, "key file " + printable(path) + ": " + std::string(what) +
                                         "; restore it from a backup, or move it away and start "
                                         "again with a new key");
    };
    if (text.empty()) return malformed("is empty");
    if (!text.starts_with(kPrefix)) return malformed("does not begin with 'kvasir-key-1 '");
    if (text.ends_with('\n')) text.remove_suffix(1);
    text.remove_prefix(kPrefix.size());
    auto seed = decode_hex(text);
    if (!seed) return malformed("the key is not lower-case hex digits");
    if (seed->size() != kSeedBytes) {
        OPENSSL_cleanse(seed->data(), seed->size());
        return malformed("the key does not have 64 hex digits");
    }
    auto pair = KeyPair::from_seed(std::span<const uint8_t, kSeedBytes>(*seed));
    OPENSSL_cleanse(seed->data(), seed->size());
    return pair;
}

// nullopt: there is no such file.
Result<std::optional<KeyPair>> try_load(const std::string& path) {
    // O_NONBLOCK: a FIFO must not hold us; fstat() then says what it is.
    const Descriptor file(open_retrying(path.c_str(), O_RDONLY | O_NONBLOCK));
    if (file.get() < 0) {
        if (errno == ENOENT) return std::optional<KeyPair>();
        return system_failure(path, "opening", errno);
    }
    struct stat info = {};
    if (::fstat(file.get(), &info) != 0) return system_failure(path, "looking at it", errno);
    if (!S_ISREG(info.st_mode)) {
        return fail(Errc::kBadInput, "key file " + printable(path) + ": is not a regular file");
    }
    if ((info.st_mode & 077) != 0) {
        return fail(Errc::kEnvironment, "key file " + printable(path) +
                                            ": others than its owner may use it; run chmod 600 " +
                                            printable(path) +
                                            ", and make a new key if somebody may have read it");
    }
    SecretText held{std::string(kLineBytes + 1, '\0')};  // one more byte tells of a longer file
    size_t have = 0;
    while (have < held.text.size()) {
        const ssize_t got = ::read(file.get(), held.text.data() + have, held.text.size() - have);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return system_failure(path, "reading", errno);
        if (got == 0) break;
        have += static_cast<size_t>(got);
    }
    auto pair = parse_key_file(path, std::string_view(held.text).substr(0, have));
    if (!pair) return tl::unexpected(pair.error());
    return std::optional<KeyPair>(std::move(*pair));
}

Status write_line(const std::string& temporary, const KeyFileCalls& calls) {
    const Descriptor file(
        open_retrying(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600));
    if (file.get() < 0) return system_failure(temporary, "making it", errno);
    std::array<uint8_t, kSeedBytes> seed;
    if (RAND_priv_bytes(seed.data(), static_cast<int>(seed.size())) != 1) {
        return fail(Errc::kEnvironment, "making a key: the system gives no random bytes");
    }
    SecretText digits{encode_hex(seed)};
    SecretText line;
    line.text.reserve(kLineBytes);
    line.text.append(kPrefix).append(digits.text).push_back('\n');
    OPENSSL_cleanse(seed.data(), seed.size());
    for (size_t done = 0; done < line.text.size();) {
        const ssize_t put =
            calls.write(file.get(), line.text.data() + done, line.text.size() - done);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return system_failure(temporary, "writing", put < 0 ? errno : EIO);
        done += static_cast<size_t>(put);
    }
    if (calls.sync(file.get()) != 0) return system_failure(temporary, "syncing", errno);
    return {};
}

// Gives the temporary file its name unless that is taken: then the other's key counts.
Status publish(const std::string& temporary, const std::string& path, const KeyFileCalls& calls) {
    if (calls.link(temporary.c_str(), path.c_str()) == 0 || errno == EEXIST) return {};
    const int link_error = errno;
    if (calls.rename_if_free(temporary.c_str(), path.c_str()) == 0 || errno == EEXIST) return {};
    return system_failure(path, "giving the new key its name", link_error);
}

Status make_key_file(const std::string& path, const KeyFileCalls& calls) {
    std::array<uint8_t, 8> suffix;
    if (RAND_bytes(suffix.data(), static_cast<int>(suffix.size())) != 1) {
        return fail(Errc::kEnvironment, "making a key: the system gives no random bytes");
    }
    const std::string temporary = path + "." + encode_hex(suffix) + ".tmp";
    Status made = write_line(temporary, calls);
    if (made) made = publish(temporary, path, calls);
    calls.unlink(temporary.c_str());  // after a rename there is nothing to remove
    if (!made) return made;
    // The name too must survive a power cut: a node that loses its key is another node.
    const std::filesystem::path folder = std::filesystem::path(path).parent_path();
    const Descriptor listing(
        open_retrying(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY));
    if (listing.get() >= 0 && calls.sync(listing.get()) != 0 && errno != EINVAL) {
        return system_failure(path, "syncing its folder", errno);
    }
    return {};
}

int rename_if_free(const char* from, const char* to) {
    return ::renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE);
}

}  // namespace

const KeyFileCalls& kernel_key_file_calls() {
    static constexpr KeyFileCalls kCalls = {::write, ::fsync, ::link, rename_if_free, ::unlink};
    return kCalls;
}

Result<KeyPair> load_or_make_key(const std::string& path, const KeyFileCalls& calls) {
    for (int attempt = 0; attempt < kAttemptsMax; ++attempt) {
        auto loaded = try_load(path);
        if (!loaded) return tl::unexpected(loaded.error());
        if (*loaded) return std::move(**loaded);
        if (const Status made = make_key_file(path, calls); !made) {
            return tl::unexpected(made.error());
        }
    }
    return fail(Errc::kEnvironment, "key file " + printable(path) +
                                        ": something removes it as soon as it is made, or it is a "
                                        "link to nowhere; choose another path");
}

Result<KeyPair> load_or_make_key(const std::string& path) {
    return load_or_make_key(path, kernel_key_file_calls());
}

}  // namespace kvasir::crypto
