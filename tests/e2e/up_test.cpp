// `kvasir up` with itself as the backbone: prompts from its input, and how much of the model others
// must hold before it answers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "net/own_address.hpp"
#include "network_testing.hpp"

namespace kvasir::e2e {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

Program start_up(const std::string& state, const std::vector<std::string>& more,
                 const std::string& listen = "127.0.0.1:0") {
    std::vector<std::string> argv = {KVASIR_PROGRAM, "up",          "-m",        demo_model(),
                                     "--listen",     listen,        "--dev-tls", "--state",
                                     state,          "--log-level", "debug"};
    argv.insert(argv.end(), more.begin(), more.end());
    ProgramOptions options;
    options.stdin_pipe = true;
    Program up(argv, options);
    EXPECT_TRUE(up.wait_for("join: kvasir worker --join ")) << up.err();
    return up;
}

Program join(const Program& up, const ScratchFolder& scratch, const std::string& name,
             const std::string& budget) {
    return join_worker(up.word_after("--join "), up.word_after("--invite "), name,
                       scratch.path(name), {.budget = budget, .more = {}});
}

// The JSON values that stand one after the other; null if something else does.
std::vector<Json> values_of(const std::string& text) {
    std::istringstream in(text);
    std::vector<Json> out;
    for (std::string line; std::getline(in, line);) {
        EXPECT_TRUE(Json::accept(line)) << line;
        out.push_back(Json::parse(line, nullptr, false));
    }
    return out;
}

// Of the 256 experts the first worker has room for fewer than half, both together for more than
// half and not for all.
TEST(Up, AnswersOnceTheShareIsHeld) {
    const ScratchFolder scratch;
    Program up = start_up(scratch.path("state"), {"--min-coverage", "50%", "-p", "Once upon a time",
                                                  "-n", "16", "--json"});
    ASSERT_TRUE(up.wait_for("waiting for 50 %")) << up.err();
    Program first = join(up, scratch, "first", "6M");
    ASSERT_TRUE(first.wait_for("joined 127.0.0.1 with")) << first.err();
    Operator desk(up.word_after("--join "), scratch.path("state"));
    const uint64_t held = desk.get("/api/v1/coverage")["experts_serving"];
    EXPECT_GT(held, 60u);
    EXPECT_LT(held, 128u);
    // What it waits for is told anew, with a third of the model there: nothing was said yet.
    EXPECT_TRUE(up.wait_for("waiting for 50 %", 2)) << up.err();
    EXPECT_THAT(up.err(), Not(HasSubstr("debug text: ")));
    Program second = join(up, scratch, "second", "4M");
    const Json json = report_of(up);
    ASSERT_FALSE(json.is_null()) << second.err();
    EXPECT_EQ(json["logits_sha256"],
              reference_digest(demo_model(), {"-p", "Once upon a time", "-n", "16"}));
    EXPECT_GT(pairs_of(json, "first"), 0u);
    EXPECT_GT(pairs_of(json, "second"), 0u);
    EXPECT_GT(json["pairs_local"], 0) << "all was held: 50 % was not what it began with";
}

std::set<std::string> keys_of(const Json& object) {
    std::set<std::string> keys;
    for (const auto& [key, value] : object.items()) keys.insert(key);
    return keys;
}

// A program that reads the one can read the other.
TEST(Up, ItsReportHasTheFieldsOfARun) {
    const ScratchFolder scratch;
    Program up = start_up(scratch.path("state"),
                          {"--min-coverage", "10%", "-p", "Once upon a time", "-n", "2", "--json"});
    Program worker = join(up, scratch, "w", "6M");
    const Json json = report_of(up);
    ASSERT_FALSE(json.is_null()) << worker.err();
    const Json run = run_json(
        {"run", "-m", demo_model(), "--workers", "1", "-p", "Once upon a time", "-n", "2"});
    ASSERT_FALSE(run.is_null());
    EXPECT_EQ(keys_of(json), keys_of(run));
    EXPECT_TRUE(json.contains("logits_sha256"));
    ASSERT_EQ(json["workers"].size(), 1u);
    ASSERT_EQ(run["workers"].size(), 1u);
    EXPECT_EQ(keys_of(json["workers"][0]), keys_of(run["workers"][0]));
    EXPECT_TRUE(json["workers"][0].contains("pairs"));
}

// Without a word about TLS, which restarts and --dev-tls go on with.
TEST(Up, ItsPortIsNeverOpenByOmission) {
    const ScratchFolder scratch;
    const std::vector<std::string> start = {
        KVASIR_PROGRAM, "up",          "-m",      demo_model(),
        "--listen",     "127.0.0.1:0", "--state", scratch.path("state")};
    ProgramOptions options;
    options.stdin_pipe = true;
    std::string invite;
    {
        Program up(start, options);
        ASSERT_TRUE(up.wait_for("join: kvasir worker --join https://")) << up.err();
        EXPECT_THAT(up.err(), HasSubstr("--tls-cert"));
        invite = up.word_after("--invite ");
        Program worker = join(up, scratch, "w", "6M");
        EXPECT_TRUE(worker.wait_for("worker: serving ")) << worker.err();
    }
    Program again = start_up(scratch.path("state"), {});
    EXPECT_THAT(again.err(), Not(HasSubstr("--tls-cert")));
    Program other = join_worker(again.word_after("--join "), invite, "other", scratch.path("other"),
                                {.budget = "6M", .more = {}});
    EXPECT_TRUE(other.wait_for("worker: serving ")) << other.err();
}

// The line that it prints when it listens on all addresses, pasted as it is.
TEST(Up, TheLineCanBePasted) {
    const ScratchFolder scratch;
    Program up = start_up(scratch.path("state"), {"-n", "8"}, "0.0.0.0:0");
    const std::string url = up.word_after("--join ");
    EXPECT_THAT(up.err(), HasSubstr("--public-url https://NAME:PORT"));
    const auto own = net::own_addresses().v4;
    if (!own) {  // no way out of this machine: nobody could dial it
        EXPECT_THAT(url, HasSubstr("https://THIS-MACHINE:"));
        return;
    }
    EXPECT_THAT(url, HasSubstr("https://" + *own + ":"));
    Program worker = join(up, scratch, "w", "6M");
    EXPECT_TRUE(worker.wait_for("joined " + *own + " with")) << worker.err();
}

// The same line, of a market that prints an invite.
TEST(Up, TheMarketsLineCanBePasted) {
    const ScratchFolder scratch;
    MarketProgram market(demo_model(), scratch.path("state"));
    const std::string out = market.program().out();
    const std::string start = "join: kvasir worker ";
    EXPECT_EQ(count_of(out, start), 1u) << "a backbone's invite starts no worker";
    const size_t at = out.find(start);
    ASSERT_NE(at, out.npos) << out;
    std::istringstream line(out.substr(at + start.size(), out.find('\n', at) - at - start.size()));
    std::vector<std::string> pasted = {KVASIR_PROGRAM, "worker"};
    for (std::string word; line >> word;) pasted.push_back(word);
    EXPECT_THAT(pasted, Contains(market.url()));
    EXPECT_THAT(pasted, Contains(market.worker_invite()));
    pasted.insert(pasted.end(), {"--cache", scratch.path("w")});
    Program worker(pasted);
    EXPECT_TRUE(worker.wait_for("worker: serving ")) << worker.err();

    const MarketProgram named(demo_model(), scratch.path("named"), "127.0.0.1:0",
                              {"--public-url", "https://swarm.example:9"});
    EXPECT_THAT(named.program().out(), HasSubstr(start + "--join https://swarm.example:9 "));
}

TEST(Up, TheMarketsDatabaseLiesWhereItIsTold) {
    const ScratchFolder scratch;
    const std::string state = scratch.path("state"), db = scratch.path("elsewhere.sqlite");
    const MarketProgram market(demo_model(), state, "127.0.0.1:0", {"--db", db});
    std::ifstream file(db, std::ios::binary);
    std::string begin(15, ' ');
    file.read(begin.data(), static_cast<std::streamsize>(begin.size()));
    EXPECT_EQ(begin, "SQLite format 3");
    EXPECT_TRUE(std::filesystem::exists(state + "/market.key"));
    EXPECT_FALSE(std::filesystem::exists(state + "/market.db"));
}

// Refused by its length, before it takes room that others need; with and without a relay.
TEST(Up, NoBodyIsReadThatTheMarketWouldNotLookAt) {
    const ScratchFolder scratch;
    for (const bool has_relay : {true, false}) {
        const std::string state = scratch.path(has_relay ? "with" : "without");
        std::vector<std::string> more;
        if (!has_relay) more = {"--relay-url", "wss://relay.example:443"};
        const MarketProgram market(demo_model(), state, "127.0.0.1:0", more);
        net::ClientTrust trust;
        trust.ca_file = state + "/dev-cert.pem";
        const auto client = net::HttpClient::make(trust);
        ASSERT_TRUE(client) << client.error().detail;
        net::HttpCall call;
        call.method = "POST";
        call.url = market.url() + "/api/v1/leases";
        call.body = std::string((512 << 10) + 1, ' ');
        const auto long_one = (*client)->call(call);
        ASSERT_TRUE(long_one) << long_one.error().detail;
        EXPECT_EQ(long_one->status, 413);
        EXPECT_THAT(long_one->body, HasSubstr("the request body is too long"));
        EXPECT_EQ(Json::parse(long_one->body)["error"]["code"], "limit");
        call.body.pop_back();
        const auto longest = (*client)->call(call);
        ASSERT_TRUE(longest) << longest.error().detail;
        EXPECT_EQ(longest->status, 403);
    }
}

TEST(Up, PromptsComeFromItsInput) {
    const ScratchFolder scratch;
    Program up = start_up(scratch.path("state"),
                          {"--min-coverage", "40%", "--ctx", "64", "-n", "8", "--json"});
    // Typed while it still waits: kept until somebody may answer.
    up.type("Once upon a time\n");
    ASSERT_TRUE(up.wait_for("waiting for 40 %")) << up.err();
    EXPECT_EQ(up.out(), "");
    Program worker = join(up, scratch, "w", "9M");
    ASSERT_TRUE(up.wait_for("logits_sha256")) << up.err() << worker.err();
    // An empty line is none; what goes wrong with one is told, and the next is taken. The last one
    // needs no end of the line.
    std::string longer;
    for (int i = 0; i < 100; ++i) longer += "word ";
    up.type("\n" + longer + "\nThe king");
    ASSERT_TRUE(up.wait_for("larger context with --ctx")) << up.err();
    EXPECT_TRUE(up.running());
    up.end_input();
    const Outcome ended = up.wait();
    EXPECT_EQ(ended.exit_code, 0) << ended.err;
    EXPECT_THAT(ended.err, HasSubstr("up: the input has ended"));
    EXPECT_THAT(ended.err, HasSubstr("event=drain nodes="));
    const auto answers = values_of(ended.out);
    ASSERT_EQ(answers.size(), 2u) << ended.out;
    const char* prompts[] = {"Once upon a time", "The king"};
    for (size_t i = 0; i < 2; ++i) {
        EXPECT_EQ(answers[i]["logits_sha256"],
                  reference_digest(demo_model(), {"-p", prompts[i], "-n", "8", "--ctx", "64"}));
        EXPECT_GT(pairs_of(answers[i], "w"), 0u) << prompts[i];
        EXPECT_EQ(answers[i]["answers"], "exact");
    }
    EXPECT_TRUE(worker.running()) << worker.err();
}

// Without --json what comes out is the text alone; nobody needs to be there without --min-coverage.
TEST(Up, TextAsPeopleReadIt) {
    const ScratchFolder scratch;
    Program up = start_up(scratch.path("state"), {"-n", "8"});
    up.type("Once upon a time\n");
    const Outcome alone =
        kvasir({"run", "-m", demo_model(), "--monolithic", "-p", "Once upon a time", "-n", "8"});
    ASSERT_EQ(alone.exit_code, 0);
    EXPECT_TRUE(eventually([&] { return up.out() == alone.out; })) << up.out() << up.err();
    up.type("Once upon a time\n");
    EXPECT_TRUE(eventually([&] { return up.out() == alone.out + alone.out; })) << up.out();
    up.signal(SIGTERM);
    EXPECT_EQ(up.wait(30).exit_code, 0) << up.err();
    EXPECT_THAT(up.err(), Not(HasSubstr("next try"))) << "it knows that its relay ends";
}

// What is missing is told before anybody could join, and before the model is read.
TEST(Up, AnApiWithoutItsServerMakesNothing) {
    namespace fs = std::filesystem;
    const ScratchFolder scratch;
    // It looks beside ggml's library: a folder where that is alone, and a PATH without any program.
    const std::string folder = scratch.path("lib");
    fs::create_directory(folder);
    fs::copy_file(fs::canonical(KVASIR_LLAMA_LIB "/libggml.so.0"), folder + "/libggml.so.0");
    fs::copy_file(demo_model(), scratch.path("model.gguf"));
    const std::vector<std::string> start = {"up",
                                            "-m",
                                            scratch.path("model.gguf"),
                                            "--state",
                                            scratch.path("state"),
                                            "--api",
                                            "127.0.0.1:0",
                                            "--listen",
                                            "127.0.0.1:0"};
    const std::string cache = scratch.path("cache");
    const ProgramOptions alone{
        {"LD_LIBRARY_PATH=" + folder, "PATH=" + folder, "XDG_CACHE_HOME=" + cache}, {}, 60};
    const Outcome none = kvasir(start, alone);
    EXPECT_EQ(none.exit_code, 4);
    EXPECT_THAT(none.err, HasSubstr("no llama-server is in " + fs::canonical(folder).string()));
    EXPECT_THAT(none.err, HasSubstr("tools/llama.sh build extra"));
    EXPECT_THAT(none.err, HasSubstr("KVASIR_CACHE"));
    auto named = start;
    named.insert(named.end(), {"--llama-server", scratch.path("no-server")});
    const Outcome wrong = kvasir(named, alone);
    EXPECT_EQ(wrong.exit_code, 4);
    EXPECT_THAT(wrong.err, HasSubstr(scratch.path("no-server")));
    for (const Outcome* outcome : {&none, &wrong}) {
        EXPECT_THAT(outcome->err, Not(HasSubstr("join: ")));
        EXPECT_THAT(outcome->err, Not(HasSubstr("hashing")));
    }
    EXPECT_FALSE(fs::exists(scratch.path("state")));
    EXPECT_FALSE(fs::exists(cache));
}

TEST(Up, OneWayOfTlsOnly) {
    const ScratchFolder scratch;
    const Outcome outcome = kvasir(
        {"up", "-m", demo_model(), "--plain", "--dev-tls", "--state", scratch.path("state")});
    EXPECT_EQ(outcome.exit_code, 2);
    EXPECT_THAT(outcome.err, HasSubstr("choose one of"));
}

TEST(Up, SharesThatAreNone) {
    for (const char* share : {"101%", "-1%", "half", "%"}) {
        const Outcome outcome =
            kvasir({"up", "-m", demo_model(), "--plain", "--min-coverage", share});
        EXPECT_EQ(outcome.exit_code, 2) << share;
        EXPECT_THAT(outcome.err, HasSubstr("share")) << share;
    }
}

}  // namespace
}  // namespace kvasir::e2e
