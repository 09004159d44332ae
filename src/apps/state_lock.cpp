#include "apps/state_lock.hpp"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>
#include <utility>

#include "base/log.hpp"

namespace kvasir::apps {

Result<moe::Fd> lock_backbone(const std::string& state_dir) {
    const std::string path = state_dir + "/backbone.lock";
    moe::Fd lock(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (!lock.is_open())
        return tl::unexpected(moe::system_error(Errc::kEnvironment, path, "opening", errno));
    if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
        return fail(Errc::kUsage,
                    printable(state_dir) +
                        ": another backbone uses this state folder; give each its own "
                        "with --state DIR");
    }
    return lock;
}

}  // namespace kvasir::apps
