#include "net/message_stream.hpp"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "net/test_frames.hpp"
#include "net/test_peer.hpp"

namespace kvasir::net {
namespace {

using testing::Bytes;
using testing::bytes_of;
using testing::control;
using testing::frame;
using testing::Over;
using testing::pattern;
using testing::RawPeer;
using testing::transport_pair;
using wire::WsOpcode;

using namespace std::chrono_literals;

Deadline in(std::chrono::milliseconds time) {
    return Clock::now() + time;
}

// The same tests over an in-memory pair, over TCP and over TLS.
class Streams : public ::testing::TestWithParam<Over> {
protected:
    std::pair<Transport, Transport> ends() const { return transport_pair(GetParam()); }
    std::pair<RawPeer, Transport> raw_and_end() const {
        auto [a, b] = ends();
        return {RawPeer(std::move(a)), std::move(b)};
    }
};
std::string name_of(const ::testing::TestParamInfo<Over>& info) {
    return info.param == Over::kPair ? "Pair" : info.param == Over::kTcp ? "Tcp" : "Tls";
}
INSTANTIATE_TEST_SUITE_P(Sockets, Streams, ::testing::Values(Over::kPair, Over::kTcp, Over::kTls),
                         name_of);

Bytes copy(std::span<const uint8_t> view) {
    return {view.begin(), view.end()};
}

// S1: every size at the borders, both directions, with a marker after each.
TEST_P(Streams, SizesAtEveryBorderBothWays) {
    auto [a, b] = ends();
    MessageLimits limits;
    limits.message_bytes_max = (2 << 20) + 7;
    MessageStream client(std::move(a), Side::kClient, {}, limits);
    MessageStream server(std::move(b), Side::kServer, {}, limits);
    const uint64_t sizes[] = {
        0,     1,     125,   126,   127,   128,   16383,         16384,
        16385, 32767, 32768, 65535, 65536, 65537, (1 << 20) + 1, limits.message_bytes_max};
    std::thread echo([&server] {
        while (auto message = server.receive(in(20s))) {
            const Bytes answer = copy(*message);
            if (!server.enqueue(answer) || !server.flush_until(in(20s))) return;
        }
    });
    for (const uint64_t size : sizes) {
        const Bytes body = pattern(size);
        const std::span<const uint8_t> whole(body);
        const std::span<const uint8_t> pieces[] = {
            whole.first(size / 3), {}, whole.subspan(size / 3)};
        ASSERT_TRUE(client.enqueue(pieces));
        ASSERT_TRUE(client.flush_until(in(20s)));
        ASSERT_TRUE(client.enqueue(bytes_of("marker")));
        auto answer = client.receive(in(20s));
        ASSERT_TRUE(answer) << size << ": " << answer.error().detail;
        ASSERT_TRUE(copy(*answer) == body) << size;
        ASSERT_EQ(reinterpret_cast<uintptr_t>(answer->data()) % 16, 0u) << size;
        auto marker = client.receive(in(20s));
        ASSERT_TRUE(marker) << size;
        ASSERT_EQ(copy(*marker), bytes_of("marker")) << size;
    }
    const Bytes over(limits.message_bytes_max + 1);
    EXPECT_EQ(client.enqueue(over).error().code, Errc::kLimit);
    EXPECT_EQ(client.counters().messages_out, 2 * std::size(sizes));
    EXPECT_EQ(client.counters().messages_in, 2 * std::size(sizes));
    EXPECT_GT(client.counters().bytes_out, client.counters().bytes_in);  // four bytes of key each
    client.close();
    echo.join();
}

// A raw peer's bytes, whole, byte by byte and in odd pieces.
TEST_P(Streams, AnySegmentationGivesTheSameMessages) {
    Bytes stream;
    for (const size_t size : {0, 1, 125, 126, 127, 128, 32768, 65535, 65536}) {
        for (const Bytes& part : {frame(pattern(size), true), frame(bytes_of("marker"), true)}) {
            stream.insert(stream.end(), part.begin(), part.end());
        }
    }
    for (const size_t piece : {~size_t{0}, size_t{1}, size_t{3}, size_t{1000}}) {
        auto [raw, end] = raw_and_end();
        MessageStream server(std::move(end), Side::kServer, {});
        std::thread peer([&, &raw = raw] { raw.write(stream, piece); });
        for (const size_t size : {0, 1, 125, 126, 127, 128, 32768, 65535, 65536}) {
            auto message = server.receive(in(30s));
            ASSERT_TRUE(message) << message.error().detail;
            ASSERT_TRUE(copy(*message) == pattern(size)) << size;
            message = server.receive(in(30s));
            ASSERT_TRUE(message);
            ASSERT_EQ(copy(*message), bytes_of("marker"));
        }
        peer.join();
    }
}

TEST_P(Streams, LeftoverOfTheUpgradeComesFirstAtEveryCut) {
    Bytes stream = frame(bytes_of("W"), true);
    for (const Bytes& part : {frame(pattern(300), true), control(WsOpcode::kPing, "x", true),
                              frame(bytes_of("last"), true)}) {
        stream.insert(stream.end(), part.begin(), part.end());
    }
    for (size_t cut = 0; cut <= stream.size(); ++cut) {
        auto [raw, end] = raw_and_end();
        MessageStream server(std::move(end), Side::kServer,
                             {stream.begin(), stream.begin() + static_cast<long>(cut)});
        raw.write(std::span(stream).subspan(cut));
        for (const Bytes& expected : {bytes_of("W"), pattern(300), bytes_of("last")}) {
            auto message = server.receive(in(10s));
            ASSERT_TRUE(message) << cut << ": " << message.error().detail;
            ASSERT_TRUE(copy(*message) == expected) << cut;
        }
        server.close();
        EXPECT_EQ(raw.read_to_end().size(), 3u + 4u) << cut;  // pong "x", close 1000
    }
}

struct Offence {
    const char* name;
    Bytes bytes;
    Errc code;
    uint16_t close_code;
};

// What a broken peer sends, the error it becomes, and the close code that goes back.
TEST_P(Streams, EveryOffenceClosesWithItsCode) {
    const auto header = [](Bytes start) { return start; };
    const Offence offences[] = {
        {"no mask", frame(bytes_of("x"), false), Errc::kProtocol, 1002},
        {"RSV bits", header({0xc2, 0x80, 0, 0, 0, 0}), Errc::kProtocol, 1002},
        {"unknown opcode", header({0x83, 0x80, 0, 0, 0, 0}), Errc::kProtocol, 1002},
        {"text", frame(bytes_of("x"), true, WsOpcode::kText), Errc::kUnsupported, 1003},
        {"claims cap+1", header({0x82, 0xfe, 0x03, 0xe9}), Errc::kProtocol,
         0},  // waits for the key
        {"cap+1", frame(pattern(1001), true), Errc::kLimit, 1009},
        {"claims 2^31", header({0x82, 0xff, 0, 0, 0, 0, 0x80, 0, 0, 0, 0, 0, 0, 0}), Errc::kLimit,
         1009},
        {"claims 2^32", header({0x82, 0xff, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0}), Errc::kLimit,
         1009},
        {"claims 2^32+126", header({0x82, 0xff, 0, 0, 0, 1, 0, 0, 0, 126, 0, 0, 0, 0}),
         Errc::kLimit, 1009},
        {"claims 2^63", header({0x82, 0xff, 0x80, 0, 0, 0, 0, 0, 0, 0}), Errc::kProtocol, 1002},
        {"claims 2^64-1", header({0x82, 0xff, 255, 255, 255, 255, 255, 255, 255, 255}),
         Errc::kProtocol, 1002},
        {"not minimal", header({0x82, 0xfe, 0, 5}), Errc::kProtocol, 1002},
        {"long ping", header({0x89, 0xfe}), Errc::kProtocol, 1002},
        {"fragmented ping", header({0x09, 0x80}), Errc::kProtocol, 1002},
        {"lone continuation", frame({}, true, WsOpcode::kContinuation), Errc::kProtocol, 1002},
        {"close of one byte", control(WsOpcode::kClose, "x", true), Errc::kProtocol, 1002},
        {"close with code 1005", control(WsOpcode::kClose, "\x03\xed", true), Errc::kProtocol,
         1002},
        {"clean close",
         control(WsOpcode::kClose,
                 "\x03\xe8"
                 "bye",
                 true),
         Errc::kClosed, 1000},
        {"close without code", control(WsOpcode::kClose, "", true), Errc::kClosed, 1000},
        {"close 1001", control(WsOpcode::kClose, "\x03\xe9", true), Errc::kClosed, 1001},
    };
    MessageLimits limits;
    limits.message_bytes_max = 1000;
    for (const Offence& offence : offences) {
        auto [raw, end] = raw_and_end();
        MessageStream server(std::move(end), Side::kServer, {}, limits);
        raw.write(frame(bytes_of("marker"), true));
        raw.write(offence.bytes);
        auto message = server.receive(in(10s));
        ASSERT_TRUE(message) << offence.name;
        EXPECT_EQ(copy(*message), bytes_of("marker")) << offence.name;
        if (offence.close_code == 0) {
            EXPECT_EQ(server.receive(in(20ms)).error().code, Errc::kTimeout) << offence.name;
            EXPECT_FALSE(server.closed());
            continue;
        }
        message = server.receive(in(10s));
        ASSERT_FALSE(message) << offence.name;
        EXPECT_EQ(message.error().code, offence.code) << offence.name << message.error().detail;
        EXPECT_TRUE(server.closed()) << offence.name;
        EXPECT_EQ(server.receive(in(10s)).error().code, Errc::kClosed) << offence.name;
        EXPECT_EQ(server.enqueue(bytes_of("x")).error().code, Errc::kClosed) << offence.name;
        const Bytes close_frame = {0x88, 2, static_cast<uint8_t>(offence.close_code >> 8),
                                   static_cast<uint8_t>(offence.close_code)};
        EXPECT_EQ(raw.read_to_end(), close_frame) << offence.name;
    }
}

TEST_P(Streams, MaskedFramesAreRefusedByAClient) {
    auto [raw, end] = raw_and_end();
    MessageStream client(std::move(end), Side::kClient, {});
    raw.write(frame(bytes_of("x"), true));
    EXPECT_EQ(client.receive(in(10s)).error().code, Errc::kProtocol);
    EXPECT_EQ(raw.read_to_end(), (Bytes{0x88, 0x82, 0, 0, 0, 0, 0x03, 0xea}));
}

TEST_P(Streams, EndlessFragmentsStopAtTheCap) {
    auto [raw, end] = raw_and_end();
    MessageLimits limits;
    limits.message_bytes_max = 100000;
    MessageStream server(std::move(end), Side::kServer, {}, limits);
    std::thread peer([&raw = raw] {
        raw.write(frame(pattern(999), true, WsOpcode::kBinary, false));
        for (int i = 0; i < 200; ++i) {
            raw.write(frame(pattern(999), true, WsOpcode::kContinuation, false));
        }
    });
    auto message = server.receive(in(10s));
    ASSERT_FALSE(message);
    EXPECT_EQ(message.error().code, Errc::kLimit);
    server = MessageStream(UniqueFd(), Side::kServer, {});  // closes the socket under the peer
    peer.join();
}

TEST_P(Streams, ExactlyAtTheLimitsPasses) {
    auto [a, b] = ends();
    MessageLimits limits;
    limits.message_bytes_max = limits.unsent_bytes_max = 70000;
    MessageStream client(std::move(a), Side::kClient, {}, limits);
    MessageStream server(std::move(b), Side::kServer, {}, limits);
    ASSERT_TRUE(client.enqueue(pattern(70000)));
    std::thread flusher([&client] { EXPECT_TRUE(client.flush_until(in(10s))); });
    auto message = server.receive(in(10s));
    flusher.join();
    ASSERT_TRUE(message) << message.error().detail;
    EXPECT_TRUE(copy(*message) == pattern(70000));
}

// A peer that never reads: the sender is told kBusy at the bound, nothing of the refused message is
// sent, and what was taken arrives whole afterwards.
TEST_P(Streams, APeerThatNeverReadsMakesUsBusyNotBig) {
    auto [a, b] = ends();
    const int small = 4096;
    ::setsockopt(a.fd(), SOL_SOCKET, SO_SNDBUF, &small, sizeof(small));
    MessageLimits limits;
    limits.unsent_bytes_max = 1 << 20;
    MessageStream sender(std::move(a), Side::kServer, {}, limits);
    size_t taken = 0;
    const auto fill = [&sender, &taken] {
        while (taken < 10000) {
            const auto status = sender.enqueue(pattern(50000, static_cast<uint32_t>(taken)));
            if (!status) return status.error().code;
            ++taken;
        }
        return Errc::kCount_;
    };
    EXPECT_EQ(fill(), Errc::kBusy);
    EXPECT_TRUE(sender.wants_write());
    EXPECT_FALSE(sender.closed());
    EXPECT_EQ(sender.flush_until(in(30ms)).error().code, Errc::kTimeout);
    EXPECT_EQ(fill(), Errc::kBusy);  // the kernel may have taken a little more by now
    const Bytes never((1 << 20) + 1);
    EXPECT_EQ(sender.enqueue(never).error().code, Errc::kLimit);

    MessageStream reader(std::move(b), Side::kClient, {});
    std::thread flusher([&sender] { EXPECT_TRUE(sender.flush_until(in(20s))); });
    for (size_t i = 0; i < taken; ++i) {
        auto message = reader.receive(in(20s));
        ASSERT_TRUE(message) << i << " of " << taken << ": " << message.error().detail;
        ASSERT_TRUE(copy(*message) == pattern(50000, static_cast<uint32_t>(i))) << i;
    }
    flusher.join();
    ASSERT_TRUE(sender.enqueue(bytes_of("marker")));
    EXPECT_EQ(copy(*reader.receive(in(10s))), bytes_of("marker"));
}

// A sender with turns gives the kernel so much a call, and keeps nothing back when it closes.
TEST_P(Streams, SendingTakesTurns) {
    auto [a, b] = ends();
    MessageLimits limits;
    limits.send_bytes_per_call = 3000;
    MessageStream sender(std::move(a), Side::kServer, {}, limits);
    MessageStream reader(std::move(b), Side::kClient, {});
    ASSERT_TRUE(sender.enqueue(pattern(2000, 0)));
    const uint64_t first = sender.counters().bytes_out;
    EXPECT_GT(first, 2000u) << "what is no more than a turn goes at once";
    ASSERT_TRUE(sender.enqueue(pattern(10000, 1)));
    EXPECT_EQ(sender.counters().bytes_out, first) << "what is more is appended";
    ASSERT_TRUE(sender.enqueue(pattern(2000, 2)));
    EXPECT_EQ(sender.counters().bytes_out, first) << "it only appends while bytes are pending";
    ASSERT_TRUE(sender.flush());
    EXPECT_EQ(sender.counters().bytes_out, first + 3000);
    EXPECT_TRUE(sender.wants_write());
    ASSERT_TRUE(sender.flush_until(in(10s)));
    ASSERT_TRUE(sender.enqueue(pattern(10000, 3)));
    sender.close(1000);
    for (uint32_t i = 0; i <= 3; ++i) {
        const auto message = reader.receive(in(10s));
        ASSERT_TRUE(message) << message.error().detail;
        EXPECT_TRUE(copy(*message) == pattern(i % 2 == 0 ? 2000 : 10000, i)) << i;
    }
    EXPECT_EQ(reader.receive(in(10s)).error().code, Errc::kClosed);
}

// Messages go from one connection to another while nobody reads at the end: long ones take the
// buffer along that they came in, and all arrive as they were.
TEST_P(Streams, PassingOnTakesTheBufferAlong) {
    auto [near, far] = ends();
    auto [next, end] = ends();
    MessageStream source(std::move(near), Side::kClient, {});
    MessageStream in_stream(std::move(far), Side::kServer, {});
    MessageStream out_stream(std::move(next), Side::kServer, {});
    MessageStream sink(std::move(end), Side::kClient, {});
    in_stream.set_bytes_per_call(16 << 10);
    out_stream.set_bytes_per_call(16 << 10);
    const std::vector<size_t> sizes = {300000, 20, 100000, 65536, 1000000, 600000, 16384, 2000000};
    uint64_t unsent = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
        SCOPED_TRACE(sizes[i]);
        ASSERT_TRUE(source.enqueue(pattern(sizes[i], static_cast<uint32_t>(i))));
        std::optional<std::span<const uint8_t>> message;
        while (!message) {
            ASSERT_TRUE(source.flush());
            const auto got = in_stream.try_receive();
            ASSERT_TRUE(got) << got.error().detail;
            message = *got;
        }
        ASSERT_EQ(message->size(), sizes[i]);
        const std::span<const uint8_t> pieces[] = {message->first(10), message->subspan(10)};
        const bool was_pending = out_stream.wants_write();
        ASSERT_TRUE(out_stream.pass_on(pieces, in_stream));
        EXPECT_EQ(in_stream.receive_buffer_bytes() == 0, sizes[i] > 262144);
        if (was_pending || sizes[i] > (16 << 10)) unsent += sizes[i];
        EXPECT_GE(out_stream.unsent_bytes(), unsent);
    }
    for (size_t i = 0; i < sizes.size(); ++i) {
        std::optional<std::span<const uint8_t>> message;
        while (!message) {
            ASSERT_TRUE(out_stream.flush());
            const auto got = sink.try_receive();
            ASSERT_TRUE(got) << got.error().detail;
            message = *got;
        }
        EXPECT_EQ(copy(*message), pattern(sizes[i], static_cast<uint32_t>(i)));
    }
    EXPECT_EQ(out_stream.unsent_bytes(), 0u);
}

TEST_P(Streams, PingsAreAnsweredAndFloodsAreNot) {
    auto [raw, end] = raw_and_end();
    MessageLimits limits;
    limits.control_per_second_max = 5;
    MessageStream server(std::move(end), Side::kServer, {}, limits);
    for (int i = 0; i < 5; ++i) raw.write(control(WsOpcode::kPing, "hello", true));
    raw.write(frame(bytes_of("marker"), true));
    ASSERT_TRUE(server.receive(in(10s)));
    // Those that arrived together may share a pong, but the last one is answered.
    const Bytes pong = control(WsOpcode::kPong, "hello", false);
    EXPECT_EQ(raw.read(pong.size()), pong);
    for (int i = 0; i < 20; ++i) raw.write(control(WsOpcode::kPong, "", true));
    EXPECT_EQ(server.receive(in(10s)).error().code, Errc::kProtocol);
}

// A peer that pings but never reads must not fill our memory with pongs.
TEST_P(Streams, PongsDoNotPileUp) {
    auto [raw, end] = raw_and_end();
    const int small = 4096;
    ::setsockopt(end.fd(), SOL_SOCKET, SO_SNDBUF, &small, sizeof(small));
    MessageLimits limits;
    limits.control_per_second_max = 1000000;
    MessageStream server(std::move(end), Side::kServer, {}, limits);
    while (!server.wants_write()) ASSERT_TRUE(server.enqueue(pattern(100000)));
    for (int i = 0; i < 50; ++i) ASSERT_TRUE(server.enqueue(pattern(100000)));
    const uint64_t out = server.counters().bytes_out;
    Bytes pings;
    for (int i = 0; i < 2000; ++i) {
        const Bytes ping = control(WsOpcode::kPing, std::string(125, static_cast<char>(i)), true);
        pings.insert(pings.end(), ping.begin(), ping.end());
    }
    std::thread peer([&, &raw = raw] {
        raw.write(pings);
        raw.write(frame(bytes_of("marker"), true));
    });
    ASSERT_TRUE(server.receive(in(10s)));
    peer.join();
    EXPECT_LT(server.counters().bytes_out - out,
              4000000u);  // the pings were read behind a full socket
    std::thread flusher([&server] {
        EXPECT_TRUE(server.flush_until(in(10s)));
        EXPECT_TRUE(server.flush());
        server.close();
    });
    const Bytes all = raw.read_to_end();
    flusher.join();
    const std::string text(all.begin(), all.end());
    size_t pongs = 0;
    for (size_t at = text.find("\x8a\x7d"); at != std::string::npos;
         at = text.find("\x8a\x7d", at + 127)) {
        ++pongs;
    }
    EXPECT_GE(pongs, 1u);
    EXPECT_LE(pongs, 3u);
}

TEST_P(Streams, AnAbruptEndIsAnErrorNotASignal) {
    for (const bool partial : {false, true}) {
        auto [raw, end] = raw_and_end();
        MessageStream server(std::move(end), Side::kServer, {});
        Bytes bytes = frame(pattern(1000), true);
        bytes.resize(500);
        if (partial) raw.write(bytes);
        raw.reset();
        auto message = server.receive(in(10s));
        ASSERT_FALSE(message);
        EXPECT_EQ(message.error().code, Errc::kClosed);
        EXPECT_EQ(message.error().detail.find("middle") != std::string::npos, partial);
    }
    // Writing to a peer that is gone: an error; SIGPIPE would end this process.
    auto [raw, end] = raw_and_end();
    MessageStream server(std::move(end), Side::kServer, {});
    raw.reset();
    Status status;
    for (int i = 0; i < 100 && status; ++i) {
        status = server.enqueue(pattern(1000));
        // tidy: sleep, the reset of the other side makes no event before the next write
        std::this_thread::sleep_for(1ms);
    }
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().code, Errc::kClosed) << status.error().detail;
    EXPECT_TRUE(server.closed());
}

