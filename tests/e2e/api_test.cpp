// `kvasir up --api`: the OpenAI API of stock llama-server, its experts computed by a worker that
// joined with the printed line.
#include <gtest/gtest.h>
#include <signal.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "llama_server.hpp"

namespace kvasir::e2e {
namespace {

constexpr unsigned kTokens = 24;
const std::string kQuestion = "Tell me of a king.";

// The llama-server that `parent` started; 0: none.
pid_t server_of(pid_t parent) {
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
        std::ifstream file(entry.path() / "stat");
        std::string line;
        if (!std::getline(file, line)) continue;
        const size_t name_end = line.rfind(')');  // "PID (NAME) STATE PARENT ..."
        if (name_end == std::string::npos || line.find("(llama-server)") == std::string::npos)
            continue;
        std::istringstream rest(line.substr(name_end + 1));
        std::string state;
        pid_t its_parent = 0;
        rest >> state >> its_parent;
        if (its_parent == parent) return static_cast<pid_t>(std::stol(line));
    }
    return 0;
}

bool is_gone(pid_t pid) {
    return kill(pid, 0) != 0 && errno == ESRCH;
}

// `kvasir up --api` on free ports, ready for requests.
struct ApiProgram {
    Program program;
    unsigned port = 0;
    pid_t server = 0;

    explicit ApiProgram(const std::string& state)
        : program({KVASIR_PROGRAM, "up", "-m", demo_model(), "--listen", "127.0.0.1:0", "--dev-tls",
                   "--state", state, "--api", "127.0.0.1:0", "--llama-server",
                   llama_program("llama-server"), "--log-level", "debug"},
                  {{"KVASIR_LOG=info"}, {}, 120}) {
        EXPECT_TRUE(program.wait_for("api: http://127.0.0.1:")) << program.err();
        const std::string rest = program.word_after("api: http://127.0.0.1:");
        EXPECT_TRUE(rest.ends_with("/v1")) << rest;
        port = rest.empty() ? 0 : static_cast<unsigned>(std::stoul(rest));
        server = server_of(program.pid());
        EXPECT_NE(server, 0);
    }
    // The command that it printed, with a name and a folder of its own.
    Program join(const std::string& cache) const {
        std::vector<std::string> argv = {KVASIR_PROGRAM, "worker"};
        for (const char* flag : {"--join", "--invite", "--budget"}) {
            argv.emplace_back(flag);
            argv.push_back(program.word_after(std::string(" ") + flag + " "));
        }
        for (const char* word : {"--name", "joined", "--log-level", "info", "--cache"})
            argv.emplace_back(word);
        argv.push_back(cache);
        return Program(argv);
    }
};

// The text of a streamed chat answer: the pieces of its server-sent events, in order.
std::string streamed_text(const std::string& answer) {
    std::istringstream lines(answer);
    std::string text;
    bool done = false;
    for (std::string line; std::getline(lines, line);) {
        const size_t data = line.find("data: ");
        if (data != 0) continue;
        if (line.find("[DONE]") != std::string::npos) done = true;
        const std::string event = line.substr(6);
        if (!Json::accept(event)) continue;
        const Json piece = Json::parse(event);
        for (const Json& choice : piece["choices"]) {
            const Json& content = choice["delta"].value("content", Json());
            if (content.is_string()) text += content.get<std::string>();
        }
    }
    EXPECT_TRUE(done) << answer;
    return text;
}

TEST(Api, AJoinedWorkerComputesAnswersOfTheOpenAiApi) {
    const std::string expected = LlamaServer(demo_model(), {}).chat(kQuestion, kTokens);
    ASSERT_FALSE(expected.empty());
    const ScratchFolder scratch;
    ApiProgram up(scratch.path("state"));
    Program worker = up.join(scratch.path("cache"));
    ASSERT_TRUE(up.program.wait_for("workers hold 256 of 256 experts"))
        << up.program.err() << worker.err();

    const Json request = chat_request(kQuestion, kTokens);
    const std::string whole = http_post(up.port, "/v1/chat/completions", request);
    const size_t body = whole.find("\r\n\r\n");
    ASSERT_TRUE(whole.starts_with("HTTP/1.1 200") && body != std::string::npos) << whole;
    const Json answer = Json::parse(whole.substr(body), nullptr, false);
    ASSERT_FALSE(answer.is_discarded()) << whole;
    EXPECT_EQ(answer["choices"][0]["message"]["content"], expected);

    Json streaming = request;
    streaming["stream"] = true;
    const std::string pieces = http_post(up.port, "/v1/chat/completions", streaming);
    ASSERT_TRUE(pieces.starts_with("HTTP/1.1 200")) << pieces;
    EXPECT_NE(pieces.find("text/event-stream"), std::string::npos) << pieces;
    EXPECT_EQ(streamed_text(pieces), expected);

    up.program.signal(SIGTERM);
    EXPECT_EQ(up.program.wait(30).exit_code, 0) << up.program.err();
    EXPECT_TRUE(is_gone(up.server));
    worker.signal(SIGTERM);
    EXPECT_EQ(worker.wait(60).exit_code, 0) << worker.err();
    const std::string pairs = worker.word_after("computed ");
    ASSERT_FALSE(pairs.empty()) << worker.err();
    // Two answers of 24 tokens in 8 layers with 4 experts each, but for what was cached.
    EXPECT_GT(std::stoull(pairs), 2 * kTokens * 8 * 4 * 3 / 4) << worker.err();
}

TEST(Api, KillingItEndsItsServer) {
    const ScratchFolder scratch;
    ApiProgram up(scratch.path("state"));
    up.program.signal(SIGKILL);
    up.program.wait(30);
    EXPECT_TRUE(eventually([&] { return is_gone(up.server); }));
}

}  // namespace
}  // namespace kvasir::e2e
