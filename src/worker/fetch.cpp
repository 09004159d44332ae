#include "worker/fetch.hpp"

#include <algorithm>
#include <cerrno>
#include <map>
#include <memory>
#include <span>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.hpp"
#include "base/log.hpp"
#include "crypto/hash.hpp"
#include "moe/file.hpp"

namespace kvasir::worker {
namespace {

constexpr uint64_t kExcuseBytes = uint64_t{256} << 10;  // of wrong slabs, besides 1 %

tl::unexpected<Error> system_failure(const std::string& path, std::string_view doing, int number) {
    return tl::unexpected(moe::system_error(moe::write_errc(number), path, doing, number));
}

std::string describe(const moe::SliceSlab& slab) {
    return "layer " + to_string(slab.expert.layer) + ", expert " +
           std::to_string(slab.expert.index) + ", tensor " + std::to_string(slab.tensor);
}

// ---- the part ----

class PartFile {
public:
    static Result<PartFile> open(const std::string& final_path);

    const std::string& path() const { return path_; }
    bool was_there() const { return was_there_; }
    // The size, with its blocks where the file system can promise them.
    Status allocate(uint64_t bytes);
    Status write(uint64_t offset, std::span<const uint8_t> data) {
        return moe::write_exactly(fd_.get(), path_, offset, data);
    }
    Status read(uint64_t offset, std::span<uint8_t> out) const {
        return moe::read_exactly(fd_.get(), path_, offset, out);
    }
    void begin_writeback(uint64_t offset, uint64_t bytes) const {
        ::sync_file_range(fd_.get(), static_cast<off_t>(offset), static_cast<off_t>(bytes),
                          SYNC_FILE_RANGE_WRITE);
    }
    Status sync();
    Status rename();
    // Nothing in it is worth keeping.
    void remove() const { ::unlink(path_.c_str()); }

private:
    PartFile(moe::Fd fd, std::string final_path, std::string path, bool was_there)
        : fd_(std::move(fd)),
          final_path_(std::move(final_path)),
          path_(std::move(path)),
          was_there_(was_there) {}

