// Fuzz target: an outline from the network, then the slice of every expert planned from it.
//
// What is accepted must say the same when it is encoded again, and a plan must stay inside the
// shards and inside the slice, with slabs that cover its ranges exactly: the downloader reads and
// writes where it says.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <vector>

#include "moe/outline.hpp"
#include "moe/segments.hpp"

namespace {

using namespace kvasir;
using namespace kvasir::moe;

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "outline_fuzz: %s\n", what);
    std::abort();
}

void check_plan(const SlicePlan& plan, const Outline& outline) {
    uint64_t end = plan.header.size();
    size_t next = 0;
    uint64_t bytes = 0;
    for (const SliceRange& range : plan.ranges) {
        require(range.shard < outline.model.shards.size(), "shard");
        const uint64_t shard_bytes = outline.model.shards[range.shard].file_bytes;
        require(range.bytes > 0 && range.bytes <= shard_bytes &&
                    range.from <= shard_bytes - range.bytes,
                "a range outside its shard");
        require(range.to >= end, "ranges out of order");
        end = range.to + range.bytes;
        require(end > range.to && end <= plan.file_bytes, "a range outside the slice");
        bytes += range.bytes;
        for (uint64_t at = range.to; at < end; at += plan.slabs[next++].bytes) {
            require(next < plan.slabs.size() && plan.slabs[next].to == at &&
                        plan.slabs[next].bytes > 0 && plan.slabs[next].bytes <= end - at,
                    "slabs do not cover the ranges");
        }
    }
    require(next == plan.slabs.size() && bytes == plan.bytes_slabs, "slabs left over");
    const auto header = parse_gguf_header(plan.header, plan.file_bytes, "plan");
    require(header.has_value(), "a header that our reader refuses");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const std::span<const uint8_t> input(data, size);
    const auto outline = decode_outline(input);
    if (!outline) {
        require(!outline.error().detail.empty(), "an error without words");
        return 0;
    }
    const std::vector<uint8_t> again = encode_outline(*outline);
    require(std::ranges::equal(again, input), "an outline with two spellings");
    const auto segments = all_segments(outline->model);
    const auto plan = plan_slice(*outline, segments);
    if (plan) check_plan(*plan, *outline);
    // One expert alone as well: its range begins inside the tensors.
    if (!segments.empty()) {
        Segment last = segments.back();
        last.begin = last.end - 1;
        const auto one = plan_slice(*outline, {last});
        require(one.has_value() == plan.has_value() || one, "a part fails where the whole works");
        if (one) check_plan(*one, *outline);
    }
    return 0;
}
