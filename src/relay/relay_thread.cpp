// The relay's thread: sockets in, events to the switchboard, its actions back to the sockets.
#include <sys/epoll.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.hpp"
#include "base/log.hpp"
#include "net/address_key.hpp"
#include "relay/relay_impl.hpp"

namespace kvasir::relay {
namespace {

using net::MessageStream;

constexpr uint64_t kBufferFree = 256 << 10;  // a reader's first buffer: mostly untouched memory
constexpr int kEventsPerWait = 64;
constexpr int kRoundsServed = 16;        // by a thread that has other things to do
constexpr uint64_t kMessageCost = 4096;  // beside its bytes: about what the system calls cost

Time read_clock() {
    return std::chrono::steady_clock::now();
}

bool wants_read(const Channel& channel) {
    return !channel.held && (channel.readable || channel.resumed);
}

int wait_milliseconds(Time until) {
    if (until == Time::min()) return 0;
    if (until == Time::max()) return -1;
    const auto left = std::chrono::ceil<milliseconds>(until - read_clock()).count();
    return static_cast<int>(std::clamp<int64_t>(left, 0, 60000));
}

}  // namespace

RelayStats RelayImpl::collect() const {
    RelayStats stats;
    stats.counters = board_.counters();
    stats.workers = board_.attached(wire::Role::kWorker);
    stats.backbones = board_.attached(wire::Role::kBackbone);
    stats.observers = board_.attached(wire::Role::kObserver);
    stats.connections = board_.connections();
    stats.queued_bytes = board_.queued_bytes();
    stats.receive_bytes = receive_total_;
    stats.cut_for_memory = cut_for_memory_;
    stats.draining = board_.draining();
    return stats;
}

Channel* RelayImpl::find(ConnectionId id) {
    const auto entry = channels_.find(id);
    return entry == channels_.end() ? nullptr : entry->second.get();
}

void RelayImpl::run() {
    std::array<epoll_event, kEventsPerWait> events;
    std::unique_lock lock(round_mu_);
    while (!stopping_.load()) {
        waits_until_ = wait_until();
        const int timeout = wait_milliseconds(waits_until_);
        lock.unlock();
        const int count = ::epoll_wait(epoll_.get(), events.data(), kEventsPerWait, timeout);
        lock.lock();
        round({events.data(), static_cast<size_t>(std::max(count, 0))});
    }
    for (auto& [id, channel] : channels_) channel->stream.close(1001);
    run_posted();  // whoever waits for an answer gets it
}

// Events may be stale: another thread may have dealt with them since.
void RelayImpl::round(std::span<const epoll_event> events) {
    now_ = read_clock();
    for (const epoll_event& event : events) on_socket(event);
    run_turns();
    if (now_ >= board_.next_tick()) apply(Tick{});
    release_idle();
    if (receive_total_ > options_.receive_total_max) cut_largest();
    ended_.clear();
    if (board_.draining() && board_.connections() == 0) drained_.store(true);
}

bool RelayImpl::serve_ready() {
    const std::unique_lock lock(round_mu_, std::try_to_lock);
    if (!lock || stopping_.load()) return false;
    std::array<epoll_event, kEventsPerWait> events;
    for (int rounds = 0; rounds < kRoundsServed; ++rounds) {
        const int count = ::epoll_wait(epoll_.get(), events.data(), kEventsPerWait, 0);
        if (count <= 0 && turns_.empty()) break;
        round({events.data(), static_cast<size_t>(std::max(count, 0))});
        if (turns_.empty()) break;
    }
    if (wait_until() < waits_until_) post([] {});  // the thread waits for a later time
    return true;
}

Time RelayImpl::wait_until() const {
    if (!turns_.empty()) return Time::min();
    const Time tick = board_.next_tick();
    return idle_.empty() ? tick : std::min(tick, idle_.front().first);
}

void RelayImpl::on_socket(const epoll_event& event) {
    if (event.data.u64 == kWakeKey) return run_posted();
    Channel* channel = find({event.data.u64});
    if (channel == nullptr) return;  // ended earlier in this round
    if ((event.events & EPOLLOUT) != 0) channel->writable = true;
    if ((event.events & ~uint32_t{EPOLLOUT}) != 0) {
        if (channel->held && (event.events & (EPOLLHUP | EPOLLERR)) != 0) {
            return apply(Closed{channel->id, {Errc::kClosed, "the connection broke"}});
        }
        channel->readable = true;
    }
    make_ready(*channel);
}

void RelayImpl::run_posted() {
    uint64_t ignored = 0;
    (void)!::read(wake_.get(), &ignored, sizeof(ignored));
    std::vector<std::function<void()>> work;
    {
        const std::lock_guard lock(mu_);
        work.swap(posted_);
    }
    for (const auto& one : work) one();
}

void RelayImpl::adopt(MessageStream stream, const std::string& peer) {
    if (stopping_.load() || stream.closed()) return;
    const ConnectionId id{++last_id_};
    Opened opened{id, net::peer_key(peer), {}};
    if (::getrandom(opened.nonce.data(), opened.nonce.size(), 0) !=
        static_cast<ssize_t>(opened.nonce.size())) {
        return log(LogLevel::kError, "relay", "event=no_random conn=" + std::to_string(id.value));
    }
    auto made = std::make_unique<Channel>(id, std::move(stream));
    Channel& channel = *made;
    channel.active = now_;
    epoll_event event = {};
    event.events = channel.interest = EPOLLIN;
    event.data.u64 = id.value;
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, channel.stream.fd(), &event) != 0) {
        return log(LogLevel::kError, "relay", std::string("event=epoll_full ") + strerror(errno));
    }
    channels_.emplace(id, std::move(made));
    log(LogLevel::kDebug, "relay",
        "event=opened conn=" + std::to_string(id.value) + " peer=" + peer);
    apply(opened);
    if (channel.closed) return;
    channel.readable = true;  // bytes may have come with the upgrade
    make_ready(channel);
}

