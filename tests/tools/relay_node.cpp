// A node that attaches to an open relay and says what it is told: one word a line.
//
//   relay_node PORT
//
// Used by the end-to-end tests of `kvasir relay`. Ends with the connection.
#include <cstdio>
#include <cstdlib>

#include "relay/relay_testing.hpp"

int main(int argc, char** argv) {
    using namespace kvasir;
    using namespace kvasir::relay::testing;
    if (argc != 2) return 2;
    Target target;
    target.endpoint.host = "127.0.0.1";
    target.endpoint.port = static_cast<uint16_t>(std::atoi(argv[1]));
    Node node = Node::attach(target, wire::Role::kWorker);
    std::printf("attached ping %u\n", node.attached.ping_interval_ms);
    std::fflush(stdout);
    while (const auto frame = node.next(std::chrono::hours(1))) {
        if (frame->header.type == wire::FrameType::kMove) {
            const auto move = wire::decode_move(frame->payload);
            std::printf("move %u\n", move ? move->within_ms : 0);
        } else {
            std::printf("frame %d\n", static_cast<int>(frame->header.type));
        }
        std::fflush(stdout);
    }
    std::printf("closed\n");
    return 0;
}
