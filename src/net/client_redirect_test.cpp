// Redirects and credentials: who sees the token, where redirects may lead, links that expire.
#include "net/client_testing.hpp"
#include "net/tls_identity_testing.hpp"

namespace kvasir::net {
namespace {

using namespace testing;
using std::chrono::milliseconds;

class RedirectTest : public ClientTest {
protected:
    // Both ways of asking: a download and a call. True: the file's bytes came.
    bool fetch(const std::string& url) {
        const Status status = download({job(url, 100, 50, file_.size())});
        HttpCall what;
        what.url = url;
        what.secret_headers = {{"Authorization", "Bearer " + kToken}};
        const Result<HttpReply> reply = call(what);
        const bool called = reply && reply->status == 200 && reply->body == file_;
        EXPECT_EQ(status.has_value(), called);
        if (status) {
            EXPECT_EQ(got_[0], file_.substr(100, 50));
        }
        return status && called;
    }
    static size_t with_token(const TestOrigin& origin, std::string_view path = "") {
        size_t count = 0;
        for (const OriginRequest& request : origin.requests()) {
            if (!request.target.starts_with(path)) continue;
            EXPECT_EQ(request.header("cookie"), "");
            for (const auto& [name, value] : request.headers) {
                if (value.find(kToken) != std::string::npos) ++count;
            }
        }
        return count;
    }

