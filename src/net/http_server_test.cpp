#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <fstream>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "net/http.hpp"
#include "net/test_frames.hpp"
#include "net/test_peer.hpp"
#include "net/upgrade.hpp"

namespace kvasir::net {
namespace {

using namespace std::chrono_literals;
using testing::RawPeer;
using testing::TestFolder;
using testing::TestTls;

// Polls for something that another thread brings about.
bool eventually(const std::function<bool()>& holds) {
    const auto end = Clock::now() + 20s;
    while (!holds()) {
        if (Clock::now() >= end) return false;
        std::this_thread::yield();
    }
    return true;
}

// What a request was, as text.
void echo(HttpRequest request, const Respond& respond) {
    HttpResponse response;
    response.content_type = "text/plain";
    response.body = request.method + " " + request.path;
    for (const auto& [name, value] : request.query) response.body += " " + name + "=" + value;
    response.body += " [" + std::string(request.bearer()) + "] " + request.body;
    respond(std::move(response));
}

struct Answer {
    int status = 0;  // 0: the connection ended
    std::string head;
    std::string body;
};

// A client of keep-alive connections, by hand.
Answer read_answer(RawPeer& peer, bool head_only = false) {
    Answer answer;
    answer.head = peer.read_header();
    if (!answer.head.starts_with("HTTP/1.1 ")) return answer;
    answer.status = std::stoi(answer.head.substr(9, 3));
    const size_t at = answer.head.find("Content-Length: ");
    if (head_only || at == std::string::npos) return answer;
    const auto body = peer.read(std::stoull(answer.head.substr(at + 16)));
    answer.body.assign(body.begin(), body.end());
    return answer;
}

class HttpServer : public ::testing::TestWithParam<bool> {
protected:
    bool tls() const { return GetParam(); }
    void listen(HttpHandler handler, HttpLimits limits = {}) {
        ListenerOptions options;
        options.handshake.pending_max = 1000;
        options.handshake.pending_per_address_max = 1000;
        options.http = std::move(handler);
        options.http_limits = limits;
        if (tls()) options.tls = TestTls::get().server;
        listener_ = Listener::make(
                        *parse_listen("127.0.0.1:0"),
                        [this](MessageStream stream, const std::string&) {
                            const std::lock_guard lock(mu_);
                            stream_.emplace(std::move(stream));
                        },
                        std::move(options))
                        .value();
    }
    RawPeer connect() const { return RawPeer(listener_->port(), tls()); }
    Answer ask(const std::string& request) const {
        RawPeer peer = connect();
        peer.write(request);
        return read_answer(peer);
    }

    // Three that had their answer, the longest idle first.
    std::vector<RawPeer> idle_peers() const {
        std::vector<RawPeer> peers;
        for (int i = 0; i < 3; ++i) {
            peers.push_back(connect());
            peers.back().write("GET / HTTP/1.1\r\n\r\n");
            EXPECT_EQ(read_answer(peers.back()).status, 200);
        }
        return peers;
    }

