#include "apps/comparison.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>

#include "apps/machine.hpp"
#include "apps/rpc_server.hpp"
#include "generate/backends.hpp"

namespace kvasir::apps {
namespace {

const std::string kModel = std::string(KVASIR_SOURCE_DIR) + "/models/skald-q4_k_m.gguf";

generate::Session open_demo(const std::string& path = kModel) {
    EXPECT_TRUE(generate::load_backends());
    generate::SessionOptions options;
    options.model_path = path;
    auto session = generate::Session::open(options);
    EXPECT_TRUE(session) << session.error().detail;
    return std::move(*session);
}

TEST(Comparison, WorkIsFixedAndInsideTheVocabulary) {
    const Work a = make_work(4096, 100, 30);
    const Work b = make_work(4096, 100, 30);
    EXPECT_EQ(a.prompt, b.prompt);
    EXPECT_EQ(a.forced, b.forced);
    EXPECT_EQ(a.prompt.size(), 100U);
    EXPECT_EQ(a.forced.size(), 31U);
    for (const auto token : make_work(3, 500, 500).prompt) {
        EXPECT_GE(token, 0);
        EXPECT_LT(token, 3);
    }
}

TEST(Comparison, MediansOfRatios) {
    EXPECT_DOUBLE_EQ(median({}), 0);
    EXPECT_DOUBLE_EQ(median({3, 1, 2}), 2);
    EXPECT_DOUBLE_EQ(median({4, 1, 3, 2}), 2.5);
    // The median of the ratios, not the ratio of the medians.
    EXPECT_DOUBLE_EQ(median_ratio({1, 9, 30}, {1, 10, 100}), 0.9);
    EXPECT_DOUBLE_EQ(median_ratio({1}, {0}), 0);
}

TEST(Comparison, TwoSessionsOfOneModelGiveTheSameBitsAndAllRoundsAreTimed) {
    generate::Session first = open_demo();
    generate::Session second = open_demo();
    std::vector<std::string> order;
    int measured = 0;
    const auto note = [&](const char* name) {
        return [&order, name] { order.emplace_back(name); };
    };
    const std::vector<Contender> contenders = {
        {"a", &first, note("a"), {}},
        {"b", &second, note("b"), [&](const generate::Generation& run) {
             EXPECT_EQ(run.step_times.size(), 4U);
             ++measured;
         }}};
    const auto all = compare(contenders, make_work(first.vocabulary(), 16, 4), 2);
    ASSERT_TRUE(all) << all.error().detail;
    ASSERT_EQ(all->size(), 2U);
    for (const Series& series : *all) {
        EXPECT_TRUE(series.bit_exact);
        EXPECT_EQ(series.gen_tok_s.size(), 2U);
        EXPECT_GT(median(series.gen_tok_s), 0);
        EXPECT_GT(median(series.prompt_tok_s), 0);
    }
    EXPECT_EQ(all->at(0).logits_sha256, all->at(1).logits_sha256);
    EXPECT_EQ(order, (std::vector<std::string>{"a", "b", "b", "a", "a", "b"}));
    EXPECT_EQ(measured, 2);
}

TEST(Comparison, DifferentBitsAreSeen) {
    // A copy of the model with the lowest bit of some weights flipped.
    const std::string path =
        ::testing::TempDir() + "kvasir-flipped-" + std::to_string(getpid()) + ".gguf";
    {
        std::ifstream in(kModel, std::ios::binary);
        std::string bytes((std::istreambuf_iterator<char>(in)), {});
        ASSERT_GT(bytes.size(), 1U << 20);
        for (size_t i = bytes.size() / 2; i < bytes.size() / 2 + 4096; ++i) bytes[i] ^= 1;
        std::ofstream(path, std::ios::binary) << bytes;
    }
    generate::Session first = open_demo();
    generate::Session flipped = open_demo(path);
    generate::Session third = open_demo();
    const std::vector<Contender> contenders = {
        {"mono", &first, {}, {}}, {"flipped", &flipped, {}, {}}, {"same", &third, {}, {}}};
    const auto all = compare(contenders, make_work(first.vocabulary(), 8, 4), 1);
    unlink(path.c_str());
    ASSERT_TRUE(all) << all.error().detail;
    EXPECT_TRUE(all->at(0).bit_exact);
    EXPECT_FALSE(all->at(1).bit_exact);
    EXPECT_TRUE(all->at(2).bit_exact);
}

TEST(Comparison, AFailingContenderIsNamed) {
    generate::Session session = open_demo();
    const std::vector<Contender> contenders = {{"the one", &session, {}, {}}};
    const auto all = compare(contenders, make_work(session.vocabulary(), 5000, 4), 1);
    ASSERT_FALSE(all);
    EXPECT_EQ(all.error().detail.rfind("the one: ", 0), 0U) << all.error().detail;
}

TEST(Machine, IsDescribed) {
    const Machine machine = describe_machine();
    EXPECT_FALSE(machine.cpu.empty());
    EXPECT_GT(machine.cores, 0U);
    EXPECT_FALSE(machine.compiler.empty());
    const std::vector<int> cpus = allowed_cpus();
    EXPECT_TRUE(std::is_sorted(cpus.begin(), cpus.end()));
}

TEST(Machine, PinningToNoCpuIsAnEnvironmentError) {
    const auto before = allowed_cpus();
    const Status pinned = pin_process({});
    ASSERT_FALSE(pinned);
    EXPECT_EQ(pinned.error().code, Errc::kEnvironment);
    EXPECT_EQ(allowed_cpus(), before);
    ASSERT_TRUE(pin_process({before.front()}));
    EXPECT_EQ(allowed_cpus(), std::vector<int>{before.front()});
    ASSERT_TRUE(pin_process(before));
}

TEST(RpcServer, AProgramThatEndsIsReported) {
    const auto server = RpcServer::start("/bin/false", 1, -1);
    ASSERT_FALSE(server);
    EXPECT_EQ(server.error().code, Errc::kClosed);
    EXPECT_NE(server.error().detail.find("exit code 1"), std::string::npos);
}

}  // namespace
}  // namespace kvasir::apps
