#include "moe/hash_ranges.hpp"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <tuple>

#include <fcntl.h>
#include <unistd.h>
#include <cerrno>

#include "crypto/hash.hpp"
#include "moe/file.hpp"

namespace kvasir::moe {
namespace {

constexpr uint64_t kProgressStepBytes = uint64_t{32} << 20;

// Pages of a model that cannot stay in memory anyway would push out those that others still use.
bool larger_than_half_of_memory(const Model& model) {
    const long pages = ::sysconf(_SC_PHYS_PAGES);
    const long page_bytes = ::sysconf(_SC_PAGESIZE);
    if (pages <= 0 || page_bytes <= 0) return false;
    const auto memory = static_cast<uint64_t>(pages) * static_cast<uint64_t>(page_bytes);
    return model.bytes_total() > memory / 2;
}

// What the threads of one call share.
struct Work {
    // Constant after construction
    const Model& model;
    const std::vector<HashRange>& ranges;
    const HashOptions& options;
    uint64_t bytes_total = 0;
    bool drop_behind = false;

    std::atomic<size_t> next = 0;
    std::atomic<bool> stop = false;

    std::mutex mu;
    // Guarded by mu
    uint64_t bytes_done = 0;
    uint64_t bytes_reported = 0;
    std::optional<Error> error;
    std::map<uint64_t, Sha256> zeros;  // by length

    void add_done(uint64_t bytes) {
        const std::lock_guard lock(mu);
        bytes_done += bytes;
        if (!options.progress) return;
        if (bytes_done == bytes_total || bytes_done - bytes_reported >= kProgressStepBytes) {
            bytes_reported = bytes_done;
            options.progress(bytes_done, bytes_total);
        }
    }
    void set_error(Error failure) {
        const std::lock_guard lock(mu);
        if (!error) error = std::move(failure);
        stop = true;
    }
};

class Worker {
public:
    explicit Worker(Work& work)
        : work_(work), buffer_(std::make_unique_for_overwrite<uint8_t[]>(kHashBufferBytes)) {}

    void run() {
        while (!stopped()) {
            const size_t index = work_.next++;
            if (index >= work_.ranges.size()) return;
            if (auto status = hash(work_.ranges[index]); !status) {
                work_.set_error(std::move(status.error()));
            }
        }
    }

private:
    bool stopped() const {
        return work_.stop || (work_.options.cancelled != nullptr && *work_.options.cancelled);
    }

    Status open(uint32_t shard) {
        if (fd_.is_open() && shard_ == shard) return {};
        const GgufHeader& header = work_.model.shards[shard];
        auto fd = open_unchanged(header.path, header.file_bytes);
        if (!fd) return tl::unexpected(fd.error());
        (void)::posix_fadvise(fd->get(), 0, 0, POSIX_FADV_SEQUENTIAL);
        fd_ = std::move(*fd);
        shard_ = shard;
        return {};
    }

    Status hash(const HashRange& range) {
        if (auto status = open(range.shard); !status) return status;
        const uint64_t hole = leading_hole(range);
        if (hole == range.bytes) {
            *range.digest = digest_of_zeros(range.bytes);
            work_.add_done(range.bytes);
            return {};
        }
        update_zeros(hole);
        uint64_t done = hole;
        work_.add_done(hole);
        while (done < range.bytes && !stopped()) {
            const auto step =
                static_cast<size_t>(std::min<uint64_t>(range.bytes - done, kHashBufferBytes));
            const std::span<uint8_t> piece(buffer_.get(), step);
            const uint64_t offset = range.offset + done;
            auto status = read_exactly(fd_.get(), work_.model.shards[shard_].path, offset, piece);
            if (!status) return status;
            hasher_.update(piece);
            if (work_.drop_behind) {
                (void)::posix_fadvise(fd_.get(), static_cast<off_t>(offset),
                                      static_cast<off_t>(step), POSIX_FADV_DONTNEED);
            }
            done += step;
            work_.add_done(step);
        }
        *range.digest = hasher_.finish();
        return {};
    }

    // How many bytes at the start of the range the file system knows never to have been written.
    uint64_t leading_hole(const HashRange& range) const {
        const off_t data = ::lseek(fd_.get(), static_cast<off_t>(range.offset), SEEK_DATA);
        // ENXIO: no data from here to the end of the file. Anything else: no knowledge of holes.
        if (data < 0) return errno == ENXIO ? range.bytes : 0;
        return std::min(static_cast<uint64_t>(data) - range.offset, range.bytes);
    }

    void update_zeros(uint64_t bytes) {
        if (bytes == 0) return;
        std::fill_n(buffer_.get(), kHashBufferBytes, uint8_t{0});
        while (bytes > 0 && !stopped()) {
            const auto step = static_cast<size_t>(std::min<uint64_t>(bytes, kHashBufferBytes));
            hasher_.update({buffer_.get(), step});
            bytes -= step;
        }
    }

    Sha256 digest_of_zeros(uint64_t bytes) {
        {
            const std::lock_guard lock(work_.mu);
            if (auto known = work_.zeros.find(bytes); known != work_.zeros.end()) {
                return known->second;
            }
        }
        update_zeros(bytes);
        const Sha256 digest = hasher_.finish();
        const std::lock_guard lock(work_.mu);
        if (!stopped()) work_.zeros[bytes] = digest;
        return digest;
    }

    Work& work_;
    std::unique_ptr<uint8_t[]> buffer_;
    crypto::Hasher hasher_;
    Fd fd_;
    uint32_t shard_ = 0;
};

}  // namespace

Status hash_ranges(const Model& model, std::vector<HashRange> ranges, const HashOptions& options) {
    std::sort(ranges.begin(), ranges.end(), [](const HashRange& a, const HashRange& b) {
        return std::tie(a.shard, a.offset, a.bytes) < std::tie(b.shard, b.offset, b.bytes);
    });
    Work work{
        .model = model, .ranges = ranges, .options = options, .mu = {}, .error = {}, .zeros = {}};
    for (const HashRange& range : ranges) work.bytes_total += range.bytes;
    work.drop_behind = larger_than_half_of_memory(model);

    unsigned threads = options.threads;
    if (threads == 0) threads = std::max(1u, std::thread::hardware_concurrency() / 2);
    threads = std::min(
        {threads, kHashThreadsMax, static_cast<unsigned>(std::max<size_t>(1, ranges.size()))});
    std::vector<std::thread> others;
    for (unsigned i = 1; i < threads; ++i) others.emplace_back([&work] { Worker(work).run(); });
    Worker(work).run();
    for (std::thread& thread : others) thread.join();
    if (work.error) return tl::unexpected(std::move(*work.error));
    if (options.cancelled != nullptr && *options.cancelled) {
        return fail(Errc::kClosed, "hashing was cancelled");
    }
    return {};
}

}  // namespace kvasir::moe
