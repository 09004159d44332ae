// Auditor: a relay under random use, and a simpler model beside it that knows what must happen.
//
// Used by the property test and the fuzz target: bytes in, a sequence of attaching, sending,
// reading, closing, replacing, waiting out. The model knows nothing of queues or handles inside:
// it only reads what nodes read. It demands that no frame ever reaches a wrong node, that none
// arrives twice, and that in the end every frame that was read from a node was delivered or told.
//
// Thread: one. Owns: the world. Limits: kNodes nodes.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <span>
#include <utility>

#include "relay/switchboard_testing.hpp"

namespace kvasir::relay::testing {

class Auditor {
public:
    static constexpr uint32_t kNodes = 6;  // 0 and 1 backbones, 5 an observer, the rest workers

    static SwitchboardOptions options() {
        SwitchboardOptions options;
        options.queue_bytes_max = 100;
        options.queue_total_max = 500;
        options.own_bytes_max = 2048;
        options.message_bytes_max = 200;
        options.handle_max = 4;
        options.handle_rest = milliseconds(200);
        options.attach_burst = 1000000;
        options.stall_max = options.hold_max = milliseconds(1500);
        options.ping_interval = milliseconds(500);
        options.silence_max = milliseconds(3000);
        return options;
    }

    explicit Auditor(SwitchboardOptions chosen = options()) : relay_(chosen) {}

    // Three bytes a step.
    void run(std::span<const uint8_t> data) {
        for (size_t i = 0; i + 3 <= data.size(); i += 3) {
            step(data[i], data[i + 1], data[i + 2]);
            check_queues();
        }
        settle();
        check_end();
    }
    uint64_t delivered() const { return delivered_; }
    uint64_t told() const { return told_; }
    const SwitchboardCounters& counters() const { return relay_.board.counters(); }

private:
    struct Known {  // what a node believes behind one of its handles
        uint64_t generation = 0;
        bool live = true;
        Time down;
    };
    struct Node {
        ConnectionId id;
        uint64_t generation = 0;
        Role role = Role::kWorker;
        size_t seen = 0;  // of taken
        std::map<uint16_t, Known> handles;
        std::deque<Time> sent_at;   // of the inbox
        std::deque<uint32_t> sent;  // their records; 0: none
    };
    enum class Fate : uint8_t { kSent, kRead, kDelivered, kTold };
    struct Record {
        ConnectionId from;
        uint16_t handle = 0;
        uint64_t to_generation = 0;
        Fate fate = Fate::kSent;
    };

    static void require(bool condition, const char* what) {
        if (condition) return;
        std::fprintf(stderr, "auditor: %s\n", what);
        std::abort();
    }
    static Role role_of(uint32_t node) {
        if (node == 5) return Role::kObserver;
        return node < 2 ? Role::kBackbone : Role::kWorker;
    }

    void step(uint8_t what, uint8_t a, uint8_t b) {
        const uint32_t number = a % kNodes;
        Node* node = nodes_.contains(number) ? &nodes_[number] : nullptr;
        if (node != nullptr && relay_.lines.at(node->id).closed) node = nullptr;
        switch (what % 16) {
            case 0:
                return attach(number, b);
            case 1:
                if (node != nullptr && b < 100) relay_.close(node->id);
                return look();
            case 2:
                if (node != nullptr && b < 20) raw(*node, b);
                return;
            case 3:
            case 4:
                return wait(milliseconds(1 + b % 40));
            case 5:
            case 6:
            case 7:
                if (node != nullptr) relay_.take(node->id, 1 + b % 4);
                return look();
            case 8:
            case 9:
            case 10:
                if (node != nullptr) read(*node);
                return look();
            default:
                if (node != nullptr) send(*node, a / kNodes, b);
        }
    }

