// ByteReader / ByteWriter: little-endian fields over a span, bounds-checked in every build.
//
// Used by every decoder and encoder (wire frames, programs, GGUF headers). A reader that runs past
// the end becomes failed() and returns zeros from then on, so a decoder may read all its fields and
// check once. Thread: values. Owns: the reader nothing, the writer its buffer.
// Limits: lengths are 64-bit; nothing is allocated from a length that was read.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

namespace kvasir {

class ByteReader {
public:
    explicit ByteReader(std::span<const uint8_t> data) : data_(data) {}

    uint8_t u8() { return read<uint8_t>(); }
    uint16_t u16() { return read<uint16_t>(); }
    uint32_t u32() { return read<uint32_t>(); }
    uint64_t u64() { return read<uint64_t>(); }
    int32_t i32() { return static_cast<int32_t>(read<uint32_t>()); }
    float f32() { return std::bit_cast<float>(read<uint32_t>()); }

    // A view of the next `count` bytes; empty and failed() if fewer remain.
    std::span<const uint8_t> bytes(uint64_t count) {
        if (failed_ || count > remaining()) {
            failed_ = true;
            return {};
        }
        auto view = data_.subspan(position_, static_cast<size_t>(count));
        position_ += static_cast<size_t>(count);
        return view;
    }
    std::string_view text(uint64_t count) {
        auto view = bytes(count);
        return {reinterpret_cast<const char*>(view.data()), view.size()};
    }

    size_t position() const { return position_; }
    size_t remaining() const { return data_.size() - position_; }
    bool failed() const { return failed_; }
    // True when everything was read and nothing was missing.
    bool finished() const { return !failed_ && remaining() == 0; }

private:
    template <class T>
    T read() {
        static_assert(std::is_unsigned_v<T>);
        auto view = bytes(sizeof(T));
        if (view.size() != sizeof(T)) return 0;
        T value = 0;
        for (size_t i = 0; i < sizeof(T); ++i) {
            value = static_cast<T>(value | (static_cast<T>(view[i]) << (8 * i)));
        }
        return value;
    }

    std::span<const uint8_t> data_;
    size_t position_ = 0;
    bool failed_ = false;
};

class ByteWriter {
public:
    void u8(uint8_t value) { write(value); }
    void u16(uint16_t value) { write(value); }
    void u32(uint32_t value) { write(value); }
    void u64(uint64_t value) { write(value); }
    void i32(int32_t value) { write(static_cast<uint32_t>(value)); }
    void f32(float value) { write(std::bit_cast<uint32_t>(value)); }
    void bytes(std::span<const uint8_t> data) {
        data_.insert(data_.end(), data.begin(), data.end());
    }
    void text(std::string_view data) { data_.insert(data_.end(), data.begin(), data.end()); }
    // Appends `count` bytes and returns them for filling in place.
    std::span<uint8_t> reserve(size_t count) {
        data_.resize(data_.size() + count);
        return std::span<uint8_t>(data_).last(count);
    }

    size_t size() const { return data_.size(); }
    void clear() { data_.clear(); }
    const std::vector<uint8_t>& data() const { return data_; }
    std::vector<uint8_t> take() { return std::move(data_); }

private:
    template <class T>
    void write(T value) {
        for (size_t i = 0; i < sizeof(T); ++i) {
            data_.push_back(static_cast<uint8_t>(value >> (8 * i)));
        }
    }

    std::vector<uint8_t> data_;
};

}  // namespace kvasir
