// Secrets of origins: which hop gets which, whoever led there, and what a refusal says.
#include <set>

#include "net/client_testing.hpp"
#include "net/tls_identity_testing.hpp"

namespace kvasir::net {
namespace {

using namespace testing;

// kToken is the market's own (of the job), this one the origin's.
const std::string kOriginSecret = "Basic b3JpZ2luOnNlY3JldA==";

class OriginSecretsTest : public ClientTest {
protected:
    void use(std::vector<OriginSecret> origins, const ClientTrust& trust = {}) {
        auto client = make_http_client(trust, time_, {std::move(origins), "--origin-auth"});
        ASSERT_TRUE(client) << client.error().detail;
        client_ = std::move(*client);
        options_.attempts_max = 2;
    }
    static OriginSecret secret_of(std::string origin, std::string value = kOriginSecret) {
        return {std::move(origin), {{"Authorization", std::move(value)}}};
    }
    // Both ways of asking.
    bool fetch(const std::string& url) {
        const Status status = download({job(url, 100, 50, file_.size())});
        HttpCall what;
        what.url = url;
        what.secret_headers = {{"Authorization", "Bearer " + kToken}};
        const Result<HttpReply> reply = call(what);
        EXPECT_EQ(status.has_value(), reply && reply->status == 200);
        if (status) {
            EXPECT_EQ(got_[0], file_.substr(100, 50));
        }
        return status.has_value();
    }
    // The different Authorization headers that came; more than one in a request is "twice".
    static std::set<std::string> seen(const TestOrigin& origin) {
        std::set<std::string> out;
        for (const OriginRequest& request : origin.requests()) {
            size_t count = 0;
            for (const auto& [name, value] : request.headers) {
                count += name == "authorization" ? 1 : 0;
                if (name != "authorization") {
                    EXPECT_EQ(value.find(kOriginSecret), std::string::npos) << name;
                }
            }
            out.insert(count > 1 ? "twice" : request.header("authorization"));
        }
        return out;
    }
    using Seen = std::set<std::string>;

