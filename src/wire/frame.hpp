// The Kvasir frame: a 16-byte header in front of every message between nodes.
//
// One WebSocket binary message carries exactly one frame, except the first message of a connection,
// which is the single role byte. Used by net users, worker, backbone, relay. docs/protocol.md has
// every byte.
//
// Thread: values. Limits: kFrameBytesMax; a decoder never allocates from a length it read.
#pragma once

#include <cstdint>
#include <span>

#include "base/bytes.hpp"
#include "base/result.hpp"

namespace kvasir::wire {

constexpr uint16_t kProtocolMajor = 1;  // differs: refused, with both values
constexpr uint16_t kProtocolMinor = 0;  // additive changes only

constexpr uint64_t kFrameHeaderBytes = 16;
constexpr uint64_t kFrameBytesMax = uint64_t{64} << 20;  // header and payload

// First byte of a connection.
enum class Role : uint8_t { kWorker = 'W', kBackbone = 'B', kObserver = 'O' };

// Never renumber. Unknown types are refused with ERROR kProtocol and a close.
enum class FrameType : uint8_t {
    kHello = 1,       // node -> hub, first frame
    kWelcome = 2,     // hub -> node, answer to hello
    kProgram = 3,     // backbone -> worker: what a bank computes
    kProgramAck = 4,  // worker -> backbone
    kCompute = 5,     // backbone -> worker: rows and pairs
    kResult = 6,      // worker -> backbone: one row a pair
    kError = 7,       // both ways; request_id 0: the connection is about to close
    kPing = 8,        // both ways, end to end; 8-byte token
    kPong = 9,        // the same token
    kDrain = 10,      // worker -> backbone: finish what is in flight, send nothing new
    kGoodbye = 11,    // both ways: a clean close follows
    // Of relays: wire/attach.hpp.
    kNonce = 12,     // server -> node, before anything else
    kAttach = 13,    // node -> server, first frame
    kAttached = 14,  // server -> node
    kPeerUp = 15,    // server -> node: somebody to talk to
    kPeerDown = 16,  // server -> node: that one is gone
    kMove = 17,      // server -> node: this server stops, come again
    kRenew = 18,     // node -> server: a newer token
};

struct FrameHeader {
    FrameType type = FrameType::kError;  // u8   @0
    uint8_t flags = 0;                   // u8   @1  zero in version 1
    uint16_t peer = 0;           // u16  @2  short handle behind a relay; 0 on a direct connection
    uint32_t request_id = 0;     // u32  @4  chosen by the asker, echoed in the answer
    uint64_t payload_bytes = 0;  // u64  @8  must equal message length - 16
};

struct FrameView {
    FrameHeader header;
    std::span<const uint8_t> payload;
};

void append_header(ByteWriter& out, const FrameHeader& header);
// Errors: kProtocol (short message, unknown type, non-zero flags, length differs), kLimit (too
// long).
Result<FrameView> decode_frame(std::span<const uint8_t> message);

}  // namespace kvasir::wire
