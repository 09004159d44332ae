// A bad link, for tests: a TCP proxy with delay, jitter, a rate, stalls and cuts.
//
//   wan --to HOST:PORT [--listen PORT] [--rtt-ms 60] [--jitter-ms 10] [--mbit 20]
//       [--stall-every-ms 0 --stall-ms 500] [--cut-every-ms 0] [--seed 1]
//
// Prints "listening PORT". Each direction of each connection is a queue of pieces with a time
// before which they may not leave; the rate is shared by all connections of a direction, as on one
// line. A stall holds everything; a cut resets every connection. One thread, until SIGTERM. SIGUSR1
// cuts now; from SIGUSR2 on it is a good line.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;
using std::chrono::microseconds;
using std::chrono::milliseconds;

struct Options {
    std::string host = "127.0.0.1";
    std::string port;
    int listen = 0;
    double rtt_ms = 60, jitter_ms = 10, mbit = 20;
    int stall_every_ms = 0, stall_ms = 500, cut_every_ms = 0;
    unsigned seed = 1;
};

struct Piece {
    Time ready;
    std::vector<char> bytes;
};

// One direction of the line: what all connections share.
struct Line {
    Time free_at{};  // when the last accepted byte has left
};

struct Leg {
    int from = -1;
    int to = -1;
    Line* line = nullptr;
    std::deque<Piece> pieces;
    size_t sent = 0;     // of the first piece
    size_t queued = 0;   // bytes
    bool ended = false;  // `from` has said its last
    bool told = false;   // and `to` knows
    bool broken = false;
};

struct Pair {
    Leg up, down;
};

constexpr size_t kQueueBytesMax = 512 << 10;  // more is not read: the sender feels the line
constexpr size_t kReadBytes = 16 << 10;

volatile std::sig_atomic_t g_stop = 0, g_cut = 0, g_good = 0;

[[noreturn]] void usage(const std::string& what) {
    std::fprintf(stderr, "wan: %s\n", what.c_str());
    std::exit(2);
}

Options parse(int argc, char** argv) {
    Options options;
    std::map<std::string, std::string> values;
    for (int i = 1; i + 1 < argc; i += 2) values[argv[i]] = argv[i + 1];
    if (argc % 2 == 0) usage("flags come with values");
    for (const auto& [name, value] : values) {
        const double number = std::atof(value.c_str());
        if (name == "--to") {
            const size_t colon = value.rfind(':');
            if (colon == std::string::npos) usage("--to HOST:PORT");
            options.host = value.substr(0, colon);
            options.port = value.substr(colon + 1);
        } else if (name == "--listen") {
            options.listen = static_cast<int>(number);
        } else if (name == "--rtt-ms") {
            options.rtt_ms = number;
        } else if (name == "--jitter-ms") {
            options.jitter_ms = number;
        } else if (name == "--mbit") {
            options.mbit = number;
        } else if (name == "--stall-every-ms") {
            options.stall_every_ms = static_cast<int>(number);
        } else if (name == "--stall-ms") {
            options.stall_ms = static_cast<int>(number);
        } else if (name == "--cut-every-ms") {
            options.cut_every_ms = static_cast<int>(number);
        } else if (name == "--seed") {
            options.seed = static_cast<unsigned>(number);
        } else {
            usage("unknown flag " + name);
        }
    }
    if (options.port.empty()) usage("--to HOST:PORT is needed");
    return options;
}

class Wan {
public:
    explicit Wan(const Options& options) : options_(options), random_(options.seed) {}

