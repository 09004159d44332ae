// Fuzz target: a relay's switchboard under any sequence of events and frames.
//
// The first byte chooses: even, the input drives the auditor's world (attaching, sending, reading,
// closing, waiting), which demands that no frame is lost, doubled or misdirected; odd, it is a row
// of messages from a few connections, each behind a byte that says whose and one with its length:
// whatever nodes say, the switchboard stays within its limits and a healthy pair is served.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <vector>

#include "relay/auditor_testing.hpp"

namespace {

using namespace kvasir;
using namespace kvasir::relay;
using namespace kvasir::relay::testing;

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "relay_fuzz: %s\n", what);
    std::abort();
}

uint16_t handle_of(const FakeRelay& relay, ConnectionId id) {
    const auto ups = relay.taken(id, FrameType::kPeerUp);
    require(!ups.empty(), "the healthy pair does not meet");
    return wire::decode_peer_up(ups.back().payload)->handle;
}

void raw_messages(std::span<const uint8_t> data) {
    FakeRelay relay(Auditor::options());
    // A model of their own: strangers may not even be seen.
    const ConnectionId backbone = relay.attach(1000, Role::kBackbone, "9 0 100000");
    const ConnectionId worker = relay.attach(1001, Role::kWorker, "9 0 100000");
    const uint16_t to_worker = handle_of(relay, backbone);
    std::vector<ConnectionId> strangers;
    ByteReader in(data);
    while (in.remaining() >= 2) {
        const uint8_t who = in.u8();
        const size_t wanted = in.u8();
        const size_t size = std::min(wanted, in.remaining());
        const auto bytes = in.bytes(size);
        if (strangers.size() < 4) {
            strangers.push_back(who < 64    ? relay.attach(who, Role::kWorker, "1 0 1000")
                                : who < 128 ? relay.attach(who, Role::kBackbone, "1 0 1000")
                                            : relay.open());
        }
        const ConnectionId id = strangers[who % strangers.size()];
        Line& line = relay.lines.at(id);
        line.reads = who % 3 != 0;
        if (line.closed) {
            strangers.erase(strangers.begin() + who % static_cast<int>(strangers.size()));
            continue;
        }
        if (!line.held && line.inbox.size() < 8) relay.say(id, {bytes.begin(), bytes.end()});
        relay.advance(milliseconds(who));
        for (const ConnectionId alive : {backbone, worker}) relay.event(Heard{alive});
    }
    require(!relay.lines.at(backbone).closed && !relay.lines.at(worker).closed, "a pair was cut");
    const size_t before = relay.taken(worker, FrameType::kCompute).size();
    relay.say(backbone, make_frame(FrameType::kCompute, to_worker, 1, Bytes(40, 1)));
    require(relay.taken(worker, FrameType::kCompute).size() == before + 1, "not served");
    require(relay.taken(worker, FrameType::kPeerUp).size() == 1, "strangers were seen");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size == 0) return 0;
    const std::span<const uint8_t> rest(data + 1, size - 1);
    if (data[0] % 2 == 0) {
        Auditor().run(rest);
    } else {
        raw_messages(rest);
    }
    return 0;
}
