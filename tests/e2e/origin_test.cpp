// A market whose nodes fetch the model from an origin elsewhere: the market's certificate is
// self-signed and pinned by the invite, the origin has one of its own, and the origin's own log
// says what a node pulled. The origin is a server of this test's, which counts what it sends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "net/origin_testing.hpp"
#include "net/tls_identity_testing.hpp"
#include "network_testing.hpp"

namespace kvasir::e2e {
namespace {

using net::testing::OriginReply;
using net::testing::OriginRequest;
using net::testing::TestOrigin;
using net::testing::TlsIdentity;
using ::testing::HasSubstr;

// Bytes of a file, in the page cache only.
class MappedFile {
public:
    explicit MappedFile(const std::string& path) : bytes_(std::filesystem::file_size(path)) {
        const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
        data_ = ::mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE, fd, 0);
        ::close(fd);
        EXPECT_NE(data_, MAP_FAILED) << path;
    }
    ~MappedFile() { ::munmap(data_, bytes_); }
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;
    std::string_view view() const { return {static_cast<const char*>(data_), bytes_}; }

private:
    const uint64_t bytes_;
    void* data_ = nullptr;
};

// An HTTPS server with ranges, and its log.
class Origin {
public:
    // With `secret` it wants that as the Authorization header.
    Origin(const std::string& model, const ScratchFolder& scratch, std::string secret = "")
        : secret_(std::move(secret)),
          name_("/files/" + std::filesystem::path(model).filename().string()),
          file_(model),
          certificate_(scratch.path("origin.pem")),
          server_([this](const OriginRequest& request) { return answer(request); }, options()) {
        std::ofstream(certificate_) << identity_.pem();
    }
    std::string url() const { return server_.url(""); }
    std::string folder() const { return server_.url("/files"); }
    const std::string& certificate() const { return certificate_; }
    uint64_t bytes_sent() const { return server_.body_bytes(); }
    std::vector<OriginRequest> log() const { return server_.requests(); }

private:
    TestOrigin::Options options() const {
        TestOrigin::Options options;
        options.tls = identity_.context();
        return options;
    }
    OriginReply answer(const OriginRequest& request) const {
        if (request.header("authorization") != secret_)
            return net::testing::plain_reply(401, "this repository is gated");
        if (request.target != name_) return net::testing::plain_reply(404, "no such file");
        return net::testing::serve_file(request, file_.view());
    }

