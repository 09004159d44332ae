// Unmodified llama.cpp programs with libggml-kvasir.so: the same answers as without it, computed by
// workers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>
#include <future>

#include "llama_server.hpp"

namespace kvasir::e2e {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr unsigned kDemoExperts = 8 * 32;
const std::vector<std::string> kQuestions = {"Tell me of a king.", "Who was the old woman?",
                                             "Where did the fox go after the rain?"};

struct Work {
    uint64_t pairs = 0;
    uint64_t requests = 0;
};

// Ends a worker and reads what it counted.
Work stop_and_count(Program& worker) {
    worker.signal(SIGTERM);
    const Outcome outcome = worker.wait();
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    const std::string pairs = worker.word_after("worker: computed ");
    const std::string requests = worker.word_after(pairs + " pairs in ");
    if (pairs.empty() || requests.empty()) {
        ADD_FAILURE() << outcome.err;
        return {};
    }
    return {std::stoull(pairs), std::stoull(requests)};
}

// Two workers, each with half of every layer of the demo model.
std::vector<Program> start_halves(const std::string& hub, const std::string& model) {
    std::vector<Program> workers;
    workers.push_back(start_worker(hub, "w0", model, "0-7:0-15"));
    workers.push_back(start_worker(hub, "w1", model, "0-7:16-31"));
    return workers;
}

// The numeric challenge: for each of 8 layers, 4 pairs on one row, and 9 + 3 on nine.
constexpr uint64_t kChallengePairs = 8 * (4 + 12);
constexpr uint64_t kChallengeRequests = 8 * 2;

std::vector<std::string> answers(const LlamaServer& server) {
    std::vector<std::string> out;
    for (const std::string& question : kQuestions) out.push_back(server.chat(question));
    return out;
}

TEST(Plugin, ChatAnswersAreTheSameAndWorkersComputeThem) {
    const std::vector<std::string> flags = {"-c", "1024", "-np", "1"};
    const std::vector<std::string> expected = answers(LlamaServer(demo_model(), flags));
    LlamaServer server(demo_model(), flags, with_plugin({demo_model()}));
    EXPECT_EQ(answers(server), expected) << "before any worker joined";
    auto workers = start_halves(server.hub(), demo_model());
    ASSERT_TRUE(server.wait_experts(kDemoExperts)) << server.log();
    EXPECT_EQ(answers(server), expected) << "with two workers";
    for (Program& worker : workers) {
        const Work work = stop_and_count(worker);
        EXPECT_GT(work.pairs, kChallengePairs + 1000);
        EXPECT_GT(work.requests, kChallengeRequests + 100);
    }
    EXPECT_EQ(answers(server), expected) << "after the workers have left";
    EXPECT_TRUE(server.program().running());
}

// KVASIR_KERNELS decides what computes here while no worker is there: the same answer.
TEST(Plugin, KernelsOnAndOffGiveTheSameAnswer) {
    const std::vector<std::string> flags = {"-c", "1024", "-np", "1"};
    const std::string expected = LlamaServer(demo_model(), flags).chat(kQuestions[0], 8);
    for (const char* kernels : {"on", "off"}) {
        SCOPED_TRACE(kernels);
        ProgramOptions options = with_plugin({demo_model(), "debug"});
        options.environment.push_back(std::string("KVASIR_KERNELS=") + kernels);
        LlamaServer server(demo_model(), flags, options);
        // The server's own warm-up is always the graph's.
        const size_t before = count_of(server.log(), "as ggml's graph");
        EXPECT_EQ(server.chat(kQuestions[0], 8), expected);
        const size_t graphs = count_of(server.log(), "as ggml's graph") - before;
        if (std::string(kernels) == "on") {
            EXPECT_EQ(graphs, 0U);
        } else {
            EXPECT_GE(graphs, 8U * 8) << "8 layers of 8 tokens";
        }
    }
}

TEST(Plugin, ParallelSlotsGiveTheSameAnswers) {
    const std::vector<std::string> flags = {"-c", "2048", "-np", "2"};
    const std::vector<std::string> expected = answers(LlamaServer(demo_model(), flags));
    LlamaServer server(demo_model(), flags, with_plugin({demo_model()}));
    auto workers = start_halves(server.hub(), demo_model());
    ASSERT_TRUE(server.wait_experts(kDemoExperts)) << server.log();
    std::vector<std::future<std::string>> asked;
    for (const std::string& question : kQuestions) {
        asked.push_back(std::async(std::launch::async, [&] { return server.chat(question); }));
    }
    std::vector<std::string> got;
    for (auto& answer : asked) got.push_back(answer.get());
    EXPECT_EQ(got, expected);
    for (Program& worker : workers) EXPECT_GT(stop_and_count(worker).pairs, kChallengePairs);
}

TEST(Plugin, KillingAWorkerDoesNotFailARequest) {
    const std::vector<std::string> flags = {"-c", "1024", "-np", "1"};
    const std::string question = kQuestions[0];
    const std::string expected = LlamaServer(demo_model(), flags).chat(question, 200);
    LlamaServer server(demo_model(), flags, with_plugin({demo_model()}));
    auto workers = start_halves(server.hub(), demo_model());
    ASSERT_TRUE(server.wait_experts(kDemoExperts)) << server.log();
    auto asked = std::async(std::launch::async, [&] { return server.chat(question, 200); });
    workers[0].signal(SIGKILL);
    EXPECT_EQ(asked.get(), expected);
    EXPECT_EQ(server.chat(question, 200), expected);
    EXPECT_GT(stop_and_count(workers[1]).pairs, kChallengePairs);
}

TEST(Plugin, NothingButTheChallengeBeforeTheFirstRequest) {
    for (const unsigned share : {100U, 50U}) {
        LlamaServer server(demo_model(), {"-c", "1024"}, with_plugin({demo_model()}));
        std::vector<Program> workers;
        workers.push_back(start_worker(server.hub(), "w0", demo_model(), "0-7:0-15"));
        if (share == 100) {
            workers.push_back(start_worker(server.hub(), "w1", demo_model(), "0-7:16-31"));
        }
        const std::string held = std::to_string(kDemoExperts * share / 100);
        ASSERT_TRUE(server.program().wait_for("workers hold " + held + " of ")) << server.log();
        for (Program& worker : workers) {
            const Work work = stop_and_count(worker);
            EXPECT_EQ(work.requests, kChallengeRequests);
            EXPECT_EQ(work.pairs, kChallengePairs);
        }
    }
}

// The server sleeps when idle and loads the model again, warm-up included, while workers hold
// everything: the warm-up, which selects every expert, must not reach them.
TEST(Plugin, WarmUpOfAReloadedModelStaysHere) {
    uint64_t pairs[2] = {};
    const std::vector<std::string> flags = {"-c", "1024", "-np", "1", "--sleep-idle-seconds", "1"};
    for (const bool sleeps : {false, true}) {
        LlamaServer server(demo_model(), flags, with_plugin({demo_model()}));
        auto workers = start_halves(server.hub(), demo_model());
        ASSERT_TRUE(server.wait_experts(kDemoExperts)) << server.log();
        if (sleeps) {
            ASSERT_TRUE(server.program().wait_for("sleeping")) << server.program().err();
        }
        EXPECT_FALSE(server.chat(kQuestions[0], 8).empty());
        for (Program& worker : workers) pairs[sleeps ? 1 : 0] += stop_and_count(worker).pairs;
    }
    EXPECT_GT(pairs[0], 2 * kChallengePairs);
    // The server itself tries out a few tokens on a fresh context; one token of a warm-up would be
    // 8 layers of 32 experts.
    EXPECT_GE(pairs[1], pairs[0]);
    EXPECT_LT(pairs[1], pairs[0] + 8 * 32);
}

Json complete(const LlamaServer& server, unsigned prompt, unsigned tokens, bool cache = true) {
    std::vector<int> numbers;
    for (unsigned i = 0; i < prompt; ++i) numbers.push_back(static_cast<int>(1 + (i * 7) % 100));
    return server.post("/completion", {{"prompt", numbers},
                                       {"temperature", 0},
                                       {"n_predict", tokens},
                                       {"ignore_eos", true},
                                       {"return_tokens", true},
                                       {"cache_prompt", cache},
                                       {"id_slot", 0}});
}

// What is used late: saved and restored slots, reused prefixes, a context that shifts.
std::vector<Json> late_paths(const LlamaServer& server) {
    std::vector<Json> out;
    out.push_back(complete(server, 40, 8)["tokens"]);
    const Json saved = server.post("/slots/0?action=save", {{"filename", "slot.bin"}});
    EXPECT_GT(saved["n_saved"], 40);
    out.push_back(saved["n_saved"]);
    out.push_back(complete(server, 20, 4)["tokens"]);
    const Json restored = server.post("/slots/0?action=restore", {{"filename", "slot.bin"}});
    EXPECT_EQ(restored["n_restored"], saved["n_saved"]);
    const Json reused = complete(server, 44, 8);
    EXPECT_GT(reused["tokens_cached"], 0);
    EXPECT_LT(reused["timings"]["prompt_n"], 44) << "the restored prefix is not computed again";
    out.push_back(reused["tokens"]);
    out.push_back(complete(server, 44, 8, false)["tokens"]);
    out.push_back(complete(server, 100, 300)["tokens"]);  // beyond the context
    EXPECT_EQ(out.back().size(), 300U);
    return out;
}

TEST(Plugin, SavedSlotsReusedPrefixesAndContextShift) {
    const ScratchFolder scratch;
    const std::string model = synth(scratch.path("model.gguf"), {"--arch", "qwen3moe"});
    const std::vector<std::string> flags = {"-c",
                                            "256",
                                            "-np",
                                            "1",
                                            "--context-shift",
                                            "--cache-reuse",
                                            "4",
                                            "--slot-save-path",
                                            scratch.path("")};
    const std::vector<Json> expected = late_paths(LlamaServer(model, flags));
    LlamaServer server(model, flags, with_plugin({model}));
    std::vector<Program> workers;
    workers.push_back(start_worker(server.hub(), "w0", model, "0-3:0-3"));
    workers.push_back(start_worker(server.hub(), "w1", model, "0-3:4-7"));
    ASSERT_TRUE(server.wait_experts(4 * 8)) << server.log();
    EXPECT_EQ(late_paths(server), expected);
    for (Program& worker : workers) EXPECT_GT(stop_and_count(worker).pairs, 1000U);
}

TEST(Plugin, AnotherModelThanTheProgramsStaysLocalWithOneWarning) {
    const ScratchFolder scratch;
    const std::string other = synth(scratch.path("other.gguf"), {"--arch", "qwen3moe"});
    const std::vector<std::string> flags = {"-c", "1024", "-np", "1"};
    const std::string expected = LlamaServer(demo_model(), flags).chat(kQuestions[0]);
    LlamaServer server(demo_model(), flags, with_plugin({other}));
    Program worker = start_worker(server.hub(), "w0", other, "0-3:*");
    ASSERT_TRUE(worker.wait_for("joined ws://")) << worker.err();
    EXPECT_EQ(server.chat(kQuestions[0]), expected);
    const std::string log = server.log();
    EXPECT_EQ(count_of(log, "kvasir warn"), 1U) << log;
    EXPECT_THAT(log, HasSubstr("KVASIR_MODEL"));
    EXPECT_LE(stop_and_count(worker).pairs, 4U * (4 + 12)) << "nothing but the challenge";
}

TEST(Plugin, ADraftModelWithTheSameLayerNames) {
    const ScratchFolder scratch;
    const std::string model = synth(scratch.path("model.gguf"), {"--arch", "qwen3moe"});
    const std::string draft =
        synth(scratch.path("draft.gguf"), {"--arch", "qwen3moe", "--seed", "2"});
    const std::vector<std::string> flags = {"-c",  "512", "-np",         "1",
                                            "-md", draft, "--spec-type", "draft-simple"};
    const Json expected = complete(LlamaServer(model, flags), 10, 64)["tokens"];
    LlamaServer server(model, flags, with_plugin({model}));
    Program worker = start_worker(server.hub(), "w0", model, "0-3:*");
    ASSERT_TRUE(server.wait_experts(4 * 8)) << server.log();
    EXPECT_EQ(complete(server, 10, 64)["tokens"], expected);
    EXPECT_GT(stop_and_count(worker).pairs, 1000U);
}

// ---- the other programs: they end by themselves, so workers are there first and keep dialing
// -----

struct Alone {
    Outcome outcome;
    uint64_t pairs = 0;
};

// Runs a program with the plugin while two workers that know its port dial it.
Alone run_with_workers(const std::vector<std::string>& argv, const std::string& model) {
    Program program(argv, with_plugin({model}));
    EXPECT_TRUE(program.wait_for("workers may join on port ")) << program.err();
    const std::string hub = "ws://127.0.0.1:" + program.word_after("workers may join on port ");
    auto workers = start_halves(hub, model);
    Alone out;
    out.outcome = program.wait();
    for (Program& worker : workers) out.pairs += stop_and_count(worker).pairs;
    return out;
}

std::string text_file(const ScratchFolder& scratch) {
    const std::string path = scratch.path("text.txt");
    std::ofstream file(path);
    for (int i = 0; i < 60; ++i) {
        file << "Once upon a time there was a king who had " << i
             << " daughters, and the youngest of them went into the wood to look for the fox.\n";
    }
    return path;
}

std::string lines_with(const std::string& text, const std::string& wanted) {
    std::istringstream all(text);
    std::string out;
    for (std::string line; std::getline(all, line);) {
        if (const size_t at = line.find(wanted); at != std::string::npos) {
            out += line.substr(at) + "\n";
        }
    }
    return out;
}

TEST(Plugin, PerplexityIsTheSameNumber) {
    const ScratchFolder scratch;
    const std::vector<std::string> argv = {llama_program("llama-perplexity"),
                                           "-m",
                                           demo_model(),
                                           "-f",
                                           text_file(scratch),
                                           "-c",
                                           "128",
                                           "--no-repack",
                                           "-t",
                                           "1"};
    // The stock program ends without waiting for its log thread, and on a busy machine often loses
    // the line that this is about: then it has said nothing, and is asked again.
    constexpr int kAttempts = 8;
    const auto estimate = [](const Outcome& outcome) {
        return lines_with(outcome.out + outcome.err, "Final estimate: PPL");
    };
    std::string expected;
    for (int attempt = 0; attempt < kAttempts && expected.empty(); ++attempt) {
        const Outcome plain = run_program(argv);
        ASSERT_EQ(plain.exit_code, 0) << plain.err;
        expected = estimate(plain);
    }
    ASSERT_THAT(expected, HasSubstr("PPL ="));
    Alone with;
    for (int attempt = 0; attempt < kAttempts && estimate(with.outcome).empty(); ++attempt) {
        with = run_with_workers(argv, demo_model());
        ASSERT_EQ(with.outcome.exit_code, 0) << with.outcome.err;
    }
    EXPECT_EQ(estimate(with.outcome), expected);
    EXPECT_GT(with.pairs, 2 * kChallengePairs) << with.outcome.err;
}

TEST(Plugin, BenchRuns) {
    const Alone with = run_with_workers({llama_program("llama-bench"), "-m", demo_model(), "-p",
                                         "64", "-n", "64", "-r", "8", "-t", "1"},
                                        demo_model());
    EXPECT_EQ(with.outcome.exit_code, 0) << with.outcome.err;
    EXPECT_THAT(with.outcome.out, HasSubstr("tg64"));
    EXPECT_GT(with.pairs, 2 * kChallengePairs) << with.outcome.err;
}

TEST(Plugin, CliGivesTheSameText) {
    const std::vector<std::string> argv = {llama_program("llama-cli"),
                                           "-m",
                                           demo_model(),
                                           "-p",
                                           kQuestions[0],
                                           "-n",
                                           "200",
                                           "--temp",
                                           "0",
                                           "--no-repack",
                                           "-t",
                                           "1",
                                           "-st",
                                           "--simple-io",
                                           "--no-show-timings"};
    const Outcome plain = run_program(argv);
    ASSERT_EQ(plain.exit_code, 0) << plain.err;
    const Alone with = run_with_workers(argv, demo_model());
    ASSERT_EQ(with.outcome.exit_code, 0) << with.outcome.err;
    EXPECT_EQ(with.outcome.out, plain.out);
}

TEST(Plugin, WithoutAModelNameItRunsAlone) {
    ProgramOptions options = with_plugin({""});
    options.environment.push_back("KVASIR_LOG=warn");
    const std::vector<std::string> flags = {"-c", "1024", "-np", "1"};
    LlamaServer server(demo_model(), flags, options);
    EXPECT_EQ(server.chat(kQuestions[0]), LlamaServer(demo_model(), flags).chat(kQuestions[0]));
    EXPECT_THAT(server.log(), HasSubstr("KVASIR_MODEL is not set"));
}

}  // namespace
}  // namespace kvasir::e2e
