#include "net/send_buffer.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <array>
#include <string>

#include "net/test_frames.hpp"

namespace kvasir::net {
namespace {

using testing::Bytes;
using testing::pattern;

Bytes next_bytes(const SendBuffer& buffer, size_t vectors_max) {
    std::vector<iovec> vectors(vectors_max);
    const size_t count = buffer.gather(vectors);
    Bytes bytes;
    for (size_t i = 0; i < count; ++i) {
        EXPECT_NE(vectors[i].iov_len, 0u);
        const auto* data = static_cast<const uint8_t*>(vectors[i].iov_base);
        bytes.insert(bytes.end(), data, data + vectors[i].iov_len);
    }
    return bytes;
}

// Copies, blocks taken over and bytes that leave, in any order: what comes out is what went in.
RC_GTEST_PROP(SendBuffer, BytesLeaveInTheirOrder, ()) {
    SendBuffer buffer;
    Bytes unsent;  // as it should be
    const auto steps = *rc::gen::container<std::vector<std::pair<uint8_t, uint16_t>>>(
        rc::gen::pair(rc::gen::inRange<uint8_t>(0, 4), rc::gen::inRange<uint16_t>(0, 6000)));
    uint32_t seed = 0;
    for (const auto& [what, size] : steps) {
        if (what == 0) {
            const Bytes data = pattern(size, ++seed);
            RC_ASSERT(buffer.append(data));
            unsent.insert(unsent.end(), data.begin(), data.end());
        } else if (what == 1) {  // lies somewhere in its block
            const Bytes data = pattern(size, ++seed);
            Block block = allocate_block(size + 50);
            std::copy(data.begin(), data.end(), block.get() + 20);
            const std::span<const uint8_t> view(block.get() + 20, size);
            buffer.append(view, std::move(block));
            unsent.insert(unsent.end(), data.begin(), data.end());
        } else {
            const Bytes bytes = next_bytes(buffer, what == 2 ? 1 : 5);
            RC_ASSERT(bytes.size() <= unsent.size());
            RC_ASSERT(std::equal(bytes.begin(), bytes.end(), unsent.begin()));
            RC_ASSERT(bytes.empty() == unsent.empty());
            const size_t count = std::min<size_t>(bytes.size(), size);
            buffer.consume(count);
            unsent.erase(unsent.begin(), unsent.begin() + static_cast<long>(count));
        }
        RC_ASSERT(buffer.size() == unsent.size());
        RC_ASSERT(buffer.empty() == unsent.empty());
    }
    RC_ASSERT(next_bytes(buffer, steps.size() + 1) == unsent);
}

}  // namespace
}  // namespace kvasir::net
