// Bounded field reading for the GGUF parser: where header bytes come from, and checked reads.
//
// Used by gguf.cpp only. A Source hands out small views of the file; FieldReader checks each
// claimed length against what the file can still hold before it uses it. Thread: values, one owner.
// Owns: the file source a buffer of one chunk, not the descriptor.
// Limits: views of kViewBytesMax, chunks of kChunkBytes, headers of kGgufHeaderBytesMax.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.hpp"
#include "base/log.hpp"
#include "base/result.hpp"
#include "moe/gguf.hpp"

namespace kvasir::moe {

inline constexpr uint64_t kViewBytesMax = 64 << 10;  // largest piece asked of a source at once
inline constexpr size_t kChunkBytes = 256 << 10;     // read from a file at once

// Where header bytes come from. A view is valid until the next call.
class Source {
public:
    virtual ~Source() = default;
    // Exactly `count` <= kViewBytesMax bytes at `offset`, which the caller knows to lie in the
    // file.
    virtual Result<std::span<const uint8_t>> view(uint64_t offset, uint64_t count) = 0;
};

class MemorySource final : public Source {
public:
    explicit MemorySource(std::span<const uint8_t> data) : data_(data) {}
    Result<std::span<const uint8_t>> view(uint64_t offset, uint64_t count) override {
        if (count > data_.size() || offset > data_.size() - count) {
            return fail(Errc::kLimit, "needs more bytes of the file than the " +
                                          std::to_string(data_.size()) + " given");
        }
        return data_.subspan(static_cast<size_t>(offset), static_cast<size_t>(count));
    }

private:
    std::span<const uint8_t> data_;
};

class FileSource final : public Source {
public:
    FileSource(int fd, uint64_t file_bytes) : fd_(fd), file_bytes_(file_bytes) {}
    Result<std::span<const uint8_t>> view(uint64_t offset, uint64_t count) override {
        if (offset < base_ || offset - base_ + count > buffer_.size()) {
            buffer_.resize(
                static_cast<size_t>(std::min<uint64_t>(kChunkBytes, file_bytes_ - offset)));
            base_ = offset;
            size_t done = 0;
            while (done < buffer_.size()) {
                const ssize_t got = pread(fd_, buffer_.data() + done, buffer_.size() - done,
                                          static_cast<off_t>(offset + done));
                if (got < 0 && errno == EINTR) continue;
                if (got < 0) return fail(Errc::kIo, std::string("cannot read: ") + strerror(errno));
                if (got == 0) break;
                done += static_cast<size_t>(got);
            }
            buffer_.resize(done);
            if (count > done) return fail(Errc::kBadInput, "the file shrank while it was read");
        }
        return std::span<const uint8_t>(buffer_).subspan(static_cast<size_t>(offset - base_),
                                                         static_cast<size_t>(count));
    }

private:
    const int fd_;
    const uint64_t file_bytes_;
    uint64_t base_ = 0;
    std::vector<uint8_t> buffer_;
};

// Reads fields in order. The first failure sticks and names file, record and field; from then on
// all reads give zeros, so a record is read whole and checked once.
class FieldReader {
public:
    FieldReader(Source& source, uint64_t file_bytes, const std::string& path)
        : source_(source), file_bytes_(file_bytes), path_(path) {}

    void set_record(std::string record) { record_ = std::move(record); }
    bool ok() const { return !error_; }
    const Error& error() const { return *error_; }
    uint64_t position() const { return position_; }
    uint64_t remaining() const { return file_bytes_ - position_; }

    void refuse(Errc code, const std::string& what) {
        if (error_) return;
        std::string text = printable(path_, 400) + ": ";
        if (!record_.empty()) text += record_ + ": ";
        error_ = Error{code, text + what};
    }

    std::span<const uint8_t> bytes(uint64_t count, std::string_view field) {
        if (!claim(count, field)) return {};
        auto view = source_.view(position_, count);
        if (!view) {
            refuse(view.error().code, std::string(field) + ": " + view.error().detail);
            return {};
        }
        position_ += count;
        return *view;
    }
    uint8_t u8(std::string_view field) { return ByteReader(bytes(1, field)).u8(); }
    uint32_t u32(std::string_view field) { return ByteReader(bytes(4, field)).u32(); }
    uint64_t u64(std::string_view field) { return ByteReader(bytes(8, field)).u64(); }

    void skip(uint64_t count, std::string_view field) {
        if (claim(count, field)) position_ += count;
    }

    // A length-prefixed string of at most `bytes_max` bytes; the memory grows with bytes read.
    std::string text(uint64_t bytes_max, std::string_view field) {
        const uint64_t length = u64(field);
        std::string out;
        if (!ok()) return out;
        if (length > remaining()) {
            refuse_length(length, field);
        } else if (length > bytes_max) {
            refuse(Errc::kLimit, std::string(field) + " has " + std::to_string(length) +
                                     " bytes, more than the " + std::to_string(bytes_max) +
                                     " supported");
        }
        for (uint64_t left = ok() ? length : 0; left > 0 && ok();) {
            const auto piece = bytes(std::min(left, kViewBytesMax), field);
            out.append(reinterpret_cast<const char*>(piece.data()), piece.size());
            left -= piece.size();
        }
        return out;
    }

private:
    void refuse_length(uint64_t count, std::string_view field) {
        refuse(Errc::kBadInput, std::string(field) + " claims " + std::to_string(count) +
                                    " bytes but only " + std::to_string(remaining()) +
                                    " remain in the file (truncated or damaged; fetch it again)");
    }
    bool claim(uint64_t count, std::string_view field) {
        if (error_) return false;
        if (count > remaining()) {
            refuse_length(count, field);
        } else if (position_ + count > kGgufHeaderBytesMax) {
            refuse(Errc::kLimit,
                   "the header is longer than " + std::to_string(kGgufHeaderBytesMax) + " bytes");
        }
        return !error_;
    }

    Source& source_;
    const uint64_t file_bytes_;
    const std::string& path_;
    std::string record_;
    uint64_t position_ = 0;
    std::optional<Error> error_;
};

}  // namespace kvasir::moe
