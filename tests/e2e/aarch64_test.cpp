// The worker built for 64-bit ARM, run by qemu: it joins this machine's backbone through market and
// relay, downloads its ranges and computes. ggml's ARM kernels round differently, so its answers
// are approximate.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include "network_testing.hpp"

namespace kvasir::e2e {
namespace {

constexpr const char* kPrompt = "Once upon a time there was a king who";

TEST(Aarch64, AWorkerUnderQemuJoinsAndIsLabelledApproximate) {
    if (::access(KVASIR_AARCH64_WORKER, X_OK) != 0) {
        GTEST_SKIP() << KVASIR_AARCH64_WORKER << " is not built: ./run worker-aarch64";
    }
    if (::access("/usr/bin/qemu-aarch64", X_OK) != 0) GTEST_SKIP() << "qemu-user is not installed";
    const ScratchFolder scratch;
    MarketProgram market(demo_model(), scratch.path("market"));
    const std::vector<std::string> prompt = {"-p", kPrompt, "-n", "48", "--exact", "any"};
    Program backbone = join_backbone(demo_model(), market.url(), market.backbone_invite(),
                                     scratch.path("backbone"), prompt);
    Program worker({"/usr/bin/qemu-aarch64", KVASIR_AARCH64_WORKER, "worker", "--join",
                    market.url(), "--invite", market.worker_invite(), "--name", "phone", "--cache",
                    scratch.path("phone"), "--budget", "20M", "--log-level", "info"});
    const Json json = report_of(backbone);
    ASSERT_FALSE(json.is_null()) << worker.err();
    EXPECT_EQ(json["answers"], "approximate");
    EXPECT_EQ(json["pairs_local"], 0);
    EXPECT_GT(pairs_of(json, "phone"), 0u) << worker.err();
    EXPECT_THAT(worker.err(), ::testing::HasSubstr("joined"));
    // What it fetched is the model's own bytes, whoever looks.
    EXPECT_EQ(
        kvasir({"verify", slice_in(scratch.path("phone")), "--model", demo_model()}).exit_code, 0);
    // Other roundings, not other answers: the text begins as llama.cpp's own does.
    const Json plain =
        run_json({"run", "-m", demo_model(), "--monolithic", "-p", kPrompt, "-n", "48"});
    ASSERT_FALSE(plain.is_null());
    EXPECT_NE(json["logits_sha256"], plain["logits_sha256"]);
    EXPECT_EQ(json["tokens"][0], plain["tokens"][0]);

    // Strict is the default: the same worker gets no work, and the bits are llama.cpp's.
    Program strict = join_backbone(demo_model(), market.url(), market.backbone_invite(),
                                   scratch.path("backbone"),
                                   {"-p", kPrompt, "-n", "48", "--wait-coverage", "0%"});
    const Json exact = report_of(strict);
    ASSERT_FALSE(exact.is_null());
    EXPECT_EQ(exact["logits_sha256"], plain["logits_sha256"]);
    EXPECT_EQ(exact["answers"], "exact");
}

}  // namespace
}  // namespace kvasir::e2e