    void attach(uint32_t number, uint8_t b) {
        static const char* const kTokens[] = {"1 1 1000", "1 2 1000", "0 3 1000", "2 4 1000"};
        const ConnectionId id = relay_.open();
        if (relay_.lines[id].closed) return;
        relay_.lines[id].reads = false;
        relay_.say(id, {static_cast<uint8_t>(role_of(number))});
        relay_.say(id, attach_frame(number, kTokens[b % 4]));
        Node fresh;
        fresh.id = id;
        fresh.role = role_of(number);
        if (nodes_.contains(number)) old_.push_back(std::move(nodes_[number]));
        nodes_[number] = std::move(fresh);
        look();
    }
    // Bytes that are no good frame: the connection may end, nothing else.
    void raw(Node& node, uint8_t b) {
        relay_.lines.at(node.id).inbox.push_back(Bytes(b, b));
        node.sent_at.push_back(relay_.now);
        node.sent.push_back(0);
    }
    void send(Node& node, uint8_t a, uint8_t b) {
        if (node.handles.empty()) return;
        auto entry = node.handles.begin();
        std::advance(entry, a % node.handles.size());
        const Known& known = entry->second;
        if (!known.live && relay_.now - known.down > milliseconds(50)) return;
        const uint32_t id = static_cast<uint32_t>(records_.size());
        records_.push_back({node.id, entry->first, known.generation});
        const size_t size = b % 8 == 0 ? 150 : b % 60;  // 150 alone is longer than a queue
        const auto type = node.role == Role::kBackbone ? FrameType::kCompute : FrameType::kResult;
        relay_.lines.at(node.id).inbox.push_back(
            make_frame(type, entry->first, id, Bytes(size, static_cast<uint8_t>(id))));
        node.sent_at.push_back(relay_.now);
        node.sent.push_back(id);
    }
    // The relay reads one message of the node.
    void read(Node& node) {
        Line& line = relay_.lines.at(node.id);
        if (line.closed || line.inbox.empty()) return;
        if (line.held) return;
        relay_.pump_one(node.id);
        note_read(node);
    }
    // Which messages have left the inbox (a resumed connection is read on its own)?
    void note_read(Node& node) {
        const Line& line = relay_.lines.at(node.id);
        while (node.sent.size() > line.inbox.size()) {
            Record& record = records_[node.sent.front()];
            if (node.sent.front() != 0 && record.fate == Fate::kSent) record.fate = Fate::kRead;
            node.sent.pop_front();
            node.sent_at.pop_front();
        }
    }
    void wait(milliseconds time) {
        // Nothing is under way longer than this, unless the relay itself does not read.
        for (auto& [number, node] : nodes_) {
            Line& line = relay_.lines.at(node.id);
            while (!line.closed && !line.held && !node.sent_at.empty() &&
                   relay_.now + time - node.sent_at.front() > milliseconds(60)) {
                read(node);
            }
        }
        relay_.advance(time);
        for (auto& [number, node] : nodes_) relay_.event(Heard{node.id});
        look();
    }

    // What nodes have read since the last look.
    void look() {
        for (auto& node : old_) look(node);
        for (auto& [number, node] : nodes_) look(node);
    }
    void look(Node& node) {
        note_read(node);
        const auto& taken = relay_.lines.at(node.id).taken;
        for (; node.seen < taken.size(); ++node.seen) look(node, taken[node.seen]);
    }
    void look(Node& node, const Frame& frame) {
        switch (frame.header.type) {
            case FrameType::kAttached:
                node.generation = wire::decode_attached(frame.payload)->generation;
                break;
            case FrameType::kPeerUp: {
                const auto up = *wire::decode_peer_up(frame.payload);
                const auto known = node.handles.find(up.handle);
                require(known == node.handles.end() || !known->second.live,
                        "a handle was given twice");
                require(node.role == Role::kObserver || up.role != node.role, "two of a role met");
                node.handles[up.handle] = {up.generation, true, {}};
                break;
            }
            case FrameType::kPeerDown: {
                const auto down = *wire::decode_peer_down(frame.payload);
                const auto known = node.handles.find(down.handle);
                require(known != node.handles.end() && known->second.live, "DOWN without UP");
                known->second.live = false;
                known->second.down = relay_.now;
                break;
            }
            case FrameType::kCompute:
            case FrameType::kResult:
                arrived(node, frame);
                break;
            case FrameType::kError:
                if (frame.header.peer != 0) told(node, frame);
                break;
            default:
                break;
        }
    }
    void arrived(Node& node, const Frame& frame) {
        require(frame.header.request_id < records_.size(), "a frame that nobody sent");
        Record& record = records_[frame.header.request_id];
        require(record.fate == Fate::kRead || record.fate == Fate::kSent, "a second fate");
        require(record.to_generation == node.generation, "a frame reached another node");
        const auto known = node.handles.find(frame.header.peer);
        require(known != node.handles.end() && known->second.live, "a frame from a stranger");
        require(known->second.generation == generation_of(record.from), "another sender's handle");
        for (const uint8_t byte : frame.payload) {
            require(byte == static_cast<uint8_t>(frame.header.request_id), "another payload");
        }
        record.fate = Fate::kDelivered;
        ++delivered_;
    }
    void told(Node& node, const Frame& frame) {
        require(frame.header.request_id < records_.size(), "told of a frame that nobody sent");
        Record& record = records_[frame.header.request_id];
        require(record.from == node.id && record.handle == frame.header.peer, "told another");
        require(record.fate == Fate::kRead || record.fate == Fate::kSent, "told of a fate");
        const uint16_t code = static_cast<uint16_t>(frame.payload[0] | frame.payload[1] << 8);
        require(node.role == Role::kBackbone || errc_from_wire(code) != Errc::kBusy,
                "a worker was told that somebody is busy");
        record.fate = Fate::kTold;
        ++told_;
    }

