#include "relay/switchboard.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "relay/switchboard_testing.hpp"

namespace kvasir::relay {
namespace {

using namespace std::chrono_literals;
using namespace testing;

wire::PeerUp up(const Frame& frame) {
    const auto decoded = wire::decode_peer_up(frame.payload);
    KVASIR_CHECK(decoded.has_value());
    return *decoded;
}

// The handle that the last PEER_UP gave to `id`.
uint16_t handle_of(const FakeRelay& relay, ConnectionId id) {
    const auto ups = relay.taken(id, FrameType::kPeerUp);
    KVASIR_CHECK(!ups.empty());
    return up(ups.back()).handle;
}

uint16_t error_code(const Frame& frame) {
    KVASIR_CHECK(frame.header.type == FrameType::kError && frame.payload.size() >= 4);
    return static_cast<uint16_t>(frame.payload[0] | frame.payload[1] << 8);
}

std::string error_text(const Frame& frame) {
    return {frame.payload.begin() + 4, frame.payload.end()};
}

// The one ERROR that `id` got, as its code; kCount_ without one.
Errc only_error(const FakeRelay& relay, ConnectionId id) {
    const auto errors = relay.taken(id, FrameType::kError);
    return errors.size() == 1 ? errc_from_wire(error_code(errors[0])) : Errc::kCount_;
}

Bytes request(uint16_t peer, uint32_t request_id, size_t payload_bytes = 100,
              FrameType type = FrameType::kCompute) {
    return make_frame(type, peer, request_id, Bytes(payload_bytes, 7));
}

struct PairOf {
    explicit PairOf(FakeRelay& relay)
        : backbone(relay.attach(1, Role::kBackbone)), worker(relay.attach(2, Role::kWorker)) {
        to_worker = handle_of(relay, backbone);
        to_backbone = handle_of(relay, worker);
    }
    ConnectionId backbone, worker;
    uint16_t to_worker, to_backbone;
};

SwitchboardOptions tiny() {
    SwitchboardOptions options;
    options.queue_bytes_max = 2 * 116;  // two frames of request()
    options.own_bytes_max = 4096;
    options.message_bytes_max = 4096;
    return options;
}

// ---- attaching ----

TEST(Attaching, NonceFirstThenAttachedThenPeers) {
    FakeRelay relay;
    const auto backbone = relay.open();
    ASSERT_EQ(relay.lines[backbone].taken.size(), 1u);
    EXPECT_EQ(relay.lines[backbone].taken[0].header.type, FrameType::kNonce);
    relay.say(backbone, {'B'});
    relay.say(backbone, attach_frame(1, "1 5 100"));
    const auto attached = relay.taken(backbone, FrameType::kAttached);
    ASSERT_EQ(attached.size(), 1u);
    const auto decoded = wire::decode_attached(attached[0].payload);
    ASSERT_TRUE(decoded);
    EXPECT_EQ(decoded->token_left_ms, 100000u);
    EXPECT_EQ(decoded->ping_interval_ms, 20000u);
    EXPECT_EQ(decoded->message_bytes_max, wire::kFrameBytesMax);
    EXPECT_TRUE(relay.lines[backbone].large);

    const auto worker = relay.attach(2, Role::kWorker);
    const auto seen = relay.taken(backbone, FrameType::kPeerUp);
    ASSERT_EQ(seen.size(), 1u);
    EXPECT_EQ(up(seen[0]).node, key_of(2));
    EXPECT_EQ(up(seen[0]).role, Role::kWorker);
    EXPECT_EQ(up(seen[0]).name, "node 2");
    EXPECT_GT(up(seen[0]).generation, decoded->generation);
    EXPECT_EQ(relay.taken(worker, FrameType::kPeerUp).size(), 1u);
    EXPECT_EQ(relay.board.attached(Role::kWorker), 1u);
}

TEST(Attaching, PeersAreToldAShortName) {
    FakeRelay relay;
    const auto backbone = relay.attach(1, Role::kBackbone);
    const auto worker = relay.open();
    relay.say(worker, {'W'});
    wire::Attach attach;
    attach.node = key_of(2);
    attach.token = "1 0 100";
    attach.name = std::string(1000, 'n');
    relay.say(worker, wire::encode_attach(attach));
    EXPECT_EQ(up(relay.taken(backbone, FrameType::kPeerUp).at(0)).name, std::string(64, 'n'));
}

TEST(Attaching, RefusesWhatIsNotARole) {
    for (const Bytes& first : {Bytes{}, Bytes{0}, Bytes{0xff}, Bytes{'G'}, Bytes{'W', 'W'},
                               attach_frame(1, "1 0 100"), Bytes(300, 'W')}) {
        FakeRelay relay;
        const auto id = relay.open();
        relay.say(id, first);
        EXPECT_TRUE(relay.lines[id].closed);
        EXPECT_EQ(only_error(relay, id), Errc::kProtocol);
        EXPECT_EQ(relay.lines[id].close_code, 1002);
        EXPECT_EQ(relay.board.connections(), 0u);
    }
}

TEST(Attaching, RefusesWhatIsNotAttach) {
    Bytes with_peer = attach_frame(1, "1 0 100");
    wire::set_peer(with_peer, 3);
    Bytes other_major = attach_frame(1, "1 0 100");
    other_major[16] = 99;
    Bytes cut = attach_frame(1, "1 0 100");
    cut.pop_back();
    const std::vector<std::pair<Bytes, Errc>> cases = {
        {{'B'}, Errc::kProtocol},  // two roles
        {request(0, 1), Errc::kProtocol},
        {request(1, 1), Errc::kProtocol},
        {with_peer, Errc::kProtocol},
        {other_major, Errc::kVersion},
        {cut, Errc::kProtocol},
        {attach_frame(1, "deny"), Errc::kDenied},
        {attach_frame(1, "1 0 0"), Errc::kExpired},
        {attach_frame(1, "1 0 -5"), Errc::kExpired},
    };
    for (const auto& [frame, code] : cases) {
        FakeRelay relay;
        const auto id = relay.open();
        relay.say(id, {'W'});
        relay.say(id, frame);
        EXPECT_TRUE(relay.lines[id].closed);
        EXPECT_EQ(only_error(relay, id), code);
        EXPECT_EQ(relay.board.attached(Role::kWorker), 0u);
    }
}

TEST(Attaching, TheDeadlineCoversRoleAndAttach) {
    FakeRelay relay;
    const auto silent = relay.open();
    const auto half = relay.open();
    relay.advance(4900ms);
    relay.say(half, {'W'});  // no new deadline
    EXPECT_FALSE(relay.lines[silent].closed);
    relay.advance(200ms);
    EXPECT_TRUE(relay.lines[silent].closed);
    EXPECT_TRUE(relay.lines[half].closed);
    EXPECT_EQ(only_error(relay, half), Errc::kTimeout);
}

TEST(Attaching, LimitsCountConnectionsAddressesAndHandshakes) {
    SwitchboardOptions options;
    options.connections_max = 4;
    options.connections_per_address_max = 2;
    options.attaching_max = 3;
    FakeRelay relay(options);
    relay.attach(1, Role::kWorker, "1 0 100", "a");
    const auto second = relay.attach(2, Role::kWorker, "1 0 100", "a");
    const auto third = relay.attach(3, Role::kWorker, "1 0 100", "a");
    EXPECT_EQ(only_error(relay, third), Errc::kBusy);  // of one address
    EXPECT_EQ(relay.lines[third].close_code, 1013);
    relay.close(second);
    relay.attach(3, Role::kWorker, "1 0 100", "a");
    EXPECT_EQ(relay.board.attached(Role::kWorker), 2u);
    relay.open("b");
    relay.open("c");
    EXPECT_EQ(only_error(relay, relay.open("d")), Errc::kBusy);  // in all
    EXPECT_EQ(relay.board.connections(), 4u);

    options.connections_max = 100;
    FakeRelay other(options);
    for (int i = 0; i < 3; ++i) other.open("x" + std::to_string(i));
    EXPECT_EQ(only_error(other, other.open("y")), Errc::kBusy);  // not attached
}

TEST(Attaching, ANodeThatComesAndGoesTooOftenWaits) {
    SwitchboardOptions options;
    options.attach_burst = 3;
    FakeRelay relay(options);
    for (int i = 0; i < 3; ++i) relay.attach(1, Role::kWorker);
    EXPECT_EQ(only_error(relay, relay.attach(1, Role::kWorker)), Errc::kBusy);
    EXPECT_EQ(relay.board.attached(Role::kWorker), 1u);  // the one before stays
    relay.advance(1000ms);
    const auto later_one = relay.attach(1, Role::kWorker);
    EXPECT_FALSE(relay.lines[later_one].closed);
}

// ---- who sees whom ----

TEST(Seeing, WorkersAndBackbonesOfOneModelOnly) {
    FakeRelay relay;
    const auto b1 = relay.attach(1, Role::kBackbone, "1 0 100");
    const auto b2 = relay.attach(2, Role::kBackbone, "2 0 100");
    const auto any = relay.attach(3, Role::kBackbone, "0 0 100");
    const auto w1 = relay.attach(4, Role::kWorker, "1 0 100");
    const auto w1b = relay.attach(5, Role::kWorker, "1 0 100");
    const auto w0 = relay.attach(6, Role::kWorker, "0 0 100");
    const auto ups = [&](ConnectionId id) { return relay.taken(id, FrameType::kPeerUp).size(); };
    EXPECT_EQ(ups(b1), 3u);   // w1, w1b, w0
    EXPECT_EQ(ups(b2), 1u);   // w0
    EXPECT_EQ(ups(any), 3u);  // every worker
    EXPECT_EQ(ups(w1), 2u);   // b1, any
    EXPECT_EQ(ups(w1b), 2u);
    EXPECT_EQ(ups(w0), 3u);
}

// They wait in silence, so the operator is told.
TEST(Seeing, WhoMeetsNobodyBecauseOfTheModelIsCounted) {
    FakeRelay relay;
    const auto unmatched = [&] { return relay.board.counters().unmatched; };
    relay.attach(1, Role::kWorker, "1 0 100");
    EXPECT_EQ(unmatched(), 0u);  // nobody is there, of any model
    relay.attach(2, Role::kBackbone, "2 0 100");
    EXPECT_EQ(unmatched(), 1u);
    relay.attach(3, Role::kWorker, "3 0 100");
    EXPECT_EQ(unmatched(), 2u);
    relay.attach(4, Role::kWorker, "2 0 100");  // meets one
    relay.attach(5, Role::kBackbone, "1 0 100");
    relay.attach(6, Role::kObserver, "7 0 100");
    EXPECT_EQ(unmatched(), 2u);
}

TEST(Seeing, TwoOfARoleNeverMeet) {
    for (const Role role : {Role::kWorker, Role::kBackbone}) {
        FakeRelay relay;
        const auto a = relay.attach(1, role);
        const auto b = relay.attach(2, role);
        EXPECT_TRUE(relay.taken(a, FrameType::kPeerUp).empty());
        relay.say(a, request(1, 1));  // a guess
        EXPECT_TRUE(relay.lines[a].closed);
        EXPECT_EQ(only_error(relay, a), Errc::kProtocol);
        EXPECT_TRUE(relay.taken(b, FrameType::kCompute).empty());
    }
}

TEST(Seeing, ObserversLookOn) {
    FakeRelay relay;
    const auto early = relay.attach(9, Role::kObserver, "0 0 100");
    const PairOf pair(relay);
    const auto late = relay.attach(8, Role::kObserver, "2 0 100");  // another model
    EXPECT_EQ(relay.taken(early, FrameType::kPeerUp).size(), 2u);
    EXPECT_EQ(relay.taken(late, FrameType::kPeerUp).size(), 0u);
    EXPECT_EQ(relay.taken(pair.worker, FrameType::kPeerUp).size(), 1u);
    relay.close(pair.worker);
    EXPECT_EQ(relay.taken(early, FrameType::kPeerDown).size(), 1u);
    relay.say(early, request(1, 1));
    EXPECT_TRUE(relay.lines[early].closed);
    EXPECT_EQ(only_error(relay, early), Errc::kDenied);
    EXPECT_TRUE(relay.taken(pair.backbone, FrameType::kCompute).empty());
}

// ---- routing ----

TEST(Routing, HandlesAreTranslated) {
    FakeRelay relay;
    const auto other = relay.attach(7, Role::kWorker, "1 0 100");
    const PairOf pair(relay);  // its worker is the second one of the backbone
    EXPECT_NE(pair.to_worker, pair.to_backbone);
    relay.say(pair.backbone, request(pair.to_worker, 42));
    const auto got = relay.taken(pair.worker, FrameType::kCompute);
    ASSERT_EQ(got.size(), 1u);
    EXPECT_EQ(got[0].header.peer, pair.to_backbone);
    EXPECT_EQ(got[0].header.request_id, 42u);
    EXPECT_EQ(got[0].payload, Bytes(100, 7));
    relay.say(pair.worker, request(pair.to_backbone, 42, 1000, FrameType::kResult));
    const auto answer = relay.taken(pair.backbone, FrameType::kResult);
    ASSERT_EQ(answer.size(), 1u);
    EXPECT_EQ(answer[0].header.peer, pair.to_worker);
    EXPECT_TRUE(relay.taken(other, FrameType::kCompute).empty());
}

TEST(Routing, FramesOfTheRelayItself) {
    FakeRelay relay;
    const PairOf pair(relay);
    relay.say(pair.worker, make_frame(FrameType::kPing, 0, 9, Bytes(8, 3)));
    const auto pong = relay.taken(pair.worker, FrameType::kPong);
    ASSERT_EQ(pong.size(), 1u);
    EXPECT_EQ(pong[0].header.request_id, 9u);
    EXPECT_EQ(pong[0].payload, Bytes(8, 3));
    // End to end it goes through.
    relay.say(pair.backbone, make_frame(FrameType::kPing, pair.to_worker, 0, Bytes(8, 4)));
    EXPECT_EQ(relay.taken(pair.worker, FrameType::kPing).size(), 1u);

    relay.say(pair.worker, make_frame(FrameType::kDrain, 0, 0));
    ASSERT_EQ(relay.taken(pair.backbone, FrameType::kDrain).size(), 1u);
    EXPECT_EQ(relay.taken(pair.backbone, FrameType::kDrain)[0].header.peer, pair.to_worker);
    const auto newcomer = relay.attach(5, Role::kBackbone);
    EXPECT_TRUE(relay.taken(newcomer, FrameType::kPeerUp).empty());

    relay.say(pair.worker, make_frame(FrameType::kGoodbye, 0, 0));
    EXPECT_TRUE(relay.lines[pair.worker].closed);
    EXPECT_EQ(relay.lines[pair.worker].close_code, 1000);
    EXPECT_EQ(relay.taken(pair.backbone, FrameType::kPeerDown).size(), 1u);
}

TEST(Routing, WhatANodeMayNotSendEndsIt) {
    for (const Bytes& frame : {request(0, 1), request(77, 1), Bytes{}, Bytes(15, 0),
                               Bytes(200, 0xff), make_frame(FrameType::kPing, 0, 0, Bytes(1000, 0)),
                               make_frame(FrameType::kPeerUp, 0, 0), attach_frame(2, "1 0 100")}) {
        FakeRelay relay;
        const PairOf pair(relay);
        relay.say(pair.worker, frame);
        EXPECT_TRUE(relay.lines[pair.worker].closed);
        EXPECT_EQ(only_error(relay, pair.worker), Errc::kProtocol);
        EXPECT_FALSE(relay.lines[pair.backbone].closed);
        EXPECT_EQ(relay.taken(pair.backbone, FrameType::kPeerDown).size(), 1u);
    }
    for (uint8_t type = 12; type <= 18; ++type) {  // the relay's own, forged to a peer
        FakeRelay relay;
        const PairOf pair(relay);
        relay.say(pair.worker, make_frame(static_cast<FrameType>(type), pair.to_backbone, 0));
        EXPECT_TRUE(relay.lines[pair.worker].closed) << int(type);
        EXPECT_EQ(relay.taken(pair.backbone, static_cast<FrameType>(type)).size(),
                  type == 14 || type == 15 || type == 16 || type == 12 ? 1u : 0u);
    }
}

// PING and RENEW cost the relay more than their bytes.
TEST(Routing, WhoTalksWithoutEndIsClosed) {
    const Bytes ping = make_frame(FrameType::kPing, 0, 1, Bytes(8, 1));
    const Bytes renew = wire::encode_renew("1 7 100", 1);
    SwitchboardOptions options;
    options.talk_burst = 100;
    options.talk_per_second = 10;
    for (const auto& [frame, in_a_row] : {std::pair{ping, 100}, std::pair{renew, 5}}) {
        FakeRelay relay(options);
        const PairOf pair(relay);
        for (int i = 0; i < in_a_row; ++i) relay.say(pair.worker, frame);
        EXPECT_FALSE(relay.lines[pair.worker].closed);
        relay.say(pair.worker, frame);
        EXPECT_TRUE(relay.lines[pair.worker].closed);
        EXPECT_EQ(only_error(relay, pair.worker), Errc::kProtocol);
        EXPECT_FALSE(relay.lines[pair.backbone].closed);
    }
    // A worker's to peers, too, when nobody asked.
    for (const FrameType type : {FrameType::kPing, FrameType::kPong}) {
        FakeRelay relay(options);
        const PairOf pair(relay);
        const Bytes frame = make_frame(type, pair.to_backbone, 0, Bytes(8, 1));
        for (int i = 0; i < 100; ++i) relay.say(pair.worker, frame);
        EXPECT_FALSE(relay.lines[pair.worker].closed);
        relay.say(pair.worker, frame);
        EXPECT_TRUE(relay.lines[pair.worker].closed);
        EXPECT_FALSE(relay.lines[pair.backbone].closed);
    }
}

// Else one backbone could have any worker thrown out.
TEST(Routing, AnswersToABackbonesPingsEndNobody) {
    SwitchboardOptions options;
    options.talk_burst = 100;
    options.talk_per_second = 10;
    FakeRelay relay(options);
    const PairOf pair(relay);
    const auto other = relay.attach(3, Role::kBackbone);
    const Bytes pong = make_frame(FrameType::kPong, pair.to_backbone, 0, Bytes(8, 1));
    for (int i = 0; i < 1000; ++i)
        relay.say(pair.backbone, make_frame(FrameType::kPing, pair.to_worker, 0, Bytes(8, 1)));
    ASSERT_EQ(relay.taken(pair.worker, FrameType::kPing).size(), 1000u);
    for (int i = 0; i < 500; ++i) relay.say(pair.worker, pong);
    EXPECT_EQ(relay.taken(pair.backbone, FrameType::kPong).size(), 500u);
    relay.close(pair.backbone);  // the answers to it that are under way are answers still
    for (int i = 0; i < 500; ++i) relay.say(pair.worker, pong);
    EXPECT_FALSE(relay.lines[pair.worker].closed);
    EXPECT_TRUE(relay.taken(other, FrameType::kPong).empty());
    // No more are owed than were asked for, and what is owed to peers is not the relay's.
    for (int i = 0; i <= 100; ++i) relay.say(pair.worker, pong);
    EXPECT_TRUE(relay.lines[pair.worker].closed);
    EXPECT_EQ(relay.board.counters().cut_protocol, 1u);
}

TEST(Routing, PongsCannotBeSavedUpWithoutEnd) {
    SwitchboardOptions options;
    options.talk_burst = 100;
    options.talk_per_second = 10;
    FakeRelay relay(options);
    const PairOf pair(relay);
    for (int i = 0; i < 12000; ++i) {
        relay.say(pair.backbone, make_frame(FrameType::kPing, pair.to_worker, 0, Bytes(8, 1)));
        if (i % 1000 == 999) (void)relay.taken(pair.worker, FrameType::kPing);
    }
    const Bytes pong = make_frame(FrameType::kPong, pair.to_backbone, 0, Bytes(8, 1));
    for (int i = 0; i < 10000 + 100; ++i) {
        relay.say(pair.worker, pong);
        if (i % 1000 == 999) (void)relay.taken(pair.backbone, FrameType::kPong);
    }
    EXPECT_FALSE(relay.lines[pair.worker].closed);
    relay.say(pair.worker, pong);
    EXPECT_TRUE(relay.lines[pair.worker].closed);
}

// A PING that a full worker cannot be given is told by its number: without one it would be the
// worker's own ERROR.
TEST(Routing, APingThatIsNotDeliveredIsToldByItsNumber) {
    FakeRelay relay(tiny());
    const PairOf pair(relay);
    relay.lines[pair.worker].reads = false;
    for (uint32_t i = 0; i < 2; ++i) relay.say(pair.backbone, request(pair.to_worker, i));
    relay.say(pair.backbone, make_frame(FrameType::kPing, pair.to_worker, 0xffffffff, Bytes(8, 1)));
    EXPECT_EQ(only_error(relay, pair.backbone), Errc::kBusy);
    const auto told = relay.taken(pair.backbone, FrameType::kError).at(0).header;
    EXPECT_EQ(told.peer, pair.to_worker);
    EXPECT_EQ(told.request_id, 0xffffffff);
    // And it is no answer that the worker owes.
    relay.take(pair.worker);
    EXPECT_TRUE(relay.taken(pair.worker, FrameType::kPing).empty());
}

// What waits for room is talk like any other, and counted once.
TEST(Routing, TalkThatWasHeldIsCountedOnce) {
    SwitchboardOptions options = tiny();
    options.own_bytes_max = 2048;
    options.talk_burst = 400;
    options.talk_per_second = 0;
    for (const bool to_peer : {false, true}) {
        FakeRelay relay(options);
        const PairOf pair(relay);
        const ConnectionId reader = to_peer ? pair.backbone : pair.worker;
        const FrameType arrives = to_peer ? FrameType::kPing : FrameType::kPong;
        relay.lines[reader].reads = false;
        int helds = 0;
        const auto say_one = [&] {
            relay.say(pair.worker,
                      make_frame(FrameType::kPing, to_peer ? pair.to_backbone : 0, 1, Bytes(8, 1)));
            if (!relay.lines[pair.worker].held) return;
            ++helds;
            relay.take(reader);
        };
        for (int i = 0; i < 400; ++i) say_one();
        relay.take(reader);
        EXPECT_FALSE(relay.lines[pair.worker].closed) << to_peer;
        EXPECT_EQ(relay.taken(reader, arrives).size(), 400u) << to_peer;
        EXPECT_GE(helds, 4) << to_peer;
        say_one();
        EXPECT_TRUE(relay.lines[pair.worker].closed) << to_peer;
        EXPECT_EQ(relay.board.counters().cut_protocol, 1u);
    }
    // A flood of which every frame is held ends the same way.
    FakeRelay relay(options);
    const PairOf pair(relay);
    relay.lines[pair.worker].reads = false;
    Line& line = relay.lines[pair.worker];
    for (int i = 0; i < 2000 && !line.closed; ++i) {
        relay.say(pair.worker, make_frame(FrameType::kPing, 0, 1, Bytes(8, 1)));
        if (line.held) relay.take(pair.worker, 1);
    }
    EXPECT_TRUE(line.closed);
}

TEST(Routing, TalkInMeasureGoesOnForEver) {
    SwitchboardOptions options;
    options.talk_burst = 100;
    options.talk_per_second = 10;
    FakeRelay relay(options);
    const PairOf pair(relay);
    for (int i = 0; i < 500; ++i) {
        relay.say(pair.worker, make_frame(FrameType::kPing, 0, 1, Bytes(8, 1)));
        relay.advance(milliseconds(100));
    }
    EXPECT_FALSE(relay.lines[pair.worker].closed);
    // Work is not talk.
    for (uint32_t i = 0; i < 1000; ++i)
        relay.say(pair.worker, request(pair.to_backbone, i, 10, FrameType::kResult));
    EXPECT_FALSE(relay.lines[pair.worker].closed);
}

TEST(Routing, AFrameToOneThatIsGoneIsTold) {
    FakeRelay relay;
    const PairOf pair(relay);
    relay.close(pair.worker);
    const auto down = relay.taken(pair.backbone, FrameType::kPeerDown);
    ASSERT_EQ(down.size(), 1u);
    EXPECT_EQ(wire::decode_peer_down(down[0].payload)->handle, pair.to_worker);
    relay.say(pair.backbone, request(pair.to_worker, 5));  // was under way
    const auto told = relay.taken(pair.backbone, FrameType::kError);
    ASSERT_EQ(told.size(), 1u);
    EXPECT_EQ(told[0].header.peer, pair.to_worker);
    EXPECT_EQ(told[0].header.request_id, 5u);
    EXPECT_EQ(error_code(told[0]), errc_info(Errc::kClosed).wire_code);
    EXPECT_FALSE(relay.lines[pair.backbone].closed);
}

// ---- generations ----

TEST(Generations, ANewerConnectionReplacesTheOlder) {
    FakeRelay relay;
    const PairOf pair(relay);
    const auto newer = relay.attach(2, Role::kWorker);
    EXPECT_TRUE(relay.lines[pair.worker].closed);
    EXPECT_THAT(error_text(relay.taken(pair.worker, FrameType::kError).at(0)),
                ::testing::HasSubstr("newer connection"));
    const auto ups = relay.taken(pair.backbone, FrameType::kPeerUp);
    ASSERT_EQ(ups.size(), 2u);
    EXPECT_GT(up(ups[1]).generation, up(ups[0]).generation);
    EXPECT_NE(up(ups[1]).handle, up(ups[0]).handle);
    // DOWN comes before UP.
    const auto& taken = relay.lines[pair.backbone].taken;
    EXPECT_EQ(taken[taken.size() - 2].header.type, FrameType::kPeerDown);
    EXPECT_EQ(taken.back().header.type, FrameType::kPeerUp);

    // The old one's late close, and late frames of it or to it, touch nothing.
    relay.event(Closed{pair.worker, {Errc::kIo, "reset"}});
    relay.event(Message{pair.worker, request(pair.to_backbone, 1)});
    relay.event(Unsent{pair.worker, 0, 12345});
    relay.event(Heard{pair.worker});
    EXPECT_EQ(relay.taken(pair.backbone, FrameType::kPeerDown).size(), 1u);
    relay.say(pair.backbone, request(up(ups[0]).handle, 6));
    EXPECT_TRUE(relay.taken(newer, FrameType::kCompute).empty());
    relay.say(pair.backbone, request(up(ups[1]).handle, 7));
    EXPECT_EQ(relay.taken(newer, FrameType::kCompute).size(), 1u);
}

TEST(Generations, TheLastOfManyAtOnceStays) {
    SwitchboardOptions options;
    options.attach_burst = 100;
    FakeRelay relay(options);
    const auto backbone = relay.attach(1, Role::kBackbone);
    std::vector<ConnectionId> all;
    for (int i = 0; i < 20; ++i) {
        all.push_back(relay.open());
        relay.say(all.back(), {'W'});
    }
    for (const auto id : all) relay.say(id, attach_frame(2, "1 0 100"));
    for (const auto id : all) relay.event(Closed{id == all.back() ? ConnectionId{999} : id, {}});
    EXPECT_EQ(relay.board.attached(Role::kWorker), 1u);
    EXPECT_EQ(relay.taken(backbone, FrameType::kPeerUp).size(), 20u);
    EXPECT_EQ(relay.taken(backbone, FrameType::kPeerDown).size(), 19u);
    relay.say(backbone, request(handle_of(relay, backbone), 1));
    EXPECT_EQ(relay.taken(all.back(), FrameType::kCompute).size(), 1u);
}

TEST(Generations, TheRoleMayChange) {
    FakeRelay relay;
    const PairOf pair(relay);
    const auto turned = relay.attach(2, Role::kBackbone);
    EXPECT_EQ(relay.board.attached(Role::kWorker), 0u);
    EXPECT_EQ(relay.board.attached(Role::kBackbone), 2u);
    EXPECT_TRUE(relay.taken(turned, FrameType::kPeerUp).empty());
}

// ---- handles ----

TEST(Handles, RestUntilDrainedAndSomeTimeMore) {
    HandleTable table(3, 100ms);
    const Time start{};
    EXPECT_EQ(table.take({1}, start), 1);
    EXPECT_EQ(table.take({2}, start), 2);
    EXPECT_EQ(table.state(3), HandleTable::State::kNever);
    table.release(1);
    EXPECT_EQ(table.state(1), HandleTable::State::kResting);
    EXPECT_EQ(table.find(1), nullptr);
    EXPECT_EQ(table.take({3}, start), 3);
    EXPECT_FALSE(table.take({4}, start + 1h));  // PEER_DOWN has not left
    table.on_drained(start + 1h);
    EXPECT_FALSE(table.take({4}, start + 1h + 99ms));
    table.on_held();
    EXPECT_FALSE(table.take({4}, start + 2h));  // its frames wait, so do its handles
    table.on_resumed(start + 1h + 50ms);
    EXPECT_FALSE(table.take({4}, start + 1h + 149ms));
    EXPECT_EQ(table.take({4}, start + 1h + 150ms), 1);
    EXPECT_EQ(table.find(1)->connection, ConnectionId{4});
    EXPECT_EQ(table.state(0), HandleTable::State::kNever);
}

TEST(Handles, RunningOutKeepsThePairApartAndIsCounted) {
    SwitchboardOptions options;
    options.handle_max = 2;
    FakeRelay relay(options);
    const auto backbone = relay.attach(1, Role::kBackbone);
    for (uint32_t i = 2; i < 6; ++i) relay.attach(i, Role::kWorker);
    EXPECT_EQ(relay.taken(backbone, FrameType::kPeerUp).size(), 2u);
    EXPECT_EQ(relay.board.counters().introductions_failed, 2u);
}

// ---- backpressure ----

TEST(Backpressure, ABackboneIsToldThatAWorkerIsFull) {
    FakeRelay relay(tiny());
    const PairOf pair(relay);
    relay.lines[pair.worker].reads = false;
    for (uint32_t i = 1; i <= 4; ++i) relay.say(pair.backbone, request(pair.to_worker, i));
    EXPECT_EQ(relay.lines[pair.worker].queue.size(), 2u);
    const auto told = relay.taken(pair.backbone, FrameType::kError);
    ASSERT_EQ(told.size(), 2u);
    EXPECT_EQ(told[0].header.request_id, 3u);
    EXPECT_EQ(told[1].header.request_id, 4u);
    EXPECT_EQ(told[1].header.peer, pair.to_worker);
    EXPECT_EQ(error_code(told[0]), errc_info(Errc::kBusy).wire_code);
    relay.take(pair.worker, 1);
    relay.say(pair.backbone, request(pair.to_worker, 5));
    EXPECT_EQ(relay.lines[pair.worker].queue.size(), 2u);
}

TEST(Backpressure, AWorkerIsNotReadWhileABackboneIsFull) {
    FakeRelay relay(tiny());
    const PairOf pair(relay);
    const auto second = relay.attach(3, Role::kWorker);
    relay.lines[pair.backbone].reads = false;
    for (uint32_t i = 1; i <= 5; ++i) {
        relay.say(pair.worker, request(pair.to_backbone, i, 100, FrameType::kResult));
    }
    relay.say(second, request(handle_of(relay, second), 100, 10, FrameType::kResult));
    EXPECT_TRUE(relay.lines[pair.worker].held);
    EXPECT_TRUE(relay.lines[second].held);  // it would fit, but it is not its turn
    EXPECT_EQ(relay.lines[pair.worker].inbox.size(), 3u);
    EXPECT_TRUE(relay.taken(pair.worker, FrameType::kError).empty());
    std::vector<uint32_t> order;
    while (order.size() < 6) {
        const size_t before = relay.lines[pair.backbone].taken.size();
        relay.take(pair.backbone, 1);
        ASSERT_GT(relay.lines[pair.backbone].taken.size(), before);
        order.push_back(relay.lines[pair.backbone].taken.back().header.request_id);
    }
    EXPECT_EQ(order, (std::vector<uint32_t>{1, 2, 3, 100, 4, 5}));
    EXPECT_EQ(relay.board.queued_bytes(), 0u);
}

TEST(Backpressure, AFrameLongerThanTheQueuePassesAlone) {
    FakeRelay relay(tiny());
    const PairOf pair(relay);
    relay.lines[pair.worker].reads = false;
    relay.say(pair.backbone, request(pair.to_worker, 1, 4096 - 16));
    relay.say(pair.backbone, request(pair.to_worker, 2, 1));
    EXPECT_EQ(relay.lines[pair.worker].queue.size(), 1u);
    EXPECT_EQ(relay.taken(pair.backbone, FrameType::kError).size(), 1u);
}

TEST(Backpressure, TheTotalIsBoundedAndNobodyWaitsForEver) {
    SwitchboardOptions options = tiny();
    options.queue_total_max = 400;
    FakeRelay relay(options);
    std::vector<ConnectionId> backbones, workers;
    for (uint32_t i = 0; i < 3; ++i) {
        const std::string token = std::to_string(i + 1) + " 0 1000";
        backbones.push_back(relay.attach(10 + i, Role::kBackbone, token));
        workers.push_back(relay.attach(20 + i, Role::kWorker, token));
        relay.lines[backbones[i]].reads = false;
    }
    for (uint32_t i = 0; i < 3; ++i) {
        for (uint32_t n = 0; n < 2; ++n) {
            relay.say(workers[i], request(handle_of(relay, workers[i]), n));
        }
    }
    EXPECT_LE(relay.board.queued_bytes(), 500u);
    EXPECT_TRUE(relay.lines[workers[2]].held);
    EXPECT_EQ(relay.board.counters().cut_memory, 0u);
    for (int round = 0; round < 10; ++round) {
        for (const auto id : backbones) relay.take(id);
    }
    for (const auto id : backbones) EXPECT_EQ(relay.taken(id, FrameType::kCompute).size(), 2u);
    EXPECT_EQ(relay.board.queued_bytes(), 0u);
}

TEST(Backpressure, StrangersWhoDoNotReadDoNotStarveAPair) {
    SwitchboardOptions options = tiny();
    options.queue_total_max = 1000;
    FakeRelay relay(options);
    const PairOf pair(relay);
    std::vector<ConnectionId> hostile;
    for (uint32_t i = 0; i < 10; ++i) {
        hostile.push_back(relay.attach(10 + i, Role::kWorker, "2 0 100"));
        relay.lines[hostile.back()].reads = false;
    }
    for (uint32_t i = 0; i < 100; ++i) {
        const auto id = hostile[i % hostile.size()];
        relay.say(id, make_frame(FrameType::kPing, 0, i, Bytes(64, 1)));
        relay.say(pair.backbone, request(pair.to_worker, i));
        ASSERT_EQ(relay.taken(pair.worker, FrameType::kCompute).size(), i + 1);
        ASSERT_LE(relay.board.queued_bytes(), 1250u);
    }
    EXPECT_GT(relay.board.counters().cut_memory, 0u);
    EXPECT_FALSE(relay.lines[pair.worker].closed);
}

// Another sender to the same receiver waits for what is queued and one frame more, however much the
// flooder has to say; strangers do not wait at all.
TEST(Backpressure, AFloodDelaysOthersByOneQueueAtMost) {
    FakeRelay relay(tiny());
    const PairOf flooded(relay);
    const auto quiet = relay.attach(3, Role::kWorker);
    const auto other_backbone = relay.attach(4, Role::kBackbone, "2 0 1000");
    const auto other_worker = relay.attach(5, Role::kWorker, "2 0 1000");
    const uint16_t from_quiet = handle_of(relay, quiet);
    const uint16_t from_other = handle_of(relay, other_worker);
    relay.lines[flooded.backbone].reads = false;
    for (uint32_t i = 0; i < 500; ++i) {
        relay.say(flooded.worker, request(flooded.to_backbone, i, 100, FrameType::kResult));
    }
    for (uint32_t n = 0; n < 100; ++n) {
        relay.say(other_worker, request(from_other, n, 100, FrameType::kResult));
        ASSERT_EQ(relay.taken(other_backbone, FrameType::kResult).size(), n + 1);
        relay.say(quiet, request(from_quiet, 1000 + n, 10, FrameType::kResult));
        uint64_t bytes_before = 0;
        while (true) {
            relay.take(flooded.backbone, 1);
            const Frame& frame = relay.lines[flooded.backbone].taken.back();
            if (frame.header.request_id == 1000 + n) break;
            bytes_before += wire::kFrameHeaderBytes + frame.payload.size();
            ASSERT_LE(bytes_before, tiny().queue_bytes_max + 116);
        }
    }
    EXPECT_FALSE(relay.lines[flooded.worker].inbox.empty()) << "the flood was over too early";
}

TEST(Backpressure, OneThatReadsNothingOfWhatItIsToldIsNotReadEither) {
    FakeRelay relay(tiny());
    const PairOf pair(relay);
    relay.lines[pair.worker].reads = false;
    relay.lines[pair.backbone].reads = false;
    for (uint32_t i = 0; i < 1000; ++i) relay.say(pair.backbone, request(pair.to_worker, i));
    EXPECT_TRUE(relay.lines[pair.backbone].held);
    EXPECT_LT(relay.board.queued_bytes(), 5000u);
    EXPECT_FALSE(relay.lines[pair.backbone].closed);
    relay.lines[pair.backbone].reads = true;
    relay.take(pair.backbone);
    EXPECT_FALSE(relay.lines[pair.backbone].held);
    EXPECT_TRUE(relay.lines[pair.backbone].inbox.empty());
    EXPECT_EQ(relay.taken(pair.backbone, FrameType::kError).size(), 998u);
}

TEST(Backpressure, ASlowReaderIsCutAndItsSendersGoOn) {
    FakeRelay relay(tiny());
    const PairOf pair(relay);
    relay.lines[pair.backbone].reads = false;
    for (uint32_t i = 0; i < 4; ++i) relay.say(pair.worker, request(pair.to_backbone, i));
    EXPECT_TRUE(relay.lines[pair.worker].held);
    relay.advance(19s);
    EXPECT_FALSE(relay.lines[pair.backbone].closed);
    relay.advance(2s);
    EXPECT_TRUE(relay.lines[pair.backbone].closed);
    EXPECT_EQ(relay.board.counters().cut_stalled, 1u);
    EXPECT_FALSE(relay.lines[pair.worker].held);
    EXPECT_TRUE(relay.lines[pair.worker].inbox.empty());
    // Two were queued for it and died with it, two are told one by one.
    EXPECT_EQ(relay.taken(pair.worker, FrameType::kPeerDown).size(), 1u);
    EXPECT_EQ(relay.taken(pair.worker, FrameType::kError).size(), 2u);
}

TEST(Backpressure, OneThatDripsIsCutWhenOthersWait) {
    SwitchboardOptions options = tiny();
    options.queue_bytes_max = 100 * 116;
    FakeRelay relay(options);
    const PairOf pair(relay);
    relay.lines[pair.backbone].reads = false;
    for (uint32_t i = 0; i < 100; ++i) relay.say(pair.worker, request(pair.to_backbone, i));
    relay.say(pair.worker, request(pair.to_backbone, 100, 4000));
    ASSERT_TRUE(relay.lines[pair.worker].held);
    for (int i = 0; i < 25 && !relay.lines[pair.backbone].closed; ++i) {
        relay.take(pair.backbone, 1);  // a frame a second: never stalled
        relay.advance(1s);
    }
    EXPECT_TRUE(relay.lines[pair.backbone].closed);
    EXPECT_FALSE(relay.lines[pair.worker].closed);
}

// ---- time ----

TEST(Liveness, PingsAndSilence) {
    FakeRelay relay;
    const PairOf pair(relay);
    for (int i = 0; i < 120; ++i) {  // ten minutes
        relay.advance(5s);
        if (i % 4 == 3) relay.event(Heard{pair.backbone});
        if (i < 12) {
            EXPECT_EQ(relay.lines[pair.worker].closed, i >= 11) << i;
        }
    }
    EXPECT_FALSE(relay.lines[pair.backbone].closed);
    EXPECT_GE(relay.lines[pair.backbone].pings.size(), 30u);
    EXPECT_LE(relay.lines[pair.backbone].pings.size(), 41u);
    EXPECT_EQ(relay.board.counters().cut_silent, 1u);
    EXPECT_EQ(relay.taken(pair.backbone, FrameType::kPeerDown).size(), 1u);
}

// S4: a proxy that cuts after 20 to 300 seconds without a byte towards the node cuts nobody, and
// pings of nodes that came together spread.
TEST(Liveness, NoSilenceThatAProxyWouldCutAndNoStampede) {
    SwitchboardOptions options;
    FakeRelay relay(options);
    std::vector<ConnectionId> nodes;
    for (uint32_t i = 0; i < 1000; ++i) nodes.push_back(relay.attach(i, Role::kWorker));
    const Time attached = relay.now;
    for (int i = 0; i < 60; ++i) {  // half an hour
        relay.advance(30s);
        for (const auto id : nodes) relay.event(Heard{id});
    }
    std::map<int64_t, int> last_minutes;  // pings per second of the last ten minutes
    for (const auto id : nodes) {
        ASSERT_FALSE(relay.lines[id].closed);
        Time last = attached;
        for (const Time ping : relay.lines[id].pings) {
            ASSERT_LT(ping - last, 20001ms);
            last = ping;
            if (relay.now - ping < 600s) {
                ++last_minutes[std::chrono::floor<seconds>(ping.time_since_epoch()).count()];
            }
        }
        ASSERT_LT(relay.now - last, 20001ms);
    }
    for (const auto& [second, count] : last_minutes) EXPECT_LT(count, 200) << second;
}

TEST(Liveness, AHeldWorkerIsNotSilent) {
    SwitchboardOptions options = tiny();
    options.hold_max = options.stall_max = 1h;
    FakeRelay relay(options);
    const PairOf pair(relay);
    relay.lines[pair.backbone].reads = false;
    for (uint32_t i = 0; i < 4; ++i) relay.say(pair.worker, request(pair.to_backbone, i));
    for (int i = 0; i < 10; ++i) {
        relay.advance(30s);
        relay.event(Heard{pair.backbone});
    }
    EXPECT_FALSE(relay.lines[pair.worker].closed);
}

// L4, without a socket.
TEST(Tokens, ExpireAndAreRenewed) {
    FakeRelay relay;
    const auto a = relay.attach(1, Role::kWorker, "1 5 30");
    const auto b = relay.attach(2, Role::kWorker, "1 6 30");
    relay.advance(29s);
    relay.say(b, wire::encode_renew("1 7 30", 77));
    const auto attached = relay.taken(b, FrameType::kAttached);
    ASSERT_EQ(attached.size(), 2u);
    EXPECT_EQ(attached[1].header.request_id, 77u);
    EXPECT_EQ(wire::decode_attached(attached[1].payload)->token_left_ms, 30000u);
    relay.advance(2s);
    EXPECT_TRUE(relay.lines[a].closed);
    EXPECT_EQ(only_error(relay, a), Errc::kExpired);
    EXPECT_FALSE(relay.lines[b].closed);

    for (const auto& [token, code] : std::vector<std::pair<std::string, Errc>>{
             {"bad", Errc::kDenied}, {"1 8 0", Errc::kExpired}, {"2 8 30", Errc::kMismatch}}) {
        relay.lines[b].taken.clear();
        relay.say(b, wire::encode_renew(token, 78));
        EXPECT_EQ(only_error(relay, b), code);
        EXPECT_FALSE(relay.lines[b].closed);
    }
}

TEST(Tokens, ARevokedOneIsCutAtOnce) {
    FakeRelay relay;
    const auto backbone = relay.attach(1, Role::kBackbone, "1 5 3000");
    const auto worker = relay.attach(2, Role::kWorker, "1 6 3000");
    relay.event(Revoke{{4, 6, 9}});
    EXPECT_TRUE(relay.lines[worker].closed);
    EXPECT_EQ(only_error(relay, worker), Errc::kRevoked);
    EXPECT_FALSE(relay.lines[backbone].closed);
    const auto down = relay.taken(backbone, FrameType::kPeerDown);
    ASSERT_EQ(down.size(), 1u);
    EXPECT_EQ(wire::decode_peer_down(down[0].payload)->code, errc_info(Errc::kRevoked).wire_code);
    relay.event(Revoke{{0}});  // "no token" is not a serial
    EXPECT_FALSE(relay.lines[backbone].closed);
}

// ---- draining ----

TEST(Draining, MoveThenClose) {
    FakeRelay relay;
    const PairOf pair(relay);
    const auto half = relay.open();
    relay.event(Drain{10s, "wss://other:443"});
    const auto move = relay.taken(pair.worker, FrameType::kMove);
    ASSERT_EQ(move.size(), 1u);
    EXPECT_EQ(wire::decode_move(move[0].payload)->within_ms, 10000u);
    EXPECT_EQ(wire::decode_move(move[0].payload)->url, "wss://other:443");
    EXPECT_TRUE(relay.lines[half].closed);
    EXPECT_EQ(only_error(relay, relay.open()), Errc::kBusy);
    relay.say(pair.backbone, request(pair.to_worker, 3));  // work goes on
    EXPECT_EQ(relay.taken(pair.worker, FrameType::kCompute).size(), 1u);
    relay.advance(14s);
    relay.event(Heard{pair.worker});
    EXPECT_FALSE(relay.lines[pair.worker].closed);
    relay.advance(2s);
    EXPECT_EQ(relay.board.connections(), 0u);
    EXPECT_EQ(only_error(relay, pair.worker), Errc::kClosed);
    EXPECT_EQ(relay.board.next_tick() == Time::max(), false);  // nodes_ are swept yet
    relay.advance(60s);
    EXPECT_EQ(relay.board.next_tick(), Time::max());
}

}  // namespace
}  // namespace kvasir::relay
