// Downloads against a scripted origin: the normal course, faults of the line, ranges that lie.
#include "net/client_testing.hpp"

#include <atomic>
#include <thread>

namespace kvasir::net {
namespace {

using namespace testing;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

class RangeDownloadTest : public ClientTest {
protected:
    const std::string file_ = pattern(300000, 1);
};

TEST_F(RangeDownloadTest, JobsOfOneFile) {
    TestOrigin origin([&](const OriginRequest& request) { return serve_file(request, file_); });
    const std::string url = origin.url("/model.gguf");
    std::vector<RangeJob> jobs = {
        job(url, 0, 1, file_.size(), 1),      job(url, 1, 99999, file_.size(), 2),
        job(url, 299999, 1, file_.size(), 3), job(url, 123456, 54321, 0, 4),
        job(url, 0, file_.size(), 0, 5),      job(url, 7, 0, 0, 6),
    };
    ASSERT_TRUE(download(jobs)) << errors_.back();
    for (const RangeJob& one : jobs) {
        EXPECT_EQ(got_[one.tag], file_.substr(one.offset, one.bytes)) << one.tag;
        EXPECT_TRUE(done_.contains(one.tag));
    }
    const RangeCounters& counters = client_->counters();
    EXPECT_EQ(counters.bytes_wanted, 1u + 99999 + 1 + 54321 + file_.size());
    EXPECT_EQ(counters.bytes_pulled, counters.bytes_wanted);
    EXPECT_EQ(origin.body_bytes(), counters.bytes_wanted);
    EXPECT_EQ(counters.requests, 5u);
    EXPECT_EQ(counters.retries, 0u);
    for (const OriginRequest& request : origin.requests()) {
        EXPECT_EQ(request.header("accept-encoding"), "identity");
        EXPECT_EQ(request.header("authorization"), "Bearer " + kToken);
        EXPECT_EQ(request.header("range").find(','), std::string::npos);  // one span a request
    }
}

TEST_F(RangeDownloadTest, ThousandsOfSmallJobsShareFewConnections) {
    TestOrigin origin([&](const OriginRequest& request) { return serve_file(request, file_); });
    std::vector<RangeJob> jobs;
    for (uint64_t i = 0; i < 3000; ++i) {
        jobs.push_back(job(origin.url("/m"), i * 100, 100, file_.size(), i));
    }
    ASSERT_TRUE(download(jobs)) << errors_.back();
    for (uint64_t i = 0; i < 3000; ++i) EXPECT_EQ(got_[i], file_.substr(i * 100, 100));
    EXPECT_EQ(origin.requests().size(), 3000u);
    EXPECT_LE(origin.accepts(), options_.parallel);
    // And the next download finds them open.
    ASSERT_TRUE(download({job(origin.url("/m"), 0, 10)}));
    EXPECT_LE(origin.accepts(), options_.parallel);
}

TEST_F(RangeDownloadTest, ChunkedAndEndlessBodies) {
    TestOrigin origin([&](const OriginRequest& request) {
        OriginReply reply = serve_file(request, file_);
        reply.chunked = request.target == "/chunked";
        reply.length = false;
        return reply;
    });
    ASSERT_TRUE(download(
        {job(origin.url("/chunked"), 5, 70000, 0, 1), job(origin.url("/close"), 5, 70000, 0, 2)}))
        << errors_.back();
    EXPECT_EQ(got_[1], file_.substr(5, 70000));
    EXPECT_EQ(got_[2], file_.substr(5, 70000));
}

TEST_F(RangeDownloadTest, ACutIsResumedFromTheLastByte) {
    // Every third request is whole, the others end early, once before the first byte.
    TestOrigin origin([&](const OriginRequest& request) {
        OriginReply reply = serve_file(request, file_);
        if (request.number % 3 != 2) reply.cut_after = request.number * 10007;
        return reply;
    });
    ASSERT_TRUE(download({job(origin.url("/m"), 1000, 200000, file_.size())})) << errors_.back();
    EXPECT_EQ(got_[0], file_.substr(1000, 200000));
    const auto requests = origin.requests();
    ASSERT_EQ(requests.size(), 3u);
    EXPECT_EQ(requests[0].header("range"), "bytes=1000-200999");
    EXPECT_EQ(requests[1].header("range"), "bytes=1000-200999");
    EXPECT_EQ(requests[2].header("range"), "bytes=11007-200999");
    EXPECT_EQ(client_->counters().retries, 2u);
    EXPECT_EQ(client_->counters().bytes_pulled, 200000u);  // nothing twice
    EXPECT_EQ(origin.body_bytes(), 200000u);
    ASSERT_EQ(time_->pauses.size(), 2u);
    EXPECT_LE(time_->pauses[1], options_.pause_first);  // the second attempt gained bytes
}

TEST_F(RangeDownloadTest, CutsAfterEveryFewBytesNeverEndIt) {
    // More cuts than attempts_max: each brought new bytes.
    TestOrigin origin([&](const OriginRequest& request) {
        OriginReply reply = serve_file(request, file_);
        reply.cut_after = 1 + request.number;
        return reply;
    });
    options_.attempts_max = 1;
    ASSERT_TRUE(download({job(origin.url("/m"), 0, 800, 0)})) << errors_.back();
    EXPECT_EQ(got_[0], file_.substr(0, 800));
    EXPECT_EQ(client_->counters().bytes_pulled, 800u);
}

TEST_F(RangeDownloadTest, ADripIsNoStall) {
    TestOrigin origin([&](const OriginRequest& request) {
        OriginReply reply = serve_file(request, file_);
        reply.drip_bytes = 1;
        reply.drip_pause = milliseconds(25);
        return reply;
    });
    options_.stall_max = milliseconds(800);
    ASSERT_TRUE(download({job(origin.url("/m"), 0, 40)})) << errors_.back();  // a second
    EXPECT_EQ(client_->counters().retries, 0u);
    EXPECT_EQ(got_[0], file_.substr(0, 40));
}

TEST_F(RangeDownloadTest, AStallIsCutAndResumed) {
    TestOrigin origin([&](const OriginRequest& request) {
        OriginReply reply = serve_file(request, file_);
        if (request.number == 0) reply.silent = true;
        if (request.number == 1) {
            reply.cut_after = 500;
            reply.stall = true;
        }
        return reply;
    });
    options_.stall_max = milliseconds(300);
    const auto begin = steady_clock::now();
    ASSERT_TRUE(download({job(origin.url("/m"), 0, 1000)})) << errors_.back();
    EXPECT_GE(steady_clock::now() - begin, milliseconds(600));
    EXPECT_LT(steady_clock::now() - begin, milliseconds(5000));
    EXPECT_EQ(got_[0], file_.substr(0, 1000));
    EXPECT_EQ(origin.requests().back().header("range"), "bytes=500-999");
}

TEST_F(RangeDownloadTest, AServerThatStallsForEver) {
    TestOrigin origin([&](const OriginRequest&) {
        OriginReply reply;
        reply.silent = true;
        return reply;
    });
    options_.stall_max = milliseconds(150);
    options_.attempts_max = 3;
    expect_failure(job(origin.url("/m"), 0, 1000), Errc::kTimeout, "no byte for 150 ms");
    EXPECT_EQ(client_->counters().requests, 3u);
}

TEST_F(RangeDownloadTest, AStallingSinkIsNobodysStall) {
    TestOrigin origin([&](const OriginRequest& request) { return serve_file(request, file_); });
    options_.stall_max = milliseconds(250);
    std::vector<RangeJob> jobs;
    for (uint64_t i = 0; i < 4; ++i) jobs.push_back(job(origin.url("/m"), 0, 50000, 0, i));
    const Status status = client_->download(
        jobs, options_,
        [](const RangeJob&, uint64_t, std::span<const uint8_t>) -> Status {
            // tidy: sleep, the sink is the slow disk of this test
            std::this_thread::sleep_for(milliseconds(80));
            return {};
        },
        [](const RangeJob&) -> Status { return {}; });
    ASSERT_TRUE(status) << status.error().detail;
    EXPECT_EQ(client_->counters().retries, 0u);
}

TEST_F(RangeDownloadTest, RefusedThenUp) {
    uint16_t port = 0;
    {
        TestOrigin gone([&](const OriginRequest& request) { return serve_file(request, file_); });
        port = gone.port();
    }
    // The second pause is when the server comes up.
    struct Opening final : ClientTime {
        std::function<void()> open;
        int pauses = 0;
        std::chrono::steady_clock::duration skipped{0};
        Point now() override { return ClientTime::now() + skipped; }
        void idle_until(Point until) override {
            if (until <= now()) return;
            skipped += until - now();
            if (++pauses == 2) open();
        }
    };
    const auto time = std::make_shared<Opening>();
    std::unique_ptr<TestOrigin> origin;
    time->open = [&] {
        TestOrigin::Options at;
        at.port = port;
        origin = std::make_unique<TestOrigin>(
            [&](const OriginRequest& request) { return serve_file(request, file_); }, at);
    };
    client_ = std::move(*make_http_client({}, time));
    const std::string url = "http://127.0.0.1:" + std::to_string(port) + "/m";
    ASSERT_TRUE(download({job(url, 10, 1000)})) << errors_.back();
    EXPECT_EQ(got_[0], file_.substr(10, 1000));
    EXPECT_EQ(client_->counters().retries, 2u);
    origin.reset();
    client_ = make_client({});
    expect_failure(job(url, 10, 1000), Errc::kIo, "after 5 attempts");
    EXPECT_EQ(client_->counters().requests, 5u);
    ASSERT_EQ(time_->pauses.size(), 4u);
    for (int i = 0; i < 4; ++i) {  // doubled, with jitter
        EXPECT_LE(time_->pauses[i], milliseconds(100 << i));
        EXPECT_GE(time_->pauses[i], milliseconds(45 << i));
    }
}

TEST_F(RangeDownloadTest, SinkFailureEndsEverythingAtOnce) {
    TestOrigin origin([&](const OriginRequest& request) {
        OriginReply reply = serve_file(request, file_);
        reply.drip_bytes = 1000;
        reply.drip_pause = milliseconds(20);
        return reply;
    });
    std::vector<RangeJob> jobs;
    for (uint64_t i = 0; i < 50; ++i) jobs.push_back(job(origin.url("/m"), 0, 250000, 0, i));
    int calls = 0;
    const auto begin = steady_clock::now();
    Status status = client_->download(
        jobs, options_,
        [&](const RangeJob&, uint64_t, std::span<const uint8_t>) -> Status {
            return ++calls < 5 ? Status() : fail(Errc::kNoSpace, "disk full");
        },
        [](const RangeJob&) -> Status { return {}; });
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().code, Errc::kNoSpace);
    EXPECT_EQ(status.error().detail, "disk full");
    EXPECT_EQ(calls, 5);
    EXPECT_LT(steady_clock::now() - begin, milliseconds(5000));
    EXPECT_LE(origin.requests().size(), options_.parallel);

