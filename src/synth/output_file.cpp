#include "synth/output_file.hpp"

#include <algorithm>
#include <utility>

#include "base/check.hpp"

namespace kvasir::synth {
namespace {

constexpr size_t kBufferBytes = 4 << 20;

}  // namespace

Result<OutputFile> OutputFile::create(const std::string& path) {
    auto file = moe::AtomicFile::create(path);
    if (!file) return tl::unexpected(std::move(file.error()));
    return OutputFile(std::move(*file));
}

OutputFile::OutputFile(moe::AtomicFile file) : file_(std::move(file)) {
    buffer_.reserve(kBufferBytes);
}

Status OutputFile::flush() {
    if (auto ok = file_.write(offset_ - buffer_.size(), buffer_); !ok) return ok;
    buffer_.clear();
    return {};
}

Status OutputFile::write(std::span<const uint8_t> data) {
    while (!data.empty()) {
        const size_t count = std::min(data.size(), kBufferBytes - buffer_.size());
        buffer_.insert(buffer_.end(), data.begin(), data.begin() + static_cast<ptrdiff_t>(count));
        offset_ += count;
        data = data.subspan(count);
        if (buffer_.size() < kBufferBytes) continue;
        if (auto ok = flush(); !ok) return ok;
    }
    return {};
}

Status OutputFile::pad_to(uint64_t offset, uint8_t value) {
    KVASIR_CHECK(offset >= offset_);
    const std::vector<uint8_t> padding(static_cast<size_t>(offset - offset_), value);
    return write(padding);
}

Status OutputFile::leave_hole_to(uint64_t bytes) {
    KVASIR_CHECK(bytes >= offset_);
    if (auto ok = flush(); !ok) return ok;
    if (auto ok = file_.resize(bytes); !ok) return ok;
    offset_ = bytes;
    return {};
}

Status OutputFile::finish(bool sync) {
    if (auto ok = flush(); !ok) return ok;
    buffer_ = {};
    return file_.close(sync);
}

}  // namespace kvasir::synth