    std::mutex mu_;
    std::optional<MessageStream> stream_;  // guarded by mu_
    std::unique_ptr<Listener> listener_;
};
INSTANTIATE_TEST_SUITE_P(Ports, HttpServer, ::testing::Bool(),
                         [](const auto& port) { return port.param ? "Tls" : "Plain"; });

TEST_P(HttpServer, RequestsArriveWholeAtEveryCut) {
    listen(echo);
    const std::string request =
        "POST /a%20b?x=1%2B HTTP/1.1\r\nHost: x\r\nAUTHORIZATION: Bearer tok\r\n"
        "Content-Length: 5\r\n\r\nhello";
    RawPeer peer = connect();
    for (size_t cut = 0; cut <= request.size(); ++cut) {
        peer.write(std::string_view(request).substr(0, cut));
        peer.write(std::string_view(request).substr(cut));
        const Answer answer = read_answer(peer);
        ASSERT_EQ(answer.status, 200) << cut << ": " << answer.head;
        ASSERT_EQ(answer.body, "POST /a b x=1+ [tok] hello") << cut;
    }
    const std::string chunked =
        "PUT /c HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n";
    for (size_t cut = 0; cut <= chunked.size(); ++cut) {
        peer.write(std::string_view(chunked).substr(0, cut));
        peer.write(std::string_view(chunked).substr(cut));
        ASSERT_EQ(read_answer(peer).body, "PUT /c [] abcde") << cut;
    }
}

TEST_P(HttpServer, PipelinedRequestsAreAnsweredInOrder) {
    std::vector<std::thread> threads;
    listen([&threads](HttpRequest request, const Respond& respond) {
        threads.emplace_back([request = std::move(request), respond] { echo(request, respond); });
    });
    RawPeer peer = connect();
    std::string all;
    for (int i = 0; i < 20; ++i) {
        all += "GET /" + std::to_string(i) + " HTTP/1.1\r\nHost: x\r\n\r\n";
    }
    peer.write(all);
    for (int i = 0; i < 20; ++i) {
        EXPECT_EQ(read_answer(peer).body, "GET /" + std::to_string(i) + " [] ");
    }
    listener_.reset();
    for (std::thread& thread : threads) thread.join();
}

TEST_P(HttpServer, HeadsWithoutBodiesAndConnectionsThatEnd) {
    listen([](const HttpRequest& request, const Respond& respond) {
        HttpResponse response;
        response.body = "12345";
        if (request.path == "/204") response.status = 204;
        response.headers = {{"X-Kind", "test"}, {"Content-Length", "99"}, {"X-Bad", "a\r\nb: c"}};
        respond(std::move(response));
    });
    RawPeer peer = connect();
    peer.write("HEAD / HTTP/1.1\r\nHost: x\r\n\r\n");
    const Answer head = read_answer(peer, true);
    EXPECT_EQ(head.status, 200);
    EXPECT_NE(head.head.find("Content-Length: 5\r\n"), std::string::npos) << head.head;
    EXPECT_NE(head.head.find("X-Kind: test\r\n"), std::string::npos);
    EXPECT_EQ(head.head.find("X-Bad"), std::string::npos) << "a header that splits the answer";
    peer.write("GET /204 HTTP/1.1\r\nHost: x\r\n\r\n");
    const Answer none = read_answer(peer);
    EXPECT_EQ(none.status, 204);
    EXPECT_EQ(none.head.find("Content-Length"), std::string::npos);
    peer.write("POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n");
    EXPECT_EQ(peer.read_header(), "HTTP/1.1 100 Continue\r\n\r\n");
    peer.write("abc");
    EXPECT_EQ(read_answer(peer).body, "12345");
    peer.write("GET / HTTP/1.1\r\nConnection: close\r\n\r\n");
    EXPECT_TRUE(peer.read_text_to_end().ends_with("\r\n\r\n12345"));
    RawPeer old = connect();
    old.write("GET / HTTP/1.0\r\n\r\n");
    EXPECT_TRUE(old.read_text_to_end().ends_with("\r\n\r\n12345"));
}

TEST_P(HttpServer, BadAndLargeRequestsGetTheirAnswer) {
    std::atomic<int> handled = 0;
    HttpLimits limits;
    limits.header_bytes_max = 4096;
    limits.body_bytes_max = 1000;
    listen(
        [&handled](HttpRequest request, const Respond& respond) {
            ++handled;
            echo(std::move(request), respond);
        },
        limits);
    const std::string big(2000, 'x');
    EXPECT_EQ(ask("GET / HTTP/1.1\r\nX: " + std::string(5000, 'x') + "\r\n\r\n").status, 431);
    EXPECT_EQ(ask("POST / HTTP/1.1\r\nContent-Length: 1001\r\n\r\n").status, 413);
    EXPECT_EQ(ask("POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 1001\r\n\r\n").status,
              413);
    EXPECT_EQ(ask("POST / HTTP/1.1\r\nContent-Length: 18446744073709551615\r\n\r\n").status, 413);
    EXPECT_EQ(ask("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n7d0\r\n" + big).status,
              413);
    EXPECT_EQ(ask("POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n").status, 400);
    EXPECT_EQ(ask("POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab").status,
              400);
    EXPECT_EQ(ask("GET / HTTP/1.1\r\nbad header\r\n\r\n").status, 400);
    for (const char* target : {"/../etc/passwd", "/%2e%2e/x", "//x", "/a%00", "*", "http://x/"}) {
        const Answer answer = ask("GET " + std::string(target) + " HTTP/1.1\r\n\r\n");
        EXPECT_EQ(answer.status, 400) << target;
        EXPECT_NE(answer.body.find("\"bad_input\""), std::string::npos) << answer.body;
    }
    EXPECT_EQ(ask("\x16\x03\x01 nonsense").status, 0);
    EXPECT_EQ(handled, 0);
    EXPECT_EQ(ask("POST / HTTP/1.1\r\nContent-Length: 1000\r\n\r\n" + big.substr(1000)).status,
              200);
}

TEST_P(HttpServer, SlowAndIdleClientsAreClosed) {
    HttpLimits limits;
    limits.request_deadline = 300ms;
    limits.idle_max = 300ms;
    listen(echo, limits);
    const auto start = Clock::now();
    RawPeer body = connect();
    body.write("POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nab");
    RawPeer idle = connect();
    idle.write("GET /1 HTTP/1.1\r\n\r\n");
    RawPeer second = connect();
    second.write("GET /2 HTTP/1.1\r\n\r\nGET /3");
    EXPECT_EQ(body.read_text_to_end(), "");
    EXPECT_TRUE(idle.read_text_to_end().ends_with("GET /1 [] "));
    EXPECT_TRUE(second.read_text_to_end().ends_with("GET /2 [] "));
    EXPECT_GE(Clock::now() - start, 290ms);
    EXPECT_LT(Clock::now() - start, 5s);
}

// Answers, but keeps who asks for /keep waiting until answer_all().
class Keeper {
public:
    HttpHandler handler() {
        return [this](const HttpRequest& request, const Respond& respond) {
            if (request.path != "/keep") return echo(request, respond);
            const std::lock_guard lock(mu_);
            kept_.push_back(respond);
        };
    }
    size_t count() const {
        const std::lock_guard lock(mu_);
        return kept_.size();
    }
    void answer_all() {
        const std::lock_guard lock(mu_);
        for (const Respond& respond : std::exchange(kept_, {})) respond({});
    }

private:
    mutable std::mutex mu_;
    std::vector<Respond> kept_;  // guarded by mu_
};

TEST_P(HttpServer, ConnectionsAreBoundedPerAddress) {
    Keeper keeper;
    HttpLimits limits;
    limits.connections_per_address_max = 3;
    listen(keeper.handler(), limits);
    std::vector<RawPeer> peers;
    for (int i = 0; i < 3; ++i) {
        peers.push_back(connect());
        peers.back().write("GET /keep HTTP/1.1\r\n\r\n");
    }
    ASSERT_TRUE(eventually([&] { return keeper.count() == 3; }));
    const Answer answer = ask("GET / HTTP/1.1\r\n\r\n");
    EXPECT_EQ(answer.status, 503);
    EXPECT_NE(answer.body.find("\"busy\""), std::string::npos);
    keeper.answer_all();
    EXPECT_TRUE(eventually([this] { return ask("GET / HTTP/1.1\r\n\r\n").status == 200; }));
    listener_.reset();  // before what it kept
}

// "POST /path" with what has come of a body of that length.
std::string post(const std::string& path, size_t length, size_t sent) {
    return "POST " + path + " HTTP/1.1\r\nContent-Length: " + std::to_string(length) + "\r\n\r\n" +
           std::string(sent, 'x');
}

TEST_P(HttpServer, BodiesThatAreHeldBackAreBoundedTogether) {
    HttpLimits limits;
    limits.body_bytes_max = 1000;
    limits.bodies_bytes_max = 2500;
    limits.request_deadline = 120s;  // what is held counts until then
    listen(echo, limits);
    std::vector<RawPeer> peers;
    peers.push_back(connect());
    peers.back().write(post("/1", 1000, 900));
    peers.push_back(connect());
    peers.back().write("POST /2 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n384\r\n" +
                       std::string(900, 'x'));
    const std::string large = post("/4", 800, 800);
    EXPECT_TRUE(eventually([&] { return ask(large).status == 503; }));
    EXPECT_EQ(ask(post("/3", 10, 10)).status, 200);
    EXPECT_EQ(ask("GET / HTTP/1.1\r\n\r\n").status, 200);  // without a body
    peers[0].write(std::string(100, 'y'));
    EXPECT_EQ(read_answer(peers[0]).status, 200);
    EXPECT_EQ(ask(large).status, 200);  // its room is given back, also by one that leaves
    peers.push_back(connect());
    peers.back().write(post("/5", 1000, 900));
    EXPECT_TRUE(eventually([&] { return ask(large).status == 503; }));
    peers.pop_back();
    EXPECT_TRUE(eventually([&] { return ask(large).status == 200; }));
    // What is refused in the middle of its body holds no room while it lingers.
    RawPeer refused = connect();
    refused.write(post("/6", 1000, 700));  // with the 900 of /2
    EXPECT_TRUE(eventually([&] { return ask(post("/7", 950, 950)).status == 503; }));
    peers.push_back(connect());
    peers.back().write(post("/8", 800, 799));
    EXPECT_TRUE(eventually([&] { return ask(post("/9", 150, 150)).status == 503; }));
    refused.write(std::string(200, 'x'));
    EXPECT_EQ(read_answer(refused).status, 503);
    EXPECT_EQ(ask(post("/7", 750, 750)).status, 200);
}

TEST_P(HttpServer, OneAddressHasItsShareOfTheRoomForBodies) {
    HttpLimits limits;
    limits.bodies_bytes_max = 4000;
    limits.bodies_bytes_per_address_max = 2000;
    limits.request_deadline = 120s;  // what is held counts until then
    listen(echo, limits);
    std::vector<RawPeer> peers;
    for (int i = 0; i < 4; ++i) {  // they would fill it all
        peers.push_back(connect());
        peers.back().write(post("/held", 1000, 900));
    }
    EXPECT_TRUE(eventually([&] { return ask(post("/", 300, 300)).status == 503; }));
    RawPeer other(listener_->port(), tls(), "127.0.0.2");
    for (int i = 0; i < 10; ++i) {  // and again: what is given back counts no more
        other.write(post("/other", 1900, 1900));
        ASSERT_EQ(read_answer(other).status, 200) << i;
    }
    peers.clear();
    EXPECT_TRUE(eventually([&] { return ask(post("/", 1900, 1900)).status == 200; }));
}

// Only what has really come takes room, whatever length is said or not said.
TEST_P(HttpServer, BodiesThatAreOnlyPromisedTakeNoRoom) {
    HttpLimits limits;
    limits.body_bytes_max = 1000;
    limits.bodies_bytes_max = limits.bodies_bytes_per_address_max = 1000;
    listen(echo, limits);
    std::vector<RawPeer> peers;
    for (const char* length : {"Content-Length: 1000", "Transfer-Encoding: chunked"}) {
        for (int i = 0; i < 3; ++i) {
            peers.push_back(connect());
            peers.back().write("POST / HTTP/1.1\r\nExpect: 100-continue\r\n" + std::string(length) +
                               "\r\n\r\n");
            ASSERT_EQ(peers.back().read_header(), "HTTP/1.1 100 Continue\r\n\r\n") << length;
        }
    }
    EXPECT_EQ(ask(post("/", 1000, 1000)).status, 200);
}

// What the parser waits for the end of without keeping it must not grow us.
TEST_P(HttpServer, ALineInABodyThatDoesNotEndIsRefused) {
    HttpLimits limits;
    limits.request_deadline = 120s;
    listen(echo, limits);
    for (const std::string begin : {"1;", "0\r\nName: "}) {
        RawPeer peer = connect();
        peer.write("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + begin);
        peer.write(std::string(limits.header_bytes_max + (16 << 10), 'x'));
        const std::string answer = peer.read_header();
        EXPECT_TRUE(answer.starts_with("HTTP/1.1 4")) << begin << ": " << answer;
    }
}

// One that sends as fast as we parse, and hardly any of it body, is only one of many.
TEST_P(HttpServer, AFloodOfChunksLeavesTheOthersTheirTurn) {
    HttpLimits limits;
    limits.request_deadline = 5s;
    listen(echo, limits);
    std::atomic<bool> is_over{false};
    std::thread flood([&] {
        RawPeer peer = connect();
        peer.write("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n");
        std::string chunks;
        for (int i = 0; i < 8; ++i) chunks += "1;" + std::string(16000, 'x') + "\r\na\r\n";
        for (const auto end = Clock::now() + 60s; Clock::now() < end;) {
            peer.write(chunks);
            pollfd entry = {peer.fd(), 0, 0};
            if (::poll(&entry, 1, 0) > 0) break;  // reset
        }
        is_over.store(true);
    });
    const auto begin = Clock::now();
    int answered = 0;
    while (!is_over.load() && ask(post("/", 10, 10)).status == 200) ++answered;
    flood.join();
    EXPECT_GE(answered, 3);
    EXPECT_LT(Clock::now() - begin, 30s) << "its deadline is 5 s";
}

// A client that takes its time with the answer holds no room meanwhile, nor does one whose request
// was malformed.
TEST_P(HttpServer, RoomForABodyIsGivenBackBeforeTheAnswerIsSent) {
    HttpLimits limits;
    limits.bodies_bytes_max = limits.bodies_bytes_per_address_max = 1000;
    listen(
        [](const HttpRequest& request, const Respond& respond) {
            HttpResponse response;
            response.body = std::string(request.path == "/large" ? 20 << 20 : 1, 'x');
            respond(std::move(response));
        },
        limits);
    RawPeer slow = connect();
    slow.write(post("/large", 900, 900));
    ASSERT_TRUE(slow.read_header().starts_with("HTTP/1.1 200"));
    EXPECT_EQ(ask(post("/", 900, 900)).status, 200);
    RawPeer wrong = connect();
    for (int i = 0; i < 3; ++i) {
        wrong.write(post("/..", 900, 900));
        ASSERT_EQ(read_answer(wrong).status, 400);
    }
    EXPECT_EQ(ask(post("/", 900, 900)).status, 200);
    EXPECT_GT(slow.read(1 << 20).size(), 0u);  // it was there all the time
}

TEST_P(HttpServer, TheConnectionThatIsIdleTheLongestGivesItsPlace) {
    for (const bool in_all : {false, true}) {
        Keeper keeper;
        HttpLimits limits;
        (in_all ? limits.connections_max : limits.connections_per_address_max) = 3;
        listen(keeper.handler(), limits);
        std::vector<RawPeer> peers = idle_peers();
        peers[0].write("GET /keep HTTP/1.1\r\n\r\n");  // the oldest has work, and is spared
        ASSERT_TRUE(eventually([&] { return keeper.count() == 1; }));
        RawPeer next = connect();
        next.write("GET / HTTP/1.1\r\n\r\n");
        EXPECT_EQ(read_answer(next).status, 200);
        EXPECT_EQ(peers[1].read_text_to_end(), "");
        peers[2].write("GET / HTTP/1.1\r\n\r\n");
        EXPECT_EQ(read_answer(peers[2]).status, 200);
        listener_.reset();  // before what it kept
    }
}

// All descriptors of the process but one are taken, as long as it lives.
class OneDescriptorLeft {
public:
    OneDescriptorLeft() {
        KVASIR_CHECK(::getrlimit(RLIMIT_NOFILE, &before_) == 0);
        UniqueFd last(::dup(0));
        rlimit few = before_;
        few.rlim_cur = static_cast<rlim_t>(last.get()) + 64;
        KVASIR_CHECK(::setrlimit(RLIMIT_NOFILE, &few) == 0);
        for (; last; last = UniqueFd(::dup(0))) taken_.push_back(std::move(last));
        KVASIR_CHECK(errno == EMFILE);
        taken_.pop_back();
    }
    ~OneDescriptorLeft() { ::setrlimit(RLIMIT_NOFILE, &before_); }
    OneDescriptorLeft(const OneDescriptorLeft&) = delete;
    OneDescriptorLeft& operator=(const OneDescriptorLeft&) = delete;

private:
    rlimit before_ = {};
    std::vector<UniqueFd> taken_;
};

TEST_P(HttpServer, WithoutDescriptorsWhoIsIdleTheLongestGivesItsOwn) {
    Keeper keeper;
    listen(keeper.handler());
    std::vector<RawPeer> peers = idle_peers();
    peers[0].write("GET /keep HTTP/1.1\r\n\r\n");  // the oldest has work, and is spared
    ASSERT_TRUE(eventually([&] { return keeper.count() == 1; }));
    {
        const OneDescriptorLeft left;
        RawPeer next = connect();  // with the last one
        next.write("GET / HTTP/1.1\r\n\r\n");
        EXPECT_EQ(read_answer(next).status, 200);
    }
    EXPECT_EQ(peers[1].read_text_to_end(), "");
    peers[2].write("GET / HTTP/1.1\r\n\r\n");
    EXPECT_EQ(read_answer(peers[2]).status, 200);
    EXPECT_EQ(ask("GET / HTTP/1.1\r\n\r\n").status, 200);
    listener_.reset();  // before what it kept
}

TEST_P(HttpServer, HandlersThatMisbehave) {
    Respond kept;
    std::atomic<bool> have = false;
    std::atomic<int> told = 0;
    std::atomic<uint64_t> bytes = 99;
    listen([&](const HttpRequest& request, const Respond& respond) {
        if (request.path == "/throw") throw std::runtime_error("handler");
        if (request.path == "/twice") {
            HttpResponse response;
            response.body = "one";
            respond(response);
            response.body = "two";
            respond(response);
        }
        if (request.path == "/keep") {
            kept = respond;
            have = true;
        }
    });
    RawPeer peer = connect();
    for (const char* path : {"/forgets", "/throw"}) {
        peer.write("GET " + std::string(path) + " HTTP/1.1\r\n\r\n");
        EXPECT_EQ(read_answer(peer).status, 500) << path;
    }
    peer.write("GET /twice HTTP/1.1\r\n\r\nGET /twice HTTP/1.1\r\n\r\n");
    EXPECT_EQ(read_answer(peer).body, "one");
    EXPECT_EQ(read_answer(peer).body, "one");

    // The listener is gone before the answer: nothing happens. (Told with 0 bytes while it stops.)
    peer.write("GET /keep HTTP/1.1\r\n\r\n");
    ASSERT_TRUE(eventually([&] { return have.load(); }));
    const auto start = Clock::now();
    listener_.reset();
    EXPECT_LT(Clock::now() - start, 3s);
    HttpResponse late;
    late.on_sent = [&](uint64_t sent) {
        ++told;
        bytes = sent;
    };
    kept(std::move(late));
    EXPECT_EQ(told, 0);
}

TEST_P(HttpServer, UpgradesGoOnBesideRequests) {
    listen(echo);
    Endpoint endpoint = *parse_url("ws://127.0.0.1:" + std::to_string(listener_->port()));
    endpoint.tls = tls();
    auto client = dial(endpoint, {}, {}, TestTls::get().client);
    ASSERT_TRUE(client) << client.error().detail;
    ASSERT_TRUE(eventually([this] {
        const std::lock_guard lock(mu_);
        return stream_.has_value();
    }));
    ASSERT_TRUE(client->enqueue(testing::bytes_of("x")));
    ASSERT_TRUE(stream_->receive(Clock::now() + 10s));
    // After a request on the same connection, too.
    RawPeer peer = connect();
    peer.write("GET /healthz HTTP/1.1\r\n\r\n");
    EXPECT_EQ(read_answer(peer).body, "GET /healthz [] ");
    peer.write(
        "GET /kvasir HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Protocol: kvasir.1\r\n\r\n");
    EXPECT_TRUE(peer.read_header().starts_with("HTTP/1.1 101"));
}

// ---- files ----

// A file whose bytes tell their place.
class TestFile {
public:
    explicit TestFile(uint64_t size) : size_(size) {
        const std::string path = folder_.path() + "/file";
        std::ofstream out(path, std::ios::binary);
        std::vector<char> block(1 << 20);
        for (uint64_t at = 0; at < size; at += block.size()) {
            for (size_t i = 0; i < block.size(); i += 1) block[i] = byte_at(at + i);
            out.write(block.data(),
                      static_cast<std::streamsize>(std::min<uint64_t>(block.size(), size - at)));
        }
        out.close();
        fd_ = std::shared_ptr<const int>(new int(::open(path.c_str(), O_RDWR | O_CLOEXEC)),
                                         [](const int* fd) {
                                             ::close(*fd);
                                             delete fd;
                                         });
        KVASIR_CHECK(*fd_ >= 0);
    }
    static char byte_at(uint64_t at) { return static_cast<char>((at * 2654435761u) >> 15); }
    FileBody body(uint64_t offset, uint64_t bytes) const { return {fd_, offset, bytes}; }
    int fd() const { return *fd_; }
    uint64_t size() const { return size_; }

private:
    TestFolder folder_;
    uint64_t size_;
    std::shared_ptr<const int> fd_;
};

HttpHandler serve_file(const TestFile& file, std::function<void(uint64_t)> on_sent) {
    return
        [&file, on_sent = std::move(on_sent)](const HttpRequest& request, const Respond& respond) {
            const auto header = request.headers.find("range");
            const auto range =
                parse_range(header == request.headers.end() ? "" : header->second, file.size());
            if (!range) return respond(error_response(range.error()));
            HttpResponse response;
            response.status = *range ? 206 : 200;
            response.file =
                *range ? file.body((*range)->offset, (*range)->bytes) : file.body(0, file.size());
            response.on_sent = on_sent;
            respond(std::move(response));
        };
}

TEST_P(HttpServer, PartsOfFiles) {
    const TestFile file(3 << 20);
    std::atomic<uint64_t> sent_total = 0;
    listen(serve_file(file, [&](uint64_t sent) { sent_total += sent; }));
    RawPeer peer = connect();
    uint64_t expected = 0;
    for (const auto& [offset, bytes] : {std::pair<uint64_t, uint64_t>{0, 1},
                                        {1, 2},
                                        {65535, 2},
                                        {100, 262144},
                                        {7, 262145},
                                        {0, 3 << 20},
                                        {(3 << 20) - 1, 1}}) {
        peer.write("GET /f HTTP/1.1\r\nRange: bytes=" + std::to_string(offset) + "-" +
                   std::to_string(offset + bytes - 1) + "\r\n\r\n");
        const Answer answer = read_answer(peer);
        ASSERT_EQ(answer.status, 206);
        ASSERT_EQ(answer.body.size(), bytes);
        for (uint64_t i = 0; i < bytes; ++i) {
            ASSERT_EQ(answer.body[i], TestFile::byte_at(offset + i)) << offset + i;
        }
        expected += bytes;
    }
    EXPECT_TRUE(eventually([&] { return sent_total == expected; }));
    peer.write("HEAD /f HTTP/1.1\r\n\r\n");
    EXPECT_NE(read_answer(peer, true).head.find("Content-Length: 3145728"), std::string::npos);
    peer.write("GET /f HTTP/1.1\r\nRange: bytes=3145728-\r\n\r\n");
    EXPECT_EQ(read_answer(peer).status, 413);  // whoever serves files makes a 416 of it
}

TEST_P(HttpServer, AFileThatShrinksEndsTheConnection) {
    const TestFile file(4 << 20);
    std::atomic<uint64_t> sent_bytes = ~uint64_t{0};
    listen([&](const HttpRequest&, const Respond& respond) {
        EXPECT_EQ(::ftruncate(file.fd(), 1 << 20), 0);
        HttpResponse response;
        response.file = file.body(0, 4 << 20);
        response.on_sent = [&](uint64_t sent) { sent_bytes = sent; };
        respond(std::move(response));
    });
    RawPeer peer = connect();
    peer.write("GET /f HTTP/1.1\r\n\r\n");
    const Answer answer = read_answer(peer);
    EXPECT_EQ(answer.body.size(), 1u << 20);
    EXPECT_TRUE(eventually([&] { return sent_bytes == 1u << 20; }));
}

#ifdef __SANITIZE_ADDRESS__
constexpr bool kFreedMemoryIsKept = true;  // what this test itself frees counts on
#else
constexpr bool kFreedMemoryIsKept = false;
#endif

uint64_t rss_bytes() {
    std::ifstream file("/proc/self/statm");
    uint64_t pages = 0;
    file >> pages >> pages;
    return pages * 4096;
}

// 100 MB to a client that reads slowly, then fast: memory stays flat and nothing is lost; others
// are served meanwhile.
TEST_P(HttpServer, LargeFilesToSlowReadersCostNoMemory) {
    const TestFile file(100 << 20);
    listen(serve_file(file, nullptr));
    RawPeer peer = connect();
    const uint64_t before = rss_bytes();
    uint64_t rss_max = 0;
    peer.write("GET /f HTTP/1.1\r\n\r\n");
    ASSERT_TRUE(peer.read_header().starts_with("HTTP/1.1 200"));
    uint64_t at = 0;
    while (at < file.size()) {
        const bool slow = at < 40000;
        const auto part = peer.read(std::min<uint64_t>(slow ? 2000 : 1 << 20, file.size() - at));
        ASSERT_FALSE(part.empty()) << at;
        for (size_t i = 0; i < part.size(); i += 509) {
            ASSERT_EQ(static_cast<char>(part[i]), TestFile::byte_at(at + i)) << at + i;
        }
        at += part.size();
        rss_max = std::max(rss_max, rss_bytes());
        if (slow) {
            RawPeer other = connect();
            other.write("GET /f HTTP/1.1\r\nRange: bytes=0-9\r\n\r\n");
            ASSERT_EQ(read_answer(other).body.size(), 10u);
        }
    }
    EXPECT_EQ(at, file.size());
    if (kFreedMemoryIsKept) return;
    EXPECT_LT(rss_max, before + (16 << 20));
}

TEST_P(HttpServer, ReadersThatStopAreDroppedAndTold) {
    const TestFile file(20 << 20);
    std::atomic<int> told = 0;
    std::atomic<uint64_t> sent_bytes = 0;
    HttpLimits limits;
    limits.write_stall_max = 200ms;
    listen(serve_file(file,
                      [&](uint64_t sent) {
                          sent_bytes = sent;
                          ++told;
                      }),
           limits);
    RawPeer stops = connect();
    stops.write("GET /f HTTP/1.1\r\n\r\n");
    EXPECT_TRUE(eventually([&] { return told == 1; }));
    EXPECT_LT(sent_bytes, file.size());
    RawPeer goes = connect();
    goes.write("GET /f HTTP/1.1\r\n\r\n");
    EXPECT_EQ(goes.read(1000).size(), 1000u);
    goes.reset();
    EXPECT_TRUE(eventually([&] { return told == 2; }));
    EXPECT_LT(sent_bytes, file.size());
}

// Bytes that lie in the socket, once no more come for a while.
uint64_t arrived(int fd) {
    int before = -1, bytes = 0;
    for (const auto give_up = Clock::now() + 20s; Clock::now() < give_up; before = bytes) {
        ::ioctl(fd, FIONREAD, &bytes);
        if (bytes > 0 && bytes == before) break;
        ::poll(nullptr, 0, 300);  // longer than any delayed acknowledgement
    }
    return static_cast<uint64_t>(bytes);
}

// A line that is cut: only what the other system had acknowledged counts, not what our own still
// held. The client reads nothing, so what arrived lies in its socket.
TEST_P(HttpServer, OfAnAnswerCutShortOnlyWhatArrivedIsCounted) {
    const TestFile file(20 << 20);
    std::atomic<int> told = 0;
    std::atomic<uint64_t> taken = 0;
    const auto on_sent = [&](uint64_t bytes) {
        taken = bytes;
        ++told;
    };
    HttpLimits limits;
    limits.write_stall_max = 1500ms;
    listen(serve_file(file, on_sent), limits);
    for (const bool resets : {true, false}) {
        SCOPED_TRACE(resets ? "reset by the client" : "dropped by the server");
        // A whole answer before it counts by itself, however late the cut.
        RawPeer peer = connect();
        told = 0;
        peer.write("GET /f HTTP/1.1\r\nRange: bytes=0-9999\r\n\r\n");
        EXPECT_EQ(read_answer(peer).body.size(), 10000u);
        ASSERT_TRUE(eventually([&] { return told == 1; }));
        EXPECT_EQ(taken, 10000u);
        peer.write("GET /f HTTP/1.1\r\n\r\n");
        const uint64_t there = arrived(peer.fd());
        ASSERT_GT(there, 20000u);
        ASSERT_LT(there, file.size() / 2);
        EXPECT_EQ(told, 1) << "the answer is under way";
        if (resets) peer.reset();
        ASSERT_TRUE(eventually([&] { return told == 2; }));
        EXPECT_LE(taken, there);
        EXPECT_GE(taken, there - there / 5);
    }
}

// Small answers that are whole in our system while nothing of them is acknowledged.
TEST_P(HttpServer, AWholeAnswerCountsOnceItIsAcknowledged) {
    const TestFile file(1 << 20);
    std::atomic<int> told = 0;
    std::atomic<uint64_t> taken = 0;
    listen(serve_file(file, [&](uint64_t bytes) {
        taken += bytes;
        ++told;
    }));
    RawPeer peer = connect();
    std::string requests;
    for (int i = 0; i < 20; ++i) {
        requests += "GET /f HTTP/1.1\r\nRange: bytes=0-99999\r\n\r\n";
    }
    peer.write(requests);
    const uint64_t there = arrived(peer.fd());
    ASSERT_LT(there, 1900000u);
    EXPECT_LE(taken, there);
    const int before = told;
    for (int i = 0; i < 20; ++i) ASSERT_EQ(read_answer(peer).body.size(), 100000u) << i;
    EXPECT_TRUE(eventually([&] { return told == 20; }));
    EXPECT_GT(told, before);
    EXPECT_EQ(taken, 2000000u);
}

TEST_P(HttpServer, ManyKeepAliveClientsAtOnce) {
    constexpr int kClients = 300;
    HttpLimits limits;
    limits.connections_per_address_max = kClients;
    listen(echo, limits);
    std::vector<RawPeer> peers;
    for (int i = 0; i < kClients; ++i) peers.push_back(connect());
    for (int round = 0; round < 5; ++round) {
        for (int i = 0; i < kClients; ++i) {
            peers[i].write("GET /" + std::to_string(i) + " HTTP/1.1\r\n\r\n");
        }
        for (int i = 0; i < kClients; ++i) {
            ASSERT_EQ(read_answer(peers[i]).body, "GET /" + std::to_string(i) + " [] ") << round;
        }
    }
    const auto start = Clock::now();
    listener_.reset();
    EXPECT_LT(Clock::now() - start, 3s);
}

}  // namespace
}  // namespace kvasir::net
