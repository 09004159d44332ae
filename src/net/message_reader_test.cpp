#include "net/message_reader.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "net/test_frames.hpp"

namespace kvasir::net {
namespace {

using testing::Bytes;
using testing::control;
using testing::frame;
using testing::pattern;
using wire::WsOpcode;

struct Seen {
    std::vector<std::pair<WsOpcode, Bytes>> events;
    std::optional<Error> error;
};

// Feeds `stream` in pieces of the sizes `cut` gives; stops at an error.
Seen feed(MessageReader& reader, std::span<const uint8_t> stream, std::function<size_t()> cut) {
    Seen seen;
    while (!stream.empty()) {
        auto room = reader.writable();
        EXPECT_TRUE(room && !room->empty());
        const size_t count = std::min({stream.size(), room->size(), std::max<size_t>(1, cut())});
        std::memcpy(room->data(), stream.data(), count);
        reader.commit(count);
        stream = stream.subspan(count);
        while (true) {
            auto event = reader.next();
            if (!event) {
                seen.error = event.error();
                return seen;
            }
            if (!*event) break;
            const auto payload = (*event)->payload;
            if ((*event)->opcode == WsOpcode::kBinary) {
                EXPECT_EQ(reinterpret_cast<uintptr_t>(payload.data()) % kMessageAlign, 0u);
            }
            seen.events.emplace_back((*event)->opcode, Bytes(payload.begin(), payload.end()));
        }
    }
    return seen;
}

Seen feed_whole(MessageReader& reader, std::span<const uint8_t> stream) {
    return feed(reader, stream, [] { return ~size_t{0}; });
}

constexpr uint64_t kCap = (1 << 20) + 100;

// Sizes at every border of the length encodings, each followed by a marker that proves that the
// reader is still in step; whole, byte by byte, and cut at every offset of the header.
TEST(MessageReader, SizesAtEveryBorderWhateverTheCut) {
    const uint64_t sizes[] = {0,     1,     125,   126,   127,   128,   16383,         16384, 16385,
                              32767, 32768, 65534, 65535, 65536, 65537, (1 << 20) + 1, kCap};
    for (const bool server : {false, true}) {
        for (const uint64_t size : sizes) {
            const Bytes body = pattern(size);
            Bytes stream = frame(body, server);
            const size_t header_bytes = stream.size() - size;
            const Bytes marker = frame(testing::bytes_of("marker"), server);
            stream.insert(stream.end(), marker.begin(), marker.end());
            std::vector<size_t> cuts = {~size_t{0}, 1, 7, 4096};
            if (size > 70000) cuts = {~size_t{0}, 4096, 65536};
            for (size_t cut = 1; cut <= header_bytes + 1; ++cut) cuts.push_back(cut);
            for (size_t i = 0; i < cuts.size(); ++i) {
                MessageReader reader(server, kCap);
                const bool once = i >= 4 || (size > 70000 && i >= 3);  // one cut, then the rest
                bool first = true;
                const Seen seen = feed(reader, stream, [&] {
                    const size_t count = once && !first ? ~size_t{0} : cuts[i];
                    first = false;
                    return count;
                });
                ASSERT_FALSE(seen.error) << size << ": " << seen.error->detail;
                ASSERT_EQ(seen.events.size(), 2u) << size << " cut " << cuts[i];
                ASSERT_TRUE(seen.events[0].second == body) << size << " cut " << cuts[i];
                ASSERT_EQ(seen.events[1].second, testing::bytes_of("marker"));
            }
        }
    }
}

TEST(MessageReader, CapIsExactAndRefusedBeforeTheBody) {
    for (const uint64_t claimed : {kCap + 1, uint64_t{1} << 31, uint64_t{1} << 32,
                                   (uint64_t{1} << 32) + 126, (uint64_t{1} << 63) - 1}) {
        MessageReader reader(false, kCap);
        wire::WsHeader header;
        header.payload_bytes = claimed;
        Bytes bytes(wire::kWsHeaderBytesMax);
        bytes.resize(wire::encode_ws_header(header, bytes));
        const Seen seen = feed_whole(reader, bytes);
        ASSERT_TRUE(seen.error) << claimed;
        EXPECT_EQ(seen.error->code, Errc::kLimit);
        EXPECT_LE(reader.capacity(), 1u << 20);
    }
}

TEST(MessageReader, ClaimsDoNotAllocate) {
    MessageReader reader(false, uint64_t{64} << 20);
    wire::WsHeader header;
    header.payload_bytes = uint64_t{64} << 20;
    Bytes bytes(wire::kWsHeaderBytesMax);
    bytes.resize(wire::encode_ws_header(header, bytes));
    EXPECT_FALSE(feed_whole(reader, bytes).error);
    ASSERT_TRUE(reader.writable());
    EXPECT_LE(reader.capacity(), 2u << 20);
}

TEST(MessageReader, BufferGrowsWithArrivalAndIsGivenBack) {
    constexpr uint64_t kLarge = 20 << 20;
    MessageReader reader(false, kLarge);
    uint64_t arrived = 0;
    const Bytes stream = frame(pattern(kLarge), false);
    const Seen seen = feed(reader, stream, [&] {
        EXPECT_LE(reader.capacity(), 2 * arrived + (2 << 20));
        arrived += 100000;
        return size_t{100000};
    });
    ASSERT_EQ(seen.events.size(), 1u);
    EXPECT_TRUE(seen.events[0].second == pattern(kLarge));
    EXPECT_GE(reader.capacity(), kLarge);
    for (int i = 0; i < 200; ++i) {
        EXPECT_EQ(feed_whole(reader, frame(pattern(1000), false)).events.size(), 1u);
    }
    EXPECT_LE(reader.capacity(), 1u << 20);
}

// Taken away while bytes of later messages lie behind it: nothing moves, nothing is lost.
TEST(MessageReader, ATakenBufferKeepsItsMessageAndTheReaderItsBytes) {
    for (const size_t behind : {size_t{0}, size_t{1}, size_t{3}, size_t{700}, size_t{300000}}) {
        SCOPED_TRACE(behind);
        MessageReader reader(true, 1 << 20);
        const Bytes first = pattern(200000, 1), second = pattern(400000, 2);
        Bytes stream = frame(first, true);
        const Bytes next = frame(second, true);
        stream.insert(stream.end(), next.begin(), next.begin() + static_cast<long>(behind));
        for (size_t at = 0; at < stream.size();) {
            const auto room = reader.writable();
            ASSERT_TRUE(room);
            const size_t count = std::min(room->size(), stream.size() - at);
            std::memcpy(room->data(), stream.data() + at, count);
            reader.commit(count);
            at += count;
        }
        const auto event = reader.next();
        ASSERT_TRUE(event && *event);
        const std::span<const uint8_t> view = (*event)->payload;
        const Block block = reader.take_block();
        ASSERT_TRUE(block);
        EXPECT_EQ(reader.partial(), behind != 0);
        EXPECT_EQ(reader.capacity() == 0, behind == 0);
        const Seen seen = feed_whole(reader, std::span(next).subspan(behind));
        ASSERT_FALSE(seen.error) << seen.error->detail;
        ASSERT_EQ(seen.events.size(), 1u);
        EXPECT_EQ(seen.events[0].second, second);
        EXPECT_TRUE(std::ranges::equal(view, first));
    }
}

TEST(MessageReader, FragmentsAreJoinedAroundControlFrames) {
    Bytes stream;
    const auto add = [&stream](const Bytes& bytes) {
        stream.insert(stream.end(), bytes.begin(), bytes.end());
    };
    add(frame(testing::bytes_of("abc"), true, WsOpcode::kBinary, false));
    add(control(WsOpcode::kPing, "p1", true));
    add(frame({}, true, WsOpcode::kContinuation, false));
    add(frame(testing::bytes_of("defgh"), true, WsOpcode::kContinuation, false));
    add(control(WsOpcode::kPong, "", true));
    add(frame(testing::bytes_of("i"), true, WsOpcode::kContinuation, true));
    add(frame(testing::bytes_of("marker"), true));
    for (size_t cut = 1; cut < stream.size(); ++cut) {
        MessageReader reader(true, 1000);
        const Seen seen = feed(reader, stream, [cut] { return cut; });
        ASSERT_FALSE(seen.error) << seen.error->detail;
        ASSERT_EQ(seen.events.size(), 4u);
        EXPECT_EQ(seen.events[0].second, testing::bytes_of("p1"));
        EXPECT_EQ(seen.events[1].first, WsOpcode::kPong);
        EXPECT_EQ(seen.events[2].second, testing::bytes_of("abcdefghi"));
        EXPECT_EQ(seen.events[3].second, testing::bytes_of("marker"));
    }
}

TEST(MessageReader, FragmentsAreCappedInSumAndNumber) {
    const auto fragment = [](size_t size, WsOpcode opcode, bool fin) {
        return frame(pattern(size), false, opcode, fin);
    };
    for (const size_t last : {size_t{400}, size_t{401}}) {
        MessageReader reader(false, 1000);
        EXPECT_FALSE(feed_whole(reader, fragment(300, WsOpcode::kBinary, false)).error);
        EXPECT_FALSE(feed_whole(reader, fragment(300, WsOpcode::kContinuation, false)).error);
        const Seen seen = feed_whole(reader, fragment(last, WsOpcode::kContinuation, true));
        EXPECT_EQ(seen.error.has_value(), last == 401);
        if (seen.error) {
            EXPECT_EQ(seen.error->code, Errc::kLimit);
        }
    }
    MessageReader reader(false, 1000);
    EXPECT_FALSE(feed_whole(reader, fragment(0, WsOpcode::kBinary, false)).error);
    uint32_t fragments = 1;
    while (fragments <= 2 * kFragmentsMax) {
        ++fragments;
        if (feed_whole(reader, fragment(0, WsOpcode::kContinuation, false)).error) break;
    }
    EXPECT_EQ(fragments, kFragmentsMax + 1);
    EXPECT_LE(reader.capacity(), 1u << 20);
}

TEST(MessageReader, SequencesThatAreNotMessagesAreRefused) {
    const struct {
        const char* name;
        Bytes bytes;
        Errc code;
    } cases[] = {
        {"text", frame(testing::bytes_of("x"), false, WsOpcode::kText), Errc::kUnsupported},
        {"lone continuation", frame({}, false, WsOpcode::kContinuation), Errc::kProtocol},
        {"masked to a client", frame({}, true), Errc::kProtocol},
    };
    for (const auto& refused : cases) {
        MessageReader reader(false, 1000);
        const Seen seen = feed_whole(reader, refused.bytes);
        ASSERT_TRUE(seen.error) << refused.name;
        EXPECT_EQ(seen.error->code, refused.code) << refused.name;
    }
    MessageReader reader(false, 1000);
    EXPECT_FALSE(feed_whole(reader, frame({}, false, WsOpcode::kBinary, false)).error);
    EXPECT_EQ(feed_whole(reader, frame({}, false)).error->code, Errc::kProtocol);
}

// Any mix of messages, fragmented at random, masked or not, cut at random.
RC_GTEST_PROP(MessageReader, AnyMixAnyCut, (bool server, uint32_t seed)) {
    std::mt19937 random(seed);
    const auto below = [&random](size_t bound) { return random() % bound; };
    const size_t sizes[] = {0, 1, 3, 125, 126, 200, 5000, 65535, 65536, 300000};
    std::vector<Bytes> messages;
    Bytes stream;
    for (size_t i = 1 + below(12); i > 0; --i) {
        messages.push_back(pattern(sizes[below(std::size(sizes))]));
        const Bytes& message = messages.back();
        size_t sent = 0;
        for (bool fin = false, first = true; !fin; first = false) {
            fin = below(3) != 0;
            const size_t part = fin ? message.size() - sent : below(message.size() - sent + 1);
            std::array<uint8_t, 4> key = {};
            for (uint8_t& byte : key) byte = static_cast<uint8_t>(random());
            if (below(4) == 0) key = {};
            const Bytes body(message.begin() + static_cast<long>(sent),
                             message.begin() + static_cast<long>(sent + part));
            const Bytes piece =
                frame(body, server, first ? WsOpcode::kBinary : WsOpcode::kContinuation, fin, key);
            stream.insert(stream.end(), piece.begin(), piece.end());
            sent += part;
        }
    }
    const size_t cuts[] = {stream.size() < 10000 ? size_t{3} : size_t{500}, 20000, 500000};
    const size_t longest = cuts[below(std::size(cuts))];
    MessageReader reader(server, 300000);
    const Seen seen = feed(reader, stream, [&] { return 1 + below(longest); });
    RC_ASSERT(!seen.error);
    RC_ASSERT(seen.events.size() == messages.size());
    for (size_t i = 0; i < messages.size(); ++i) RC_ASSERT(seen.events[i].second == messages[i]);
}

}  // namespace
}  // namespace kvasir::net
