// A relay without sockets: carries out what a Switchboard says, with queues that tests can see.
//
// Used by the tests of relay and its fuzz target. A node here is a Line: what it has sent and was
// not read yet (inbox), what the relay has queued for it, what it has read. Time is a number.
// Thread: one. Owns: everything. Limits: none.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/bytes.hpp"
#include "base/check.hpp"
#include "relay/own_frames.hpp"
#include "relay/switchboard.hpp"

namespace kvasir::relay::testing {

using Bytes = std::vector<uint8_t>;
using wire::FrameType;
using wire::Role;

// Takes the token's text as the claims: "MODEL SERIAL SECONDS", or "deny".
class TextGate final : public Gate {
public:
    Result<Admission> admit(const wire::Nonce&, Role, const wire::Attach& attach) override {
        return parse(attach.token);
    }
    Result<Admission> renew(const wire::NodeKey&, Role, const std::string& token) override {
        return parse(token);
    }

private:
    static Result<Admission> parse(const std::string& token) {
        unsigned model = 0;
        unsigned long long serial = 0;
        long left = 0;
        if (std::sscanf(token.c_str(), "%u %llu %ld", &model, &serial, &left) != 3) {
            return fail(Errc::kDenied, "no such token");
        }
        Admission admission;
        admission.model_id[0] = static_cast<uint8_t>(model);
        admission.serial = serial;
        admission.left = seconds(left);
        return admission;
    }
};

struct Frame {
    wire::FrameHeader header;
    Bytes payload;
};

struct Line {
    std::deque<Bytes> inbox;   // sent by the node, not yet read by the relay
    std::deque<Bytes> queue;   // sent by the relay, not yet taken
    std::vector<Frame> taken;  // what the node has read
    uint64_t sent_total = 0;
    bool reads = true;  // takes what is queued at once
    bool held = false;
    bool large = false;
    bool closed = false;
    uint16_t close_code = 0;
    std::vector<Time> pings;
};

inline wire::NodeKey key_of(uint32_t number) {
    wire::NodeKey key = {};
    for (size_t i = 0; i < 4; ++i) key[i] = static_cast<uint8_t>(number >> (8 * i));
    key[31] = 1;
    return key;
}

inline Bytes attach_frame(uint32_t node, const std::string& token) {
    wire::Attach attach;
    attach.node = key_of(node);
    attach.token = token;
    attach.name = "node " + std::to_string(node);
    return wire::encode_attach(attach);
}

class FakeRelay {
public:
    explicit FakeRelay(const SwitchboardOptions& options = {}) : board(options, gate) {}

    ConnectionId open(const std::string& address = "10.0.0.1") {
        const ConnectionId id{++last_id};
        lines[id];
        event(Opened{id, address, {}});
        return id;
    }
    // A node that has attached, if the switchboard lets it.
    ConnectionId attach(uint32_t node, Role role, const std::string& token = "1 0 100000",
                        const std::string& address = "10.0.0.1") {
        const ConnectionId id = open(address);
        say(id, {static_cast<uint8_t>(role)});
        say(id, attach_frame(node, token));
        return id;
    }
    void say(ConnectionId id, Bytes message) {
        lines.at(id).inbox.push_back(std::move(message));
        pump(id);
    }
    // The relay reads what the node has sent.
    void pump(ConnectionId id) {
        while (pump_one(id)) {
        }
        run_resumed();
    }
    bool pump_one(ConnectionId id) {
        Line& line = lines.at(id);
        if (line.closed || line.held || line.inbox.empty()) return false;
        const Bytes message = line.inbox.front();
        current = &message;
        event(Message{id, message});
        current = nullptr;
        if (!line.held) line.inbox.pop_front();
        return !line.held;
    }
    // The node takes up to `count` frames from its queue.
    void take(ConnectionId id, size_t count = SIZE_MAX) {
        Line& line = lines.at(id);
        for (; count > 0 && !line.queue.empty(); --count) {
            const Bytes bytes = std::move(line.queue.front());
            line.queue.pop_front();
            line.sent_total += bytes.size();
            const auto frame = wire::decode_frame(bytes);
            KVASIR_CHECK(frame.has_value());
            line.taken.push_back({frame->header, {frame->payload.begin(), frame->payload.end()}});
        }
        report(id);
        run_resumed();
    }
    void close(ConnectionId id) {
        if (lines.at(id).closed) return;
        event(Closed{id, {Errc::kClosed, "test"}});
    }
    void advance(milliseconds time) {
        const Time end = now + time;
        while (board.next_tick() <= end) {
            now = std::max(now, board.next_tick());
            event(Tick{});
        }
        now = end;
    }
    void event(const Event& one) {
        board.on_event(one, now, actions);
        if (performing) return;
        performing = true;
        for (size_t i = 0; i < actions.size(); ++i) {  // more are appended meanwhile
            const Action action = actions[i];
            std::visit([this](const auto& what) { perform(what); }, action);
        }
        actions.clear();
        performing = false;
        run_resumed();
    }
    // Frames of a type that the node has read.
    std::vector<Frame> taken(ConnectionId id, FrameType type) const {
        std::vector<Frame> found;
        for (const Frame& frame : lines.at(id).taken) {
            if (frame.header.type == type) found.push_back(frame);
        }
        return found;
    }

    TextGate gate;
    Switchboard board;
    Time now = Time(std::chrono::hours(1));
    std::map<ConnectionId, Line> lines;
    uint64_t last_id = 0;

private:
    void report(ConnectionId id) {
        Line& line = lines.at(id);
        uint64_t bytes = 0;
        for (const Bytes& frame : line.queue) bytes += frame.size();
        event(Unsent{id, bytes, line.sent_total});
    }
    void queue(ConnectionId id, Bytes frame) {
        Line& line = lines.at(id);
        if (line.closed) return;
        line.queue.push_back(std::move(frame));
        if (line.reads) {
            take(id);
        } else {
            report(id);
        }
    }
    void perform(const Send& action) { queue(action.to, action.frame); }
    void perform(const Forward& action) {
        KVASIR_CHECK(current != nullptr);
        Bytes frame = *current;
        wire::set_peer(frame, action.peer);
        queue(action.to, std::move(frame));
    }
    void perform(const Hold& action) {
        KVASIR_CHECK(!lines.at(action.from).held);
        lines.at(action.from).held = true;
    }
    void perform(const Resume& action) {
        KVASIR_CHECK(lines.at(action.from).held);
        lines.at(action.from).held = false;
        resumed.push_back(action.from);
    }
    void perform(const AllowFrames& action) { lines.at(action.id).large = true; }
    void perform(const Ping& action) { lines.at(action.id).pings.push_back(now); }
    void perform(const Close& action) {
        lines.at(action.id).closed = true;
        lines.at(action.id).close_code = action.ws_code;
    }
    void run_resumed() {
        while (!performing && current == nullptr && !resumed.empty()) {
            const ConnectionId id = resumed.front();
            resumed.pop_front();
            pump(id);
        }
    }

    std::deque<ConnectionId> resumed;
    const Bytes* current = nullptr;
    std::vector<Action> actions;
    bool performing = false;
};

}  // namespace kvasir::relay::testing