// In the queue, if it has something to do.
void RelayImpl::make_ready(Channel& channel) {
    if (channel.ready || channel.closed || (!channel.writable && !wants_read(channel))) return;
    channel.ready = true;
    turns_.add(channel.id, channel.account);
}

// About one long turn, or some short ones: then the sockets are asked who else is there.
void RelayImpl::run_turns() {
    turn_bytes_ = crowd_.is_here(now_) ? options_.turn_bytes : options_.turn_bytes_alone;
    for (uint64_t cost = 0; !turns_.empty() && cost < turn_bytes_;) {
        Channel* channel = find(turns_.take());
        if (channel == nullptr) continue;
        crowd_.note(channel->id, now_);
        const uint64_t this_cost = turn(*channel);
        cost += this_cost;
        if (channel->closed) continue;
        channel->account += this_cost;
        channel->ready = false;
        note_received(*channel);
        make_ready(*channel);
        update_interest(*channel);
    }
}

// Writes or reads, by turns if there is much of both; returns what it cost, in bytes.
uint64_t RelayImpl::turn(Channel& channel) {
    channel.stream.set_bytes_per_call(turn_bytes_);
    uint64_t cost = 0;
    const bool reads_first = std::exchange(channel.wrote, false) && wants_read(channel);
    if (channel.writable && !reads_first) {
        cost = write_turn(channel);
        channel.wrote = cost >= turn_bytes_;
    }
    if (cost < turn_bytes_ && !channel.closed) cost += read_turn(channel);
    return cost;
}

uint64_t RelayImpl::write_turn(Channel& channel) {
    const uint64_t before = channel.stream.counters().bytes_out;
    const Status status = channel.stream.flush();
    const uint64_t bytes = channel.stream.counters().bytes_out - before;
    channel.writable = channel.stream.wants_write() && bytes >= turn_bytes_;
    after_write(channel, status);
    return bytes;
}

uint64_t RelayImpl::read_turn(Channel& channel) {
    uint64_t cost = 0;
    if (channel.resumed && !channel.held) {
        channel.resumed = false;
        cost += present(channel);
    }
    uint64_t read = 0;
    while (channel.readable && !channel.held && !channel.closed && cost < turn_bytes_) {
        const uint64_t before = channel.stream.counters().effort_in;
        const auto message = channel.stream.try_receive();
        if (!message) {
            apply(Closed{channel.id, message.error()});
            break;
        }
        const uint64_t effort = channel.stream.counters().effort_in - before;
        read += effort;
        if (!*message) {  // the kernel has no more, or this was all for one turn
            channel.readable = effort >= turn_bytes_;
            break;
        }
        channel.message = **message;
        channel.readable = channel.stream.may_have_more();
        cost += present(channel);
    }
    return cost + read;
}

// The switchboard decides about the message; returns what that cost.
uint64_t RelayImpl::present(Channel& channel) {
    const uint64_t bytes = channel.message.size();
    apply(Message{channel.id, channel.message});
    return kMessageCost + std::min(bytes, turn_bytes_);
}

void RelayImpl::note_received(Channel& channel) {
    const uint64_t capacity = channel.stream.receive_buffer_bytes();
    const uint64_t counted = capacity > kBufferFree ? capacity - kBufferFree : 0;
    receive_total_ += counted - channel.buffer_bytes;
    channel.buffer_bytes = counted;
    const uint64_t bytes_in = channel.stream.counters().bytes_in;
    if (bytes_in == channel.bytes_in && channel.watched) return;
    if (bytes_in != channel.bytes_in) {
        channel.bytes_in = bytes_in;
        apply(Heard{channel.id});
    }
    channel.active = now_;
    if (!channel.watched) {
        channel.watched = true;
        idle_.emplace_back(now_ + options_.buffer_idle, channel.id);
    }
}

