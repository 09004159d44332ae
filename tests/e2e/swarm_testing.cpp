#include "swarm_testing.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <sstream>

namespace kvasir::e2e {

ScratchFolder::ScratchFolder() {
    std::string pattern = ::testing::TempDir() + "kvasir-e2e-XXXXXX";
    EXPECT_NE(mkdtemp(pattern.data()), nullptr) << pattern;
    path_ = pattern;
}

ScratchFolder::~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
}

std::string tokens_up_to(uint32_t count) {
    std::string out = "1";
    for (uint32_t i = 2; i <= count; ++i) out += "," + std::to_string(1 + (i * 7) % 100);
    return out;
}

Json run_json(std::vector<std::string> arguments, const ProgramOptions& options) {
    arguments.push_back("--json");
    const Outcome outcome = kvasir(arguments, options);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    if (!Json::accept(outcome.out)) {
        ADD_FAILURE() << "not JSON: " << outcome.out << outcome.err;
        return nullptr;
    }
    return Json::parse(outcome.out);
}

std::string synth(const std::string& path, std::vector<std::string> flags) {
    flags.insert(flags.begin(), KVASIR_SYNTH);
    flags.insert(flags.end(), {"--no-sync", "-o", path});
    const Outcome outcome = run_program(flags);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return outcome.out.substr(0, outcome.out.find('\n'));
}

std::string llama_program(const std::string& name) {
    std::string path = std::string(KVASIR_LLAMA_LIB) + "/" + name;
    EXPECT_EQ(access(path.c_str(), X_OK), 0)
        << path << " is missing: build llama.cpp's extra programs (tools/llama.sh build extra), or "
        << "configure with -DKVASIR_LLAMA_PROGRAMS=OFF to leave out the tests that need them.";
    return path;
}

Program start_worker(const std::string& url, const std::string& name, const std::string& model,
                     const std::string& experts) {
    return Program({KVASIR_PROGRAM, "worker", "--model", model, "--experts", experts, "--connect",
                    url, "--name", name, "--log-level", "info"});
}

Program start_slice_worker(const std::string& url, const std::string& name,
                           const std::string& slice) {
    return Program({KVASIR_PROGRAM, "worker", "--slice", slice, "--connect", url, "--name", name,
                    "--log-level", "info"});
}

namespace {

Program start_listening(const std::string& model, std::vector<std::string> flags,
                        const std::string& port) {
    std::vector<std::string> argv = {KVASIR_PROGRAM, "run",         "-m",
                                     model,          "--listen",    "127.0.0.1:" + port,
                                     "--json",       "--log-level", "debug"};
    argv.insert(argv.end(), flags.begin(), flags.end());
    return Program(argv);
}

}  // namespace

ListeningRun::ListeningRun(const std::string& model, std::vector<std::string> flags,
                           const std::string& port)
    : program_(start_listening(model, std::move(flags), port)) {
    EXPECT_TRUE(program_.wait_for("listening on ws://")) << program_.err();
    url_ = program_.word_after("listening on ");
}

bool ListeningRun::wait_tokens(size_t count) {
    return program_.wait_for("debug text: ", count);
}

Json ListeningRun::result() {
    const Outcome outcome = program_.wait(240);
    EXPECT_EQ(outcome.exit_code, 0) << log();
    if (!Json::accept(outcome.out)) {
        ADD_FAILURE() << "not JSON: " << outcome.out;
        return nullptr;
    }
    return Json::parse(outcome.out);
}

std::string ListeningRun::log() const {
    std::istringstream all(program_.err());
    std::string out;
    for (std::string line; std::getline(all, line);) {
        if (line.find(" debug ") == std::string::npos) out += line + "\n";
    }
    return out;
}

size_t ListeningRun::given_up(const std::string& name) const {
    return count_of(program_.err(), "dispatch: " + name + "#");
}

uint64_t pairs_of(const Json& report, const std::string& name) {
    uint64_t pairs = 0;
    for (const Json& worker : report["workers"]) {
        if (worker["id"].get<std::string>().rfind(name + "#", 0) == 0) {
            pairs += worker["pairs"].get<uint64_t>();
        }
    }
    return pairs;
}

}  // namespace kvasir::e2e
