// The worker built for 64-bit ARM, run by qemu: it joins this machine's backbone through market and
// relay, downloads its ranges and computes. The kernels give it the backbone's bits; without them
// ggml's own ARM code rounds differently, and its answers are approximate.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <optional>

#include "network_testing.hpp"

namespace kvasir::e2e {
namespace {

constexpr const char* kPrompt = "Once upon a time there was a king who";

class Aarch64 : public ::testing::Test {
protected:
    void SetUp() override {
        if (::access(KVASIR_AARCH64_WORKER, X_OK) != 0) {
            GTEST_SKIP() << KVASIR_AARCH64_WORKER << " is not built: ./run worker-aarch64";
        }
        if (::access("/usr/bin/qemu-aarch64", X_OK) != 0) {
            GTEST_SKIP() << "qemu-user is not installed";
        }
        market_.emplace(demo_model(), scratch_.path("market"));
    }

    Program backbone(const std::vector<std::string>& more) {
        std::vector<std::string> arguments = {"-p", kPrompt, "-n", "48"};
        arguments.insert(arguments.end(), more.begin(), more.end());
        return join_backbone(demo_model(), market_->url(), market_->backbone_invite(),
                             scratch_.path("backbone"), arguments);
    }
    // processor: what qemu is told to be.
    Program phone(const std::string& processor, const std::vector<std::string>& more) {
        std::vector<std::string> arguments = {"/usr/bin/qemu-aarch64",
                                              "-cpu",
                                              processor,
                                              KVASIR_AARCH64_WORKER,
                                              "worker",
                                              "--join",
                                              market_->url(),
                                              "--invite",
                                              market_->worker_invite(),
                                              "--name",
                                              "phone",
                                              "--cache",
                                              scratch_.path("phone"),
                                              "--budget",
                                              "20M",
                                              "--log-level",
                                              "info"};
        arguments.insert(arguments.end(), more.begin(), more.end());
        return Program(arguments);
    }
    static Json plain() {
        return run_json({"run", "-m", demo_model(), "--monolithic", "-p", kPrompt, "-n", "48"});
    }
    // All experts on the ARM worker, under --exact strict: the logits are llama.cpp's.
    void expect_exact(const std::string& processor, const std::string& kernels) {
        Program run = backbone({"--exact", "strict"});
        const Program worker = phone(processor, {});
        const Json json = report_of(run);
        ASSERT_FALSE(json.is_null()) << worker.err();
        EXPECT_EQ(json["answers"], "exact");
        EXPECT_EQ(json["pairs_local"], 0);
        EXPECT_GT(pairs_of(json, "phone"), 0u) << worker.err();
        ASSERT_EQ(json["workers"].size(), 1u);
        EXPECT_EQ(json["workers"][0]["exact"], true);
        EXPECT_THAT(json["workers"][0]["computes"].get<std::string>(),
                    ::testing::StartsWith("kernels " + kernels + " as x86-v"));
        const Json wanted = plain();
        ASSERT_FALSE(wanted.is_null());
        EXPECT_EQ(json["tokens"], wanted["tokens"]);
        EXPECT_EQ(json["logits_sha256"], wanted["logits_sha256"]);
    }

    const ScratchFolder scratch_;
    std::optional<MarketProgram> market_;
};

TEST_F(Aarch64, AWorkerUnderQemuIsExact) {
    expect_exact("max", "neon-dot");
    // What it fetched is the model's own bytes, whoever looks.
    EXPECT_EQ(
        kvasir({"verify", slice_in(scratch_.path("phone")), "--model", demo_model()}).exit_code, 0);
}

TEST_F(Aarch64, SoIsOneWithoutTheDotProduct) {
    expect_exact("cortex-a53", "neon");
}

TEST_F(Aarch64, WithGgmlsOwnCodeItIsApproximate) {
    Program run = backbone({"--exact", "any"});
    const Program worker = phone("max", {"--kernels", "off"});
    const Json json = report_of(run);
    ASSERT_FALSE(json.is_null()) << worker.err();
    EXPECT_EQ(json["answers"], "approximate");
    EXPECT_EQ(json["pairs_local"], 0);
    EXPECT_GT(pairs_of(json, "phone"), 0u) << worker.err();
    // Other roundings, not other answers: the text begins as llama.cpp's own does.
    const Json wanted = plain();
    ASSERT_FALSE(wanted.is_null());
    EXPECT_NE(json["logits_sha256"], wanted["logits_sha256"]);
    EXPECT_EQ(json["tokens"][0], wanted["tokens"][0]);

    // Strict is the default: the same worker gets no work, and the bits are llama.cpp's.
    Program strict = backbone({"--wait-coverage", "0%"});
    const Json exact = report_of(strict);
    ASSERT_FALSE(exact.is_null());
    EXPECT_EQ(exact["logits_sha256"], wanted["logits_sha256"]);
    EXPECT_EQ(exact["answers"], "exact");
}

}  // namespace
}  // namespace kvasir::e2e
