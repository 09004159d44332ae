// The real program: flags, exit codes, monolithic runs, the benchmark against llama.cpp RPC.
#include <gmock/gmock.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <csignal>
#include <set>

#include <nlohmann/json.hpp>

#include "net/own_address.hpp"
#include "swarm_testing.hpp"

namespace kvasir::e2e {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using Json = nlohmann::json;

std::vector<std::string> monolithic(std::vector<std::string> more) {
    std::vector<std::string> out = {"run", "-m", demo_model(), "--monolithic"};
    out.insert(out.end(), more.begin(), more.end());
    return out;
}

TEST(Program, VersionAndHelp) {
    const Outcome version = kvasir({"--version"});
    EXPECT_EQ(version.exit_code, 0);
    EXPECT_THAT(version.out, HasSubstr("kvasir "));
    const Outcome help = kvasir({"run", "--help"});
    EXPECT_EQ(help.exit_code, 0);
    for (const char* flag : {"--workers", "--prompt-tokens", "--temp", "--seed", "--threads",
                             "--worker-threads", "--json", "--monolithic", "--listen",
                             "--wait-coverage", "--exact", "--report", "--check"}) {
        EXPECT_THAT(help.out, HasSubstr(flag));
    }
    for (const char* command : {"run", "bench", "inspect", "slice", "verify", "worker", "relay",
                                "market", "up", "plugin-path"}) {
        EXPECT_THAT(kvasir({command, "--help"}).out, HasSubstr("--log-level")) << command;
    }
    // What its certificate can be believed by: no client has an option to pin a relay's key.
    EXPECT_THAT(kvasir({"relay", "--help"}).out, HasSubstr("dev-cert.pem"));
}

// How to call it is said at once: nothing is looked for, fetched or built.
TEST(Program, TheBenchmarksSayHowTheyAreCalledWithoutABuild) {
    ProgramOptions options;
    options.environment = {"KVASIR_CACHE=/dev/null/none"};
    const Outcome help = run_program({KVASIR_SOURCE_DIR "/run", "bench", "--help"}, options);
    EXPECT_EQ(help.exit_code, 0) << help.err;
    EXPECT_THAT(help.out, StartsWith("usage: ./run bench"));
    EXPECT_EQ(help.err, "");
}

// What a program says to people may have no reader any more: a full disk, a closed pipe.
TEST(Program, GoesOnWhenNobodyReadsItsErrors) {
    const auto through_shell = [](const std::string& arguments, const std::string& where) {
        return Program({"/bin/sh", "-c", "exec " KVASIR_PROGRAM " " + arguments + " " + where});
    };
    for (const char* where : {"2>/dev/full", "2>&-"}) {
        SCOPED_TRACE(where);
        EXPECT_EQ(through_shell("inspect /nonexistent", where).wait().exit_code, 4);
        EXPECT_EQ(through_shell("inspect --frobnicate", where).wait().exit_code, 2);
        const ScratchFolder scratch;
        Program market = through_shell("market -m " + demo_model() +
                                           " --plain --listen 127.0.0.1:0"
                                           " --state " +
                                           scratch.path("state") +
                                           " --print-invite worker --print-invite backbone",
                                       where);
        ASSERT_TRUE(market.wait_for("invite backbone: "));
        const std::string join = "--join " + market.word_after("market: ") + " --invite ";
        Program worker = through_shell("worker " + join + market.word_after("invite worker: ") +
                                           " --budget 12M --cache " + scratch.path("cache"),
                                       where);
        const Outcome text =
            through_shell("run -m " + demo_model() + " --prompt-tokens 3,5 -n 4 " + join +
                              market.word_after("invite backbone: ") +
                              " --wait-coverage 20% --state " + scratch.path("run"),
                          where)
                .wait();
        EXPECT_EQ(text.exit_code, 0);
        EXPECT_FALSE(text.out.empty());
        EXPECT_TRUE(worker.running());
        for (Program* program : {&worker, &market}) {
            program->signal(SIGTERM);
            EXPECT_EQ(program->wait().exit_code, 0);
        }
    }
}

TEST(Program, ExitCodesDifferByKindOfError) {
    const std::string model = demo_model();
    const struct {
        std::vector<std::string> arguments;
        int exit_code;
        const char* says;
    } cases[] = {
        {{}, 2, "subcommand"},
        {{"frobnicate"}, 2, "'frobnicate' is not a subcommand"},
        {{"run"}, 2, "--model"},
        {{"run", "-m", model, "--monolithic"}, 2, "--prompt-tokens"},
        {monolithic({"-p", "x", "--prompt-tokens", "3"}), 2, "exclude"},
        {monolithic({"-p", "x", "--workers", "2"}), 2, "exclude"},
        {monolithic({"-p", "x", "--nonsense"}), 2, "--nonsense"},
        {monolithic({"-p", "x", "--threads", "0"}), 2, "--threads"},
        {monolithic({"-p", "x", "--temp", "-1"}), 2, "--temp"},
        {monolithic({"-p", "x", "-n", "0"}), 2, "at least 1"},
        {monolithic({"-p", "x", "-n", "5000"}), 2, "--ctx"},
        {monolithic({"-p", ""}), 2, "empty"},
        {monolithic({"--prompt-tokens", "3,x"}), 2, "item 2"},
        {monolithic({"--prompt-tokens", "3,4096"}), 2, "from 0 to 4095"},
        {monolithic({"--prompt-tokens", "3", "--seed", "4294967295"}), 2, "seed"},
        {{"run", "-m", model, "-p", "x", "--wait-coverage", "50%"}, 2, "--listen"},
        {{"run", "-m", model, "-p", "x", "--exact", "nearly"}, 2, "--exact"},
        {{"--log-level", "loud", "run", "-m", model, "-p", "x"}, 2, "log level"},
        {{"run", "-m", "/no/such/model.gguf", "--monolithic", "-p", "x"}, 4, "/no/such/model.gguf"},
        {{"run", "-m", KVASIR_SOURCE_DIR "/CMakeLists.txt", "--monolithic", "-p", "x"},
         3,
         "CMakeLists.txt"},
        {{"bench", "-m", model, "--skip-swarm"}, 2, "--rpc-server"},
        {{"bench", "-m", model, "--skip-swarm", "--rpc-server", "/no/such/program"},
         4,
         "/no/such/program"},
    };
    for (const auto& c : cases) {
        const Outcome outcome = kvasir(c.arguments);
        EXPECT_EQ(outcome.exit_code, c.exit_code) << outcome.err;
        EXPECT_THAT(outcome.err, HasSubstr(c.says));
        EXPECT_EQ(outcome.out, "");
    }
}

TEST(Program, MonolithicJsonRepeatsAndAgreesWithTheStreamedText) {
    const std::vector<std::string> flags = {"-p",  "Once upon a time", "-n", "16", "--temp",
                                            "0.7", "--seed",           "5"};
    std::vector<std::string> with_json = flags;
    with_json.push_back("--json");
    const Outcome first = kvasir(monolithic(with_json));
    const Outcome second = kvasir(monolithic(with_json));
    ASSERT_EQ(first.exit_code, 0) << first.err;
    const Json a = Json::parse(first.out);
    const Json b = Json::parse(second.out);
    for (const char* key : {"text", "tokens", "logits_sha256"}) EXPECT_EQ(a[key], b[key]) << key;
    EXPECT_EQ(a["tokens"].size(), 16U);
    EXPECT_GT(a["gen_tok_s"].get<double>(), 0);
    EXPECT_EQ(a["pairs_remote"], 0);
    const Outcome plain = kvasir(monolithic(flags));
    EXPECT_EQ(plain.out, a["text"].get<std::string>() + "\n");
    EXPECT_EQ(plain.err, "");
}

TEST(Program, PromptAsTextAndAsTokensAreTheSame) {
    // Token 11 of the demo model is the comma.
    const Json text = Json::parse(kvasir(monolithic({"-p", ",", "-n", "3", "--json"})).out);
    const Json tokens =
        Json::parse(kvasir(monolithic({"--prompt-tokens", "11", "-n", "3", "--json"})).out);
    EXPECT_EQ(text["prompt_tokens"], 1);
    EXPECT_EQ(text["logits_sha256"], tokens["logits_sha256"]);
    EXPECT_EQ(text["text"], tokens["text"]);
}

TEST(Program, ReportAndEcho) {
    const Outcome outcome = kvasir(monolithic({"-p", "The fox", "-n", "4", "--report", "--echo"}));
    EXPECT_EQ(outcome.exit_code, 0);
    EXPECT_EQ(outcome.out.rfind("The fox", 0), 0U);
    EXPECT_THAT(outcome.out, HasSubstr("generated: 4 tokens"));
}

TEST(Program, ThePluginVariableDoesNotReachTheReference) {
    ProgramOptions options;
    options.environment = {"GGML_BACKEND_PATH=/no/such/libggml-kvasir.so"};
    const std::vector<std::string> flags = monolithic({"-p", "The fox", "-n", "4", "--json"});
    const Outcome with = kvasir(flags, options);
    ASSERT_EQ(with.exit_code, 0) << with.err;
    EXPECT_EQ(Json::parse(with.out)["logits_sha256"],
              Json::parse(kvasir(flags).out)["logits_sha256"]);
}

TEST(Program, LogGoesToStderrAtTheChosenLevel) {
    ProgramOptions options;
    options.environment = {"KVASIR_LOG=debug"};
    const Outcome loud = kvasir(monolithic({"-p", "The fox", "-n", "2", "--json"}), options);
    EXPECT_THAT(loud.err, HasSubstr("debug llama:"));
    EXPECT_TRUE(Json::accept(loud.out));
    const Outcome flag_wins =
        kvasir(monolithic({"-p", "The fox", "-n", "2", "--json", "--log-level", "error"}), options);
    EXPECT_THAT(flag_wins.err, Not(HasSubstr("debug")));
}

TEST(Program, AFullDiskUnderStdoutIsAnError) {
    ProgramOptions options;
    options.stdout_path = "/dev/full";
    for (const std::vector<std::string>& arguments :
         {monolithic({"-p", "The fox", "-n", "2"}), {"inspect", demo_model()}, {"plugin-path"}}) {
        const Outcome outcome = kvasir(arguments, options);
        EXPECT_EQ(outcome.exit_code, 4) << arguments[0];
        EXPECT_THAT(outcome.err, HasSubstr("standard output")) << arguments[0];
    }
}

TEST(Program, SwarmRunIsCheckedAgainstLlama) {
    const Outcome outcome = kvasir({"run", "-m", demo_model(), "--workers", "2", "-p", "The fox",
                                    "-n", "8", "--check", "--json"});
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    const Json json = Json::parse(outcome.out);
    EXPECT_EQ(json["bit_exact"], true);
    EXPECT_EQ(json["workers"].size(), 2U);
    EXPECT_GT(json["pairs_remote"].get<uint64_t>(), 0U);
    const Outcome plain = kvasir(monolithic({"-p", "The fox", "-n", "8", "--json"}));
    EXPECT_EQ(json["logits_sha256"], Json::parse(plain.out)["logits_sha256"]);
}

// As others dial it; its own workers dial it on this machine.
TEST(Program, WhatListensEverywhereNamesTheMachinesAddress) {
    const auto own = net::own_addresses().v4;
    const Outcome run = kvasir({"run", "-m", demo_model(), "--listen", "0.0.0.0:0", "--workers",
                                "2", "--prompt-tokens", "1,2,3", "-n", "2", "--ignore-eos"});
    EXPECT_EQ(run.exit_code, 0) << run.err;
    EXPECT_THAT(run.err, HasSubstr("listening on ws://" + own.value_or("THIS-MACHINE") + ":"));
    EXPECT_THAT(run.err, HasSubstr("below"));
}

// The kernels and ggml's graphs compute the same bits, on the backbone and on workers.
TEST(Program, KernelsOffGivesTheSameBits) {
    const std::vector<std::string> flags = {"run", "-m", demo_model(), "-p",          "The fox",
                                            "-n",  "8",  "--check",    "--log-level", "debug"};
    std::set<std::string> logits;
    for (const char* kernels : {"on", "off"}) {
        SCOPED_TRACE(kernels);
        const bool on = std::string(kernels) == "on";
        for (const char* workers : {"0", "1"}) {
            SCOPED_TRACE(workers);
            auto arguments = flags;
            arguments.insert(arguments.end(),
                             {"--json", "--workers", workers, "--kernels", kernels});
            const Outcome outcome = kvasir(arguments);
            ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
            const Json json = Json::parse(outcome.out);
            EXPECT_EQ(json["bit_exact"], true);
            logits.insert(json["logits_sha256"]);
            if (*workers == '0') {
                EXPECT_GT(json["pairs_local"].get<uint64_t>(), 0U);
                EXPECT_EQ(outcome.err.find("computed locally: layer ") == std::string::npos, on);
                continue;
            }
            EXPECT_GT(json["pairs_remote"].get<uint64_t>(), 0U);
            EXPECT_THAT(json["workers"][0]["computes"].get<std::string>(),
                        StartsWith(on ? "kernels " : "ggml: kernels are off"));
        }
    }
    EXPECT_EQ(logits.size(), 1U);
}

TEST(Program, BenchMeasuresTheKernelsBesideTheGraph) {
    std::vector<std::string> flags = {"bench",          "-m",      demo_model(), "--workers", "0",
                                      "--beside-graph", "--pairs", "2",          "-n",        "4",
                                      "--prompt",       "8"};
    const Outcome table = kvasir(flags);
    ASSERT_EQ(table.exit_code, 0) << table.err;
    EXPECT_THAT(table.out, HasSubstr("; as ggml's graph "));
    flags.push_back("--json");
    const Outcome outcome = kvasir(flags);
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    const Json json = Json::parse(outcome.out);
    EXPECT_EQ(json["bit_exact"], true);
    EXPECT_EQ(json["graph_bit_exact"], true);
    for (const char* key : {"graph_tok_s", "experts_ms_per_token", "graph_experts_ms_per_token",
                            "experts_speedup", "pairs_local"}) {
        EXPECT_GT(json[key].get<double>(), 0) << key;
    }
    EXPECT_EQ(json["rounds"].size(), 2U);
    EXPECT_GT(json["rounds"][1]["graph_tok_s"].get<double>(), 0);
}

TEST(Program, BenchComparesTheSwarmAndFailsBelowTheWantedEfficiency) {
    const std::vector<std::string> flags = {"bench", "-m",       demo_model(), "--workers",
                                            "1",     "--pairs",  "1",          "-n",
                                            "4",     "--prompt", "8",          "--json"};
    const Outcome outcome = kvasir(flags);
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    const Json json = Json::parse(outcome.out);
    EXPECT_EQ(json["bit_exact"], true);
    for (const char* key : {"efficiency", "prefill_efficiency", "overhead_us_p50",
                            "overhead_us_p99", "mono_tok_s", "swarm_tok_s"}) {
        EXPECT_GT(json[key].get<double>(), 0) << key;
    }
    std::vector<std::string> demanding = flags;
    demanding.insert(demanding.end(), {"--min-efficiency", "100"});
    const Outcome slow = kvasir(demanding);
    EXPECT_EQ(slow.exit_code, 1);
    EXPECT_THAT(slow.err, HasSubstr("--min-efficiency"));
}

#ifdef KVASIR_RPC_SERVER
TEST(Program, BenchMeasuresLlamaRpcWithTheSameBits) {
    const Outcome outcome =
        kvasir({"bench", "-m", demo_model(), "--skip-swarm", "--rpc-server", KVASIR_RPC_SERVER,
                "--pairs", "2", "-n", "4", "--prompt", "8", "--json"});
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    const Json json = Json::parse(outcome.out);
    EXPECT_EQ(json["bit_exact"], true);
    EXPECT_EQ(json["rpc_bit_exact"], true);
    EXPECT_GT(json["mono_tok_s"].get<double>(), 0);
    EXPECT_GT(json["rpc_tok_s"].get<double>(), 0);
    EXPECT_GT(json["rpc_efficiency"].get<double>(), 0);
    EXPECT_EQ(json["rounds"].size(), 2U);
    EXPECT_FALSE(json["machine"]["cpu"].get<std::string>().empty());
}
#endif

// Whatever else a test looks at: a program that a sanitizer ended fails it.
TEST(Program, AFindingOfASanitizerIsAFailure) {
    for (const char* line : {"==1==ERROR: AddressSanitizer: heap-use-after-free on address 0x1",
                             "x.cpp:1:2: runtime error: signed integer overflow"}) {
        EXPECT_NONFATAL_FAILURE(run_program({"/bin/sh", "-c", "echo \"$0\" >&2", line}),
                                "a sanitizer's finding: " + std::string(line));
    }
    run_program({"/bin/sh", "-c", "echo 'kvasir: error: no such file' >&2"});
}

}  // namespace
}  // namespace kvasir::e2e