    status = client_->download(
        {job(origin.url("/m"), 0, 10), job(origin.url("/m"), 0, 20)}, options_,
        [](const RangeJob&, uint64_t, std::span<const uint8_t>) -> Status { return {}; },
        [](const RangeJob&) -> Status { return fail(Errc::kBadInput, "hash differs"); });
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().detail, "hash differs");
}

// A loopback listener whose queue is full: further connections wait for its answer.
class FullListener {
public:
    FullListener() {
        sockaddr_in address = {};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t size = sizeof(address);
        auto* generic = reinterpret_cast<sockaddr*>(&address);
        sockets_.push_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        KVASIR_CHECK(bind(sockets_[0], generic, size) == 0 && listen(sockets_[0], 0) == 0);
        getsockname(sockets_[0], generic, &size);
        url_ = "http://127.0.0.1:" + std::to_string(ntohs(address.sin_port)) + "/m";
        for (int i = 0; i < 4; ++i) {
            sockets_.push_back(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
            static_cast<void>(connect(sockets_.back(), generic, size));
        }
    }
    ~FullListener() {
        for (const int fd : sockets_) close(fd);
    }
    FullListener(const FullListener&) = delete;
    FullListener& operator=(const FullListener&) = delete;
    const std::string& url() const { return url_; }

private:
    std::vector<int> sockets_;
    std::string url_;
};

TEST_F(RangeDownloadTest, CancelFromAnotherThread) {
    // What it waits for: bytes, a head, a connection, a pause.
    for (const std::string phase : {"body", "head", "connect", "pause", "before"}) {
        SCOPED_TRACE(phase);
        std::atomic<bool> asked{false};
        TestOrigin origin([&](const OriginRequest& request) {
            asked = true;
            OriginReply reply = serve_file(request, file_);
            if (phase == "pause") return plain_reply(503, "", {{"Retry-After", "20"}});
            reply.silent = phase == "head";
            reply.cut_after = 100;
            reply.stall = true;
            return reply;
        });
        const FullListener full;
        // A busy machine may hold up any thread for so long; not every time.
        auto fastest = steady_clock::duration::max();
        for (int i = 0; i < 5 && fastest >= milliseconds(200); ++i) {
            asked = phase == "before" || phase == "connect";
            client_ = std::move(*HttpClient::make({}));
            steady_clock::time_point cancelled;
            std::thread other([&] {
                const auto deadline = steady_clock::now() + std::chrono::seconds(10);
                while (!asked && steady_clock::now() < deadline) std::this_thread::yield();
                // tidy: sleep, a random moment while it connects: nothing shows that from outside
                if (phase == "connect") std::this_thread::sleep_for(milliseconds(50));
                cancelled = steady_clock::now();
                client_->cancel();
            });
            if (phase == "before") other.join();
            const Status status =
                download({job(phase == "connect" ? full.url() : origin.url("/m"), 0, 1000)});
            const auto ended = steady_clock::now();
            if (other.joinable()) other.join();
            ASSERT_FALSE(status);
            EXPECT_EQ(status.error().code, Errc::kClosed) << status.error().detail;
            fastest = std::min(fastest, ended - cancelled);
        }
        EXPECT_LT(fastest, milliseconds(200));
    }
}

TEST_F(RangeDownloadTest, BytesPerSecond) {
    const std::string large = pattern(1 << 20, 3);
    TestOrigin origin([&](const OriginRequest& request) { return serve_file(request, large); });
    options_.bytes_per_second_max = 2 << 20;
    options_.stall_max = milliseconds(400);  // being slow on purpose is no stall
    std::vector<RangeJob> jobs;
    for (uint64_t i = 0; i < 4; ++i) jobs.push_back(job(origin.url("/m"), i << 18, 1 << 18, 0, i));
    const auto begin = steady_clock::now();
    ASSERT_TRUE(download(jobs)) << errors_.back();
    const double seconds = std::chrono::duration<double>(steady_clock::now() - begin).count();
    EXPECT_GT(seconds, 0.5 * 0.8);
    EXPECT_LT(seconds, 0.5 * 10);  // a busy machine adds, never takes away
    EXPECT_EQ(client_->counters().retries, 0u);
    for (uint64_t i = 0; i < 4; ++i) EXPECT_EQ(got_[i], large.substr(i << 18, 1 << 18));
}

TEST_F(RangeDownloadTest, JobsThatMakeNoSense) {
    TestOrigin origin([&](const OriginRequest& request) { return serve_file(request, file_); });
    const std::string url = origin.url("/m");
    expect_failure(job(url, 10, 10, 19), Errc::kUsage, "not in the file");
    expect_failure(job(url, UINT64_MAX, 10), Errc::kUsage, "not in the file");
    expect_failure(job(url, 10, UINT64_MAX), Errc::kUsage, "not in the file");
    expect_failure(job("file:///etc/passwd", 0, 10), Errc::kUsage, "not an http or https URL");
    expect_failure(job("http://user:pass@127.0.0.1/m", 0, 10), Errc::kUsage, "user name");
    expect_failure(job("http://127.0.0.1/a\r\nX: y", 0, 10), Errc::kUsage, "control");
    RangeJob split = job(url, 0, 10);
    split.secret_headers = {{"Authorization", kToken + "\r\nX: y"}};
    expect_failure(split, Errc::kUsage, "Authorization");
    split.secret_headers = {{"Range", "bytes=0-1"}};
    expect_failure(split, Errc::kUsage, "Range");
    ASSERT_FALSE(download({job(url, 0, 10, 100, 0), job(url, 0, 10, 200, 1)}));
    EXPECT_NE(errors_.back().find("two sizes"), std::string::npos);
    options_.parallel = 0;
    expect_failure(job(url, 0, 10), Errc::kUsage, "parallel");
    EXPECT_EQ(origin.accepts(), 0u);
}

// ---- ranges that lie ----

TEST_F(RangeDownloadTest, ContentRangeLies) {
    struct Case {
        const char* range;  // nullptr: missing
        Errc code;
        const char* words;
    };
    const Case cases[] = {
        {nullptr, Errc::kMismatch, "without Content-Range"},
        {"bytes 0-999/300000", Errc::kMismatch, "got bytes 0-999"},  // another piece
        {"bytes 1001-2000/300000", Errc::kMismatch, "got bytes 1001-2000"},
        {"bytes 1000-2000/300000", Errc::kMismatch, "got bytes 1000-2000"},  // longer
        {"bytes 1000-1999/300001", Errc::kMismatch, "the file changed"},
        {"bytes 1000-1998/300000", Errc::kMismatch, "Content-Length 1000"},
        {"bytes 1000-1999/1500", Errc::kMismatch, "malformed"},
        {"bytes 1999-1000/300000", Errc::kMismatch, "malformed"},
        {"bytes */300000", Errc::kMismatch, "malformed"},
        {"bytes 1000-18446744073709551615/*", Errc::kMismatch, "malformed"},
        {"bytes 1000-99999999999999999999/*", Errc::kMismatch, "malformed"},
        {"bytes +1000-1999/300000", Errc::kMismatch, "malformed"},
        {"pages 1000-1999/300000", Errc::kMismatch, "malformed"},
        {"\x1b[2J", Errc::kMismatch, "malformed: ?[2J"},
    };
    for (const Case& one : cases) {
        SCOPED_TRACE(one.range ? one.range : "missing");
        TestOrigin origin([&](const OriginRequest&) {
            OriginReply reply = plain_reply(206, file_.substr(1000, 1000));
            if (one.range) reply.headers.emplace_back("Content-Range", one.range);
            return reply;
        });
        expect_failure(job(origin.url("/m"), 1000, 1000, file_.size()), one.code, one.words);
        EXPECT_TRUE(got_.empty());  // not a byte of it
        EXPECT_EQ(origin.requests().size(), 1u);
    }
}

TEST_F(RangeDownloadTest, ShorterPiecesAreJoinedLongerOnesRefused) {
    TestOrigin origin([&](const OriginRequest& request) {
        const auto range = request.range();
        if (request.target == "/short") {  // honest, but never more than 1000 bytes
            OriginRequest less = request;
            less.headers = {
                {"range", "bytes=" + std::to_string(range->first) + "-" +
                              std::to_string(std::min(range->second, range->first + 999))}};
            return serve_file(less, file_);
        }
        OriginReply reply = serve_file(request, file_);  // the head is right, the body is not
        reply.chunked = request.target == "/longer-chunked";
        reply.length = false;
        reply.body = file_.substr(range->first, range->second - range->first + 2);
        return reply;
    });
    ASSERT_TRUE(download({job(origin.url("/short"), 100, 4500, file_.size())})) << errors_.back();
    EXPECT_EQ(got_[0], file_.substr(100, 4500));
    EXPECT_EQ(origin.requests().size(), 5u);
    EXPECT_EQ(client_->counters().retries, 0u);
    EXPECT_TRUE(time_->pauses.empty());
    expect_failure(job(origin.url("/longer-chunked"), 100, 4500), Errc::kMismatch, "more bytes");
    expect_failure(job(origin.url("/longer"), 100, 4500), Errc::kMismatch, "more bytes");
}

TEST_F(RangeDownloadTest, BodyShorterThanItsHeadIsAskedFor) {
    TestOrigin origin([&](const OriginRequest& request) {
        OriginReply reply = serve_file(request, file_);
        if (request.number == 0) {
            reply.body = std::string(reply.shared.substr(0, 700));
            reply.length = false;  // ends with the connection, as if all were well
        }
        return reply;
    });
    ASSERT_TRUE(download({job(origin.url("/m"), 100, 2000)})) << errors_.back();
    EXPECT_EQ(got_[0], file_.substr(100, 2000));
    EXPECT_EQ(origin.requests().back().header("range"), "bytes=800-2099");
    EXPECT_EQ(client_->counters().retries, 1u);
}

}  // namespace
}  // namespace kvasir::net
