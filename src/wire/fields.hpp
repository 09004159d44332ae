// What the codecs of this module share: writing a frame around a payload, reading fields whose
// first fault becomes the error.
//
// Used by messages.cpp and attach.cpp only. Thread: values. Owns: nothing. Limits: text has at most
// kTextBytesMax bytes.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bytes.hpp"
#include "base/result.hpp"
#include "wire/frame.hpp"
#include "wire/messages.hpp"

namespace kvasir::wire {

// Header in front of a payload that is already written.
inline std::vector<uint8_t> finish(FrameType type, uint32_t request_id, const ByteWriter& payload) {
    ByteWriter out;
    FrameHeader header;
    header.type = type;
    header.request_id = request_id;
    header.payload_bytes = payload.size();
    append_header(out, header);
    out.bytes(payload.data());
    return out.take();
}

// Our own text is cut at the limit rather than refused: it is only for people.
inline void put_text(ByteWriter& out, std::string_view text) {
    text = text.substr(0, kTextBytesMax);
    out.u16(static_cast<uint16_t>(text.size()));
    out.text(text);
}

// Reads the fields of one payload; the first thing that is wrong becomes the error.
class FieldReader {
public:
    FieldReader(std::string_view message, std::span<const uint8_t> payload)
        : message_(message), in_(payload) {}

    uint8_t u8(std::string_view field) { return take(field, in_.u8()); }
    uint16_t u16(std::string_view field) { return take(field, in_.u16()); }
    uint32_t u32(std::string_view field) { return take(field, in_.u32()); }
    uint64_t u64(std::string_view field) { return take(field, in_.u64()); }

    std::string text(std::string_view field) {
        const uint16_t size = u16(field);
        if (size > kTextBytesMax) {
            over_limit(field, size, kTextBytesMax);
            return {};
        }
        return std::string(take(field, in_.text(size)));
    }
    template <size_t N>
    std::array<uint8_t, N> array(std::string_view field) {
        std::array<uint8_t, N> value = {};
        const auto view = bytes(field, N);
        std::copy(view.begin(), view.end(), value.begin());
        return value;
    }
    std::span<const uint8_t> bytes(std::string_view field, uint64_t count) {
        return take(field, in_.bytes(count));
    }

    uint64_t remaining() const { return in_.remaining(); }
    bool failed() const { return failed_; }
    Error error() && { return std::move(error_); }

    void over_limit(std::string_view field, uint64_t value, uint64_t limit) {
        set(Errc::kLimit, field,
            std::to_string(value) + " is over the limit of " + std::to_string(limit));
    }
    void wrong(std::string_view field, const std::string& what) {
        set(Errc::kProtocol, field, what);
    }
    // A count that must be 1..limit.
    void check_count(std::string_view field, uint64_t value, uint64_t limit) {
        if (value == 0) wrong(field, "must not be 0");
        if (value > limit) over_limit(field, value, limit);
    }
    void check_finished() {
        if (in_.remaining() != 0) {
            wrong("end", std::to_string(in_.remaining()) + " bytes left over");
        }
    }

private:
    template <class T>
    T take(std::string_view field, T value) {
        if (in_.failed()) wrong(field, "the payload ends before it");
        return value;
    }
    void set(Errc code, std::string_view field, const std::string& what) {
        if (failed_) return;
        failed_ = true;
        error_ = Error{code, std::string(message_) + "." + std::string(field) + ": " + what};
    }

    std::string_view message_;
    ByteReader in_;
    bool failed_ = false;
    Error error_;
};

template <class T>
Result<T> done(FieldReader& in, T&& value) {
    if (in.failed()) return tl::unexpected(std::move(in).error());
    return std::forward<T>(value);
}

inline Status check_version(std::string_view message, uint16_t major, uint16_t minor) {
    if (major == kProtocolMajor) return {};
    return fail(Errc::kVersion, std::string(message) + ": the peer speaks protocol " +
                                    std::to_string(major) + "." + std::to_string(minor) +
                                    ", this build speaks " + std::to_string(kProtocolMajor) + "." +
                                    std::to_string(kProtocolMinor) + "; update the older side");
}

}  // namespace kvasir::wire
