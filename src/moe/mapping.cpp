#include "moe/mapping.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.hpp"
#include "base/log.hpp"
#include "moe/file.hpp"

namespace kvasir::moe {
namespace {

void unmap(std::vector<std::span<const uint8_t>>& shards) {
    for (const auto shard : shards) {
        if (!shard.empty()) munmap(const_cast<uint8_t*>(shard.data()), shard.size());
    }
    shards.clear();
}

}  // namespace

Result<std::span<const uint8_t>> Mapping::map_shard(const GgufHeader& header, Watched& watched) {
    const std::string shown = printable(header.path, 400);
    const auto refuse = [&](Errc code, const std::string& what) {
        return fail(code, shown + ": " + what);
    };
    Fd fd(open(header.path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (!fd.is_open())
        return refuse(Errc::kEnvironment, std::string("cannot open: ") + strerror(errno));
    struct stat info = {};
    const bool has_info = fstat(fd.get(), &info) == 0;
    if (!has_info || !S_ISREG(info.st_mode) ||
        static_cast<uint64_t>(info.st_size) < header.file_bytes || header.file_bytes == 0) {
        return refuse(Errc::kBadInput, "is shorter than when its header was read; fetch it again");
    }
    const auto bytes = static_cast<size_t>(header.file_bytes);
    void* address = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, fd.get(), 0);
    if (address == MAP_FAILED) {
        return refuse(Errc::kEnvironment, std::string("cannot map: ") + strerror(errno) +
                                              " (address space limit? see ulimit -v)");
    }
    watched = {std::move(fd), shown, static_cast<uint64_t>(info.st_size), info.st_mtim.tv_sec,
               info.st_mtim.tv_nsec};
    return std::span<const uint8_t>(static_cast<const uint8_t*>(address), bytes);
}

Result<Mapping> Mapping::make(const Model& model) {
    Mapping mapping;
    for (const GgufHeader& header : model.shards) {
        Watched watched;
        auto shard = map_shard(header, watched);
        if (!shard) return tl::unexpected<Error>(std::move(shard.error()));
        mapping.shards_.push_back(*shard);
        mapping.watched_.push_back(std::move(watched));
    }
    return mapping;
}

Status Mapping::unchanged() const {
    for (const Watched& file : watched_) {
        struct stat info = {};
        if (fstat(file.fd.get(), &info) == 0 && static_cast<uint64_t>(info.st_size) == file.bytes &&
            info.st_mtim.tv_sec == file.written_s && info.st_mtim.tv_nsec == file.written_ns) {
            continue;
        }
        return fail(Errc::kBadInput,
                    file.path + ": was written to while it was in use; what it now holds is not " +
                        "what was checked. Start again, and replace such files by renaming");
    }
    return {};
}

Mapping::Mapping(Mapping&& other) noexcept
    : shards_(std::exchange(other.shards_, {})), watched_(std::exchange(other.watched_, {})) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
    if (this != &other) {
        unmap(shards_);
        shards_ = std::exchange(other.shards_, {});
        watched_ = std::exchange(other.watched_, {});
    }
    return *this;
}

Mapping::~Mapping() {
    unmap(shards_);
}

std::span<const uint8_t> Mapping::tensor(const ExpertBank& bank, const SlabTensor& tensor) const {
    KVASIR_CHECK(tensor.shard < shards_.size());
    const uint64_t bytes = tensor.slab_bytes * bank.experts;
    const auto shard = shards_[tensor.shard];
    KVASIR_CHECK(bytes <= shard.size() && tensor.offset <= shard.size() - bytes);
    return shard.subspan(static_cast<size_t>(tensor.offset), static_cast<size_t>(bytes));
}

std::span<const uint8_t> Mapping::slab(const SlabTensor& tensor, uint32_t expert) const {
    KVASIR_CHECK(tensor.shard < shards_.size());
    const auto shard = shards_[tensor.shard];
    const uint64_t offset = tensor.offset + uint64_t{expert} * tensor.slab_bytes;
    KVASIR_CHECK(tensor.slab_bytes <= shard.size() && offset <= shard.size() - tensor.slab_bytes);
    return shard.subspan(static_cast<size_t>(offset), static_cast<size_t>(tensor.slab_bytes));
}

}  // namespace kvasir::moe
