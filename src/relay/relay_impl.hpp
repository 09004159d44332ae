// The sockets of a relay: what Relay and its thread share. Private to relay.cpp and
// relay_thread.cpp.
//
// Thread: members are grouped by it. Owns: the listener, the thread, the connections. Limits:
// RelayOptions.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "relay/relay.hpp"
#include "relay/turn_queue.hpp"

struct epoll_event;

namespace kvasir::relay {

// One connection as the relay's thread has it.
struct Channel {
    Channel(ConnectionId id_in, net::MessageStream stream_in)
        : id(id_in), stream(std::move(stream_in)) {}
    ConnectionId id;
    net::MessageStream stream;
    uint32_t interest = 0;  // as epoll has it
    bool ready = false;     // in turns_
    bool readable = false;  // as far as we know
    bool writable = false;
    bool wrote = false;  // all of its last turn, so that it reads in the next
    bool held = false;
    bool resumed = false;  // `message` comes again
    bool closed = false;
    bool watched = false;              // in idle_
    std::span<const uint8_t> message;  // being passed on, or held: in the stream's buffer
    TurnQueue::Account account = 0;
    uint64_t bytes_in = 0;      // when last looked at
    uint64_t buffer_bytes = 0;  // its part of receive_total_
    Time active;
};

class RelayImpl final : public Relay {
public:
    static constexpr uint64_t kWakeKey = 0;  // of wake_ in the epoll set
    explicit RelayImpl(RelayOptions options)
        : options_(std::move(options)), gate_(options_.gate), board_(options_.switchboard, gate_) {}
    ~RelayImpl() override;

    Status start(const net::Endpoint& listen);
    uint16_t port() const override { return listener_->port(); }
    uint16_t local_port() const override {
        return local_listener_ ? local_listener_->port() : uint16_t{0};
    }
    void drain(milliseconds within, std::string url) override;
    bool drained() const override { return drained_.load(); }
    void revoke(std::vector<uint64_t> serials) override;
    RelayStats stats() const override;
    int event_fd() const override { return epoll_.get(); }
    bool serve_ready() override;

private:
    void post(std::function<void()> work) const;
    void answer_http(net::HttpRequest request, net::Respond respond);
    RelayStats collect() const;

    void run();
    void round(std::span<const epoll_event> events);
    Time wait_until() const;
    void on_socket(const epoll_event& event);
    void run_posted();
    void adopt(net::MessageStream stream, const std::string& peer);
    void run_turns();
    uint64_t turn(Channel& channel);
    uint64_t write_turn(Channel& channel);
    uint64_t read_turn(Channel& channel);
    uint64_t present(Channel& channel);
    void note_received(Channel& channel);
    void cut_largest();
    void release_idle();

    void apply(const Event& event);
    void perform(Send& action);
    void perform(const Forward& action);
    void perform(const Hold& action);
    void perform(const Resume& action);
    void perform(const AllowFrames& action);
    void perform(const Ping& action);
    void perform(const Close& action);
    void after_write(Channel& channel, const Status& status);
    void make_ready(Channel& channel);
    void update_interest(Channel& channel);
    Channel* find(ConnectionId id);

    // Constant after start()
    const RelayOptions options_;
    net::UniqueFd epoll_;
    net::UniqueFd wake_;

    // Guarded by round_mu_: a round is the relay thread's, or that of a caller of serve_ready()
    std::mutex round_mu_;
    Time waits_until_;  // the relay's thread, unless something comes
    TokenGate gate_;
    Switchboard board_;
    std::unordered_map<ConnectionId, std::unique_ptr<Channel>, ConnectionIdHash> channels_;
    std::vector<std::unique_ptr<Channel>> ended_;  // until the end of the round
    TurnQueue turns_;
    Crowd crowd_;
    uint64_t turn_bytes_ = 0;                         // of this round: fewer when there is a crowd
    std::deque<std::pair<Time, ConnectionId>> idle_;  // whose buffers to look at, and when
    std::vector<Action> actions_;
    bool applying_ = false;
    Time now_ = std::chrono::steady_clock::now();
    uint64_t last_id_ = 0;
    uint64_t receive_total_ = 0;
    uint64_t cut_for_memory_ = 0;

    std::atomic<bool> stopping_{false};
    std::atomic<bool> draining_{false};
    std::atomic<bool> drained_{false};

    mutable std::mutex mu_;
    mutable std::vector<std::function<void()>> posted_;  // guarded by mu_

    std::thread thread_;
    std::unique_ptr<net::Listener> listener_;
    std::unique_ptr<net::Listener> local_listener_;
};

}  // namespace kvasir::relay