    int run() {
        listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        const int on = 1;
        ::setsockopt(listener_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_ANY);
        address.sin_port = htons(static_cast<uint16_t>(options_.listen));
        socklen_t size = sizeof(address);
        if (::bind(listener_, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
            ::listen(listener_, 128) != 0 ||
            ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
            std::perror("wan: listen");
            return 4;
        }
        std::printf("listening %d\n", ntohs(address.sin_port));
        std::fflush(stdout);
        const auto start = Clock::now();
        next_stall_ = start + milliseconds(options_.stall_every_ms);
        next_cut_ = start + milliseconds(options_.cut_every_ms);
        while (g_stop == 0) step();
        return 0;
    }

private:
    void step() {
        const Time now = Clock::now();
        if (g_good != 0) {
            g_good = 0;
            options_.rtt_ms = options_.jitter_ms = 0;
            options_.mbit = 10'000;
            options_.stall_every_ms = options_.cut_every_ms = 0;
            stalled_until_ = {};
        }
        if (options_.stall_every_ms > 0 && now >= next_stall_) {
            stalled_until_ = now + milliseconds(options_.stall_ms);
            next_stall_ = stalled_until_ + milliseconds(options_.stall_every_ms);
        }
        if (options_.cut_every_ms > 0 && now >= next_cut_) {
            next_cut_ = now + milliseconds(options_.cut_every_ms);
            for (Pair& pair : pairs_) pair.up.broken = true;
        }
        if (g_cut != 0) {
            g_cut = 0;
            for (Pair& pair : pairs_) pair.up.broken = true;
        }
        for (auto it = pairs_.begin(); it != pairs_.end();) {
            const bool over = it->up.broken || it->down.broken || (it->up.told && it->down.told);
            if (over) close_pair(*it);
            it = over ? pairs_.erase(it) : std::next(it);
        }
        wait(now);
    }

    void wait(Time now) {
        std::vector<pollfd> entries{{listener_, POLLIN, 0}};
        std::vector<Leg*> legs;
        Time wake = now + milliseconds(200);
        for (Pair& pair : pairs_) {
            for (Leg* leg : {&pair.up, &pair.down}) {
                short from_events = !leg->ended && leg->queued < kQueueBytesMax ? POLLIN : 0;
                short to_events = 0;
                if (!leg->pieces.empty()) {
                    const Time ready = std::max(leg->pieces.front().ready, stalled_until_);
                    if (ready <= now) {
                        to_events = POLLOUT;
                    } else {
                        wake = std::min(wake, ready);
                    }
                }
                legs.push_back(leg);
                entries.push_back({from_events != 0 ? leg->from : -1, from_events, 0});
                entries.push_back({to_events != 0 ? leg->to : -1, to_events, 0});
            }
        }
        const auto left = std::chrono::ceil<microseconds>(wake - now).count();
        const timespec timeout{left / 1000000, left % 1000000 * 1000};
        ::ppoll(entries.data(), entries.size(), &timeout, nullptr);
        for (size_t i = 0; i < legs.size(); ++i) {
            if (entries[1 + 2 * i].revents != 0) read_leg(*legs[i]);
            if (entries[2 + 2 * i].revents != 0) write_leg(*legs[i]);
            if (legs[i]->ended && legs[i]->pieces.empty() && !legs[i]->told) {
                legs[i]->told = true;
                ::shutdown(legs[i]->to, SHUT_WR);
            }
        }
        if (entries[0].revents != 0) accept_one();
    }

    void read_leg(Leg& leg) {
        std::vector<char> buffer(kReadBytes);
        const ssize_t got = ::recv(leg.from, buffer.data(), buffer.size(), MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (got < 0) {
            leg.broken = true;
            return;
        }
        if (got == 0) {
            leg.ended = true;
            return;
        }
        buffer.resize(static_cast<size_t>(got));
        const Time now = Clock::now();
        const double us = static_cast<double>(got) * 8 / options_.mbit;
        Line& line = *leg.line;
        line.free_at = std::max(line.free_at, now) + microseconds(static_cast<int64_t>(us));
        const double jitter =
            options_.jitter_ms * std::uniform_real_distribution<double>(0, 1)(random_);
        Time ready = line.free_at +
                     microseconds(static_cast<int64_t>((options_.rtt_ms / 2 + jitter) * 1000));
        if (!leg.pieces.empty())
            ready = std::max(ready, leg.pieces.back().ready);  // TCP is ordered
        leg.queued += buffer.size();
        leg.pieces.push_back({ready, std::move(buffer)});
    }

    void write_leg(Leg& leg) {
        const Time now = Clock::now();
        while (!leg.pieces.empty() && leg.pieces.front().ready <= now) {
            Piece& piece = leg.pieces.front();
            const ssize_t sent = ::send(leg.to, piece.bytes.data() + leg.sent,
                                        piece.bytes.size() - leg.sent, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (sent < 0) {
                leg.broken = leg.broken || (errno != EAGAIN && errno != EINTR);
                return;
            }
            leg.sent += static_cast<size_t>(sent);
            leg.queued -= static_cast<size_t>(sent);
            if (leg.sent < piece.bytes.size()) return;
            leg.pieces.pop_front();
            leg.sent = 0;
        }
    }

    void accept_one() {
        const int client = ::accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (client < 0) return;
        addrinfo hints{};
        hints.ai_socktype = SOCK_STREAM;
        addrinfo* found = nullptr;
        int server = -1;
        if (::getaddrinfo(options_.host.c_str(), options_.port.c_str(), &hints, &found) == 0) {
            server = ::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
            if (::connect(server, found->ai_addr, found->ai_addrlen) != 0) {
                ::close(server);
                server = -1;
            }
            ::freeaddrinfo(found);
        }
        if (server < 0) {
            ::close(client);
            return;
        }
        for (int fd : {client, server}) {
            const int on = 1;
            ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
            ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
        }
        Pair& pair = pairs_.emplace_back();
        pair.up.from = pair.down.to = client;
        pair.up.to = pair.down.from = server;
        pair.up.line = &up_;
        pair.down.line = &down_;
    }

    static void close_pair(Pair& pair) {
        for (int fd : {pair.up.from, pair.up.to}) {
            if (pair.up.broken || pair.down.broken) {
                const linger now{1, 0};  // a reset, as when a line is cut
                ::setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
            }
            ::close(fd);
        }
    }

    Options options_;
    std::mt19937 random_;
    int listener_ = -1;
    std::list<Pair> pairs_;
    Line up_, down_;
    Time stalled_until_{}, next_stall_{}, next_cut_{};
};

}  // namespace

int main(int argc, char** argv) {
    std::signal(SIGPIPE, SIG_IGN);
    std::signal(SIGTERM, [](int) { g_stop = 1; });
    std::signal(SIGUSR1, [](int) { g_cut = 1; });
    std::signal(SIGUSR2, [](int) { g_good = 1; });
    const Options options = parse(argc, argv);
    return Wan(options).run();
}
