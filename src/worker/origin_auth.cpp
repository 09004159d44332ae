#include "worker/origin_auth.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/log.hpp"
#include "moe/file.hpp"

namespace kvasir::worker {
namespace {

constexpr size_t kValueBytesMax = 8 << 10;
constexpr size_t kOriginsMax = 64;

Result<std::string> first_line(const std::string& path) {
    const std::string where = std::string(kOriginAuthFlag) + ": " + printable(path);
    const moe::Fd file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
    struct stat info {};
    if (!file.is_open() || ::fstat(file.get(), &info) != 0)
        return fail(Errc::kEnvironment, where + ": " + std::strerror(errno));
    if (!S_ISREG(info.st_mode) || (info.st_mode & 077) != 0) {
        return fail(Errc::kEnvironment,
                    where + " must be a file that only its owner may use: chmod 600 it");
    }
    std::string text(kValueBytesMax + 2, '\0');
    const ssize_t got = ::read(file.get(), text.data(), text.size());
    if (got < 0) return fail(Errc::kEnvironment, where + ": " + std::strerror(errno));
    text.resize(std::min(static_cast<size_t>(got), text.find('\n')));
    if (text.ends_with('\r')) text.pop_back();
    const bool is_value =
        std::ranges::all_of(text, [](unsigned char c) { return c >= ' ' && c <= '~'; });
    if (text.empty() || text.size() > kValueBytesMax || !is_value) {
        return fail(Errc::kBadInput, where +
                                         ": its first line must be the value of an Authorization "
                                         "header, like \"Bearer TOKEN\"");
    }
    return text;
}

}  // namespace

Result<net::OriginSecrets> load_origin_auth(const std::vector<std::string>& flags,
                                            const std::string& market_url) {
    net::OriginSecrets out;
    out.flag = kOriginAuthFlag;
    const std::string name = std::string(kOriginAuthFlag) + ": ";
    if (flags.size() > kOriginsMax) return fail(Errc::kUsage, name + "more than 64 origins");
    const auto market = net::parse_origin(market_url);
    std::vector<std::string> files;
    for (const std::string& flag : flags) {
        const size_t equals = flag.find('=');
        if (equals == flag.npos || equals == 0 || equals + 1 == flag.size())
            return fail(Errc::kUsage, name + "write ORIGIN=FILE, like https://HOST=FILE");
        const auto origin = net::parse_origin(flag.substr(0, equals));
        if (!origin) return fail(Errc::kUsage, name + origin.error().detail);
        if (market && market->text == origin->text) {
            return fail(Errc::kUsage, name + printable(origin->text) +
                                          " is the market: it gets the token that it gave itself");
        }
        out.origins.push_back({flag.substr(0, equals), {}});
        files.push_back(flag.substr(equals + 1));
    }
    if (const Status ok = net::check_secrets(out); !ok)
        return fail(Errc::kUsage, name + ok.error().detail);
    for (size_t i = 0; i < files.size(); ++i) {
        auto value = first_line(files[i]);
        if (!value) return tl::unexpected(value.error());
        out.origins[i].headers.emplace_back("Authorization", std::move(*value));
    }
    return out;
}

}  // namespace kvasir::worker
