#include "worker/cache.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include "base/log.hpp"
#include "crypto/hash.hpp"
#include "moe/model.hpp"
#include "moe/segments.hpp"
#include "moe/verify.hpp"

namespace kvasir::worker {
namespace {

namespace fs = std::filesystem;

constexpr size_t kNameDigits = 16;
constexpr std::string_view kSliceEnd = ".gguf";
constexpr std::string_view kPartEnd = ".part";
constexpr std::string_view kOutlineBegin = "outline.";

bool is_hex(std::string_view text) {
    return text.size() == kNameDigits &&
           text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

bool is_part(std::string_view name) {
    return name.ends_with(kPartEnd);
}

// "<16 hex>.<16 hex>.gguf" or that with ".part".
bool is_slice_name(std::string_view name) {
    if (is_part(name)) name.remove_suffix(kPartEnd.size());
    if (!name.ends_with(kSliceEnd)) return false;
    name.remove_suffix(kSliceEnd.size());
    return name.size() == 2 * kNameDigits + 1 && name[kNameDigits] == '.' &&
           is_hex(name.substr(0, kNameDigits)) && is_hex(name.substr(kNameDigits + 1));
}

std::string without_part(const std::string& path) {
    return is_part(path) ? path.substr(0, path.size() - kPartEnd.size()) : path;
}

bool is_kept(const std::string& path, const std::vector<std::string>& keep) {
    return std::ranges::find(keep, without_part(path)) != keep.end();
}

struct OpenSlice {
    moe::Model model;
    moe::Manifest manifest;
};
// The header of a slice of that model, if the file has one.
std::optional<OpenSlice> open_slice(const std::string& path, const Sha256& model_id) {
    auto model = moe::open_model(path);
    if (!model || !model->is_slice) return std::nullopt;
    auto manifest = moe::slice_manifest(*model);
    if (!manifest || manifest->model_id != model_id) return std::nullopt;
    return OpenSlice{std::move(*model), std::move(*manifest)};
}

Errc code_of(int error_number) {
    return error_number == ENOSPC || error_number == EDQUOT ? Errc::kNoSpace : Errc::kEnvironment;
}

}  // namespace

Result<std::string> default_cache_folder() {
    const char* cache = std::getenv("XDG_CACHE_HOME");
    if (cache != nullptr && *cache != '\0') return std::string(cache) + "/kvasir/worker";
    const char* home = std::getenv("HOME");
    if (home != nullptr && *home != '\0') return std::string(home) + "/.cache/kvasir/worker";
    return fail(Errc::kUsage, "no folder for the cache: give --cache DIR, or set HOME");
}

const SlabSource* Donors::find(const Sha256& digest) const {
    const auto found = std::ranges::lower_bound(slabs, digest, {}, &SlabSource::digest);
    return found != slabs.end() && found->digest == digest ? &*found : nullptr;
}

Result<SliceCache> SliceCache::open(const std::string& folder, uint64_t bytes_max) {
    std::error_code error;
    if (!fs::exists(folder, error)) {
        fs::create_directories(folder, error);
        if (error) {
            return tl::unexpected(
                moe::system_error(code_of(error.value()), folder, "making it", error.value()));
        }
        fs::permissions(folder, fs::perms::owner_all, error);
    }
    const std::string path = folder + "/lock";
    moe::Fd lock(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (!lock.is_open())
        return tl::unexpected(moe::system_error(code_of(errno), path, "opening", errno));
    if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
        return fail(Errc::kUsage, printable(folder) +
                                      ": another worker uses this cache folder; give each worker "
                                      "its own with --cache DIR");
    }
    return SliceCache(folder, bytes_max, std::move(lock));
}

std::string SliceCache::slice_path(const Sha256& model_id,
                                   const std::vector<Segment>& segments) const {
    const std::string text = moe::to_string(segments);
    const Sha256 plan =
        crypto::sha256({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
    return folder_ + "/" + kvasir::to_hex(model_id).substr(0, kNameDigits) + "." +
           kvasir::to_hex(plan).substr(0, kNameDigits) + std::string(kSliceEnd);
}

std::vector<SliceCache::Entry> SliceCache::entries() const {
    std::vector<Entry> found;
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(folder_, error)) {
        if (!is_slice_name(entry.path().filename().string())) continue;
        struct stat info = {};
        if (::lstat(entry.path().c_str(), &info) != 0 || !S_ISREG(info.st_mode)) continue;
        found.push_back({entry.path().string(), static_cast<uint64_t>(info.st_blocks) * 512,
                         info.st_mtim.tv_sec * 1'000'000'000 + info.st_mtim.tv_nsec});
    }
    std::ranges::sort(found, [](const Entry& a, const Entry& b) {
        return std::pair(a.used_ns, a.path) < std::pair(b.used_ns, b.path);
    });
    return found;
}

std::vector<Segment> SliceCache::have(const Sha256& model_id) const {
    std::vector<Segment> all;
    for (const Entry& entry : entries()) {
        if (is_part(entry.path)) continue;
        const auto slice = open_slice(entry.path, model_id);
        if (!slice) continue;
        const auto segments = moe::all_segments(slice->model);
        all.insert(all.end(), segments.begin(), segments.end());
    }
    return moe::normalise(std::move(all));
}

std::vector<Segment> SliceCache::begun(const Sha256& model_id) const {
    const auto all = entries();
    for (auto entry = all.rbegin(); entry != all.rend(); ++entry) {
        if (!is_part(entry->path)) continue;
        if (const auto slice = open_slice(entry->path, model_id))
            return moe::normalise(moe::all_segments(slice->model));
    }
    return {};
}

Donors SliceCache::donors(const Sha256& model_id, const std::string& except) const {
    Donors donors;
    for (const Entry& entry : entries()) {
        if (without_part(entry.path) == except) continue;
        const auto slice = open_slice(entry.path, model_id);
        if (!slice) continue;
        const auto file = static_cast<uint32_t>(donors.paths.size());
        donors.paths.push_back(entry.path);
        for (size_t b = 0; b < slice->model.banks.size(); ++b) {
            const moe::ExpertBank& bank = slice->model.banks[b];
            for (size_t t = 0; t < bank.tensors.size(); ++t) {
                const moe::SlabTensor& tensor = bank.tensors[t];
                for (uint32_t e = 0; e < bank.experts; ++e) {
                    donors.slabs.push_back({slice->manifest.banks[b].slabs[t][e], file,
                                            tensor.offset + e * tensor.slab_bytes});
                }
            }
        }
    }
    std::ranges::sort(donors.slabs, {}, &SlabSource::digest);
    return donors;
}

uint64_t SliceCache::bytes_used() const {
    uint64_t bytes = 0;
    for (const Entry& entry : entries()) bytes += entry.bytes;
    return bytes;
}

uint64_t SliceCache::bytes_of(const std::string& path) const {
    uint64_t bytes = 0;
    for (const Entry& entry : entries()) {
        if (without_part(entry.path) == path) bytes += entry.bytes;
    }
    return bytes;
}

Status SliceCache::make_room(uint64_t bytes, const std::vector<std::string>& keep) {
    uint64_t used = bytes_used();
    for (const Entry& entry : entries()) {
        if (used + bytes <= bytes_max_) return {};
        std::error_code error;
        if (is_kept(entry.path, keep) || !fs::remove(entry.path, error)) continue;
        used -= std::min(used, entry.bytes);
    }
    if (used + bytes <= bytes_max_) return {};
    return fail(Errc::kNoSpace, printable(folder_) + ": the cache may hold " +
                                    std::to_string(bytes_max_) + " bytes, " + std::to_string(used) +
                                    " are in use and " + std::to_string(bytes) +
                                    " more are needed; give a larger --cache-max or a smaller "
                                    "--budget");
}

uint64_t SliceCache::remove_others(const std::vector<std::string>& keep) {
    uint64_t freed = 0;
    for (const Entry& entry : entries()) {
        std::error_code error;
        if (is_kept(entry.path, keep) || !fs::remove(entry.path, error)) continue;
        freed += entry.bytes;
    }
    return freed;
}

void SliceCache::touch(const std::string& path) const {
    ::utimensat(AT_FDCWD, path.c_str(), nullptr, 0);
}

// ---- the outline ----

std::optional<std::vector<uint8_t>> SliceCache::load_outline(const Sha256& name) const {
    const std::string path =
        folder_ + "/" + std::string(kOutlineBegin) + kvasir::to_hex(name).substr(0, kNameDigits);
    struct stat info = {};
    auto fd = moe::open_for_reading(path);
    if (!fd || ::fstat(fd->get(), &info) != 0 ||
        static_cast<uint64_t>(info.st_size) > 2 * moe::kOutlineBytesMax)
        return std::nullopt;
    std::vector<uint8_t> bytes(static_cast<size_t>(info.st_size));
    if (!moe::read_exactly(fd->get(), path, 0, bytes)) return std::nullopt;
    return bytes;
}

Status SliceCache::store_outline(const Sha256& name,
                                 std::span<const uint8_t> signed_outline) const {
    const std::string file_name =
        std::string(kOutlineBegin) + kvasir::to_hex(name).substr(0, kNameDigits);
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(folder_, error)) {
        const std::string other = entry.path().filename().string();
        const bool is_outline = other.starts_with(kOutlineBegin) &&
                                is_hex(std::string_view(other).substr(kOutlineBegin.size()));
        if (is_outline && other != file_name) fs::remove(entry.path(), error);
    }
    auto file = moe::AtomicFile::create(folder_ + "/" + file_name);
    if (!file) return tl::unexpected(file.error());
    if (Status ok = file->write(0, signed_outline); !ok) return ok;
    return file->commit(true);
}

}  // namespace kvasir::worker
