// Downloads from servers that ignore ranges, code bodies, change the file, or ask to come later.
#include "net/client_testing.hpp"

#include <random>

namespace kvasir::net {
namespace {

using namespace testing;
using std::chrono::milliseconds;
using std::chrono::seconds;

class RangeFailureTest : public ClientTest {
protected:
    const std::string file_ = pattern(300000, 4);
    static const std::string& large() {
        static const std::string bytes = pattern(32 << 20, 5);
        return bytes;
    }
};

// ---- ranges ignored, bodies coded ----

TEST_F(RangeFailureTest, RepliesThatAreNotThePiece) {
    struct Case {
        const char* name;
        std::function<OriginReply()> reply;
        Errc code;
        const char* words;
    };
    const auto part = [&](Headers headers) {
        headers.emplace_back("Content-Range", "bytes 1000-1999/300000");
        return plain_reply(206, file_.substr(1000, 1000), std::move(headers));
    };
    const std::vector<Case> cases = {
        {"200 full", [&] { return plain_reply(200, file_); }, Errc::kUnsupported, "ignores ranges"},
        {"200 full, no length",
         [&] {
             OriginReply reply = plain_reply(200, file_);
             reply.length = false;
             return reply;
         },
         Errc::kUnsupported, "ignores ranges"},
        {"206 gzip",
         [&] {
             return part({{"Content-Encoding", "gzip"}});
         },
         Errc::kUnsupported, "Content-Encoding: gzip"},
        {"206 br after identity",
         [&] {
             return part({{"Content-Encoding", "identity"}, {"Content-Encoding", "br"}});
         },
         Errc::kUnsupported, "Content-Encoding: br"},
        {"200 gzip",
         [&] {
             return plain_reply(200, file_, {{"Content-Encoding", "x-gzip"}});
         },
         Errc::kUnsupported, "Content-Encoding"},
        {"login page",
         [&] {
             return plain_reply(200, "<html>log in</html>",
                                {{"Content-Type", "text/html; charset=utf-8"}});
         },
         Errc::kUnsupported, "web page"},
        {"204", [&] { return plain_reply(204, ""); }, Errc::kUnsupported, "HTTP 204"},
        {"203", [&] { return plain_reply(203, file_); }, Errc::kUnsupported, "HTTP 203"},
        {"multipart",
         [&] {
             return plain_reply(206, "--x\r\n", {{"Content-Type", "multipart/byteranges"}});
         },
         Errc::kMismatch, "without Content-Range"},
    };
    for (const Case& one : cases) {
        SCOPED_TRACE(one.name);
        TestOrigin origin([&](const OriginRequest&) { return one.reply(); });
        expect_failure(job(origin.url("/m"), 1000, 1000, file_.size()), one.code, one.words);
        EXPECT_TRUE(got_.empty());
        EXPECT_EQ(origin.requests().size(), 1u);
        EXPECT_NE(errors_.back().find(origin.url("/m")), std::string::npos);
        if (one.code == Errc::kUnsupported && one.words != std::string("HTTP 204") &&
            one.words != std::string("HTTP 203")) {
            EXPECT_TRUE(logged("origin " + origin.url("")));
        }
    }
    // "identity" codes nothing.
    TestOrigin origin([&](const OriginRequest&) {
        return part({{"Content-Encoding", "identity"}});
    });
    ASSERT_TRUE(download({job(origin.url("/m"), 1000, 1000, file_.size())})) << errors_.back();
}

TEST_F(RangeFailureTest, AWholeFileIsNeverPulledByAccident) {
    TestOrigin::Options small;
    small.send_buffer_bytes = 16 << 10;
    for (const bool length : {true, false}) {
        TestOrigin origin(
            [&](const OriginRequest&) {
                OriginReply reply;
                reply.shared = large();
                reply.length = length;
                return reply;
            },
            small);
        const uint64_t before = client_->counters().bytes_pulled;
        // From the middle: refused at the head.
        expect_failure(job(origin.url("/m"), 1 << 20, 1 << 20), Errc::kUnsupported, "ignores");
        EXPECT_EQ(client_->counters().bytes_pulled, before);
        // From the start: what is wanted is taken, and no more.
        ASSERT_TRUE(download({job(origin.url("/m"), 0, 200000)})) << errors_.back();
        EXPECT_EQ(got_[0], large().substr(0, 200000));
        EXPECT_LE(client_->counters().bytes_pulled - before, 200000 * 1.01 + (64 << 10));
        EXPECT_TRUE(logged("ignores ranges"));
        // The origin's own count: beyond that only what buffers of the two kernels took.
        EXPECT_LE(origin.body_bytes(), 200000 * 1.01 + (64 << 10) + 2 * (512 << 10));
    }
}

TEST_F(RangeFailureTest, AWholeFileThatIsTheRangeIsTaken) {
    TestOrigin origin([&](const OriginRequest& request) {
        OriginReply reply;
        reply.shared = file_;
        if (request.number == 0) reply.cut_after = 0;
        return reply;
    });
    ASSERT_TRUE(download({job(origin.url("/m"), 0, file_.size(), file_.size())}));
    EXPECT_EQ(got_[0], file_);
    EXPECT_FALSE(logged("ignores ranges"));
    // A page of another length is not that file; neither is one that is shorter than the range.
    expect_failure(job(origin.url("/n"), 0, 1000, 299999), Errc::kMismatch, "the file changed");
    expect_failure(job(origin.url("/o"), 0, 300001), Errc::kMismatch, "only 300000 bytes");
}

TEST_F(RangeFailureTest, BudgetIsKeptWhateverTheOriginDoes) {
    // Errors with large bodies, for ever; and redirects with large bodies.
    TestOrigin::Options small;
    small.send_buffer_bytes = 16 << 10;
    TestOrigin origin(
        [&](const OriginRequest& request) {
            OriginReply reply =
                request.target == "/m" ? plain_reply(503, "") : redirect_to("/x" + request.target);
            reply.body.clear();
            reply.shared = large();
            return reply;
        },
        small);
    options_.attempts_max = 1000;
    std::vector<RangeJob> jobs;
    for (uint64_t i = 0; i < 3; ++i) jobs.push_back(job(origin.url("/m"), i * 1000, 1000, 0, i));
    ASSERT_FALSE(download(jobs));
    EXPECT_NE(errors_.back().find("wasted"), std::string::npos) << errors_.back();
    const uint64_t budget = 3030 + 3 * (64 << 10);
    EXPECT_LE(client_->counters().bytes_pulled, budget + (64 << 10));
    const uint64_t before = client_->counters().bytes_pulled;
    options_.redirects_max = 1000000;
    expect_failure(job(origin.url("/r"), 0, 1000), Errc::kLimit, "wasted");
    EXPECT_LE(client_->counters().bytes_pulled - before, 1010u + 2 * (64 << 10));
    // A connection costs the origin what the kernels buffer, never a file.
    EXPECT_LE(origin.body_bytes(), origin.accepts() * (1 << 20));
}

// ---- the file changes ----

TEST_F(RangeFailureTest, ChangesAreSeenWhateverTells) {
    struct Version {
        std::string etag, modified;
        size_t bytes;
    };
    struct Case {
        const char* name;
        Version before, after;
        bool same;
    };
    const std::string monday = "Mon, 01 Jan 2024 00:00:00 GMT";
    const std::string tuesday = "Tue, 02 Jan 2024 00:00:00 GMT";
    const std::vector<Case> cases = {
        {"tag", {"\"a1\"", "", 9000}, {"\"b2\"", "", 9000}, false},
        {"weak tag", {"W/\"a1\"", "", 9000}, {"W/\"b2\"", "", 9000}, false},
        {"unquoted tag", {"a1", "", 9000}, {"b2", "", 9000}, false},
        {"date", {"", monday, 9000}, {"", tuesday, 9000}, false},
        {"size alone", {"", "", 9000}, {"", "", 9001}, false},
        {"size, same tag", {"\"a1\"", "", 9000}, {"\"a1\"", "", 9001}, false},
        {"tag and date", {"\"a1\"", monday, 9000}, {"\"b2\"", monday, 9000}, false},
        {"weak or not", {"W/\"a1\"", "", 9000}, {"\"a1\"", "", 9000}, true},
        {"quoted or not, case", {"\"Ab1\"", "", 9000}, {"aB1", "", 9000}, true},
        {"same tag, other date", {"\"a1\"", monday, 9000}, {"\"a1\"", tuesday, 9000}, true},
        {"tag comes and goes", {"\"a1\"", "", 9000}, {"", monday, 9000}, true},
    };
    for (const Case& one : cases) {
        for (const bool between_downloads : {false, true}) {
            SCOPED_TRACE(std::string(one.name) + (between_downloads ? ", later" : ""));
            client_ = make_client({});
            TestOrigin origin([&](const OriginRequest& request) {
                const Version& now = request.number < 2 ? one.before : one.after;
                Headers headers;
                if (!now.etag.empty()) headers.emplace_back("ETag", now.etag);
                if (!now.modified.empty()) headers.emplace_back("Last-Modified", now.modified);
                return serve_file(request, std::string_view(file_).substr(0, now.bytes), headers);
            });
            options_.parallel = 1;
            const std::string url = origin.url("/m");
            std::vector<RangeJob> jobs;
            for (uint64_t i = 0; i < 4; ++i) jobs.push_back(job(url, i * 1000, 1000, 0, i));
            Status status;
            if (between_downloads) {
                ASSERT_TRUE(download({jobs[0], jobs[1]})) << errors_.back();
                status = download({jobs[2], jobs[3]});
                if (!status) {
                    EXPECT_TRUE(got_.empty());
                }
            } else {
                status = download(jobs);
                if (!status) {
                    EXPECT_EQ(done_.size(), 2u);
                }
            }
            ASSERT_EQ(status.has_value(), one.same);
            if (status) continue;
            EXPECT_EQ(status.error().code, Errc::kMismatch);
            EXPECT_NE(status.error().detail.find("the file changed"), std::string::npos);
            EXPECT_EQ(origin.requests().size(), 3u);
            // The plan was void; a new one, of the new version, works.
            EXPECT_TRUE(download(jobs)) << errors_.back();
        }
    }
}

TEST_F(RangeFailureTest, FlipsAtAnyRequestNeverMixVersions) {
    // Each version's bytes carry its number everywhere; random moments, same length or not.
    std::mt19937 random(7);
    for (int round = 0; round < 60; ++round) {
        const uint64_t flip = random() % 12;
        const bool same_length = random() % 2 == 0;
        const bool cuts = random() % 2 == 0;
        const std::string versions[2] = {std::string(9000, '0'),
                                         std::string(same_length ? 9000 : 9500, '1')};
        TestOrigin origin([&](const OriginRequest& request) {
            const int version = request.number < flip ? 0 : 1;
            OriginReply reply =
                serve_file(request, versions[version], {{"ETag", version ? "\"x\"" : "\"y\""}});
            if (cuts && request.number % 2 == 0) reply.cut_after = 300;
            return reply;
        });
        client_ = make_client({});
        std::vector<RangeJob> jobs;
        for (uint64_t i = 0; i < 9; ++i)
            jobs.push_back(job(origin.url("/m"), i * 1000, 1000, 0, i));
        const Status status = download(jobs);
        if (!status) {
            EXPECT_EQ(status.error().code, Errc::kMismatch) << status.error().detail;
        }
        std::set<char> seen;
        for (const auto& [tag, bytes] : got_) seen.insert(bytes.begin(), bytes.end());
        EXPECT_LE(seen.size(), 1u) << "round " << round;
        if (flip == 0) {
            EXPECT_TRUE(status);
        }
    }
}

TEST_F(RangeFailureTest, TagsOfHubAndCdnsAreComparedPerHop) {
    // Two CDN hosts with tags of their own, in turn; the content and the hub's word stay.
    std::string linked = "\"sha-1\"";
    const auto cdn_script = [&](const char* tag) {
        return [this, tag](const OriginRequest& request) {
            OriginReply reply = serve_file(request, file_, {{"ETag", tag}});
            reply.cut_after = 400;  // so that every 400 bytes the hub is asked again
            return reply;
        };
    };
    TestOrigin cdn1(cdn_script("\"cdn-1\""));
    TestOrigin cdn2(cdn_script("W/\"cdn-2\""));
    TestOrigin hub([&](const OriginRequest& request) {
        OriginReply reply = redirect_to((request.number % 2 == 0 ? cdn1 : cdn2).url("/f?n=") +
                                        std::to_string(request.number));
        reply.headers.emplace_back("ETag", "\"of the redirect " + std::to_string(request.number));
        reply.headers.emplace_back("X-Linked-Etag", linked);
        return reply;
    });
    ASSERT_TRUE(download({job(hub.url("/m"), 0, 2000, file_.size())})) << errors_.back();
    EXPECT_EQ(got_[0], file_.substr(0, 2000));
    EXPECT_GE(cdn1.requests().size(), 2u);
    EXPECT_GE(cdn2.requests().size(), 2u);
    linked = "\"sha-2\"";  // the hub says that its link now means other content
    expect_failure(job(hub.url("/m"), 0, 2000), Errc::kMismatch, "the file changed");
}

// ---- come later ----

TEST_F(RangeFailureTest, RetryAfterInSecondsAndAsADate) {
    for (const char* later : {"7", "Tue, 14 Nov 2023 22:13:27 GMT"}) {
        for (const int status : {429, 503}) {
            SCOPED_TRACE(std::to_string(status) + " " + later);
            time_->pauses.clear();
            TestOrigin origin([&](const OriginRequest& request) {
                if (request.number < 2) return plain_reply(status, "", {{"Retry-After", later}});
                return serve_file(request, file_);
            });
            ASSERT_TRUE(download({job(origin.url("/m"), 0, 1000)})) << errors_.back();
            EXPECT_EQ(got_[0], file_.substr(0, 1000));
            EXPECT_EQ(origin.requests().size(), 3u);
            EXPECT_GE(time_->total(), milliseconds(13900));
            EXPECT_LE(time_->total(), milliseconds(14100));
        }
    }
}

TEST_F(RangeFailureTest, RetryAfterHoldsAllJobsOfTheOrigin) {
    TestOrigin origin([&](const OriginRequest& request) {
        if (request.number == 0) return plain_reply(429, "slow down", {{"Retry-After", "5"}});
        return serve_file(request, file_);
    });
    options_.parallel = 1;
    std::vector<RangeJob> jobs;
    for (uint64_t i = 0; i < 20; ++i) jobs.push_back(job(origin.url("/m"), i, 1, 0, i));
    ASSERT_TRUE(download(jobs)) << errors_.back();
    EXPECT_EQ(origin.requests().size(), 21u);
    EXPECT_GE(time_->total(), milliseconds(4900));
    EXPECT_LE(time_->total(), milliseconds(5100));
}

TEST_F(RangeFailureTest, OddRetryAfter) {
    std::string later;
    TestOrigin origin([&](const OriginRequest& request) {
        if (request.target == "/once" && request.number > 0) return serve_file(request, file_);
        return plain_reply(503, "maintenance", {{"Retry-After", later}});
    });
    // Too far away: the caller decides, not we.
    for (const char* far : {"3600", "99999999999999", "Wed, 14 Nov 2029 22:13:20 GMT"}) {
        later = far;
        time_->pauses.clear();
        expect_failure(job(origin.url("/m"), 0, 10), Errc::kBusy, "maintenance");
        EXPECT_TRUE(time_->pauses.empty());
    }
    // Nonsense and the past: our own pauses.
    for (const char* odd : {"soon", "-5", "Tue, 14 Nov 2023 22:13:00 GMT", "0"}) {
        later = odd;
        time_->pauses.clear();
        const size_t before = origin.requests().size();
        expect_failure(job(origin.url("/m"), 0, 10), Errc::kIo, "after 5 attempts");
        EXPECT_EQ(origin.requests().size() - before, 5u);
        EXPECT_GE(time_->total(), milliseconds(100 + 200 + 400 + 800) / 2 - milliseconds(40));
        EXPECT_LE(time_->total(), milliseconds(100 + 200 + 400 + 800));
    }
}

TEST_F(RangeFailureTest, ErrorsThatPass) {
    for (const int status : {408, 425, 429, 500, 502, 503, 504, 522}) {
        TestOrigin origin([&](const OriginRequest& request) {
            if (request.number < 4) return plain_reply(status, "try again");
            return serve_file(request, file_);
        });
        EXPECT_TRUE(download({job(origin.url("/m"), 0, 1000)})) << status << errors_.back();
        EXPECT_EQ(origin.accepts(), 1u);  // small error bodies are read, so the connection stays
    }
}

TEST_F(RangeFailureTest, WholeFileRefusedSmallSpansServed) {
    // A host with a limit for one path: spans work, and the message of the other is the server's.
    TestOrigin origin([&](const OriginRequest& request) {
        const auto range = request.range();
        if (!range || range->second - range->first >= 50000) {
            return plain_reply(400, "object too large for this path");
        }
        return serve_file(request, file_);
    });
    ASSERT_TRUE(download({job(origin.url("/m"), 0, 50000)})) << errors_.back();
    expect_failure(job(origin.url("/m"), 0, file_.size()), Errc::kIo, "object too large");
}

}  // namespace
}  // namespace kvasir::net
