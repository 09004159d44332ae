// The bytes of the model: ranges within the caller's leases, nothing else.
#include <cctype>
#include <utility>

#include "base/log.hpp"
#include "coordinator/service.hpp"

namespace kvasir::coordinator {
namespace {

// "https://host/folder" -> ".../FILE"; with "{file}" in it, that is replaced.
std::string origin_url(const std::string& origin, const std::string& file) {
    static const std::string kMark = "{file}";
    std::string escaped;
    for (const char c : file) {
        const bool is_plain = std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' ||
                              c == '.' || c == '_' || c == '~';
        constexpr const char* kHex = "0123456789ABCDEF";
        const auto byte = static_cast<unsigned char>(c);
        if (is_plain) escaped += c;
        if (!is_plain) escaped += {'%', kHex[byte >> 4], kHex[byte & 15]};
    }
    const size_t mark = origin.find(kMark);
    if (mark != origin.npos) return std::string(origin).replace(mark, kMark.size(), escaped);
    return origin + (origin.ends_with('/') ? "" : "/") + escaped;
}

}  // namespace

Service::Answer Service::data(const net::HttpRequest& request, const crypto::PublicKey& node) {
    const ModelFiles& files = parts_.files;
    const std::string name = request.path.substr(data_prefix_.size());
    const auto shard = files.find_shard(name);
    if (!shard) return fail(Errc::kNotFound, "the model has no file " + printable(name));
    const auto header = request.headers.find("range");
    const uint64_t size = files.shard_bytes(*shard);
    auto span = net::parse_range(header == request.headers.end() ? "" : header->second, size);
    if (!span && span.error().code == Errc::kLimit) {
        net::HttpResponse response = net::error_response(span.error());
        response.status = 416;
        response.headers.emplace_back("Content-Range", "bytes */" + std::to_string(size));
        return response;
    }
    if (!span) return tl::unexpected(span.error());
    if (!*span) {
        return fail(Errc::kUsage, "a Range is needed: bytes=FIRST-LAST, within your leases");
    }
    const uint64_t begin = (*span)->offset, end = (*span)->offset + (*span)->bytes;
    std::vector<Segment> segments;
    for (const market::Lease& lease : book_.leases_of(node, now())) {
        segments.push_back(lease.segment);
    }
    if (!covers(files.ranges_of(segments), {*shard, begin, end})) {
        return fail(Errc::kDenied, "bytes " + std::to_string(begin) + "-" +
                                       std::to_string(end - 1) + " of file " +
                                       std::to_string(*shard) + " are not within your leases");
    }
    if (!config_.origin.empty()) {
        net::HttpResponse response;
        response.status = 307;
        response.headers = {{"Location", origin_url(config_.origin, files.shard_name(*shard))},
                            {"Cache-Control", "no-store"}};
        return response;
    }
    auto body = files.body(*shard, **span);
    if (!body) return tl::unexpected(body.error());
    net::HttpResponse response;
    response.status = 206;
    response.content_type = "application/octet-stream";
    response.file = std::move(*body);
    response.headers = {{"Content-Range", "bytes " + std::to_string(begin) + "-" +
                                              std::to_string(end - 1) + "/" + std::to_string(size)},
                        {"ETag", files.shard_tag(*shard)},
                        {"Accept-Ranges", "bytes"},
                        {"Cache-Control", "private, no-transform"}};
    // Counted also when the market is gone before the client has everything.
    response.on_sent = [counters = parts_.registry.counters(node)](uint64_t bytes) {
        counters->bytes_served += bytes;
        counters->bytes_unsaved += bytes;
    };
    return response;
}

}  // namespace kvasir::coordinator
