// A link to a relay: what a node behind it may do to the others, which is nothing.
#include "backbone/link.hpp"

#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include "backbone/session.hpp"
#include "base/bytes.hpp"
#include "base/check.hpp"
#include "net/test_peer.hpp"
#include "wire/attach.hpp"
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
            if (Status ok = link_->pump(nullptr, {}); !ok) return ok;
        }
        return link_->pump(nullptr, {});
    }
    // It lies at the link unread, and the relay is gone.
    void say_and_leave(const std::vector<Bytes>& messages) {
        for (const Bytes& message : messages) KVASIR_CHECK(relay_.enqueue(message).has_value());
        KVASIR_CHECK(!relay_.wants_write());
        relay_.close();
    }
    Link& link() { return *link_; }
    // A worker behind the relay that has joined.
    std::shared_ptr<WorkerSession> add_session(uint16_t peer) {
        auto session = std::make_shared<WorkerSession>(1, link_, peer, wire::Hello{}, event_.get(),
                                                       dispatch::HealthOptions{});
        link_->add(session);
        return session;
    }
    // The next frame that comes to the relay, which must be there.
    wire::FrameHeader next() {
        const auto message = relay_.try_receive();
        KVASIR_CHECK(message.has_value() && message->has_value());
        return wire::decode_frame(**message)->header;
    }
    struct Told {
        uint16_t peer = 0;
        Errc code = Errc::kCount_;
    };
    // The ERRORs that have come to the relay since the last call.
    std::vector<Told> told() {
        std::vector<Told> out;
        for (;;) {
            const auto message = relay_.try_receive();
            KVASIR_CHECK(message.has_value());
            if (!*message) return out;
            const auto frame = wire::decode_frame(**message);
            KVASIR_CHECK(frame.has_value());
            if (frame->header.type != FrameType::kError) continue;
            EXPECT_EQ(frame->header.request_id, 0u);
            out.push_back({frame->header.peer, wire::decode_error(frame->payload)->code});
        }
    }

private:
    explicit RelayedLink(std::pair<net::Transport, net::Transport> ends)
        : link_(std::make_shared<Link>(
              1, Link::Kind::kRelay,
              net::MessageStream(std::move(ends.first), net::Side::kClient, {}, limits()), "relay",
              epoll_.get(), event_.get())),
          relay_(std::move(ends.second), net::Side::kServer, {}, limits()) {}

    static net::MessageLimits limits() {
        net::MessageLimits limits;
        limits.message_bytes_max = limits.unsent_bytes_max = 64 << 20;
        return limits;
    }

    net::UniqueFd epoll_{::epoll_create1(EPOLL_CLOEXEC)};
    net::UniqueFd event_{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
    std::shared_ptr<Link> link_;
    net::MessageStream relay_;
};

TEST(RelayedLink, FramesOfANodeThatIsNoWorkerHarmNobody) {
    RelayedLink relayed;
    for (int i = 0; i < 5; ++i) {  // 35 MB of what is no HELLO
        ASSERT_TRUE(relayed.say(frame_of(FrameType::kPong, 7, 7 << 20)));
        ASSERT_TRUE(relayed.say(frame_of(FrameType::kResult, 7, 100)));
    }
    EXPECT_TRUE(relayed.told().empty());
    ASSERT_TRUE(relayed.say(frame_of(FrameType::kHello, 7, kHelloBytesMax)));  // header on top
    EXPECT_TRUE(relayed.link().take_control().empty());
    const auto told = relayed.told();
    ASSERT_EQ(told.size(), 1u);
    EXPECT_EQ(told[0].peer, 7);
    EXPECT_EQ(told[0].code, Errc::kLimit);
    EXPECT_EQ(relayed.link().hellos_refused(), 1u);

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
    // It hears of it, and not each time.
    const auto told = relayed.told();
    EXPECT_EQ(relayed.link().hellos_refused(), 101 - kept.size());
    ASSERT_GE(told.size(), 1u);
    EXPECT_LT(told.size(), relayed.link().hellos_refused());
    for (const auto& one : told) {
        EXPECT_EQ(one.peer, 7);
        EXPECT_EQ(one.code, Errc::kBusy);
    }
}

TEST(RelayedLink, WhoseHelloFindsNoRoomIsToldToComeAgain) {
    RelayedLink relayed;
    const size_t payload = kHelloBytesMax - wire::kFrameHeaderBytes;
    const uint16_t fits = kControlBytesMax / 2 / kHelloBytesMax;
    for (uint16_t peer = 1; peer <= fits; ++peer)
        ASSERT_TRUE(relayed.say(frame_of(FrameType::kHello, peer, payload)));
    EXPECT_TRUE(relayed.told().empty());
    ASSERT_TRUE(relayed.say(frame_of(FrameType::kHello, 100, 100)));  // an honest one
    const auto told = relayed.told();
    ASSERT_EQ(told.size(), 1u);
    EXPECT_EQ(told[0].peer, 100);
    EXPECT_EQ(told[0].code, Errc::kBusy);
    EXPECT_EQ(relayed.link().hellos_refused(), 1u);
    EXPECT_EQ(relayed.link().take_control().size(), fits);
    ASSERT_TRUE(relayed.say(frame_of(FrameType::kHello, 100, 100)));
    EXPECT_EQ(relayed.link().take_control().size(), 1u);
}

