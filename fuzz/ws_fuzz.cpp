// Fuzz target: a byte stream through MessageReader, cut in two ways, must give the same events.
//
// Input: byte 0: bit 0 = server side (frames must be masked), bits 1..: seed of the cuts; the rest
// is the stream. In two of the runs the messages' buffers are taken away. Also checked: messages
// are aligned, within the limit, and the buffer does not outgrow what arrived.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "net/message_reader.hpp"

namespace {

using namespace kvasir;

constexpr uint64_t kMessageBytesMax = 100000;

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "ws_fuzz: %s\n", what);
    std::abort();
}

struct Outcome {
    std::vector<std::pair<uint8_t, std::string>> events;
    std::string error;  // empty: more bytes are wanted
    bool operator==(const Outcome&) const = default;
};

// Takes every event that is ready. false: an error, the stream is over.
bool take_events(net::MessageReader& reader, bool take_blocks, Outcome& outcome) {
    while (true) {
        auto event = reader.next();
        if (!event) {
            outcome.error = event.error().detail;
            return false;
        }
        if (!*event) return true;
        const auto payload = (*event)->payload;
        net::Block block;
        if ((*event)->opcode == wire::WsOpcode::kBinary) {
            require(payload.size() <= kMessageBytesMax, "message over the limit");
            if (take_blocks) block = reader.take_block();  // the payload stays where it is
            require(reinterpret_cast<uintptr_t>(payload.data()) % net::kMessageAlign == 0,
                    "message not aligned");
        }
        outcome.events.emplace_back(static_cast<uint8_t>((*event)->opcode),
                                    std::string(payload.begin(), payload.end()));
    }
}

// `next_cut(rest)`: how many bytes to deliver next, at least 1.
template <class Cut>
Outcome run(std::span<const uint8_t> stream, bool server, bool take_blocks, Cut next_cut) {
    net::MessageReader reader(server, kMessageBytesMax);
    Outcome outcome;
    size_t delivered = 0;
    while (delivered < stream.size()) {
        auto room = reader.writable();
        require(room && !room->empty(), "no room");
        require(reader.capacity() <= 2 * delivered + (2 << 20), "buffer grew ahead of the bytes");
        const size_t left = stream.size() - delivered;
        const size_t count = std::min({left, room->size(), next_cut(left)});
        std::memcpy(room->data(), stream.data() + delivered, count);
        reader.commit(count);
        delivered += count;
        if (!take_events(reader, take_blocks, outcome)) break;
    }
    return outcome;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size == 0) return 0;
    const bool server = (data[0] & 1) != 0;
    uint32_t seed = data[0] >> 1;
    const std::span<const uint8_t> stream(data + 1, size - 1);
    const Outcome whole = run(stream, server, true, [](size_t left) { return left; });
    const Outcome bytewise = run(stream, server, false, [](size_t) { return size_t{1}; });
    const Outcome random = run(stream, server, true, [&seed](size_t) {
        seed = seed * 1664525 + 1013904223;
        return size_t{1} + (seed >> 24) % 40;
    });
    require(whole == bytewise, "byte by byte gives other events");
    require(whole == random, "random cuts give other events");
    return 0;
}
