// SendBuffer: bytes that the kernel did not take yet, in the order they go out.
//
// Used by MessageStream. Large appends get a chunk of exactly their size, small ones share one, so
// the memory is what is unsent plus at most one chunk; nothing is moved when bytes leave at the
// front. Thread: not thread-safe. Owns: its chunks. Limits: the caller's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include <sys/uio.h>

namespace kvasir::net {

class SendBuffer {
public:
    bool empty() const { return bytes_ == 0; }
    uint64_t size() const { return bytes_; }

    void append(std::span<const uint8_t> data) {
        if (data.empty()) return;
        if (chunks_.empty() || chunks_.back().capacity() - chunks_.back().size() < data.size()) {
            chunks_.emplace_back().reserve(std::max(data.size(), kChunkBytesMin));
        }
        chunks_.back().insert(chunks_.back().end(), data.begin(), data.end());
        bytes_ += data.size();
    }

    // Fills `out` with what goes next; returns how many entries.
    size_t gather(std::span<iovec> out) const {
        size_t count = 0;
        size_t skip = head_;
        for (const auto& chunk : chunks_) {
            if (count == out.size()) break;
            out[count].iov_base = const_cast<uint8_t*>(chunk.data()) + skip;
            out[count].iov_len = chunk.size() - skip;
            ++count;
            skip = 0;
        }
        return count;
    }

    void consume(uint64_t count) {
        bytes_ -= count;
        while (count != 0) {
            const uint64_t here = std::min<uint64_t>(count, chunks_.front().size() - head_);
            head_ += here;
            count -= here;
            if (head_ == chunks_.front().size()) {
                chunks_.pop_front();
                head_ = 0;
            }
        }
    }

    void clear() {
        chunks_.clear();
        head_ = 0;
        bytes_ = 0;
    }

private:
    static constexpr size_t kChunkBytesMin = 4096;

    std::deque<std::vector<uint8_t>> chunks_;
    size_t head_ = 0;     // bytes of the first chunk that are gone
    uint64_t bytes_ = 0;  // unsent
};

}  // namespace kvasir::net