// What the peer said before it went away can be read although our own writes fail by then.
TEST_P(Streams, LastWordsAreReadAfterAFailedWrite) {
    auto [raw, end] = raw_and_end();
    MessageStream server(std::move(end), Side::kServer, {});
    raw.write(frame(bytes_of("the reason"), true));
    raw.reset();
    Status status;
    for (int i = 0; i < 100 && status; ++i) {
        status = server.enqueue(pattern(100));
        // tidy: sleep, the reset of the other side makes no event before the next write
        std::this_thread::sleep_for(1ms);
    }
    ASSERT_FALSE(status);
    auto message = server.receive(in(10s));
    ASSERT_TRUE(message) << message.error().detail;
    EXPECT_EQ(copy(*message), bytes_of("the reason"));
    EXPECT_EQ(server.receive(in(10s)).error().code, Errc::kClosed);
}

TEST_P(Streams, CloseReachesThePeerBehindWhatWasSent) {
    auto [a, b] = ends();
    MessageStream client(std::move(a), Side::kClient, {});
    MessageStream server(std::move(b), Side::kServer, {});
    ASSERT_TRUE(client.enqueue(pattern(5000)));  // unread at the server when it closes
    ASSERT_TRUE(server.enqueue(bytes_of("error text")));
    server.close(1008);
    EXPECT_TRUE(server.closed());
    auto message = client.receive(in(10s));
    ASSERT_TRUE(message) << message.error().detail;
    EXPECT_EQ(copy(*message), bytes_of("error text"));
    message = client.receive(in(10s));
    ASSERT_FALSE(message);
    EXPECT_EQ(message.error().code, Errc::kClosed);
    EXPECT_NE(message.error().detail.find("1008"), std::string::npos) << message.error().detail;
}

