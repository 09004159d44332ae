// The manifest cache: one file per set of shard paths. Layout (little-endian):
//   "kvasir-manifest" u8 version = 1
//   u32 shards, per shard {u32 path bytes, path, u64 size, u64 mtime s, u32 ns, u64 ctime s,
//                          u32 ns, u64 inode, u64 device}
//   32 bytes model id
//   u32 banks, per bank {u32 layer, u32 bank, u32 experts, u32 tensors,
//                        tensors x experts x 32 bytes}
//   32 bytes SHA-256 of all of the above
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <sys/stat.h>

#include "base/bytes.hpp"
#include "base/log.hpp"
#include "crypto/hash.hpp"
#include "moe/file.hpp"
#include "moe/manifest.hpp"

namespace kvasir::moe {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kMagic = "kvasir-manifest";
constexpr uint8_t kVersion = 1;
constexpr size_t kNameDigits = 32;
constexpr std::string_view kNameEnd = ".manifest";

std::string cache_folder(const std::string& asked) {
    if (!asked.empty()) return asked;
    const char* cache = std::getenv("XDG_CACHE_HOME");
    if (cache != nullptr && cache[0] == '/') return std::string(cache) + "/kvasir";
    const char* home = std::getenv("HOME");
    if (home != nullptr && home[0] == '/') return std::string(home) + "/.cache/kvasir";
    return {};
}

// What must be unchanged for a cached manifest to count. The change time is there because a file
// can be rewritten and given its old modification time back.
struct CacheKey {
    std::string file_name;  // from the paths alone, so that a newer model replaces an older one
    std::vector<uint8_t> record;
};

Result<CacheKey> make_key(const Model& model) {
    ByteWriter paths;
    ByteWriter record;
    record.u32(static_cast<uint32_t>(model.shards.size()));
    for (const GgufHeader& header : model.shards) {
        std::error_code error;
        const std::string path = fs::canonical(header.path, error).string();
        struct stat info = {};
        if (error || ::stat(path.c_str(), &info) != 0) {
            const int error_number = error ? error.value() : errno;
            return tl::unexpected(
                system_error(Errc::kEnvironment, header.path, "looking at it", error_number));
        }
        for (ByteWriter* out : {&paths, &record}) {
            out->u32(static_cast<uint32_t>(path.size()));
            out->text(path);
        }
        record.u64(static_cast<uint64_t>(info.st_size));
        for (const timespec& time : {info.st_mtim, info.st_ctim}) {
            record.u64(static_cast<uint64_t>(time.tv_sec));
            record.u32(static_cast<uint32_t>(time.tv_nsec));
        }
        record.u64(info.st_ino);
        record.u64(info.st_dev);
    }
    return CacheKey{
        to_hex(crypto::sha256(paths.data())).substr(0, kNameDigits) + std::string(kNameEnd),
        record.take()};
}

// True for the names that make_key() gives: nothing else in the folder is ours to remove.
bool is_manifest_name(const std::string& name) {
    return name.size() == kNameDigits + kNameEnd.size() && name.ends_with(kNameEnd) &&
           name.find_first_not_of("0123456789abcdef") == kNameDigits;
}

// Keeps the kCacheFilesMax newest manifests: models come and go, their manifests would stay.
void evict_oldest(const std::string& folder) {
    std::error_code error;
    std::vector<std::pair<fs::file_time_type, fs::path>> files;
    for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
        if (!is_manifest_name(it->path().filename().string())) continue;
        std::error_code gone;
        const auto time = fs::last_write_time(it->path(), gone);
        if (!gone) files.emplace_back(time, it->path());
    }
    if (files.size() <= kCacheFilesMax) return;
    std::sort(files.begin(), files.end());
    for (size_t i = 0; i < files.size() - kCacheFilesMax; ++i) fs::remove(files[i].second, error);
}

std::vector<uint8_t> encode(const Manifest& manifest, const CacheKey& key) {
    ByteWriter out;
    out.text(kMagic);
    out.u8(kVersion);
    out.bytes(key.record);
    out.bytes(manifest.model_id);
    out.u32(static_cast<uint32_t>(manifest.banks.size()));
    for (const BankDigests& bank : manifest.banks) {
        out.u32(bank.key.layer);
        out.u32(bank.key.bank);
        out.u32(bank.experts);
        out.u32(static_cast<uint32_t>(bank.slabs.size()));
        for (const auto& tensor : bank.slabs) {
            for (const Sha256& digest : tensor) out.bytes(digest);
        }
    }
    const Sha256 own = crypto::sha256(out.data());
    out.bytes(own);
    return out.take();
}

