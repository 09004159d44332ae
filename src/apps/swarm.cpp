#include "apps/swarm.hpp"

namespace kvasir::apps {

// The one place that says so until the backbone is linked in.
Result<std::unique_ptr<Swarm>> Swarm::start(const SwarmOptions&) {
    return fail(Errc::kUnsupported,
                "the swarm is not built into this program yet; use --monolithic");
}

}  // namespace kvasir::apps
