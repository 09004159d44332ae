// One worker that joins a market, as a program: its memory, its budget, kill -9 in the middle of
// the download, and sleep.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "swarm_testing.hpp"

namespace kvasir::e2e {
namespace {

using ::testing::HasSubstr;

// A market with its relay, and the words that joining takes.
struct Middle {
    Program program;
    std::string url, worker_invite, backbone_invite;

    Middle(const std::string& model, const std::string& state)
        : program({KVASIR_PROGRAM, "market", "-m", model, "--listen", "127.0.0.1:0", "--state",
                   state, "--dev-tls", "--print-invite", "worker", "--print-invite", "backbone"}) {
        EXPECT_TRUE(program.wait_for("invite backbone: ")) << program.err();
        url = program.word_after("market: ");
        worker_invite = program.word_after("invite worker: ");
        backbone_invite = program.word_after("invite backbone: ");
    }
    Program join(const std::string& cache, const std::string& budget,
                 std::vector<std::string> more = {}) const {
        std::vector<std::string> argv = {
            KVASIR_PROGRAM, "worker",   "--join", url,      "--invite", worker_invite, "--cache",
            cache,          "--budget", budget,   "--name", "joined",   "--log-level", "info"};
        argv.insert(argv.end(), more.begin(), more.end());
        return Program(argv);
    }
};

std::string wide_model(const ScratchFolder& scratch) {
    return synth(scratch.path("m.gguf"), {"--arch", "qwen3moe", "--embd", "1024", "--ff", "1024",
                                          "--type-dense", "q8_0", "--vocab", "600"});
}

uint64_t most_memory(pid_t pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/status");
    for (std::string line; std::getline(file, line);) {
        if (line.rfind("VmHWM:", 0) == 0) return std::stoull(line.substr(6)) << 10;
    }
    return 0;
}

std::vector<std::filesystem::path> files_in(const std::string& folder, const std::string& end) {
    std::vector<std::filesystem::path> found;
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
        if (entry.path().string().ends_with(end)) found.push_back(entry.path());
    }
    return found;
}

TEST(Join, MemoryAndFileStayWithinTheBudget) {
    const ScratchFolder scratch;
    const std::string model = wide_model(scratch);
    const Middle middle(model, scratch.path("state"));
    const uint64_t budget = 20'000'001;
    Program worker = middle.join(scratch.path("w"), std::to_string(budget));
    ASSERT_TRUE(worker.wait_for("worker: serving ")) << worker.err();
    const auto slices = files_in(scratch.path("w"), ".gguf");
    ASSERT_EQ(slices.size(), 1u);
    const uint64_t bytes = std::filesystem::file_size(slices[0]);
    EXPECT_LE(bytes, budget);
    EXPECT_GT(bytes, budget * 3 / 4) << "the budget is used";
    const Json json =
        run_json({"run", "-m", model, "--join", middle.url, "--invite", middle.backbone_invite,
                  "--state", scratch.path("backbone"), "--prompt-tokens", tokens_up_to(128), "-n",
                  "16", "--ignore-eos", "--wait-coverage", "1%"});
    ASSERT_FALSE(json.is_null()) << worker.err();
    EXPECT_GT(pairs_of(json, "joined"), 100u);
    const uint64_t most = most_memory(worker.pid());
    std::printf("joined worker: %.1f MiB at most for a slice of %.1f MiB\n",
                static_cast<double>(most) / 1048576, static_cast<double>(bytes) / 1048576);
    if (kMeasures) {
        EXPECT_LE(most, bytes + (uint64_t{24} << 20));
    }
    worker.signal(SIGTERM);
    EXPECT_EQ(worker.wait(30).exit_code, 0);
}

// kill -9 while bytes come: no slice under its final name, and the next start ends with a whole
// one.
TEST(Join, KillInTheMiddleOfTheDownload) {
    const ScratchFolder scratch;
    const std::string model = wide_model(scratch);
    const Middle middle(model, scratch.path("state"));
    // One per cent of a core: the download lasts.
    Program first = middle.join(scratch.path("w"), "40M", {"--max-cpu", "1"});
    ASSERT_TRUE(eventually([&] { return !files_in(scratch.path("w"), ".part").empty(); }))
        << first.err();
    first.signal(SIGKILL);
    first.wait();
    EXPECT_TRUE(files_in(scratch.path("w"), ".gguf").empty());
    Program second = middle.join(scratch.path("w"), "40M");
    ASSERT_TRUE(second.wait_for("worker: serving ")) << second.err();
    const auto slices = files_in(scratch.path("w"), ".gguf");
    ASSERT_EQ(slices.size(), 1u);
    EXPECT_TRUE(files_in(scratch.path("w"), ".part").empty());
    const Outcome verified = kvasir(
        {"verify", slices[0].string(), "--model", model, "--cache-dir", scratch.path("manifests")});
    EXPECT_EQ(verified.exit_code, 0) << verified.err;
}

// W6: stopped for longer than anything waits; then it connects anew before it answers anything.
TEST(Join, AfterSleepItComesBackByItself) {
    const ScratchFolder scratch;
    const std::string model = wide_model(scratch);
    const Middle middle(model, scratch.path("state"));
    Program worker = middle.join(scratch.path("w"), "20M");
    ASSERT_TRUE(worker.wait_for("attached to ")) << worker.err();
    worker.signal(SIGSTOP);
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    eventually([&] { return std::chrono::steady_clock::now() > until; });
    worker.signal(SIGCONT);
    EXPECT_TRUE(worker.wait_for("this process was asleep")) << worker.err();
    EXPECT_TRUE(worker.wait_for("attached to ", 2)) << worker.err();
    const Json json =
        run_json({"run", "-m", model, "--join", middle.url, "--invite", middle.backbone_invite,
                  "--state", scratch.path("backbone"), "--prompt-tokens", tokens_up_to(32), "-n",
                  "4", "--ignore-eos", "--wait-coverage", "1%"});
    ASSERT_FALSE(json.is_null()) << worker.err();
    EXPECT_GT(pairs_of(json, "joined"), 0u);
    worker.signal(SIGTERM);
    EXPECT_EQ(worker.wait(30).exit_code, 0);
}

// An invite of the other role is refused with the reason, and still good for what it was made for.
TEST(Join, AnInviteOfTheOtherRoleIsNotUsedUp) {
    const ScratchFolder scratch;
    Program market({KVASIR_PROGRAM, "market", "-m", demo_model(), "--listen", "127.0.0.1:0",
                    "--state", scratch.path("state"), "--dev-tls", "--uses", "1", "--print-invite",
                    "worker", "--print-invite", "backbone"});
    ASSERT_TRUE(market.wait_for("invite backbone: ")) << market.err();
    const std::string url = market.word_after("market: ");
    const std::string for_worker = market.word_after("invite worker: ");
    const std::string for_backbone = market.word_after("invite backbone: ");
    const auto work = [&](const std::string& invite) {
        return std::vector<std::string>{KVASIR_PROGRAM, "worker", "--join",  url,
                                        "--invite",     invite,   "--cache", scratch.path("w"),
                                        "--budget",     "12M"};
    };
    const auto lead = [&](const std::string& invite, const char* coverage) {
        return kvasir({"run", "-m", demo_model(), "--join", url, "--invite", invite, "--state",
                       scratch.path("b"), "--prompt-tokens", "1", "-n", "1", "--wait-coverage",
                       coverage});
    };
    const Outcome no_worker = run_program(work(for_backbone));
    EXPECT_EQ(no_worker.exit_code, 1);
    EXPECT_THAT(no_worker.err, HasSubstr("gives the role backbone"));
    EXPECT_THAT(no_worker.err, HasSubstr("needs the role worker"));
    const Outcome no_backbone = lead(for_worker, "0%");
    EXPECT_EQ(no_backbone.exit_code, 1);
    EXPECT_THAT(no_backbone.err, HasSubstr("gives the role worker"));
    Program worker(work(for_worker));
    EXPECT_TRUE(worker.wait_for("worker: serving ")) << worker.err();
    const Outcome backbone = lead(for_backbone, "1%");
    EXPECT_EQ(backbone.exit_code, 0) << backbone.err;
    worker.signal(SIGTERM);
    EXPECT_EQ(worker.wait(30).exit_code, 0);
}

TEST(Join, MistakesAreOneSentence) {
    const ScratchFolder scratch;
    const std::string cache = scratch.path("w");
    const auto join = [&](const std::string& url, const std::string& invite,
                          const std::string& budget) {
        return kvasir(
            {"worker", "--join", url, "--invite", invite, "--budget", budget, "--cache", cache});
    };
    const Outcome no_invite = kvasir({"worker", "--join", "https://127.0.0.1:1"});
    EXPECT_EQ(no_invite.exit_code, 2);
    EXPECT_THAT(no_invite.err, HasSubstr("--invite"));
    const Outcome bad_invite = join("https://127.0.0.1:1", "kvi1-xyz", "1M");
    EXPECT_EQ(bad_invite.exit_code, 2);
    const Outcome bad_url = join("ftp://127.0.0.1:1", "kvi1-xyz", "1M");
    EXPECT_EQ(bad_url.exit_code, 2);
    EXPECT_THAT(bad_url.err, HasSubstr("https://HOST:PORT"));
    EXPECT_EQ(kvasir({"worker"}).exit_code, 2);
}

}  // namespace
}  // namespace kvasir::e2e
