// Processor time of whole programs, as the kernel counts it: a worker that may have a fifth of a
// core takes no more while it computes, and who has lost the others waits without spinning.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <sstream>

#include "network_testing.hpp"

namespace kvasir::e2e {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// utime and stime of all its threads (fields 14 and 15 of /proc/PID/stat).
Seconds cpu_of(pid_t pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    std::istringstream fields(text.substr(std::min(text.size(), text.rfind(')') + 1)));
    std::string skipped;
    for (int i = 3; i < 14; ++i) fields >> skipped;
    double user = 0, system = 0;
    fields >> user >> system;
    EXPECT_TRUE(fields) << text;
    return Seconds((user + system) / static_cast<double>(::sysconf(_SC_CLK_TCK)));
}

// Lets that time pass, in which they do what they do.
void pass(Seconds time) {
    const auto end = Clock::now() + time;
    eventually([&] { return Clock::now() >= end; });
}

TEST(Cpu, ALimitedWorkerStaysWithinItsShareWhileItComputes) {
    const ScratchFolder scratch;
    const std::string model =
        synth(scratch.path("model.gguf"), {"--layers", "3", "--embd", "1024", "--ff", "1536",
                                           "--experts", "8", "--used", "8", "--type", "q8_0"});
    MarketProgram market(model, scratch.path("state"));
    Program worker = join_worker(market.url(), market.worker_invite(), "w", scratch.path("w"),
                                 {.budget = "160M", .more = {"--max-cpu", "20", "--threads", "1"}});
    Program backbone =
        join_backbone(model, market.url(), market.backbone_invite(), scratch.path("backbone"),
                      {"--prompt-tokens", tokens_up_to(64), "-n", "600", "--ignore-eos"});
    ASSERT_TRUE(backbone.wait_for("debug text: ", 2)) << backbone.err() << worker.err();
    const auto begin = Clock::now();
    const Seconds before = cpu_of(worker.pid());
    const Json json = report_of(backbone);
    ASSERT_FALSE(json.is_null()) << worker.err();
    const Seconds used = cpu_of(worker.pid()) - before;
    const Seconds passed = Clock::now() - begin;
    std::printf("--max-cpu 20: %.2f s of processor time in %.2f s, %llu pairs\n", used.count(),
                passed.count(), static_cast<unsigned long long>(pairs_of(json, "w")));
    EXPECT_GT(pairs_of(json, "w"), 5000u) << "it has to compute, or nothing is shown";
    // A fifth, and the window that may be used at once.
    EXPECT_LE(used.count(), 0.25 * passed.count() + 0.3);
}

// W1: what was lost is dialed again with pauses, and nobody waits by looking again and again.
TEST(Cpu, WhoLosesTheOthersIdles) {
    constexpr Seconds kLater{10};
    constexpr Seconds kLook{4};
    const ScratchFolder scratch;
    MarketProgram market(demo_model(), scratch.path("state"));
    // Not for everything: the second backbone waits for more workers.
    Program worker = join_worker(market.url(), market.worker_invite(), "w", scratch.path("w"),
                                 {.budget = "6M", .more = {}});
    const auto start = [&](const std::string& coverage) {
        return join_backbone(
            demo_model(), market.url(), market.backbone_invite(), scratch.path("backbone"),
            {"--prompt-tokens", "1,2,3", "-n", "900", "--ignore-eos", "--wait-coverage", coverage});
    };
    const auto expect_idle = [&](const char* what, std::vector<std::pair<std::string, pid_t>> all) {
        pass(kLater);
        std::vector<Seconds> before;
        for (const auto& [name, pid] : all) before.push_back(cpu_of(pid));
        const auto begin = Clock::now();
        pass(kLook);
        for (size_t i = 0; i < all.size(); ++i) {
            const Seconds used = cpu_of(all[i].second) - before[i];
            const Seconds passed = Clock::now() - begin;
            std::printf("%s: %s used %.2f s in %.2f s\n", what, all[i].first.c_str(), used.count(),
                        passed.count());
            EXPECT_LT(used / passed, 0.05) << what << ": " << all[i].first;
        }
    };
    {
        Program lost = start("1%");
        ASSERT_TRUE(lost.wait_for("debug text: ", 20)) << lost.err() << worker.err();
        lost.signal(SIGKILL);
        lost.wait();
        expect_idle("the backbone is gone",
                    {{"worker", worker.pid()}, {"market", market.program().pid()}});
    }
    Program waiting = start("100%");
    ASSERT_TRUE(waiting.wait_for("attached to relay")) << waiting.err();
    ASSERT_TRUE(worker.wait_for("joined 127.0.0.1 with", 2)) << worker.err() << waiting.err();
    market.program().signal(SIGKILL);
    market.program().wait();
    expect_idle("the relay is gone", {{"worker", worker.pid()}, {"backbone", waiting.pid()}});
    EXPECT_TRUE(worker.running()) << worker.err();
    EXPECT_TRUE(waiting.running()) << waiting.err();
}

}  // namespace
}  // namespace kvasir::e2e
