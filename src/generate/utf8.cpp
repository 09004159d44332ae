#include "generate/utf8.hpp"

#include <algorithm>
#include <utility>

namespace kvasir::generate {
namespace {

// Bytes of a character by its first byte; 0 for a byte that cannot start one of several bytes.
size_t sequence_bytes(unsigned char lead) {
    if (lead >= 0xc2 && lead <= 0xdf) return 2;
    if (lead >= 0xe0 && lead <= 0xef) return 3;
    if (lead >= 0xf0 && lead <= 0xf4) return 4;
    return 0;
}

// The second byte's range depends on the first (no overlong forms, surrogates or code points past
// U+10FFFF).
bool second_byte_fits(unsigned char lead, unsigned char second) {
    unsigned char low = 0x80;
    unsigned char high = 0xbf;
    if (lead == 0xe0) low = 0xa0;
    if (lead == 0xed) high = 0x9f;
    if (lead == 0xf0) low = 0x90;
    if (lead == 0xf4) high = 0x8f;
    return second >= low && second <= high;
}

}  // namespace

size_t unfinished_tail_bytes(std::string_view text) {
    const size_t look_back = std::min<size_t>(3, text.size());
    for (size_t back = 1; back <= look_back; ++back) {
        const auto byte = static_cast<unsigned char>(text[text.size() - back]);
        if (byte >= 0x80 && byte <= 0xbf) continue;  // continuation: look further back
        if (back >= sequence_bytes(byte)) return 0;  // complete, or not a lead byte at all
        if (back >= 2) {
            const auto second = static_cast<unsigned char>(text[text.size() - back + 1]);
            if (!second_byte_fits(byte, second)) return 0;
        }
        return back;
    }
    return 0;
}

std::string Utf8Stream::push(std::string_view bytes) {
    held_.append(bytes);
    const size_t tail = unfinished_tail_bytes(held_);
    std::string out = held_.substr(0, held_.size() - tail);
    held_.erase(0, out.size());
    return out;
}

std::string Utf8Stream::finish() {
    return std::exchange(held_, {});
}

}  // namespace kvasir::generate
