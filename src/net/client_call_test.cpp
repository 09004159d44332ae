// Small calls, TLS and what decides about it.
#include "net/client_testing.hpp"
#include "net/tls_identity_testing.hpp"

#include <atomic>
#include <cstdlib>
#include <thread>

namespace kvasir::net {
namespace {

using namespace testing;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

class CallTest : public ClientTest {
protected:
    HttpCall get(std::string url) {
        HttpCall what;
        what.url = std::move(url);
        what.secret_headers = {{"Authorization", "Bearer " + kToken}};
        return what;
    }
    void expect_error(const HttpCall& what, Errc code, std::string_view words) {
        const auto reply = call(what);
        ASSERT_FALSE(reply);
        EXPECT_EQ(reply.error().code, code) << reply.error().detail;
        EXPECT_NE(reply.error().detail.find(words), std::string::npos) << reply.error().detail;
    }
    // A pinned or trusted call of `origin` works, or is refused as not accepted.
    void expect_trust(const ClientTrust& trust, const std::string& url, bool accepted) {
        client_ = make_client(trust);
        const auto reply = call(get(url));
        EXPECT_EQ(reply.has_value(), accepted) << (reply ? "" : errors_.back());
        if (!reply) {
            EXPECT_EQ(reply.error().code, Errc::kDenied) << reply.error().detail;
        }
        const Status status = download({job(url, 0, 2)});
        EXPECT_EQ(status.has_value(), accepted);
        if (!status) {
            EXPECT_EQ(status.error().code, Errc::kDenied) << status.error().detail;
        }
    }
    const TestOrigin::Script serve_ = [](const OriginRequest& request) {
        return serve_file(request, "ok");
    };
};

// Secrets may go to this machine without TLS: not by way of another one.
TEST_F(CallTest, WhatIsOnThisMachineIsAskedWithoutAProxy) {
    TestOrigin origin(serve_);
    ASSERT_EQ(::setenv("http_proxy", "http://127.0.0.1:1", 1), 0);
    const auto here = call(get(origin.url("/a")));
    const auto elsewhere = call(get("http://host.invalid/a"));
    ::unsetenv("http_proxy");
    EXPECT_TRUE(here) << here.error().detail;
    ASSERT_FALSE(elsewhere);  // there is no such proxy, and it was asked
    EXPECT_NE(elsewhere.error().detail.find("port 1 "), std::string::npos)
        << elsewhere.error().detail;
}

TEST_F(CallTest, WhatIsSentAndWhatComesBack) {
    TestOrigin origin([](const OriginRequest& request) {
        return plain_reply(request.method == "DELETE" ? 204 : 418,
                           request.method + " " + request.target + " " + request.body,
                           {{"X-Odd", "  spaces "}, {"x-empty", ""}});
    });
    HttpCall what = get(origin.url("/a/b?c=d"));
    what.headers = {{"X-Mine", "1"}, {"X-Empty", ""}};
    auto reply = call(what);
    ASSERT_TRUE(reply);
    EXPECT_EQ(reply->status, 418);  // any status is a reply
    EXPECT_EQ(reply->body, "GET /a/b?c=d ");
    const HeaderList expected = {{"x-odd", "spaces"}, {"x-empty", ""}};
    EXPECT_EQ(HeaderList(reply->headers.begin(), reply->headers.begin() + 2), expected);
    for (const char* method : {"POST", "PUT", "PATCH", "DELETE"}) {
        what.method = method;
        what.body = std::string("{\"\0\"}", 5);
        reply = call(what);
        ASSERT_TRUE(reply);
    }
    what.method = "POST";
    what.body.clear();
    what.headers.emplace_back("Content-Type", "text/plain");
    ASSERT_TRUE(call(what));
    what.method = "HEAD";
    reply = call(what);
    ASSERT_TRUE(reply);
    EXPECT_EQ(reply->body, "");
    const auto requests = origin.requests();
    ASSERT_EQ(requests.size(), 7u);
    EXPECT_EQ(requests[0].header("x-mine"), "1");
    EXPECT_EQ(requests[0].header("authorization"), "Bearer " + kToken);
    EXPECT_TRUE(requests[0].header("user-agent").starts_with("kvasir/"));
    for (size_t i = 1; i < 5; ++i) {
        EXPECT_EQ(requests[i].body, std::string("{\"\0\"}", 5)) << requests[i].method;
        EXPECT_EQ(requests[i].header("content-type"), "application/json");
    }
    EXPECT_EQ(requests[5].header("content-length"), "0");
    EXPECT_EQ(requests[5].header("content-type"), "text/plain");
    EXPECT_EQ(origin.accepts(), 1u);
}

TEST_F(CallTest, Limits) {
    TestOrigin origin([](const OriginRequest& request) {
        if (request.target == "/headers") {
            return plain_reply(200, "", {{"X", std::string(70 << 10, 'x')}});
        }
        OriginReply reply = plain_reply(200, std::string(1000, 'x'));
        reply.chunked = request.target == "/chunked";
        if (request.target == "/coded") reply.headers = {{"Content-Encoding", "gzip"}};
        return reply;
    });
    for (const char* path : {"/sized", "/chunked"}) {
        HttpCall what = get(origin.url(path));
        what.reply_bytes_max = 1000;
        EXPECT_TRUE(call(what));
        what.reply_bytes_max = 999;
        expect_error(what, Errc::kLimit, "more than 999 bytes");
        what.reply_bytes_max = 0;
        expect_error(what, Errc::kLimit, "more than 0 bytes");
    }
    expect_error(get(origin.url("/headers")), Errc::kLimit, "headers");
    expect_error(get(origin.url("/coded")), Errc::kUnsupported, "Content-Encoding: gzip");
    EXPECT_FALSE(download({job(origin.url("/headers"), 0, 10)}));
}

TEST_F(CallTest, MistakesOfTheCaller) {
    TestOrigin origin(serve_);
    HttpCall what = get(origin.url("/"));
    what.headers = {{"authorization", "Bearer " + kToken}};
    expect_error(what, Errc::kUsage, "secret_headers");
    for (const auto& [name, value] : HeaderList{{"X Y", "1"},
                                                {"", "1"},
                                                {"X:", "1"},
                                                {"X", "a\nb"},
                                                {"X", std::string("\0", 1)},
                                                {"X\r\nY", "1"}}) {
        what = get(origin.url("/"));
        what.secret_headers = {{name, value + kToken}};
        expect_error(what, Errc::kUsage, "header");
    }
    what = get(origin.url("/"));
    what.method = "GET / HTTP/1.1\r\nX:";
    expect_error(what, Errc::kUsage, "not an HTTP method");
    for (const char* url : {"", "127.0.0.1/x", "ftp://127.0.0.1/", "http://", "http://a b/",
                            "https://user@127.0.0.1/", "file:///etc/passwd"}) {
        expect_error(get(url), Errc::kUsage, "");
    }
    EXPECT_EQ(origin.accepts(), 0u);
}

TEST_F(CallTest, TimeoutsAndBrokenConnections) {
    TestOrigin origin([](const OriginRequest& request) {
        OriginReply reply = plain_reply(200, "0123456789");
        reply.silent = request.target == "/silent";
        reply.drip_bytes = 1;
        reply.drip_pause = milliseconds(request.target == "/drip" ? 50 : 1);
        if (request.target == "/cut") reply.cut_after = 5;
        return reply;
    });
    for (const char* path : {"/silent", "/drip"}) {  // the time counts for all of it
        HttpCall what = get(origin.url(path));
        what.timeout = milliseconds(150);
        const auto begin = steady_clock::now();
        expect_error(what, Errc::kTimeout, "");
        EXPECT_GE(steady_clock::now() - begin, milliseconds(140));
        EXPECT_LT(steady_clock::now() - begin, milliseconds(2000));
    }
    expect_error(get(origin.url("/cut")), Errc::kIo, origin.url("/cut"));
    EXPECT_TRUE(call(get(origin.url("/whole"))));
    std::string gone;
    {
        TestOrigin closed(serve_);
        gone = closed.url("/");
    }
    expect_error(get(gone), Errc::kIo, gone);
}

TEST_F(CallTest, AKeptConnectionThatTheServerClosedIsNoError) {
    TestOrigin origin([](const OriginRequest& request) {
        OriginReply reply = plain_reply(200, "ok");
        reply.cut_after = request.number % 2 == 0 ? std::optional<uint64_t>(2) : std::nullopt;
        return reply;
    });
    for (int i = 0; i < 20; ++i) EXPECT_TRUE(call(get(origin.url("/")))) << errors_.back();
}

TEST_F(CallTest, CancelFromAnotherThread) {
    std::atomic<bool> asked{false};
    TestOrigin origin([&](const OriginRequest&) {
        asked = true;
        OriginReply reply;
        reply.silent = true;
        return reply;
    });
    auto fastest = steady_clock::duration::max();  // of a machine that may be busy
    for (int i = 0; i < 5 && fastest >= milliseconds(200); ++i) {
        asked = false;
        client_ = make_client({});
        steady_clock::time_point cancelled;
        std::thread other([&] {
            const auto deadline = steady_clock::now() + std::chrono::seconds(10);
            while (!asked && steady_clock::now() < deadline) std::this_thread::yield();
            cancelled = steady_clock::now();
            client_->cancel();
        });
        expect_error(get(origin.url("/")), Errc::kClosed, "cancelled");
        const auto ended = steady_clock::now();
        other.join();
        fastest = std::min(fastest, ended - cancelled);
    }
    EXPECT_LT(fastest, milliseconds(200));
    expect_error(get(origin.url("/")), Errc::kClosed, "cancelled");  // for good
}

TEST_F(CallTest, ManyClientsInManyThreads) {
    TestOrigin origin(serve_);
    std::atomic<int> good{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; ++i) {
        threads.emplace_back([&] {
            auto client = HttpClient::make({});
            for (int j = 0; j < 10 && client; ++j) {
                const auto reply = (*client)->call(get(origin.url("/")));
                if (reply && reply->body == "ok") ++good;
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(good, 80);
}

// ---- TLS ----

TEST_F(CallTest, ThePinAloneDecides) {
    TlsIdentity right("DNS:localhost,IP:127.0.0.1");
    TlsIdentity other_name("DNS:example.org", -5);  // and expired
    TestOrigin::Options options;
    options.tls = right.context();
    TestOrigin origin(serve_, options);
    options.tls = other_name.context();
    TestOrigin odd(serve_, options);

    expect_trust({right.pin(), ""}, origin.url("/"), true);
    expect_trust({other_name.pin(), ""}, odd.url("/"), true);
    expect_trust({other_name.pin(), ""}, origin.url("/"), false);
    expect_trust({right.pin(), ""}, odd.url("/"), false);
    Sha256 near = right.pin();
    near[31] ^= 1;
    expect_trust({near, ""}, origin.url("/"), false);
    expect_trust({Sha256{}, ""}, origin.url("/"), false);
    // A trusted root beside the pin changes nothing.
    const std::string root = write_file("right.pem", right.pem());
    expect_trust({other_name.pin(), root}, origin.url("/"), false);
    // Nothing but what was accepted was ever asked.
    EXPECT_EQ(origin.requests().size(), 2u);
    EXPECT_EQ(odd.requests().size(), 2u);
    ASSERT_FALSE(errors_.empty());
    EXPECT_NE(errors_.back().find("not the pinned one"), std::string::npos);
}

TEST_F(CallTest, WithoutAPinTheChainAndTheNameDecide) {
    TlsIdentity right("DNS:localhost,IP:127.0.0.1");
    TlsIdentity other("DNS:localhost,IP:127.0.0.1");
    TlsIdentity expired("DNS:localhost,IP:127.0.0.1", -5);
    TlsIdentity named("DNS:example.org");
    const std::string root = write_file("root.pem", right.pem());
    TestOrigin::Options options;
    options.tls = right.context();
    TestOrigin origin(serve_, options);
    expect_trust({std::nullopt, root}, origin.url("/"), true);
    expect_trust({std::nullopt, root}, origin.url("/", "localhost"), true);
    expect_trust({std::nullopt, root}, origin.url("/", "x.localhost"), false);  // not its name
    const auto is_advised = [this] {
        return errors_.back().find("; give the pin or the CA's file") != std::string::npos;
    };
    expect_trust({}, origin.url("/"), false);  // the system does not know it
    EXPECT_TRUE(is_advised()) << errors_.back();
    expect_trust({std::nullopt, write_file("other.pem", other.pem())}, origin.url("/"), false);
    for (const TlsIdentity* identity : {&expired, &named}) {
        options.tls = identity->context();
        TestOrigin wrong(serve_, options);
        expect_trust({std::nullopt, write_file("wrong.pem", identity->pem())}, wrong.url("/"),
                     false);
        EXPECT_FALSE(is_advised()) << "no CA helps: " << errors_.back();
        EXPECT_TRUE(wrong.requests().empty());
    }
}

TEST_F(CallTest, CertificateFilesThatAreNone) {
    const auto missing = HttpClient::make({std::nullopt, "/no/such/file.pem"});
    ASSERT_FALSE(missing);
    EXPECT_EQ(missing.error().code, Errc::kEnvironment);
    EXPECT_NE(missing.error().detail.find("/no/such/file.pem"), std::string::npos);
    TlsIdentity right("IP:127.0.0.1");
    TestOrigin::Options options;
    options.tls = right.context();
    TestOrigin origin(serve_, options);
    client_ = make_client({std::nullopt, write_file("no.pem", "not a certificate")});
    expect_error(get(origin.url("/")), Errc::kEnvironment, "no.pem");
}

TEST_F(CallTest, AnonymousAndOldHandshakesAreRefused) {
    TlsIdentity right("IP:127.0.0.1");
    // Without a certificate there is nothing to pin; the server offers only that.
    SSL_CTX_set_cipher_list(right.context(), "aNULL@SECLEVEL=0");
    SSL_CTX_set_max_proto_version(right.context(), TLS1_2_VERSION);
    SSL_CTX_set_dh_auto(right.context(), 1);
    TlsIdentity old("IP:127.0.0.1");
    SSL_CTX_set_cipher_list(old.context(), "ALL@SECLEVEL=0");
    SSL_CTX_set_max_proto_version(old.context(), TLS1_1_VERSION);
    for (const TlsIdentity* identity : {&right, &old}) {
        TestOrigin::Options options;
        options.tls = identity->context();
        TestOrigin origin(serve_, options);
        client_ = make_client({identity->pin(), ""});
        EXPECT_FALSE(call(get(origin.url("/"))));
        EXPECT_TRUE(origin.requests().empty());
    }
}

TEST_F(CallTest, AServerThatVanishesUnderALargeBodyKillsNobody) {
    // SIGPIPE would: it has its default effect here.
    TlsIdentity identity("IP:127.0.0.1");
    struct Closing {
        int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        uint16_t port = 0;
        std::thread thread;
        explicit Closing(SSL_CTX* context) {
            sockaddr_in address = {};
            address.sin_family = AF_INET;
            address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
            socklen_t size = sizeof(address);
            auto* generic = reinterpret_cast<sockaddr*>(&address);
            KVASIR_CHECK(bind(listener, generic, size) == 0 && listen(listener, 8) == 0);
            getsockname(listener, generic, &size);
            port = ntohs(address.sin_port);
            thread = std::thread([this, context] {
                const int fd = accept(listener, nullptr, nullptr);
                SSL* ssl = context != nullptr ? SSL_new(context) : nullptr;
                char byte = 0;
                if (ssl != nullptr) {
                    SSL_set_fd(ssl, fd);
                    if (SSL_accept(ssl) == 1) SSL_read(ssl, &byte, 1);
                    SSL_free(ssl);
                } else {
                    static_cast<void>(recv(fd, &byte, 1, 0));
                }
                close(fd);  // with unread bytes: a reset
            });
        }
        ~Closing() {
            thread.join();
            close(listener);
        }
    };
    struct sigaction fatal = {}, before = {};
    fatal.sa_handler = SIG_DFL;
    sigaction(SIGPIPE, &fatal, &before);
    for (SSL_CTX* context : {static_cast<SSL_CTX*>(nullptr), identity.context()}) {
        Closing server(context);
        client_ = make_client({identity.pin(), ""});
        HttpCall what = get((context != nullptr ? "https://127.0.0.1:" : "http://127.0.0.1:") +
                            std::to_string(server.port) + "/");
        what.method = "POST";
        what.body = std::string(32 << 20, 'x');
        expect_error(what, Errc::kIo, "127.0.0.1");
    }
    sigaction(SIGPIPE, &before, nullptr);
}

}  // namespace
}  // namespace kvasir::net
