#include "apps/run_report.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "apps/console.hpp"

namespace kvasir::apps {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using ::testing::Not;

RunOutcome outcome_with_two_workers() {
    RunOutcome out;
    out.generation.text = "a \"king\"";
    out.generation.tokens = {11, 269, 259};
    out.generation.prompt_tokens = 8;
    out.generation.prompt_time = milliseconds(40);
    out.generation.step_times = {milliseconds(10), milliseconds(30)};
    out.generation.logits_sha256.fill(0xab);
    backbone::Report swarm;
    swarm.pairs_remote = 75;
    swarm.pairs_local = 25;
    swarm.workers.resize(2);
    swarm.workers[0] = {.id = "w0",
                        .build = "kvasir 0.1.0",
                        .computes = "kernels avx2 as x86-v3",
                        .experts_held = 128,
                        .pairs = 50,
                        .bytes_in = 3000,
                        .bytes_out = 1000,
                        .compute_us_p50 = 12.5,
                        .exact = true,
                        .connected = true};
    swarm.workers[1] = swarm.workers[0];
    swarm.workers[1].id = "w\x1b[31m";
    swarm.workers[1].pairs = 25;
    swarm.workers[1].bytes_in = 5000;
    swarm.workers[1].connected = false;
    swarm.overhead_us_p50 = 24;
    swarm.overhead_us_p99 = 80;
    swarm.layers = 16;
    swarm.retries = 2;
    out.swarm = swarm;
    out.bit_exact = true;
    return out;
}

TEST(RunReport, JsonHasTheDocumentedKeys) {
    const auto json = nlohmann::json::parse(to_json(outcome_with_two_workers()));
    EXPECT_EQ(json["text"], "a \"king\"");
    EXPECT_EQ(json["tokens"], (std::vector<int>{11, 269, 259}));
    EXPECT_EQ(json["logits_sha256"].get<std::string>().size(), 64U);
    EXPECT_DOUBLE_EQ(json["prompt_tok_s"], 200);
    EXPECT_DOUBLE_EQ(json["gen_tok_s"], 50);
    EXPECT_DOUBLE_EQ(json["longest_step_us"], 30000);
    EXPECT_EQ(json["pairs_remote"], 75);
    EXPECT_EQ(json["pairs_local"], 25);
    ASSERT_EQ(json["workers"].size(), 2U);
    EXPECT_EQ(json["workers"][0]["id"], "w0");
    EXPECT_EQ(json["workers"][0]["build"], "kvasir 0.1.0");
    EXPECT_EQ(json["workers"][0]["pairs"], 50);
    EXPECT_EQ(json["workers"][0]["bytes_in"], 3000);
    EXPECT_EQ(json["workers"][0]["bytes_out"], 1000);
    EXPECT_DOUBLE_EQ(json["workers"][0]["compute_us_p50"], 12.5);
    EXPECT_EQ(json["workers"][1]["id"], "w?[31m");
    EXPECT_DOUBLE_EQ(json["overhead_us_p50"], 24);
    EXPECT_DOUBLE_EQ(json["overhead_us_p99"], 80);
    EXPECT_DOUBLE_EQ(json["wire_bytes_per_token"], 1000);  // 10,000 bytes, 8 + 2 tokens
    EXPECT_EQ(json["bit_exact"], true);
    EXPECT_EQ(json["answers"], "exact");
}

TEST(RunReport, MonolithicJsonHasTheSameKeysWithoutACheck) {
    RunOutcome out;
    out.generation.tokens = {1};
    const auto json = nlohmann::json::parse(to_json(out));
    EXPECT_EQ(json["mode"], "monolithic");
    EXPECT_TRUE(json["workers"].is_array());
    EXPECT_EQ(json["pairs_remote"], 0);
    EXPECT_DOUBLE_EQ(json["gen_tok_s"], 0);  // one token: no step was timed
    EXPECT_FALSE(json.contains("bit_exact"));
}

TEST(RunReport, TextThatIsNotUtf8StaysValidJson) {
    RunOutcome out;
    out.generation.text = "a\xff\xc3";
    const auto json = nlohmann::json::parse(to_json(out));
    EXPECT_EQ(json["text"], "a\xef\xbf\xbd\xef\xbf\xbd");
}

TEST(RunReport, AnswersAreApproximateWhenAnInexactWorkerComputed) {
    RunOutcome out = outcome_with_two_workers();
    out.swarm->workers[1].exact = false;
    EXPECT_EQ(nlohmann::json::parse(to_json(out))["answers"], "approximate");
    EXPECT_THAT(to_table(out), HasSubstr("approximate"));
    out.swarm->workers[1].pairs = 0;  // it was there but did nothing
    EXPECT_EQ(nlohmann::json::parse(to_json(out))["answers"], "exact");
    out.swarm->exact = false;  // a worker that is gone from the list may have answered
    EXPECT_EQ(nlohmann::json::parse(to_json(out))["answers"], "approximate");
}

TEST(RunReport, TableShowsWhoComputedWhatAndNoEscapes) {
    const std::string table = to_table(outcome_with_two_workers());
    EXPECT_THAT(table, HasSubstr("w0"));
    EXPECT_THAT(table, HasSubstr("50.0%"));
    EXPECT_THAT(table, HasSubstr("backbone"));
    EXPECT_THAT(table, HasSubstr("24 us p50, 80 us p99 over 16 layers, 2 computed again"));
    EXPECT_THAT(table, HasSubstr("1.0 kB per token"));
    EXPECT_THAT(table, HasSubstr("lost"));
    EXPECT_THAT(table, Not(HasSubstr("\x1b")));
}

TEST(Console, TerminalTextKeepsTextAndDropsControls) {
    EXPECT_EQ(terminal_text("a\n\tb\x1b[2J\x07\x7f\r\xc3\xa9"), "a\n\tb[2J\xc3\xa9");
}

TEST(Console, LogLevelsAreAClosedSet) {
    for (const char* level : {"debug", "info", "warn", "error", "off"})
        EXPECT_TRUE(install_log(level));
    const Status wrong = install_log("loud");
    ASSERT_FALSE(wrong);
    EXPECT_EQ(wrong.error().code, Errc::kUsage);
    setenv("KVASIR_LOG", "loud", 1);
    EXPECT_FALSE(install_log(""));
    EXPECT_TRUE(install_log("off"));
    unsetenv("KVASIR_LOG");
    EXPECT_TRUE(install_log(""));
    EXPECT_TRUE(install_log("off"));
}

}  // namespace
}  // namespace kvasir::apps