Sha256 read_digest(ByteReader& in) {
    Sha256 digest = {};
    const auto bytes = in.bytes(digest.size());
    std::copy(bytes.begin(), bytes.end(), digest.begin());
    return digest;
}

// nullopt for anything but exactly this key and exactly the shape of this model.
std::optional<Manifest> decode(std::span<const uint8_t> data, const CacheKey& key,
                               const Model& model) {
    Manifest manifest;
    if (data.size() < manifest.model_id.size()) return std::nullopt;
    ByteReader end(data.last(manifest.model_id.size()));
    data = data.first(data.size() - manifest.model_id.size());
    if (read_digest(end) != crypto::sha256(data)) return std::nullopt;

    ByteReader in(data);
    if (in.text(kMagic.size()) != kMagic || in.u8() != kVersion) return std::nullopt;
    const auto record = in.bytes(key.record.size());
    if (!std::equal(record.begin(), record.end(), key.record.begin(), key.record.end())) {
        return std::nullopt;
    }
    manifest.model_id = read_digest(in);
    manifest.banks = empty_digests(model);
    if (in.u32() != manifest.banks.size()) return std::nullopt;
    for (BankDigests& bank : manifest.banks) {
        const LayerKey layer{in.u32(), in.u32()};
        if (layer != bank.key || in.u32() != bank.experts || in.u32() != bank.slabs.size()) {
            return std::nullopt;
        }
        for (auto& tensor : bank.slabs) {
            for (Sha256& digest : tensor) digest = read_digest(in);
        }
    }
    if (!in.finished() || !manifest.has_model_id()) return std::nullopt;
    return manifest;
}

std::optional<Manifest> load(const std::string& folder, const CacheKey& key, const Model& model) {
    const std::string path = folder + "/" + key.file_name;
    struct stat info = {};
    if (::stat(path.c_str(), &info) != 0 || !S_ISREG(info.st_mode)) return std::nullopt;
    if (static_cast<uint64_t>(info.st_size) > kCacheBytesMax) return std::nullopt;
    const auto fd = open_for_reading(path);
    if (!fd) return std::nullopt;
    std::vector<uint8_t> data(static_cast<size_t>(info.st_size));
    if (!read_exactly(fd->get(), path, 0, data)) return std::nullopt;
    auto manifest = decode(data, key, model);
    if (!manifest) log(LogLevel::kInfo, "moe", printable(path) + ": stale or damaged, replaced");
    return manifest;
}

Status store(const std::string& folder, const CacheKey& key, const Manifest& manifest) {
    if (folder.empty()) {
        return fail(Errc::kEnvironment, "no cache folder: set XDG_CACHE_HOME or HOME");
    }
    std::error_code error;
    fs::create_directories(folder, error);
    if (error) {
        return tl::unexpected(
            system_error(Errc::kEnvironment, folder, "creating the folder", error.value()));
    }
    const FileSizeSignalGuard guard;
    auto file = AtomicFile::create(folder + "/" + key.file_name);
    if (!file) return tl::unexpected(std::move(file.error()));
    if (auto status = file->write(0, encode(manifest, key)); !status) return status;
    if (auto status = file->commit(true); !status) return status;
    evict_oldest(folder);
    return {};
}

}  // namespace

std::optional<Manifest> cached_manifest(const Model& model, const std::string& cache_dir) {
    const std::string folder = cache_folder(cache_dir);
    const auto key = make_key(model);
    if (!key || folder.empty()) return std::nullopt;
    return load(folder, *key, model);
}

Result<Manifest> load_or_compute_manifest(const Model& model, const std::string& cache_dir,
                                          const Progress& progress) {
    const std::string folder = cache_folder(cache_dir);
    const auto key = make_key(model);
    if (!key) return tl::unexpected(key.error());
    if (!folder.empty()) {
        if (auto cached = load(folder, *key, model)) return std::move(*cached);
    }
    auto manifest = compute_manifest(model, {.threads = 0, .progress = progress});
    if (!manifest) return manifest;
    const auto key_now = make_key(model);
    if (!key_now) return tl::unexpected(key_now.error());
    if (key_now->record != key->record) {
        return fail(Errc::kBadInput, printable(model.shards.front().path) +
                                         ": the model was written to while it was being read; run "
                                         "again when nothing changes it");
    }
    if (auto status = store(folder, *key, *manifest); !status) {
        log(LogLevel::kWarn, "moe",
            "the manifest is not cached, so the next run reads the whole model again: " +
                status.error().detail);
    }
    return manifest;
}

}  // namespace kvasir::moe
