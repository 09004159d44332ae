// A link to a relay: what a node behind it may do to the others, which is nothing.
#include "backbone/link.hpp"

#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include "base/bytes.hpp"
#include "net/test_peer.hpp"
#include "wire/messages.hpp"

namespace kvasir::backbone::testing {
namespace {

using Bytes = std::vector<uint8_t>;
using wire::FrameType;

Bytes frame_of(FrameType type, uint16_t peer, size_t payload) {
    ByteWriter out;
    wire::append_header(out, {type, 0, peer, 0, payload});
    Bytes bytes = out.take();
    bytes.resize(bytes.size() + payload, 7);
    return bytes;
}

// One end is the backbone's link, the other the relay, which says what a test wants.
class RelayedLink {
public:
    RelayedLink() : RelayedLink(net::testing::transport_pair(net::testing::Over::kPair)) {}

    // All of it arrives: the link reads while the relay writes.
    Status say(const Bytes& message) {
        KVASIR_CHECK(relay_.enqueue(message).has_value());
        while (relay_.wants_write()) {
            KVASIR_CHECK(relay_.flush().has_value());
            if (Status ok = link_.pump(nullptr, {}); !ok) return ok;
        }
        return link_.pump(nullptr, {});
    }
    Link& link() { return link_; }

private:
    explicit RelayedLink(std::pair<net::Transport, net::Transport> ends)
        : link_(1, Link::Kind::kRelay,
                net::MessageStream(std::move(ends.first), net::Side::kClient, {}, limits()),
                "relay", epoll_.get(), event_.get()),
          relay_(std::move(ends.second), net::Side::kServer, {}, limits()) {}

    static net::MessageLimits limits() {
        net::MessageLimits limits;
        limits.message_bytes_max = limits.unsent_bytes_max = 64 << 20;
        return limits;
    }

    net::UniqueFd epoll_{::epoll_create1(EPOLL_CLOEXEC)};
    net::UniqueFd event_{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
    Link link_;
    net::MessageStream relay_;
};

TEST(RelayedLink, FramesOfANodeThatIsNoWorkerHarmNobody) {
    RelayedLink relayed;
    for (int i = 0; i < 5; ++i) {  // 35 MB of what is no HELLO
        ASSERT_TRUE(relayed.say(frame_of(FrameType::kPong, 7, 7 << 20)));
        ASSERT_TRUE(relayed.say(frame_of(FrameType::kResult, 7, 100)));
    }
    ASSERT_TRUE(relayed.say(frame_of(FrameType::kHello, 7, kHelloBytesMax)));  // header on top
    EXPECT_TRUE(relayed.link().take_control().empty());

    // The relay's own frames still come.
    ASSERT_TRUE(relayed.say(frame_of(FrameType::kPing, 0, 8)));
    EXPECT_EQ(relayed.link().take_control().size(), 1u);
    EXPECT_TRUE(relayed.link().open());
}

TEST(RelayedLink, HellosOfOneNodeAreCounted) {
    RelayedLink relayed;
    for (int i = 0; i < 100; ++i) ASSERT_TRUE(relayed.say(frame_of(FrameType::kHello, 7, 100)));
    ASSERT_TRUE(relayed.say(frame_of(FrameType::kHello, 8, 100)));
    const auto kept = relayed.link().take_control();
    ASSERT_GE(kept.size(), kHelloBurst + 1u);
    EXPECT_LT(kept.size(), 100u) << "one a second, after the first eight";
    EXPECT_EQ(kept.back()[2], 8) << "another's are not";
}

TEST(RelayedLink, HellosLeaveRoomForTheRelaysOwn) {
    RelayedLink relayed;
    const size_t payload = kHelloBytesMax - wire::kFrameHeaderBytes;
    for (uint16_t peer = 1; peer <= 100; ++peer)  // 25 MB
        ASSERT_TRUE(relayed.say(frame_of(FrameType::kHello, peer, payload)));
    ASSERT_TRUE(relayed.say(frame_of(FrameType::kPing, 0, 8)));
    EXPECT_EQ(relayed.link().take_control().size(), kControlBytesMax / 2 / kHelloBytesMax + 1);
    // Room again.
    ASSERT_TRUE(relayed.say(frame_of(FrameType::kHello, 200, payload)));
    EXPECT_EQ(relayed.link().take_control().size(), 1u);
}

TEST(RelayedLink, ARelayThatFloodsIsLeft) {
    RelayedLink relayed;
    Status ok;
    for (int i = 0; i < 5 && ok; ++i) ok = relayed.say(frame_of(FrameType::kPeerUp, 0, 7 << 20));
    EXPECT_FALSE(ok);
    EXPECT_FALSE(relayed.link().open());
}

}  // namespace
}  // namespace kvasir::backbone::testing