    const std::string file_ = pattern(5000, 2);
    TestOrigin::Script serve_ = [this](const OriginRequest& request) {
        return serve_file(request, file_);
    };
};

TEST_F(RedirectTest, EveryStatusSameHost) {
    for (const int status : {301, 302, 303, 307, 308}) {
        for (const std::string form : {"/b/file", "file", "../a/file", "//HOST/b/file", "?x=1",
                                       "http://HOST/b/file#part", "/b/a file"}) {
            SCOPED_TRACE(std::to_string(status) + " " + form);
            std::string host;
            TestOrigin origin([&](const OriginRequest& request) {
                if (request.target != "/a/start") return serve_file(request, file_);
                std::string location = form;
                if (const size_t at = form.find("HOST"); at != form.npos) {
                    location.replace(at, 4, host);
                }
                return redirect_to(location, status);
            });
            host = "127.0.0.1:" + std::to_string(origin.port());
            ASSERT_TRUE(fetch(origin.url("/a/start")));
            // The hub's own redirects keep the token: two requests of each way of asking.
            EXPECT_EQ(with_token(origin), 4u);
            EXPECT_EQ(origin.accepts(), 1u);
        }
    }
}

TEST_F(RedirectTest, AnotherOriginNeverSeesTheToken) {
    TestOrigin cdn(serve_);
    TestOrigin::Options elsewhere;
    elsewhere.address = "127.0.0.2";
    TestOrigin cdn2(serve_, elsewhere);
    std::string location;
    TestOrigin hub([&](const OriginRequest&) { return redirect_to(location + kSignedQuery); });
    const std::string port = ":" + std::to_string(cdn.port());
    const std::string port2 = ":" + std::to_string(cdn2.port());
    const std::string hub_host = "hub.localhost:" + std::to_string(hub.port());
    for (const std::string& place : std::vector<std::string>{
             "http://127.0.0.1" + port + "/other-port",
             "http://127.0.0.2" + port2 + "/other-host",
             "http://hub.localhost" + port + "/same-name-other-port",
             "http://HUB.localhost" + port + "/case",
             "http://hub.localhost.evil.localhost" + port + "/prefix",
             "http://evilhub.localhost" + port + "/suffix",
             "http://sub.hub.localhost" + port + "/below",
             "http://127.0.0.1" + port + "/path/" + hub_host,
             "http://" + hub_host + "@127.0.0.1" + port + "/user-info",
             "http://user:password@127.0.0.1" + port + "/password",
             "//127.0.0.1" + port + "/relative-scheme",
             "http://127.1" + port + "/short-number",
         }) {
        SCOPED_TRACE(place);
        location = place;
        const size_t before = cdn.requests().size() + cdn2.requests().size();
        EXPECT_TRUE(fetch("http://" + hub_host + "/model"));
        EXPECT_GT(cdn.requests().size() + cdn2.requests().size(), before);
    }
    EXPECT_EQ(with_token(cdn), 0u);
    EXPECT_EQ(with_token(cdn2), 0u);
    EXPECT_EQ(with_token(hub), hub.requests().size());
    for (const OriginRequest& request : cdn.requests()) {
        EXPECT_EQ(request.header("authorization"), "");  // nor that of a user name in Location
        EXPECT_NE(request.target.find(kSignedQuery), std::string::npos);
    }
}

TEST_F(RedirectTest, TheSameHostWrittenInOtherWaysIsTheSame) {
    TestOrigin hub([&](const OriginRequest& request) {
        return request.target == "/b"
                   ? serve_file(request, file_)
                   : redirect_to("http://HUB.LocalHost:" + request.header("host").substr(14) +
                                 "/b");
    });
    ASSERT_TRUE(fetch(hub.url("/a", "hub.localhost")));
    EXPECT_EQ(with_token(hub), 4u);
}

TEST_F(RedirectTest, ThereAndBackIsJudgedAtEveryHop) {
    std::string back;
    TestOrigin middle([&](const OriginRequest&) { return redirect_to(back); });
    TestOrigin hub([&](const OriginRequest& request) {
        return request.target == "/back" ? serve_file(request, file_)
                                         : redirect_to(middle.url("/middle"));
    });
    back = hub.url("/back");
    ASSERT_TRUE(fetch(hub.url("/start")));
    EXPECT_EQ(with_token(middle), 0u);
    EXPECT_EQ(with_token(hub, "/back"), 2u);
    EXPECT_EQ(with_token(hub, "/start"), 2u);
}

TEST_F(RedirectTest, Loops) {
    TestOrigin hub([&](const OriginRequest& request) {
        return redirect_to(request.target == "/self" ? "/self" : request.target + "x");
    });
    for (const char* path : {"/self", "/growing"}) {
        const size_t before = hub.requests().size();
        expect_failure(job(hub.url(path), 0, 10), Errc::kLimit, "more than 5 redirects");
        HttpCall what;
        what.url = hub.url(path);
        const auto reply = call(what);
        ASSERT_FALSE(reply);
        EXPECT_EQ(reply.error().code, Errc::kLimit);
        EXPECT_EQ(hub.requests().size() - before, 12u);
    }
}

TEST_F(RedirectTest, PlacesNobodyFollows) {
    std::string location;
    TestOrigin hub([&](const OriginRequest&) { return redirect_to(location); });
    for (const char* place :
         {"file:///etc/passwd", "ftp://127.0.0.1/x", "gopher://127.0.0.1/", "javascript:alert(1)",
          "http://", "http:////x", "http://[::1/", "http://127.0.0.1:99999/", "http://a b/"}) {
        SCOPED_TRACE(place);
        location = place;
        EXPECT_FALSE(fetch(hub.url("/m")));
    }
    TestOrigin nowhere([&](const OriginRequest&) { return plain_reply(302, "moved"); });
    expect_failure(job(nowhere.url("/m"), 0, 10), Errc::kUnsupported, "without Location");
}

TEST_F(RedirectTest, NeverFromHttpsToHttp) {
    TestOrigin plain(serve_);
    TlsIdentity identity("DNS:localhost");
    TestOrigin::Options secure;
    secure.tls = identity.context();
    std::string location = plain.url("/m") + kSignedQuery;
    TestOrigin hub([&](const OriginRequest&) { return redirect_to(location); }, secure);
    client_ = make_client({identity.pin(), ""});
    expect_failure(job(hub.url("/m"), 0, 10), Errc::kDenied, "from https to http");
    HttpCall what;
    what.url = hub.url("/m");
    const auto reply = call(what);
    ASSERT_FALSE(reply);
    EXPECT_EQ(reply.error().code, Errc::kDenied);
    EXPECT_EQ(plain.accepts(), 0u);
    // The other way is well, and without the token: another scheme is another origin.
    TestOrigin target(serve_, secure);
    TestOrigin start([&](const OriginRequest&) { return redirect_to(target.url("/m")); });
    EXPECT_TRUE(fetch(start.url("/m")));
    EXPECT_EQ(with_token(target), 0u);
}

// A market with a self-signed certificate and its pin, and files at an origin with a real one.
TEST_F(RedirectTest, APinIsForItsOwnOriginOnly) {
    TlsIdentity of_hub("IP:127.0.0.1"), of_cdn("IP:127.0.0.1"), of_nobody("IP:127.0.0.1");
    TestOrigin::Options secure;
    secure.tls = of_cdn.context();
    TestOrigin cdn(serve_, secure);
    secure.tls = of_hub.context();
    TestOrigin same_key(serve_, secure);
    std::string location;
    TestOrigin hub([&](const OriginRequest&) { return redirect_to(location); }, secure);
    const std::string cdn_roots = write_file("cdn.pem", of_cdn.pem());
    ClientTrust trust{of_hub.pin(), cdn_roots, hub.url("/any/path")};
    client_ = make_client(trust);
    location = cdn.url("/m");
    EXPECT_TRUE(fetch(hub.url("/m"))) << errors_.back();
    EXPECT_EQ(with_token(hub), 2u);
    EXPECT_EQ(with_token(cdn), 0u);
    EXPECT_EQ(cdn.requests().size(), 2u);

    // The pinned key at another origin is a certificate like any other: not of these roots.
    location = same_key.url("/m");
    expect_failure(job(hub.url("/m"), 0, 10), Errc::kDenied, "certificate is not accepted");
    EXPECT_TRUE(same_key.requests().empty());
    // The hub itself needs its pin, whatever the roots say.
    location = cdn.url("/m");
    trust.pin = of_nobody.pin();
    trust.ca_file = write_file("hub.pem", of_hub.pem());
    client_ = make_client(trust);
    const size_t asked = hub.requests().size();
    expect_failure(job(hub.url("/m"), 0, 10), Errc::kDenied, "not the pinned one");
    EXPECT_EQ(hub.requests().size(), asked);
    // Roots that do not have the origin's certificate, the system's too.
    for (const std::string& roots : {trust.ca_file, std::string()}) {
        client_ = make_client({of_hub.pin(), roots, hub.url("")});
        EXPECT_FALSE(fetch(hub.url("/m")));
    }
    // Without the pin's origin it is everybody's.
    client_ = make_client({of_hub.pin(), cdn_roots});
    expect_failure(job(hub.url("/m"), 0, 10), Errc::kDenied, "not the pinned one");
    EXPECT_EQ(cdn.requests().size(), 2u);
}

TEST_F(RedirectTest, CallsChangeTheirMethodAsBrowsersDo) {
    TestOrigin other(serve_);
    std::string location;
    TestOrigin hub([&](const OriginRequest& request) {
        if (request.target == "/end") {
            return plain_reply(200, request.method + " " + request.body);
        }
        return redirect_to(location, std::stoi(request.target.substr(1)));
    });
    HttpCall what;
    what.method = "POST";
    what.body = "{\"a\":1}";
    for (const int status : {301, 302, 303, 307, 308}) {
        what.url = hub.url("/" + std::to_string(status));
        location = "/end";
        auto reply = call(what);
        ASSERT_TRUE(reply);
        EXPECT_EQ(reply->body, status >= 307 ? "POST {\"a\":1}" : "GET ") << status;
        location = other.url("/end");
        reply = call(what);
        EXPECT_EQ(reply.has_value(), status < 307);
        if (!reply) {
            EXPECT_EQ(reply.error().code, Errc::kDenied);
        }
    }
    for (const OriginRequest& request : other.requests()) EXPECT_EQ(request.body, "");
}

TEST_F(RedirectTest, SecretsEchoedByTheServerAreHidden) {
    TestOrigin cdn([&](const OriginRequest& request) {
        return plain_reply(403, "<Code>SignatureDoesNotMatch</Code> for " + request.target +
                                    " signed " + kSignaturePlain + " with Bearer " + kToken);
    });
    TestOrigin hub([&](const OriginRequest& request) {
        if (request.target.starts_with("/direct")) {
            return plain_reply(401, "bad token '" + request.header("authorization") + "'");
        }
        return redirect_to(cdn.url("/file") + kSignedQuery);
    });
    options_.attempts_max = 2;
    expect_failure(job(hub.url("/m"), 0, 10), Errc::kDenied, "SignatureDoesNotMatch");
    EXPECT_NE(errors_.back().find("redirected to " + cdn.url("")), std::string::npos);
    expect_failure(job(hub.url("/direct"), 0, 10), Errc::kDenied, "bad token '[hidden]'");
    expect_failure(job(hub.url("/direct") + kSignedQuery, 0, 10), Errc::kDenied, "HTTP 401");
    // TearDown looks for the secrets in every error and log line.
}

// ---- signed links ----

TEST_F(RedirectTest, ALinkIsKeptUntilItIsRefused) {
    // A link dies after 3 requests; the hub gives a new one each time.
    int links = 0;
    std::map<std::string, int> used;
    TestOrigin cdn([&](const OriginRequest& request) {
        if (++used[request.target] > 3) return plain_reply(403, "Request has expired");
        return serve_file(request, file_);
    });
    TestOrigin hub([&](const OriginRequest&) {
        return redirect_to(cdn.url("/f?link=") + std::to_string(++links));
    });
    options_.parallel = 1;
    std::vector<RangeJob> jobs;
    for (uint64_t i = 0; i < 10; ++i) {
        jobs.push_back(job(hub.url("/m"), i * 500, 500, file_.size(), i));
    }
    ASSERT_TRUE(download(jobs)) << errors_.back();
    for (uint64_t i = 0; i < 10; ++i) EXPECT_EQ(got_[i], file_.substr(i * 500, 500));
    EXPECT_EQ(hub.requests().size(), 4u);   // not one per piece
    EXPECT_EQ(cdn.requests().size(), 13u);  // three refusals, each costs one request
    EXPECT_EQ(client_->counters().retries, 3u);
    EXPECT_EQ(client_->counters().bytes_wanted, 5000u);
    EXPECT_TRUE(time_->pauses.empty() || time_->total() == milliseconds(0));
}

TEST_F(RedirectTest, ALinkThatExpiresInMidFileCostsOnlyTheRest) {
    int links = 0;
    std::string valid;
    TestOrigin cdn([&](const OriginRequest& request) {
        if (request.target != valid) return plain_reply(410, "gone");
        OriginReply reply = serve_file(request, file_);
        valid = "";  // dies with this request, which ends early
        reply.cut_after = 2000;
        return reply;
    });
    TestOrigin hub([&](const OriginRequest&) {
        valid = "/f?link=" + std::to_string(++links);
        return redirect_to(cdn.url(valid));
    });
    ASSERT_TRUE(download({job(hub.url("/m"), 0, 5000, 5000)})) << errors_.back();
    EXPECT_EQ(got_[0], file_);
    EXPECT_EQ(hub.requests().size(), 3u);
    EXPECT_EQ(cdn.body_bytes() - 4 * (cdn.requests().size() - 3), 5000u);
}

TEST_F(RedirectTest, AFreshLinkThatIsRefusedEndsWithTheServersWords) {
    for (const auto& [status, code] : {std::pair{401, Errc::kDenied}, std::pair{403, Errc::kDenied},
                                       std::pair{410, Errc::kNotFound}}) {
        TestOrigin cdn([&, refusal = status](const OriginRequest&) {
            return plain_reply(refusal, "bad signature: clock of the key service");
        });
        TestOrigin hub([&](const OriginRequest&) { return redirect_to(cdn.url("/f?sig=1")); });
        time_->pauses.clear();
        options_.attempts_max = 4;
        expect_failure(job(hub.url("/m"), 0, 10), code, "bad signature: clock");
        EXPECT_EQ(cdn.requests().size(), 1u);
        EXPECT_EQ(hub.requests().size(), 1u);
        EXPECT_TRUE(time_->pauses.empty());
    }
}

TEST_F(RedirectTest, APageForBrowsersIsNotQuoted) {
    TestOrigin hub([](const OriginRequest&) {
        return plain_reply(401, "<html><h1>nginx</h1></html>", {{"Content-Type", "text/html"}});
    });
    expect_failure(job(hub.url("/m"), 0, 10), Errc::kDenied, "HTTP 401");
    EXPECT_EQ(errors_.back().find("nginx"), std::string::npos) << errors_.back();
}

// An origin that wants credentials which we do not have is not asked once for every range.
TEST_F(RedirectTest, ARefusalEndsAllJobsOfTheDownload) {
    for (const int status : {401, 403, 404, 410, 416}) {
        SCOPED_TRACE(status);
        TestOrigin cdn([&](const OriginRequest&) { return plain_reply(status, "no"); });
        TestOrigin hub([&](const OriginRequest&) { return redirect_to(cdn.url("/f")); });
        options_.parallel = 3;
        std::vector<RangeJob> jobs;
        for (uint64_t i = 0; i < 50; ++i) jobs.push_back(job(hub.url("/m"), i * 10, 10, 0, i));
        ASSERT_FALSE(download(jobs));
        EXPECT_GE(cdn.requests().size(), 1u);
        EXPECT_LE(cdn.requests().size(), 3u);
        EXPECT_LE(hub.requests().size(), 3u);
        EXPECT_TRUE(time_->pauses.empty());
    }
}

TEST_F(RedirectTest, DirectRefusalsAndOtherFourHundredsEndAtOnce) {
    int status = 0;
    TestOrigin hub([&](const OriginRequest& request) {
        if (request.target == "/to") return redirect_to("/end");
        std::string words = "because:\x1b[31m ";
        for (int i = 0; i < 100; ++i) words += "why ";
        return plain_reply(status, words + "END");
    });
    struct Case {
        int status;
        const char* path;
        Errc code;
    };
    for (const Case& one :
         {Case{400, "/m", Errc::kIo}, Case{400, "/to", Errc::kIo}, Case{401, "/m", Errc::kDenied},
          Case{403, "/m", Errc::kDenied}, Case{404, "/m", Errc::kNotFound},
          Case{404, "/to", Errc::kNotFound}, Case{410, "/m", Errc::kNotFound},
          Case{416, "/m", Errc::kMismatch}, Case{416, "/to", Errc::kMismatch},
          Case{451, "/m", Errc::kDenied}, Case{501, "/m", Errc::kIo}, Case{304, "/m", Errc::kIo}}) {
        SCOPED_TRACE(std::to_string(one.status) + one.path);
        status = one.status;
        const size_t before = hub.requests().size();
        const std::string words = one.status == 304 ? "HTTP 304" : "because:?[31m";
        expect_failure(job(hub.url(one.path), 0, 10), one.code, words);
        EXPECT_EQ(hub.requests().size() - before, std::string(one.path) == "/to" ? 2u : 1u);
        EXPECT_EQ(errors_.back().find("END"), std::string::npos);  // 300 bytes of it
    }
    EXPECT_TRUE(time_->pauses.empty());
}

}  // namespace
}  // namespace kvasir::net
