// A market whose nodes fetch the model from an origin elsewhere: the market's certificate is
// self-signed and pinned by the invite, the origin has one of its own, and the origin's own log
// says what a node pulled. The origin is a server of this test's, which counts what it sends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

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
    Origin(const std::string& model, const ScratchFolder& scratch)
        : name_("/files/" + std::filesystem::path(model).filename().string()),
          file_(model),
          certificate_(scratch.path("origin.pem")),
          server_([this](const OriginRequest& request) { return answer(request); }, options()) {
        std::ofstream(certificate_) << identity_.pem();
    }
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
        if (request.target != name_) return net::testing::plain_reply(404, "no such file");
        return net::testing::serve_file(request, file_.view());
    }

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