    moe::Fd fd_;
    std::string final_path_;
    std::string path_;
    bool was_there_ = false;
};

// A slice under its final name becomes the part again: whoever finds the name finds a whole slice.
Result<PartFile> PartFile::open(const std::string& final_path) {
    std::string path = final_path + ".part";
    struct stat info = {};
    if (::lstat(final_path.c_str(), &info) == 0 &&
        ::rename(final_path.c_str(), path.c_str()) != 0) {
        return system_failure(final_path, "renaming", errno);
    }
    const bool was_there = ::lstat(path.c_str(), &info) == 0 && info.st_size > 0;
    moe::Fd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (!fd.is_open()) return system_failure(path, "opening", errno);
    if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0)
        return fail(Errc::kBusy, printable(path) + ": another process writes this slice");
    return PartFile(std::move(fd), final_path, std::move(path), was_there);
}

Status PartFile::allocate(uint64_t bytes) {
    if (::ftruncate(fd_.get(), static_cast<off_t>(bytes)) != 0)
        return system_failure(path_, "making room", errno);
    int number = 0;
    do {
        number = ::fallocate(fd_.get(), 0, 0, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
    } while (number == EINTR);
    if (number == 0 || number == EOPNOTSUPP || number == ENOSYS || number == EINVAL) return {};
    return system_failure(path_, "making room", number);
}

// What sync() said is not on the disk may still be in the cache, from where check_part() would take
// it for good: the next reader is to get what the disk has.
Status PartFile::sync() {
    int failed = 0;
    do failed = ::fsync(fd_.get());
    while (failed != 0 && errno == EINTR);
    if (failed == 0) return {};
    const int number = errno;
    ::posix_fadvise(fd_.get(), 0, 0, POSIX_FADV_DONTNEED);
    return system_failure(path_, "syncing", number);
}

Status PartFile::rename() {
    if (::rename(path_.c_str(), final_path_.c_str()) != 0)
        return system_failure(path_, "renaming", errno);
    const size_t slash = final_path_.rfind('/');
    const std::string folder = slash == std::string::npos ? "." : final_path_.substr(0, slash);
    const moe::Fd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    // Some file systems cannot sync a folder.
    if (!fd.is_open() || (::fsync(fd.get()) != 0 && errno != EINVAL))
        return system_failure(folder, "syncing", errno);
    return {};
}

// ---- one fetch ----

class Fetch {
public:
    Fetch(net::HttpClient& http, const moe::SlicePlan& plan, const FetchTarget& target,
          const FetchOptions& options)
        : http_(http),
          plan_(plan),
          target_(target),
          options_(options),
          done_(plan.slabs.size(), false),
          buffer_(kFetchBufferBytes) {}

    Result<FetchReport> run();

private:
    // A slab under way of one job.
    struct Cursor {
        size_t slab = 0;
        uint64_t bytes = 0;  // of it, so far
        crypto::Hasher hasher;
    };

    bool is_whole(const std::string& path);
    Status prepare();
    Status check_part();
    Status copy_slabs();
    Result<bool> copy_slab(size_t index, const SlabSource& source, int fd);
    Status download();
    std::vector<net::RangeJob> missing_jobs() const;
    Status on_data(const net::RangeJob& job, std::span<const uint8_t> data);
    Status end_of_slab(Cursor& cursor);
    // Hashes a slab of the file; nullopt when it cannot be read.
    template <class Read>
    Result<Sha256> hash_slab(const moe::SliceSlab& slab, Read read);
    void mark(size_t index);
    Status pause();
    void step(FetchStep step) const {
        if (options_.on_step) options_.on_step(step);
    }

    net::HttpClient& http_;
    const moe::SlicePlan& plan_;
    const FetchTarget& target_;
    const FetchOptions& options_;
    std::vector<bool> done_;  // by slab
    std::vector<uint8_t> buffer_;
    std::unique_ptr<PartFile> part_;
    std::map<uint64_t, Cursor> cursors_;  // by job tag
    uint64_t bytes_missing_ = 0;          // before the download
    uint64_t bytes_wrong_ = 0;
    std::string wrong_;  // the first wrong slab of a round
    FetchReport report_;
};

Status Fetch::pause() {
    if (options_.on_piece) options_.on_piece();
    if (options_.cancelled != nullptr && options_.cancelled->load())
        return fail(Errc::kClosed, "stopped while the slice was fetched");
    return {};
}

void Fetch::mark(size_t index) {
    done_[index] = true;
    if (options_.on_slab) options_.on_slab(plan_.slabs[index]);
}

template <class Read>
Result<Sha256> Fetch::hash_slab(const moe::SliceSlab& slab, Read read) {
    crypto::Hasher hasher;
    for (uint64_t at = 0; at < slab.bytes; at += buffer_.size()) {
        const auto size = std::min<uint64_t>(buffer_.size(), slab.bytes - at);
        const auto piece = std::span<uint8_t>(buffer_).first(size);
        if (Status ok = read(at, piece); !ok) return tl::unexpected(ok.error());
        hasher.update(piece);
        if (Status ok = pause(); !ok) return tl::unexpected(ok.error());
    }
    return hasher.finish();
}

// Every byte of the file under its final name: header, slabs, zeros between them, length.
bool Fetch::is_whole(const std::string& path) {
    auto fd = moe::open_for_reading(path);
    struct stat info = {};
    if (!fd || ::fstat(fd->get(), &info) != 0 ||
        static_cast<uint64_t>(info.st_size) != plan_.file_bytes)
        return false;
    const auto same = [&](uint64_t offset, std::span<const uint8_t> want) {
        std::vector<uint8_t> got(want.size());
        return moe::read_exactly(fd->get(), path, offset, got) && std::ranges::equal(got, want);
    };
    if (!same(0, plan_.header)) return false;
    uint64_t at = plan_.header.size();
    for (const moe::SliceSlab& slab : plan_.slabs) {
        if (!same(at, std::vector<uint8_t>(slab.to - at))) return false;
        const auto digest = hash_slab(slab, [&](uint64_t offset, std::span<uint8_t> out) {
            return moe::read_exactly(fd->get(), path, slab.to + offset, out);
        });
        if (!digest || *digest != slab.digest) return false;
        at = slab.to + slab.bytes;
    }
    return same(at, std::vector<uint8_t>(plan_.file_bytes - at));
}

Status Fetch::prepare() {
    auto part = PartFile::open(target_.path);
    if (!part) return tl::unexpected(part.error());
    part_ = std::make_unique<PartFile>(std::move(*part));
    if (Status ok = part_->allocate(plan_.file_bytes); !ok) {
        // A full disk is not to be filled further by what was allocated before it was full.
        if (!part_->was_there()) part_->remove();
        return ok;
    }
    step(FetchStep::kOpened);
    if (Status ok = part_->write(0, plan_.header); !ok) return ok;
    // What lies between slabs is zero, also in a damaged slice that became a part again.
    uint64_t at = plan_.header.size();
    for (size_t i = 0; i <= plan_.slabs.size(); ++i) {
        const uint64_t next = i < plan_.slabs.size() ? plan_.slabs[i].to : plan_.file_bytes;
        KVASIR_CHECK(next >= at);
        if (next > at) {
            if (Status ok = part_->write(at, std::vector<uint8_t>(next - at)); !ok) return ok;
        }
        if (i < plan_.slabs.size()) at = next + plan_.slabs[i].bytes;
    }
    step(FetchStep::kHeaderWritten);
    return {};
}

Status Fetch::check_part() {
    if (!part_->was_there()) return {};
    for (size_t i = 0; i < plan_.slabs.size(); ++i) {
        const moe::SliceSlab& slab = plan_.slabs[i];
        auto digest = hash_slab(slab, [&](uint64_t offset, std::span<uint8_t> out) {
            return part_->read(slab.to + offset, out);
        });
        if (!digest) return tl::unexpected(digest.error());
        if (*digest != slab.digest) continue;
        report_.bytes_found += slab.bytes;
        mark(i);
    }
    return {};
}

Status Fetch::copy_slabs() {
    std::vector<moe::Fd> files(target_.donors.paths.size());
    for (size_t i = 0; i < files.size(); ++i) {
        if (auto fd = moe::open_for_reading(target_.donors.paths[i])) files[i] = std::move(*fd);
    }
    for (size_t i = 0; i < plan_.slabs.size(); ++i) {
        if (done_[i]) continue;
        const SlabSource* source = target_.donors.find(plan_.slabs[i].digest);
        if (source == nullptr || !files[source->file].is_open()) continue;
        auto copied = copy_slab(i, *source, files[source->file].get());
        if (!copied) return tl::unexpected(copied.error());
        if (!*copied) continue;
        report_.bytes_copied += plan_.slabs[i].bytes;
        mark(i);
        step(FetchStep::kSlabWritten);
    }
    return {};
}

// False: the donor's bytes are damaged, cut off or gone.
Result<bool> Fetch::copy_slab(size_t index, const SlabSource& source, int fd) {
    const moe::SliceSlab& slab = plan_.slabs[index];
    const std::string& path = target_.donors.paths[source.file];
    bool is_readable = true;
    const auto digest = hash_slab(slab, [&](uint64_t offset, std::span<uint8_t> out) -> Status {
        if (Status ok = moe::read_exactly(fd, path, source.offset + offset, out); !ok) {
            is_readable = false;
            return ok;
        }
        return part_->write(slab.to + offset, out);
    });
    if (!digest && !is_readable) return false;
    if (!digest) return tl::unexpected(digest.error());
    return *digest == slab.digest;
}

// Neighbouring missing slabs of a range are one job; the tag is the first one's index.
std::vector<net::RangeJob> Fetch::missing_jobs() const {
    std::vector<net::RangeJob> jobs;
    size_t slab = 0;
    for (const moe::SliceRange& range : plan_.ranges) {
        net::RangeJob* open = nullptr;
        for (; slab < plan_.slabs.size() && plan_.slabs[slab].to < range.to + range.bytes; ++slab) {
            const moe::SliceSlab& next = plan_.slabs[slab];
            if (done_[slab]) {
                open = nullptr;
                continue;
            }
            if (open != nullptr) {
                open->bytes += next.bytes;
                continue;
            }
            net::RangeJob job;
            job.url = target_.shards[range.shard].url;
            job.secret_headers = target_.secret_headers;
            job.offset = range.from + (next.to - range.to);
            job.bytes = next.bytes;
            job.file_bytes = target_.shards[range.shard].file_bytes;
            job.tag = slab;
            jobs.push_back(std::move(job));
            open = &jobs.back();
        }
    }
    return jobs;
}

Status Fetch::end_of_slab(Cursor& cursor) {
    const moe::SliceSlab& slab = plan_.slabs[cursor.slab];
    if (cursor.hasher.finish() == slab.digest) {
        report_.bytes_fetched += slab.bytes;
        part_->begin_writeback(slab.to, slab.bytes);
        mark(cursor.slab);
        step(FetchStep::kSlabWritten);
    } else {
        ++report_.slabs_wrong;
        bytes_wrong_ += slab.bytes;
        if (wrong_.empty()) wrong_ = describe(slab);
        // Pulling on would be more than the leases and a hundredth.
        if (bytes_wrong_ > bytes_missing_ / 100 + kExcuseBytes) {
            return fail(Errc::kMismatch,
                        printable(target_.path) + ": the bytes that came for " + wrong_ +
                            (report_.slabs_wrong > 1
                                 ? " and " + std::to_string(report_.slabs_wrong - 1) + " more"
                                 : std::string()) +
                            " are not those of the model: the file at the origin was changed, or "
                            "the origin is broken");
        }
    }
    ++cursor.slab;
    cursor.bytes = 0;
    return {};
}

Status Fetch::on_data(const net::RangeJob& job, std::span<const uint8_t> data) {
    Cursor& cursor = cursors_[job.tag];
    while (!data.empty()) {
        KVASIR_CHECK(cursor.slab < plan_.slabs.size());
        const moe::SliceSlab& slab = plan_.slabs[cursor.slab];
        const auto size = std::min<uint64_t>(data.size(), slab.bytes - cursor.bytes);
        const auto piece = data.first(size);
        if (Status ok = part_->write(slab.to + cursor.bytes, piece); !ok) return ok;
        cursor.hasher.update(piece);
        cursor.bytes += size;
        data = data.subspan(size);
        if (cursor.bytes < slab.bytes) continue;
        if (Status ok = end_of_slab(cursor); !ok) return ok;
    }
    return pause();
}

Status Fetch::download() {
    for (size_t i = 0; i < plan_.slabs.size(); ++i) {
        if (!done_[i]) bytes_missing_ += plan_.slabs[i].bytes;
    }
    const uint64_t pulled_before = http_.counters().bytes_pulled;
    Status ok;
    for (int round = 0; ok && round <= kRefetchRounds; ++round) {
        auto jobs = missing_jobs();
        if (jobs.empty()) break;
        cursors_.clear();
        for (const net::RangeJob& job : jobs) cursors_[job.tag].slab = job.tag;
        report_.ranges += jobs.size();
        ok = http_.download(
            std::move(jobs), options_.ranges,
            [this](const net::RangeJob& job, uint64_t, std::span<const uint8_t> data) {
                return on_data(job, data);
            },
            [](const net::RangeJob&) { return Status(); });
    }
    report_.bytes_pulled = http_.counters().bytes_pulled - pulled_before;
    if (!ok) return ok;
    if (std::ranges::find(done_, false) == done_.end()) return {};
    return fail(Errc::kMismatch,
                printable(target_.path) + ": " + wrong_ +
                    " came with wrong bytes again and again: the origin is broken");
}

Result<FetchReport> Fetch::run() {
    const moe::FileSizeSignalGuard guard;
    struct stat info = {};
    if (::lstat(target_.path.c_str(), &info) == 0) {
        if (is_whole(target_.path)) {
            for (size_t i = 0; i < plan_.slabs.size(); ++i) mark(i);
            report_.bytes_found = plan_.bytes_slabs;
            return report_;
        }
        if (Status ok = pause(); !ok) return tl::unexpected(ok.error());
        log(LogLevel::kWarn, "worker",
            printable(target_.path) + ": the cached slice is damaged; mending it");
    }
    if (Status ok = prepare(); !ok) return tl::unexpected(ok.error());
    if (Status ok = check_part(); !ok) return tl::unexpected(ok.error());
    if (Status ok = copy_slabs(); !ok) return tl::unexpected(ok.error());
    if (Status ok = download(); !ok) return tl::unexpected(ok.error());
    if (Status ok = part_->sync(); !ok) return tl::unexpected(ok.error());
    step(FetchStep::kSynced);
    if (Status ok = part_->rename(); !ok) return tl::unexpected(ok.error());
    step(FetchStep::kRenamed);
    return report_;
}

}  // namespace

Result<FetchReport> fetch_slice(net::HttpClient& http, const moe::SlicePlan& plan,
                                const FetchTarget& target, const FetchOptions& options) {
    for (const moe::SliceRange& range : plan.ranges) {
        if (range.shard >= target.shards.size())
            return fail(Errc::kUsage, "the plan names a shard that the target does not have");
    }
    return Fetch(http, plan, target, options).run();
}

}  // namespace kvasir::worker
