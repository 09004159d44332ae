// Fuzz target: what an origin answers to a request for a range.
//
// Input: 8 bytes offset, 4 bytes length, 8 bytes size of the file (little-endian; 0: not known),
// 2 bytes status, then header lines "name: value\n". Checked: an accepted reply has bytes that were
// asked for, within the file; Content-Range is a range; Retry-After is no more than ten years; a
// version agrees with itself, before and after it has seen another.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>

#include "net/range_reply.hpp"

namespace {

using namespace kvasir;

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "range_reply_fuzz: %s\n", what);
    std::abort();
}

uint64_t number(std::span<const uint8_t>& data, size_t bytes) {
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; ++i) value |= static_cast<uint64_t>(data[i]) << (8 * i);
    data = data.subspan(bytes);
    return value;
}

// As Transfer hands them over: names in lower case, values without outer spaces.
net::HeaderList headers_of(std::string_view text) {
    net::HeaderList out;
    while (!text.empty()) {
        const size_t end = std::min(text.find('\n'), text.size());
        const std::string_view line = text.substr(0, end);
        text.remove_prefix(std::min(end + 1, text.size()));
        const size_t colon = line.find(':');
        if (colon == line.npos) continue;
        std::string name(line.substr(0, colon));
        for (char& c : name) {
            if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
        }
        std::string_view value = line.substr(colon + 1);
        while (value.starts_with(' ')) value.remove_prefix(1);
        while (value.ends_with(' ')) value.remove_suffix(1);
        out.emplace_back(std::move(name), value);
    }
    return out;
}

void check_reply(const net::ReplyHead& head, const net::AskedRange& asked) {
    const auto accepted = net::accept_reply(head, asked);
    if (!accepted) {
        require(!accepted.error().detail.empty(), "an error without words");
        return;
    }
    require(accepted->bytes != 0 && accepted->bytes <= asked.bytes, "bytes nobody asked for");
    const uint64_t size = accepted->file_bytes;
    require(asked.file_bytes == 0 || size == asked.file_bytes, "the size has changed");
    require(size == 0 || asked.offset + accepted->bytes <= size, "bytes behind the end");
    require(!accepted->ignores_ranges || asked.offset == 0, "the beginning in place of a part");
    require(net::check_coding(head).has_value(), "a coded body");
}

void check_text(const std::string& text) {
    if (const auto range = net::parse_content_range(text)) {
        require(range->first <= range->last && range->last != UINT64_MAX, "no range");
        require(!range->total || range->last < *range->total, "a range behind the end");
    }
    for (const std::time_t now : {std::time_t{0}, std::time_t{1'800'000'000}}) {
        const auto later = net::parse_retry_after(text, now);
        require(!later || (later->count() >= 0 && *later <= std::chrono::hours(24 * 3650)),
                "Retry-After is no time");
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    std::span<const uint8_t> rest(data, size);
    if (rest.size() < 22) return 0;
    // What RangeDownload lets through: no sum of these wraps, and the part is in the file.
    net::AskedRange asked;
    asked.offset = number(rest, 8) / 2;
    asked.bytes = 1 + number(rest, 4);
    asked.file_bytes = number(rest, 8);
    if (asked.file_bytes != 0) {
        asked.file_bytes = std::max(asked.file_bytes, asked.offset + asked.bytes);
    }
    net::ReplyHead head;
    head.status = static_cast<int>(number(rest, 2));
    head.headers = headers_of({reinterpret_cast<const char*>(rest.data()), rest.size()});

    if (net::classify_status(head.status) == net::ReplyKind::kBytes) check_reply(head, asked);
    for (const auto& [name, value] : head.headers) check_text(value);
    net::Validators seen = net::Validators::of(head);
    const net::Validators same = seen;
    require(seen.agree(same), "a version that is not itself");
    net::ReplyHead other;
    for (size_t i = 0; i + 1 < head.headers.size(); ++i) {
        other.headers.emplace_back(head.headers[i].first, head.headers[i + 1].second);
    }
    if (seen.agree(net::Validators::of(other))) require(seen.agree(same), "forgot what it was");
    return 0;
}