    uint64_t generation_of(ConnectionId id) const {
        for (const auto& [number, node] : nodes_) {
            if (node.id == id) return generation_in(node);
        }
        for (const Node& node : old_) {
            if (node.id == id) return generation_in(node);
        }
        return 0;
    }
    // Also when the node itself has not yet read its ATTACHED.
    uint64_t generation_in(const Node& node) const {
        if (node.generation != 0) return node.generation;
        for (const Bytes& bytes : relay_.lines.at(node.id).queue) {
            const auto frame = wire::decode_frame(bytes);
            if (frame->header.type == FrameType::kAttached) {
                return wire::decode_attached(frame->payload)->generation;
            }
        }
        return 0;
    }

    void check_queues() {
        for (const auto& [id, line] : relay_.lines) {
            if (line.closed) continue;
            uint64_t bytes = 0, frames = 0, all = 0;
            for (const Bytes& frame : line.queue) {
                const auto type = static_cast<FrameType>(frame[0]);
                all += frame.size();
                if (type != FrameType::kCompute && type != FrameType::kResult) continue;
                bytes += frame.size();
                ++frames;
            }
            require(frames <= 1 || bytes <= options().queue_bytes_max, "a queue is too long");
            require(all <= 200 + 2048, "too much is queued");
        }
    }
    // Everybody reads everything.
    void settle() {
        for (auto& [id, line] : relay_.lines) {
            if (!line.closed) line.reads = true;
        }
        for (int round = 0; round < 1000; ++round) {
            bool more = false;
            for (auto& [number, node] : nodes_) {
                Line& line = relay_.lines.at(node.id);
                if (line.closed) continue;
                more |= !line.queue.empty() || !line.inbox.empty();
                relay_.take(node.id);
                relay_.pump(node.id);
            }
            look();
            if (!more) return;
        }
        require(false, "something waits for ever");
    }
    void check_end() {
        require(relay_.board.queued_bytes() == 0, "bytes are counted that are not queued");
        std::map<uint64_t, bool> alive;
        std::map<ConnectionId, Node*> by_id;
        for (auto& [number, node] : nodes_) {
            if (relay_.lines.at(node.id).closed) continue;
            alive[node.generation] = true;
            by_id[node.id] = &node;
        }
        for (const Record& record : records_) {
            if (record.fate != Fate::kRead || !by_id.contains(record.from)) continue;
            require(!alive.contains(record.to_generation), "a frame was lost in silence");
            const auto& known = by_id[record.from]->handles.at(record.handle);
            require(!known.live || known.generation != record.to_generation,
                    "its receiver is gone, and nobody said so");
        }
    }

    FakeRelay relay_;
    std::map<uint32_t, Node> nodes_;
    std::deque<Node> old_;
    std::vector<Record> records_ = {{}};  // by request id; 0 is none
    uint64_t delivered_ = 0;
    uint64_t told_ = 0;
};

}  // namespace kvasir::relay::testing