TEST(RelayedLink, OneNodeCannotTakeTheRoomOfTheOthers) {
    RelayedLink relayed;
    const size_t payload = kHelloBytesMax - wire::kFrameHeaderBytes;
    const uint16_t hostile = 5;
    for (uint16_t peer = 1; peer <= hostile; ++peer) {
        for (uint32_t i = 0; i < kHelloBurst; ++i)
            ASSERT_TRUE(relayed.say(frame_of(FrameType::kHello, peer, payload)));
    }
    (void)relayed.told();
    for (uint16_t peer = 100; peer < 200; ++peer)
        ASSERT_TRUE(relayed.say(frame_of(FrameType::kHello, peer, 4000)));
    EXPECT_TRUE(relayed.told().empty());
    EXPECT_EQ(relayed.link().take_control().size(), hostile + 100u);
    // Its share is free again with the room.
    ASSERT_TRUE(relayed.say(frame_of(FrameType::kHello, 1, payload)));
    EXPECT_EQ(relayed.link().take_control().size(), 1u);
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

// Of a worker that is suspect already, perhaps because it is behind with reading: no reason to end
// what we have with it.
TEST(RelayedLink, APingThatTheRelayCannotDeliverEndsNothing) {
    RelayedLink relayed;
    const auto session = relayed.add_session(7);
    session->ping();
    const wire::FrameHeader ping = relayed.next();
    ASSERT_EQ(ping.type, FrameType::kPing);
    EXPECT_EQ(ping.peer, 7);
    ASSERT_NE(ping.request_id, 0u);
    auto told =
        wire::encode_error({Errc::kBusy, "its queue at the relay is full"}, ping.request_id);
    wire::set_peer(told, 7);
    ASSERT_TRUE(relayed.say(told));
    EXPECT_TRUE(session->open());
    // The worker's own ERROR does.
    auto own = wire::encode_error({Errc::kBusy, "enough"}, 0);
    wire::set_peer(own, 7);
    ASSERT_TRUE(relayed.say(own));
    EXPECT_FALSE(session->open());
    EXPECT_TRUE(relayed.link().open());
}

// Another thread reads the end of it while the hub welcomes a worker behind it.
TEST(RelayedLink, AWorkerThatIsWelcomedTooLateHasEnded) {
    RelayedLink relayed;
    relayed.link().close({Errc::kClosed, "gone"});
    const auto session = relayed.add_session(7);
    EXPECT_FALSE(session->open());
    EXPECT_FALSE(session->usable());
    EXPECT_EQ(session.use_count(), 1) << "the two must not keep each other";
}

// Where to go, above all: of the relay, not of those behind it.
TEST(RelayedLink, WhatTheRelayHadSaidIsReadAfterASendThatFailed) {
    const Bytes move = wire::encode_move({0, "ws://next:1"});
    for (const bool is_of_session : {false, true}) {
        SCOPED_TRACE(is_of_session);
        RelayedLink relayed;
        const auto session = relayed.add_session(7);
        relayed.say_and_leave(
            {frame_of(FrameType::kResult, 7, 1 << 10), frame_of(FrameType::kHello, 8, 100), move});
        if (is_of_session) {
            session->ping();
        } else {
            EXPECT_FALSE(relayed.link().send(wire::encode_ping(1)));
        }
        EXPECT_FALSE(relayed.link().open());
        EXPECT_FALSE(session->open());
        EXPECT_EQ(relayed.link().take_control(), (std::vector<Bytes>{move}));
    }
}

TEST(RelayedLink, AnAnswerIsReadThoughTheNextRequestCannotBeWritten) {
    RelayedLink relayed;
    Mailbox box;
    const auto session = relayed.add_session(7);
    const Bytes first = frame_of(FrameType::kCompute, 0, 100);
    const Bytes next = frame_of(FrameType::kCompute, 0, 8 << 20);
    const std::span<const uint8_t> pieces[] = {first, next};
    ASSERT_TRUE(session->request(1, {&pieces[0], 1}, 1, &box, 11));
    ASSERT_TRUE(session->request(2, {&pieces[1], 1}, 1, &box, 12));
    ASSERT_TRUE(relayed.link().wants_write());
    Bytes result = frame_of(FrameType::kResult, 7, 100);
    result[4] = 1;  // request_id
    const Bytes move = wire::encode_move({0, "ws://next:1"});
    relayed.say_and_leave({result, move});
    EXPECT_FALSE(relayed.link().pump(nullptr, {}));
    EXPECT_FALSE(relayed.link().open());
    std::vector<Reply> replies;
    box.take(replies);
    ASSERT_EQ(replies.size(), 2u);
    EXPECT_EQ(replies[0].cookie, 11u);
    EXPECT_EQ(static_cast<int>(replies[0].type), static_cast<int>(FrameType::kResult));
    EXPECT_EQ(replies[1].cookie, 12u);
    EXPECT_EQ(replies[1].error.code, Errc::kClosed);
    EXPECT_EQ(relayed.link().take_control(), (std::vector<Bytes>{move}));
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