// Half received and held frames are too much together: who holds most goes.
void RelayImpl::cut_largest() {
    const Channel* largest = nullptr;
    for (const auto& [id, channel] : channels_) {
        if (largest == nullptr || channel->buffer_bytes > largest->buffer_bytes) {
            largest = channel.get();
        }
    }
    if (largest == nullptr) return;
    ++cut_for_memory_;
    apply(Closed{largest->id, {Errc::kBusy, "the relay is short of memory for half frames"}});
}

void RelayImpl::release_idle() {
    for (int i = 0; i < kEventsPerWait && !idle_.empty() && idle_.front().first <= now_; ++i) {
        const ConnectionId id = idle_.front().second;
        idle_.pop_front();
        Channel* channel = find(id);
        if (channel == nullptr) continue;
        const bool busy = channel->held || channel->resumed || channel->ready;
        if (busy || now_ - channel->active < options_.buffer_idle) {
            idle_.emplace_back(std::max(channel->active, now_) + options_.buffer_idle, id);
            continue;
        }
        channel->watched = false;
        channel->stream.release_idle_buffers();
        if (channel->stream.receive_buffer_bytes() == 0) {
            receive_total_ -= channel->buffer_bytes;
            channel->buffer_bytes = 0;
        }
    }
}

// ---- what the switchboard says ----

// Actions are done in order; events that follow from them append theirs.
void RelayImpl::apply(const Event& event) {
    board_.on_event(event, now_, actions_);
    if (applying_) return;
    applying_ = true;
    for (size_t i = 0; i < actions_.size(); ++i) {
        Action action = std::move(actions_[i]);
        std::visit([this](auto& what) { perform(what); }, action);
    }
    actions_.clear();
    applying_ = false;
}

void RelayImpl::after_write(Channel& channel, const Status& status) {
    if (!status) return apply(Closed{channel.id, status.error()});
    apply(Unsent{channel.id, channel.stream.unsent_bytes(), channel.stream.counters().bytes_out});
    if (!channel.closed) update_interest(channel);
}

void RelayImpl::perform(Send& action) {
    if (Channel* to = find(action.to)) {
        const std::span<const uint8_t> frame(action.frame);
        after_write(*to, to->stream.enqueue(frame));
    }
}

void RelayImpl::perform(const Forward& action) {
    Channel* from = find(action.from);
    Channel* to = find(action.to);
    if (to == nullptr) return;
    KVASIR_CHECK(from != nullptr && from->message.size() >= wire::kFrameHeaderBytes);
    std::array<uint8_t, wire::kFrameHeaderBytes> head;
    std::copy_n(from->message.begin(), head.size(), head.begin());
    wire::set_peer(head, action.peer);
    const std::span<const uint8_t> pieces[] = {head, from->message.subspan(head.size())};
    to->stream.set_bytes_per_call(turn_bytes_);
    after_write(*to, to->stream.pass_on(pieces, from->stream));  // a long one goes in its turns
}

void RelayImpl::perform(const Hold& action) {
    if (Channel* from = find(action.from)) from->held = true;
}

void RelayImpl::perform(const Resume& action) {
    Channel* from = find(action.from);
    if (from == nullptr) return;
    from->held = false;
    from->resumed = true;
    make_ready(*from);
}

void RelayImpl::perform(const AllowFrames& action) {
    Channel* channel = find(action.id);
    if (channel == nullptr) return;
    net::MessageLimits limits;
    limits.message_bytes_max = options_.switchboard.message_bytes_max;
    limits.unsent_bytes_max = UINT64_MAX;  // the switchboard counts
    limits.receive_bytes_per_call = limits.send_bytes_per_call = turn_bytes_;
    channel->stream.set_limits(limits);
}

void RelayImpl::perform(const Ping& action) {
    if (Channel* channel = find(action.id)) after_write(*channel, channel->stream.enqueue_ping());
}

void RelayImpl::perform(const Close& action) {
    const auto entry = channels_.find(action.id);
    if (entry == channels_.end()) return;
    Channel& channel = *entry->second;
    channel.closed = true;
    receive_total_ -= channel.buffer_bytes;
    channel.stream.close(action.ws_code);
    ended_.push_back(std::move(entry->second));
    channels_.erase(entry);
}

void RelayImpl::update_interest(Channel& channel) {
    // What is known already need not be told again: so who is new is told at once.
    uint32_t interest = channel.held || channel.readable ? 0 : uint32_t{EPOLLIN};
    if (channel.stream.wants_write() && !channel.writable) interest |= uint32_t{EPOLLOUT};
    if (interest == channel.interest) return;
    channel.interest = interest;
    epoll_event event = {};
    event.events = interest;
    event.data.u64 = channel.id.value;
    (void)::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, channel.stream.fd(), &event);
}

}  // namespace kvasir::relay
