#include "apps/first_part.hpp"

#include "moe/splits.hpp"

namespace kvasir::apps {

Result<std::string> first_part(const std::string& path) {
    const auto parts = moe::collect_shards(path);
    if (!parts) return tl::unexpected(parts.error());
    return parts->front().path;
}

}  // namespace kvasir::apps