TEST_P(Streams, DeadlineHoldsAgainstADrippingPeer) {
    auto [raw, end] = raw_and_end();
    MessageStream server(std::move(end), Side::kServer, {});
    std::atomic<bool> stop = false;
    std::thread peer([&, &raw = raw] {
        const Bytes bytes = frame(pattern(60000), true);
        for (size_t i = 0; i < bytes.size() && !stop; ++i) {
            raw.write(std::span(bytes).subspan(i, 1));
            // tidy: sleep, a peer that drips its bytes is what is tested
            std::this_thread::sleep_for(100us);
        }
    });
    const auto start = Clock::now();
    EXPECT_EQ(server.receive(in(100ms)).error().code, Errc::kTimeout);
    EXPECT_LT(Clock::now() - start, 2s);
    EXPECT_FALSE(server.closed());
    EXPECT_GT(server.last_heard(), start);
    stop = true;
    peer.join();
}

TEST_P(Streams, TimeoutLeavesTheStreamUsable) {
    auto [a, b] = ends();
    MessageStream client(std::move(a), Side::kClient, {});
    MessageStream server(std::move(b), Side::kServer, {});
    EXPECT_EQ(server.receive(in(5ms)).error().code, Errc::kTimeout);
    EXPECT_EQ(server.receive(Clock::now() - 1s).error().code, Errc::kTimeout);
    ASSERT_TRUE(client.enqueue(bytes_of("late")));
    auto message = server.receive(Deadline::max());
    ASSERT_TRUE(message);
    EXPECT_EQ(copy(*message), bytes_of("late"));
    EXPECT_FALSE(*server.try_receive());
}

