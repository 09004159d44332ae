// Against the demo model of the repository, on the CPU.
#include "generate/session.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "crypto/hash.hpp"
#include "generate/backends.hpp"

namespace kvasir::generate {
namespace {

const std::string kModel = std::string(KVASIR_SOURCE_DIR) + "/models/skald-q4_k_m.gguf";
constexpr const char* kPrompt = "Once upon a time there was a king who";

class SessionTest : public ::testing::Test {
protected:
    static void SetUpTestSuite() {
        const Status loaded = load_backends();
        ASSERT_TRUE(loaded) << loaded.error().detail;
    }
    static Session open(SessionOptions options = {}) {
        options.model_path = kModel;
        auto session = Session::open(std::move(options));
        EXPECT_TRUE(session) << session.error().detail;
        return std::move(*session);
    }
    static Generation run(Session& session, const Request& request) {
        auto out = session.generate(request);
        EXPECT_TRUE(out) << out.error().detail;
        return out ? std::move(*out) : Generation{};
    }
    static Request story(uint32_t count = 12) {
        Request request;
        request.prompt = kPrompt;
        request.tokens_max = count;
        return request;
    }
    static void expect_same(const Generation& a, const Generation& b) {
        EXPECT_EQ(a.text, b.text);
        EXPECT_EQ(a.tokens, b.tokens);
        EXPECT_EQ(to_hex(a.logits_sha256), to_hex(b.logits_sha256));
    }
};

TEST_F(SessionTest, GreedyRunsRepeatInOneSessionAndInAnother) {
    Session first = open();
    const Generation a = run(first, story());
    Request other = story(5);
    other.prompt = "The fox said";
    EXPECT_NE(to_hex(run(first, other).logits_sha256), to_hex(a.logits_sha256));
    const Generation b = run(first, story());
    Session second = open();
    const Generation c = run(second, story());
    expect_same(a, b);
    expect_same(a, c);
    EXPECT_EQ(a.tokens.size(), 12U);
    EXPECT_EQ(a.step_times.size(), 11U);
    EXPECT_GT(a.gen_tok_s(), 0);
    EXPECT_GT(a.prompt_tok_s(), 0);
    EXPECT_GE(a.longest_step(), a.step_times.front());
    EXPECT_FALSE(a.text.empty());
}

TEST_F(SessionTest, SeededRunsRepeatAndSeedsDiffer) {
    Session session = open();
    Request request = story(24);
    request.temperature = 0.9F;
    request.seed = 7;
    const Generation a = run(session, request);
    expect_same(a, run(session, request));
    request.seed = 8;
    EXPECT_NE(run(session, request).tokens, a.tokens);
}

TEST_F(SessionTest, TwoThreadsRepeat) {
    SessionOptions options;
    options.threads = 2;
    Session session = open(options);
    const Generation a = run(session, story(3));
    expect_same(a, run(session, story(3)));
}

TEST_F(SessionTest, HashCoversEveryRowThatATokenWasChosenFrom) {
    Session session = open();
    Request request = story(6);
    request.keep_logits = true;
    const Generation out = run(session, request);
    ASSERT_EQ(out.logits.size(), out.tokens.size());
    crypto::Hasher hasher;
    for (size_t i = 0; i < out.logits.size(); ++i) {
        const std::vector<float>& row = out.logits[i];
        ASSERT_EQ(row.size(), session.vocabulary());
        EXPECT_EQ(std::max_element(row.begin(), row.end()) - row.begin(), out.tokens[i]);
        hasher.update({reinterpret_cast<const uint8_t*>(row.data()), row.size() * sizeof(float)});
    }
    EXPECT_EQ(to_hex(hasher.finish()), to_hex(out.logits_sha256));
}

TEST_F(SessionTest, TeacherForcingReplaysARun) {
    Session session = open();
    const Generation free_run = run(session, story());
    Request replay;
    const auto prompt = session.tokenize(kPrompt);
    ASSERT_TRUE(prompt);
    replay.prompt_tokens = *prompt;
    replay.forced = free_run.tokens;
    expect_same(free_run, run(session, replay));
}

TEST_F(SessionTest, PromptGoesInBatchesAndStreamsWholeText) {
    SessionOptions options;
    options.batch_tokens = 4;  // the prompt takes several
    Session session = open(options);
    Request request = story();
    std::string streamed;
    int prompts_done = 0;
    request.on_text = [&](std::string_view text) {
        EXPECT_EQ(prompts_done, 1);
        streamed += text;
    };
    request.on_prompt_done = [&] { ++prompts_done; };
    const Generation out = run(session, request);
    EXPECT_GT(out.prompt_tokens, 4U);
    EXPECT_EQ(streamed, out.text);
    expect_same(out, run(session, story()));
}

TEST_F(SessionTest, ATextCanBeBrokenOff) {
    Session session = open();
    Request request = story();
    std::string streamed;
    request.on_text = [&](std::string_view text) { streamed += text; };
    int asked = 0;
    request.is_cancelled = [&] { return ++asked > 3; };
    const auto out = session.generate(request);
    ASSERT_FALSE(out);
    EXPECT_EQ(out.error().code, Errc::kClosed);
    EXPECT_EQ(asked, 4);
    Request whole = story();
    const Generation after = run(session, whole);
    EXPECT_EQ(after.text.substr(0, streamed.size()), streamed);
    EXPECT_GT(after.text.size(), streamed.size());
}

TEST_F(SessionTest, StopsAtAnEndTokenOnlyWhenAsked) {
    Session session = open();
    Request request;
    request.prompt = "and they all lived happily ever after.";  // the model ends the text here
    request.tokens_max = 8;
    const Generation stopped = run(session, request);
    ASSERT_TRUE(stopped.stopped_at_end);
    ASSERT_LT(stopped.tokens.size(), 8U);
    request.stop_at_end = false;
    const Generation on = run(session, request);
    EXPECT_FALSE(on.stopped_at_end);
    ASSERT_EQ(on.tokens.size(), 8U);
    EXPECT_EQ(on.tokens[stopped.tokens.size() - 1], stopped.tokens.back());
}

TEST_F(SessionTest, RepackedAndPlainAreDifferentSettings) {
    // Not that the bits differ (that depends on the machine), but that both run.
    SessionOptions options;
    options.repack = true;
    options.mmap = false;
    Session session = open(options);
    EXPECT_EQ(run(session, story(3)).tokens.size(), 3U);
}

TEST_F(SessionTest, BadRequestsAreUsageErrorsAndTheSessionLives) {
    Session session = open();
    struct Case {
        const char* says;
        Request request;
    };
    std::vector<Case> cases;
    cases.push_back({"empty", Request{}});
    Request request = story();
    request.prompt_tokens = {1};
    cases.push_back({"not both", request});
    request = story(0);
    cases.push_back({"at least 1", request});
    request = story();
    request.temperature = -1;
    cases.push_back({"temperature", request});
    request = story();
    request.seed = 0xffffffffU;
    cases.push_back({"seed", request});
    request = story(100000);
    cases.push_back({"trained for 1024", request});
    for (const Token token : {-1, static_cast<Token>(session.vocabulary()), 2147483647}) {
        request = Request{};
        request.prompt_tokens = {3, token};
        cases.push_back({"prompt token number 2", request});
        request.prompt_tokens = {3};
        request.forced = {5, token};
        cases.push_back({"forced token number 2", request});
    }
    for (const Case& c : cases) {
        const auto out = session.generate(c.request);
        ASSERT_FALSE(out) << c.says;
        EXPECT_EQ(out.error().code, Errc::kUsage) << out.error().detail;
        EXPECT_NE(out.error().detail.find(c.says), std::string::npos) << out.error().detail;
    }
    EXPECT_EQ(run(session, story(2)).tokens.size(), 2U);
}

TEST_F(SessionTest, ExplicitContextIsALimit) {
    SessionOptions options;
    options.context_tokens = 16;
    Session session = open(options);
    EXPECT_EQ(run(session, story(2)).tokens.size(), 2U);
    const auto out = session.generate(story(64));
    ASSERT_FALSE(out);
    EXPECT_EQ(out.error().code, Errc::kUsage);
    EXPECT_NE(out.error().detail.find("set for 16"), std::string::npos) << out.error().detail;
}

TEST_F(SessionTest, BadModelsAreNamed) {
    namespace fs = std::filesystem;
    const fs::path folder =
        fs::temp_directory_path() / ("kvasir-session-" + std::to_string(getpid()));
    fs::create_directories(folder);
    const auto write = [&](const char* name, const std::string& bytes) {
        std::ofstream(folder / name, std::ios::binary) << bytes;
        return (folder / name).string();
    };
    std::ifstream in(kModel, std::ios::binary);
    std::string whole((std::istreambuf_iterator<char>(in)), {});
    const struct {
        std::string path;
        Errc code;
    } cases[] = {
        {(folder / "absent.gguf").string(), Errc::kEnvironment},
        {folder.string(), Errc::kUsage},
        {write("empty.gguf", ""), Errc::kBadInput},
        {write("text.gguf", "this is not a model"), Errc::kBadInput},
        {write("cut.gguf", whole.substr(0, whole.size() / 2)), Errc::kBadInput},
        {write("head.gguf", whole.substr(0, 64)), Errc::kBadInput},
    };
    for (const auto& c : cases) {
        SessionOptions options;
        options.model_path = c.path;
        const auto session = Session::open(options);
        ASSERT_FALSE(session) << c.path;
        EXPECT_EQ(session.error().code, c.code) << session.error().detail;
        EXPECT_NE(session.error().detail.find(c.path), std::string::npos);
        EXPECT_EQ(session.error().detail.find("no reason given"), std::string::npos)
            << session.error().detail;
    }
    fs::remove_all(folder);
}

TEST_F(SessionTest, BadOptionsAreUsageErrors) {
    const auto expect_usage = [](SessionOptions options) {
        options.model_path = kModel;
        const auto session = Session::open(std::move(options));
        ASSERT_FALSE(session);
        EXPECT_EQ(session.error().code, Errc::kUsage) << session.error().detail;
    };
    SessionOptions options;
    options.threads = 0;
    expect_usage(options);
    options = {};
    options.batch_tokens = 0;
    expect_usage(options);
    options = {};
    options.devices = {"NOSUCH"};
    expect_usage(options);
    options = {};
    options.placements = {{"_exps", "NOSUCH"}};
    expect_usage(options);
}

TEST_F(SessionTest, PlacementByDeviceNameIsAccepted) {
    Session plain = open();
    SessionOptions options;
    options.placements = {{"_exps", "CPU"}};
    Session placed = open(options);
    expect_same(run(plain, story(4)), run(placed, story(4)));
}

TEST(Backends, LoadingTwiceIsHarmlessAndThePluginVariableIsIgnored) {
    setenv("GGML_BACKEND_PATH", "/nonexistent/libggml-kvasir.so", 1);
    EXPECT_TRUE(load_backends());
    EXPECT_TRUE(load_backends());
    EXPECT_STREQ(std::getenv("GGML_BACKEND_PATH"), "/nonexistent/libggml-kvasir.so");
    unsetenv("GGML_BACKEND_PATH");
    EXPECT_FALSE(llama_version_text().empty());
}

}  // namespace
}  // namespace kvasir::generate