    const std::string secret_;
    const std::string name_;
    const MappedFile file_;
    const TlsIdentity identity_{"IP:127.0.0.1"};
    const std::string certificate_;
    TestOrigin server_;
};

// The shape of the real model with four of its layers: holes, but for a mark in every megabyte, so
// that no two slabs are equal.
std::string large_model(const ScratchFolder& scratch) {
    const std::string path = synth(scratch.path("large.gguf"),
                                   {"--preset", "qwen3.5-122b", "--layers", "4", "--sparse"});
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    const uint64_t bytes = std::filesystem::file_size(path);
    for (uint64_t at = uint64_t{16} << 20; at < bytes; at += 1 << 20) {
        file.seekp(static_cast<std::streamoff>(at));
        file << at;
    }
    EXPECT_TRUE(file.good());
    return path;
}

// H4: the market's token stays with the market.
TEST(Origin, ANodePullsItsLeasesAndHardlyMore) {
    const ScratchFolder scratch;
    const std::string model = large_model(scratch);
    const Origin origin(model, scratch);
    MarketProgram market(model, scratch.path("state"), "127.0.0.1:0",
                         {"--origin", origin.folder()});
    Operator desk(market.url(), scratch.path("state"));
    const Program worker =
        join_worker(market.url(), market.worker_invite(), "far", scratch.path("far"),
                    {.budget = "340M", .more = {"--ca", origin.certificate()}});
    ASSERT_TRUE(eventually(
        [&] {
            const Json node = desk.node("far");
            return !worker.running() || (!node.is_null() && node["leases_serving"] > 0);
        },
        240))
        << worker.err();
    const Json node = desk.node("far");
    ASSERT_FALSE(node.is_null()) << worker.err();
    const auto leased = node["bytes_leased"].get<uint64_t>();
    const auto pulled = origin.bytes_sent();
    std::printf("model %.3f GB; leased %llu bytes; sent by the origin %llu in %zu requests: %.4f\n",
                static_cast<double>(std::filesystem::file_size(model)) / 1e9,
                static_cast<unsigned long long>(leased), static_cast<unsigned long long>(pulled),
                origin.log().size(), static_cast<double>(pulled) / static_cast<double>(leased));
    EXPECT_GT(leased, 310'000'000u);
    EXPECT_LE(leased, 340'000'000u);
    EXPECT_GE(pulled, leased);
    EXPECT_LE(pulled, leased + leased / 100);
    EXPECT_EQ(node["bytes_served"], 0) << "the market itself serves nothing";
    for (const OriginRequest& request : origin.log()) {
        EXPECT_TRUE(request.range().has_value());
        EXPECT_EQ(request.header("authorization"), "") << "the market's token went to the origin";
    }
    const Outcome verified = kvasir({"verify", slice_in(scratch.path("far")), "--model", model,
                                     "--cache-dir", scratch.path("manifests")});
    EXPECT_EQ(verified.exit_code, 0) << verified.err;
    EXPECT_THAT(verified.out, HasSubstr("byte for byte"));
}

// A plain server, slow enough that a download can be broken off.
class SlowOrigin {
public:
    explicit SlowOrigin(const std::string& model)
        : file_(model), server_([this](const OriginRequest& request) {
              OriginReply reply = net::testing::serve_file(request, file_.view());
              reply.drip_bytes = 4096;
              reply.drip_pause = std::chrono::milliseconds(5);
              return reply;
          }) {}
    std::string folder() const { return server_.url("/files"); }
    uint64_t bytes_sent() const { return server_.body_bytes(); }

private:
    const MappedFile file_;
    TestOrigin server_;
};

// Stopped in the middle of its download, again and again, a worker goes on where it was: also when
// it gave its leases back, so that the market might offer it others.
TEST(Origin, ADownloadThatIsBrokenOffGoesOn) {
    for (const int how : {SIGTERM, SIGKILL}) {
        SCOPED_TRACE(how);
        const ScratchFolder scratch;
        const SlowOrigin origin(demo_model());
        MarketProgram market(demo_model(), scratch.path("state"), "127.0.0.1:0",
                             {"--plain", "--origin", origin.folder()});
        // The cache has no room for a second slice beside this one.
        const auto join = [&] {
            return join_worker(market.url(), market.worker_invite(), "w", scratch.path("w"),
                               {.budget = "4M", .more = {"--cache-max", "5M"}});
        };
        for (int stop = 1; stop <= 3; ++stop) {
            Program worker = join();
            const uint64_t enough = static_cast<uint64_t>(stop) * 900'000;
            ASSERT_TRUE(eventually([&] { return origin.bytes_sent() >= enough; })) << worker.err();
            worker.signal(how);
            worker.wait(30);
        }
        Program last = join();
        ASSERT_TRUE(last.wait_for("worker: serving ")) << last.err();
        Operator desk(market.url(), scratch.path("state"));
        const auto leased = desk.node("w")["bytes_leased"].get<uint64_t>();
        std::printf("leased %llu bytes; sent by the origin %llu: %.4f\n",
                    static_cast<unsigned long long>(leased),
                    static_cast<unsigned long long>(origin.bytes_sent()),
                    static_cast<double>(origin.bytes_sent()) / static_cast<double>(leased));
        EXPECT_GT(leased, 3'000'000u);
        // What was under way at a stop is lost: a piece of a slab for each of four connections.
        EXPECT_LE(origin.bytes_sent(), leased + leased / 10);
    }
}

// A gated hub: the worker has credentials for it, the market none.
TEST(Origin, AGatedOriginGetsItsCredentialsAndNobodyElse) {
    const ScratchFolder scratch;
    const std::string secret = "Bearer hf_S3cretOfTheOrigin";
    const Origin origin(demo_model(), scratch, secret);
    MarketProgram market(demo_model(), scratch.path("state"), "127.0.0.1:0",
                         {"--origin", origin.folder(), "--log-level", "debug"});
    const auto join = [&](std::vector<std::string> more) {
        more.insert(more.end(), {"--ca", origin.certificate()});
        return join_worker(market.url(), market.worker_invite(), "far", scratch.path("far"),
                           {.budget = "12M", .more = more});
    };
    const std::string file = scratch.path("hub.auth");
    std::ofstream(file) << secret << "\n";
    const std::string flag = origin.url() + "=" + file;
    std::string said;
    {
        const Outcome open = kvasir({"worker", "--join", market.url(), "--invite", "x", "--budget",
                                     "12M", "--origin-auth", flag});
        EXPECT_EQ(open.exit_code, 4);
        EXPECT_THAT(open.err, HasSubstr("chmod 600"));
        std::filesystem::permissions(file, std::filesystem::perms::owner_read);
    }
    {
        Program without = join({});
        EXPECT_TRUE(without.wait_for("give them with --origin-auth " + origin.url() + "=FILE"))
            << without.err();
        EXPECT_THAT(without.err(), HasSubstr("this repository is gated"));
        without.signal(SIGTERM);
        said += without.wait(30).err;
    }
    {
        const std::string wrong_file = scratch.path("wrong.auth");
        std::ofstream(wrong_file) << "Bearer hf_S3cretOfSomebody\n";
        std::filesystem::permissions(wrong_file, std::filesystem::perms::owner_read);
        Program wrong = join({"--origin-auth", origin.url() + "=" + wrong_file});
        EXPECT_TRUE(wrong.wait_for("gives is not accepted there")) << wrong.err();
        wrong.signal(SIGTERM);
        said += wrong.wait(30).err;
    }
    Program worker = join({"--origin-auth", "https://127.0.0.2:1=" + file, "--origin-auth", flag});
    EXPECT_TRUE(worker.wait_for("serving ")) << worker.err();
    size_t with = 0;
    for (const OriginRequest& request : origin.log()) {
        const std::string got = request.header("authorization");
        with += got == secret ? 1 : 0;
        EXPECT_TRUE(got.empty() || got.starts_with("Bearer hf_")) << "the market's token?";
    }
    EXPECT_GT(with, 0u);
    worker.signal(SIGTERM);
    said += worker.wait(30).err + market.program().err() + market.program().out();
    EXPECT_EQ(said.find("hf_S3cret"), std::string::npos) << said;
}

// ---- secrets ----

std::string all_of(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream bytes;
    bytes << file.rdbuf();
    return std::move(bytes).str();
}

// What every party of a swarm says at debug level, and what the market keeps, while all of it is
// used: invites, tokens, the operator's secret, an origin's credentials.
TEST(Origin, NoSecretStandsInALogOrInTheDatabase) {
    const ScratchFolder scratch;
    const std::string secret = "Bearer hf_S3cretOfTheOrigin";
    const Origin origin(demo_model(), scratch, secret);
    const std::string auth = scratch.path("hub.auth");
    std::ofstream(auth) << secret << "\n";
    std::filesystem::permissions(auth, std::filesystem::perms::owner_read);
    const std::string state = scratch.path("state");
    // A token is renewed several times on the way.
    RelayElsewhere swarm(
        demo_model(), state, "debug",
        {"--origin", origin.folder(), "--token-life", "5", "--log-level", "debug"});
    Program& relay = swarm.relay();
    MarketProgram& market = swarm.market();
    const std::string url = market.url();
    const auto join = [&](const std::string& invite, const std::string& name) {
        return Program({KVASIR_PROGRAM, "worker", "--join", url, "--invite", invite, "--name", name,
                        "--cache", scratch.path(name), "--budget", "64M", "--ca",
                        origin.certificate(), "--origin-auth", origin.url() + "=" + auth,
                        "--log-level", "debug"});
    };
    Program worker = join(market.worker_invite(), "far");
    Program wrong_role = join(market.backbone_invite(), "wrong-role");
    Program backbone =
        join_backbone(demo_model(), url, market.backbone_invite(), scratch.path("backbone"),
                      {"--prompt-tokens", "1,2,3", "-n", "4", "--ignore-eos"});
    const Json json = report_of(backbone);
    ASSERT_FALSE(json.is_null()) << worker.err();
    const auto http = net::HttpClient::make({});
    ASSERT_TRUE(http);
    net::HttpCall metrics;
    metrics.url = "http://" + relay.word_after("listening on ws://") + "/metrics";
    EXPECT_TRUE(eventually([&] {
        const auto page = (*http)->call(metrics);
        const std::string name = "\nkvasir_relay_renewed_total ";
        const size_t at = page ? page->body.find(name) : std::string::npos;
        return at != std::string::npos && page->body[at + name.size()] > '0';
    })) << "no token was renewed on a live connection";
    Operator desk(url, state);
    desk.post("/api/v1/admin/revoke", {{"node", desk.node("far")["node"]}});
    EXPECT_EQ(worker.wait(60).exit_code, 1) << worker.err();
    EXPECT_EQ(wrong_role.wait(60).exit_code, 1) << wrong_role.err();
    EXPECT_TRUE(relay.wait_for("code=revoked")) << relay.err();

    // The market's stdout has the invites that it was asked to print.
    std::string database;
    for (const char* end : {"", "-wal", "-shm"}) database += all_of(state + "/market.db" + end);
    const std::vector<std::pair<std::string, std::string>> places = {
        {"market's log", market.program().err()},
        {"relay's log", relay.err() + relay.out()},
        {"worker's log", worker.err() + worker.out() + wrong_role.err() + wrong_role.out()},
        {"backbone's log", backbone.err() + backbone.out()},
        {"database", database}};
    const std::string operator_secret = all_of(state + "/operator.secret").substr(0, 64);
    ASSERT_EQ(operator_secret.size(), 64u);
    for (const auto& [place, text] : places) {
        EXPECT_GT(text.size(), 40u) << place << ": nothing was said, nothing is shown";
        for (const std::string& word :
             {std::string("kvt1."), std::string("kvi1-"), market.worker_invite().substr(5),
              market.backbone_invite().substr(5), operator_secret, std::string("hf_S3cret")}) {
            const size_t at = text.find(word);
            if (at == text.npos) continue;
            ADD_FAILURE() << place << " has " << word << ": "
                          << text.substr(at - std::min<size_t>(at, 200), 400);
        }
    }
    EXPECT_THAT(database, HasSubstr("far")) << "a node's name, so that it is the database";
}

// The pin of the invite is the market's; nobody vouches for this origin.
TEST(Origin, AnOriginWithoutAnAcceptedCertificateIsRefused) {
    const ScratchFolder scratch;
    const Origin origin(demo_model(), scratch);
    MarketProgram market(demo_model(), scratch.path("state"), "127.0.0.1:0",
                         {"--origin", origin.folder()});
    Program worker = join_worker(market.url(), market.worker_invite(), "far", scratch.path("far"));
    EXPECT_TRUE(worker.wait_for("certificate is not accepted")) << worker.err();
    EXPECT_TRUE(origin.log().empty());
    EXPECT_EQ(origin.bytes_sent(), 0u);
    worker.signal(SIGTERM);
    EXPECT_EQ(worker.wait(30).exit_code, 0);
}

}  // namespace
}  // namespace kvasir::e2e