// Many pieces, and queued messages of all sizes behind a full socket, in order and whole.
TEST_P(Streams, QueuedMessagesKeepTheirOrder) {
    auto [a, b] = ends();
    const int small = 4096;
    ::setsockopt(a.fd(), SOL_SOCKET, SO_SNDBUF, &small, sizeof(small));
    MessageStream sender(std::move(a), Side::kClient, {});
    MessageStream reader(std::move(b), Side::kServer, {});
    std::vector<Bytes> sent;
    for (uint32_t i = 0; i < 300; ++i) {
        sent.push_back(pattern((i * 7919) % 20000, i));
        std::vector<std::span<const uint8_t>> pieces;
        std::span<const uint8_t> rest(sent.back());
        const size_t step = std::max<size_t>(1, rest.size() / (1 + i % 40));
        while (!rest.empty()) {
            pieces.push_back(rest.first(std::min(step, rest.size())));
            rest = rest.subspan(pieces.back().size());
        }
        ASSERT_TRUE(sender.enqueue(pieces));
    }
    EXPECT_TRUE(sender.wants_write());
    std::thread flusher([&sender] { EXPECT_TRUE(sender.flush_until(in(20s))); });
    for (const Bytes& expected : sent) {
        auto message = reader.receive(in(20s));
        ASSERT_TRUE(message) << message.error().detail;
        ASSERT_TRUE(copy(*message) == expected);
    }
    flusher.join();
}

}  // namespace
}  // namespace kvasir::net
