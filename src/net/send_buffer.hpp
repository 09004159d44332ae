// SendBuffer: bytes that the kernel did not take yet, in the order they go out.
//
// Used by MessageStream. Large appends get a chunk of exactly their size, small ones share one, and
// whole blocks can be taken over, so the memory is what is unsent plus at most one chunk (and what
// else is in a block); nothing is moved when bytes leave at the front. Thread: not thread-safe.
// Owns: its chunks. Limits: the caller's.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <span>
#include <utility>

#include "net/block.hpp"

namespace kvasir::net {

class SendBuffer {
public:
    bool empty() const { return bytes_ == 0; }
    uint64_t size() const { return bytes_; }

    // A copy. False: no memory, nothing is appended.
    [[nodiscard]] bool append(std::span<const uint8_t> data) {
        if (data.empty()) return true;
        if (chunks_.empty() || chunks_.back().capacity - chunks_.back().end < data.size()) {
            const size_t capacity = std::max(data.size(), kChunkBytesMin);
            Block block = allocate_block(capacity);
            if (!block) return false;
            chunks_.push_back({std::move(block), 0, 0, capacity});
        }
        Chunk& chunk = chunks_.back();
        std::memcpy(chunk.data.get() + chunk.end, data.data(), data.size());
        chunk.end += data.size();
        bytes_ += data.size();
        return true;
    }

    // `data`, which lies in `block`, without a copy.
    void append(std::span<const uint8_t> data, Block block) {
        if (data.empty()) return;
        const auto begin = static_cast<size_t>(data.data() - block.get());
        const size_t end = begin + data.size();
        chunks_.push_back({std::move(block), begin, end, end});
        bytes_ += data.size();
    }

    // Fills `out` with what goes next; returns how many entries.
    size_t gather(std::span<iovec> out) const {
        const size_t count = std::min(out.size(), chunks_.size());
        for (size_t i = 0; i < count; ++i) {
            out[i] = {chunks_[i].data.get() + chunks_[i].begin, chunks_[i].end - chunks_[i].begin};
        }
        return count;
    }

    void consume(uint64_t count) {
        bytes_ -= count;
        while (count != 0) {
            Chunk& first = chunks_.front();
            const uint64_t here = std::min<uint64_t>(count, first.end - first.begin);
            first.begin += here;
            count -= here;
            if (first.begin == first.end) chunks_.pop_front();
        }
    }

    void clear() {
        chunks_.clear();
        bytes_ = 0;
    }

private:
    static constexpr size_t kChunkBytesMin = 4096;

    struct Chunk {
        Block data;
        size_t begin = 0, end = 0;  // unsent
        size_t capacity = 0;        // up to where append() may write
    };

    std::deque<Chunk> chunks_;
    uint64_t bytes_ = 0;  // unsent
};

}  // namespace kvasir::net