    const std::string file_ = pattern(5000, 3);
    TestOrigin::Script serve_ = [this](const OriginRequest& request) {
        return serve_file(request, file_);
    };
};

// The market redirects to a hub that wants credentials, the hub to where its files are.
TEST_F(OriginSecretsTest, OnlyTheOriginGetsThemAndNotWhereItSendsUs) {
    TestOrigin cdn(serve_);
    TestOrigin hub([&](const OriginRequest& request) {
        return request.header("authorization") == kOriginSecret
                   ? redirect_to(cdn.url("/blob") + kSignedQuery)
                   : plain_reply(401, "who are you?");
    });
    TestOrigin market([&](const OriginRequest&) { return redirect_to(hub.url("/model"), 307); });
    use({secret_of(hub.url(""))});
    ASSERT_TRUE(fetch(market.url("/data")));
    EXPECT_EQ(seen(market), Seen{"Bearer " + kToken});
    EXPECT_EQ(seen(hub), Seen{kOriginSecret});
    EXPECT_EQ(seen(cdn), Seen{""});
}

TEST_F(OriginSecretsTest, AskedDirectlyItGetsThem) {
    TestOrigin hub(serve_);
    use({secret_of(hub.url("/"))});  // a slash after it is the same origin
    RangeJob bare = job(hub.url("/m"), 0, 10, file_.size());
    bare.secret_headers.clear();
    ASSERT_TRUE(download({bare}));
    HttpCall what;
    what.url = hub.url("/m");
    ASSERT_TRUE(call(what));
    EXPECT_EQ(hub.requests().size(), 2u);
    EXPECT_EQ(seen(hub), Seen{kOriginSecret});
    // What the caller sends itself is what is sent, and once.
    ASSERT_TRUE(fetch(hub.url("/n")));
    EXPECT_EQ(seen(hub), (Seen{kOriginSecret, "Bearer " + kToken}));
}

// The same host under another port, name, number or scheme is another origin; two have two secrets.
TEST_F(OriginSecretsTest, TheExactOriginDecides) {
    TestOrigin::Options elsewhere;
    elsewhere.address = "127.0.0.2";
    TestOrigin named(serve_), other_port(serve_), other_host(serve_, elsewhere);
    TlsIdentity identity("DNS:localhost,IP:127.0.0.1");
    TestOrigin::Options tls;
    tls.tls = identity.context();
    TestOrigin secure(serve_, tls);
    const std::string port = ":" + std::to_string(named.port());
    const std::string secure_port = ":" + std::to_string(secure.port());
    std::string location;
    TestOrigin market([&](const OriginRequest&) { return redirect_to(location, 307); });
    ClientTrust trust;
    trust.ca_file = write_file("roots.pem", identity.pem());
    // "HTTP://LocalHost" is how a person may write it.
    use({secret_of("HTTP://LocalHost" + port, "Bearer of-named"),
         secret_of("http://127.0.0.1" + secure_port, "Bearer of-nobody"),
         secret_of("https://localhost" + secure_port, "Bearer of-secure")},
        trust);
    struct Case {
        std::string place;
        const TestOrigin* at;
        std::string value;
    };
    size_t asked = 0;
    for (const Case& one : {
             Case{"http://localhost" + port, &named, "Bearer of-named"},
             Case{"http://LOCALHOST" + port, &named, "Bearer of-named"},
             Case{"http://127.0.0.1" + port, &named, ""},
             Case{"http://hub.localhost" + port, &named, ""},
             Case{"http://localhost@127.0.0.1" + port, &named, ""},
             Case{other_port.url(""), &other_port, ""},
             Case{"http://localhost:" + std::to_string(other_port.port()), &other_port, ""},
             Case{other_host.url(""), &other_host, ""},
             Case{"https://localhost" + secure_port, &secure, "Bearer of-secure"},
             Case{"https://127.0.0.1" + secure_port, &secure, ""},  // http has one, https not
         }) {
        SCOPED_TRACE(one.place);
        location = one.place + "/m";
        const size_t before = one.at->requests().size();
        ASSERT_TRUE(fetch(market.url("/data"))) << errors_.back();
        const auto requests = one.at->requests();
        ASSERT_EQ(requests.size(), before + 2);
        for (size_t i = before; i < requests.size(); ++i) {
            EXPECT_EQ(requests[i].header("authorization"), one.value);
        }
        asked += 2;
    }
    EXPECT_EQ(market.requests().size(), asked);
    EXPECT_EQ(seen(market), Seen{"Bearer " + kToken});
}

// There, away and back: judged at every hop, also for the link that a download keeps.
TEST_F(OriginSecretsTest, EveryHopAndEveryKeptLinkIsJudged) {
    std::string back;
    TestOrigin away([&](const OriginRequest&) { return redirect_to(back); });
    TestOrigin hub([&](const OriginRequest& request) {
        return request.target == "/back" ? serve_file(request, file_)
                                         : redirect_to(away.url("/away"));
    });
    back = hub.url("/back");
    TestOrigin market([&](const OriginRequest&) { return redirect_to(hub.url("/start"), 307); });
    use({secret_of(hub.url(""))});
    options_.parallel = 1;
    ASSERT_TRUE(download({job(market.url("/data"), 0, 10, file_.size(), 0),
                          job(market.url("/data"), 10, 10, file_.size(), 1),
                          job(market.url("/data"), 20, 10, file_.size(), 2)}));
    EXPECT_EQ(market.requests().size(), 1u);  // the link was kept
    EXPECT_EQ(hub.requests().size(), 4u);
    EXPECT_EQ(seen(hub), Seen{kOriginSecret});
    EXPECT_EQ(seen(away), Seen{""});
}

TEST_F(OriginSecretsTest, ARefusalNamesTheFlag) {
    std::string echoed;
    TestOrigin hub([&](const OriginRequest& request) {
        echoed = request.header("authorization");
        return plain_reply(request.target == "/401" ? 401 : 403, "no: '" + echoed + "'");
    });
    TestOrigin market(
        [&](const OriginRequest& request) { return redirect_to(hub.url(request.target), 307); });
    const std::string how = "--origin-auth " + hub.url("") + "=FILE";
    for (const char* path : {"/401", "/403"}) {
        use({});
        expect_failure(job(market.url(path), 0, 10), Errc::kDenied,
                       "if it wants credentials, give them with " + how);
        EXPECT_EQ(echoed, "");
        use({secret_of(hub.url(""))});
        expect_failure(job(market.url(path), 0, 10), Errc::kDenied,
                       "what " + how + " gives is not accepted there");
        EXPECT_EQ(echoed, kOriginSecret);
        EXPECT_NE(errors_.back().find("no: '[hidden]'"), std::string::npos) << errors_.back();
        // Whoever was asked with the job's own credentials did not refuse for lack of some.
        expect_failure(job(market.url(path), 0, 10), Errc::kDenied, "not accepted there");
        TestOrigin own([](const OriginRequest&) { return plain_reply(403, "not leased"); });
        expect_failure(job(own.url(path), 0, 10), Errc::kDenied, "not leased");
        EXPECT_EQ(errors_.back().find("--origin-auth"), std::string::npos) << errors_.back();
    }
    // A link that the hub signed for us is refused: nothing that more credentials would mend.
    TestOrigin cdn([](const OriginRequest&) { return plain_reply(403, "expired"); });
    TestOrigin signing([&](const OriginRequest&) { return redirect_to(cdn.url("/x?sig=1234")); });
    use({secret_of(signing.url(""))});
    expect_failure(job(signing.url("/m"), 0, 10), Errc::kDenied, "expired");
    EXPECT_EQ(errors_.back().find("--origin-auth"), std::string::npos) << errors_.back();
    for (const std::string& line : errors_) {
        EXPECT_EQ(line.find("b3JpZ2lu"), std::string::npos) << line;
    }
    EXPECT_FALSE(logged("b3JpZ2lu"));
}

TEST_F(OriginSecretsTest, NotForPlainHttpToOtherMachinesNorForPaths) {
    const auto code = [](std::vector<OriginSecret> origins) {
        const auto client = HttpClient::make({}, {std::move(origins), ""});
        return client ? std::string() : client.error().detail;
    };
    for (const char* good :
         {"https://hub.example", "https://hub.example:8443/", "https://[::1]:1",
          "http://127.0.0.1:80", "http://127.9.8.7", "http://localhost:1", "http://[::1]:9"}) {
        EXPECT_EQ(code({secret_of(good)}), "") << good;
    }
    for (const char* plain : {"http://hub.example", "http://10.0.0.1", "http://128.0.0.1",
                              "http://127.0.0.1.example", "http://localhost.example"}) {
        EXPECT_NE(code({secret_of(plain)}).find("only https"), std::string::npos) << plain;
    }
    for (const char* path : {"https://hub.example/x", "https://hub.example/?x=1"}) {
        EXPECT_NE(code({secret_of(path)}).find("not for a path"), std::string::npos) << path;
    }
    for (const char* none : {"", "hub.example", "ftp://hub.example", "https://user@hub.example"}) {
        EXPECT_NE(code({secret_of(none)}), "") << none;
    }
    EXPECT_NE(code({secret_of("https://hub.example"), secret_of("https://HUB.example:443")})
                  .find("given twice"),
              std::string::npos);
}

}  // namespace
}  // namespace kvasir::net
