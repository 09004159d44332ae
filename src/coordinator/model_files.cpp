#include "coordinator/model_files.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cerrno>
#include <cstring>

#include <algorithm>
#include <charconv>
#include <filesystem>

#include "base/check.hpp"
#include "base/log.hpp"
#include "moe/file.hpp"
#include "moe/outline.hpp"

namespace kvasir::coordinator {
namespace {

std::shared_ptr<const int> share(int fd) {
    return {new int(fd), [](const int* held) {
                ::close(*held);
                delete held;
            }};
}

int64_t changed_ns(const struct stat& info) {
    return int64_t{info.st_mtim.tv_sec} * 1000000000 + info.st_mtim.tv_nsec;
}

}  // namespace

Result<std::unique_ptr<ModelFiles>> ModelFiles::open(const std::string& model_path,
                                                     const std::string& cache_dir,
                                                     const moe::Progress& progress) {
    auto model = moe::open_model(model_path);
    if (!model) return tl::unexpected(model.error());
    if (model->is_slice) {
        return fail(Errc::kUsage,
                    printable(model_path) + " is a slice: a market needs the whole model");
    }
    if (model->banks.empty()) {
        return fail(Errc::kBadInput,
                    printable(model_path) + " has no experts: there is nothing to share");
    }
    auto manifest = moe::load_or_compute_manifest(*model, cache_dir, progress);
    if (!manifest) return tl::unexpected(manifest.error());
    auto outline = moe::make_outline(*model, *manifest);
    if (!outline) return tl::unexpected(outline.error());
    std::unique_ptr<ModelFiles> files(new ModelFiles());
    files->model_ = std::move(*model);
    files->model_id_ = manifest->model_id;
    if (Status ok = files->open_shards(); !ok) return tl::unexpected(ok.error());
    if (Status ok = files->keep_outline(moe::encode_outline(*outline)); !ok) {
        return tl::unexpected(ok.error());
    }
    return files;
}

Status ModelFiles::open_shards() {
    for (const moe::GgufHeader& header : model_.shards) {
        const int fd = ::open(header.path.c_str(), O_RDONLY | O_CLOEXEC);
        if (fd < 0) {
            return fail(Errc::kEnvironment,
                        "cannot open " + printable(header.path) + ": " + std::strerror(errno));
        }
        Shard shard{share(fd), 0};
        struct stat info {};
        if (::fstat(fd, &info) != 0 || static_cast<uint64_t>(info.st_size) != header.file_bytes) {
            return fail(Errc::kBadInput, printable(header.path) + " is being changed: try again");
        }
        shard.changed_ns = changed_ns(info);
        shards_.push_back(std::move(shard));
    }
    return {};
}

Status ModelFiles::keep_outline(std::vector<uint8_t> bytes) {
    const int fd = ::memfd_create("kvasir-outline", MFD_CLOEXEC);
    if (fd < 0) {
        return fail(Errc::kEnvironment,
                    std::string("no memory for the model's outline: ") + std::strerror(errno));
    }
    outline_.fd = share(fd);
    outline_.bytes = bytes.size();
    for (size_t done = 0; done < bytes.size();) {
        const ssize_t wrote = ::write(fd, bytes.data() + done, bytes.size() - done);
        if (wrote < 0 && errno == EINTR) continue;
        if (wrote <= 0) {
            return fail(Errc::kEnvironment,
                        std::string("no memory for the model's outline: ") + std::strerror(errno));
        }
        done += static_cast<size_t>(wrote);
    }
    outline_bytes_ = std::move(bytes);
    return {};
}

std::optional<uint32_t> ModelFiles::find_shard(std::string_view text) const {
    uint32_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error == std::errc() && end == text.data() + text.size() && number < shards_.size()) {
        return number;
    }
    for (uint32_t i = 0; i < shards_.size(); ++i) {
        if (shard_name(i) == text) return i;
    }
    return std::nullopt;
}

std::string ModelFiles::shard_name(uint32_t shard) const {
    return std::filesystem::path(model_.shards[shard].path).filename().string();
}

std::string ModelFiles::shard_tag(uint32_t shard) const {
    return "\"" + to_hex(model_id_).substr(0, 32) + "-" + std::to_string(shard) + "\"";
}

Status ModelFiles::check_unchanged(uint32_t shard) const {
    struct stat info {};
    const Shard& file = shards_[shard];
    if (::fstat(*file.fd, &info) == 0 && changed_ns(info) == file.changed_ns &&
        static_cast<uint64_t>(info.st_size) == shard_bytes(shard)) {
        return {};
    }
    const std::string name = printable(shard_name(shard));
    if (!change_told_.exchange(true)) {
        log(LogLevel::kError, "market",
            name +
                " was changed since the market started: nothing is served or proven from it; "
                "restart the market with the file that the model was");
    }
    return fail(Errc::kMismatch,
                "the market's file " + name + " was changed since the market started");
}

Result<net::FileBody> ModelFiles::body(uint32_t shard, const net::ByteSpan& span) const {
    if (Status ok = check_unchanged(shard); !ok) return tl::unexpected(ok.error());
    return net::FileBody{shards_[shard].fd, span.offset, span.bytes};
}

Result<std::vector<uint8_t>> ModelFiles::read(const market::Probe& probe, LayerKey layer) const {
    const moe::ExpertBank* bank = model_.find_bank(layer);
    KVASIR_CHECK(bank != nullptr && probe.tensor < bank->tensors.size());
    const uint32_t shard = bank->tensors[probe.tensor].shard;
    std::vector<uint8_t> out(probe.bytes);
    Status ok = moe::read_exactly(*shards_[shard].fd, model_.shards[shard].path,
                                  market::probe_offset(probe, *bank), out);
    // Afterwards: what was read is the model's only if the file is still the one that was hashed.
    if (Status same = check_unchanged(shard); !same) return tl::unexpected(same.error());
    if (!ok) {
        log(LogLevel::kError, "market", ok.error().detail);
        return fail(ok.error().code,
                    "the market cannot read its file " + printable(shard_name(shard)));
    }
    return out;
}

std::vector<FileRange> ModelFiles::ranges_of(std::span<const Segment> segments) const {
    std::vector<FileRange> all;
    for (const Segment& segment : segments) {
        const moe::ExpertBank* bank = model_.find_bank(segment.layer);
        if (bank == nullptr) continue;
        for (const moe::SlabTensor& tensor : bank->tensors) {
            all.push_back({tensor.shard, tensor.offset + segment.begin * tensor.slab_bytes,
                           tensor.offset + segment.end * tensor.slab_bytes});
        }
    }
    std::ranges::sort(all);
    std::vector<FileRange> out;
    for (const FileRange& range : all) {
        if (!out.empty() && out.back().shard == range.shard && range.begin <= out.back().end) {
            out.back().end = std::max(out.back().end, range.end);
        } else {
            out.push_back(range);
        }
    }
    return out;
}

bool covers(std::span<const FileRange> ranges, const FileRange& wanted) {
    return std::ranges::any_of(ranges, [&](const FileRange& range) {
        return range.shard == wanted.shard && range.begin <= wanted.begin &&
               wanted.end <= range.end;
    });
}

}  // namespace kvasir::coordinator
