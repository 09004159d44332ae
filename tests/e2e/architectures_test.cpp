// Every Mixture-of-Experts layout that llama.cpp's own generator of toy models can write, with the
// experts computed by two worker processes, compared bit for bit with plain llama.cpp.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>

#include "swarm_testing.hpp"

namespace kvasir::e2e {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

// Of the files with "moe" in the name: those that turn out to have no experts.
const std::set<std::string> kWithoutExperts = {"ernie4_5-moe", "granitemoe-dense",
                                               "nemotron_h_moe-dense", "paddleocr-moe"};
// Has expert tensors, but llama.cpp's graph never uses them.
constexpr const char* kExpertsUnused = "refact-moe";
// llama.cpp's quantizer turns a bias of it into Q4_K, which llama.cpp then cannot add: it aborts.
constexpr const char* kNotQuantisable = "qwen4exp-moe";
constexpr size_t kFiles = 56;
constexpr size_t kWithRemoteExperts = 51;
constexpr uint32_t kPromptTokens[] = {1, 7, 40};

// The toys' folder, filled on first use; kept in the build folder, so later runs find it.
std::string toys() {
    const std::string folder = KVASIR_TOYS;
    fs::create_directories(folder);
    const int lock = open((folder + "/lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644);
    flock(lock, LOCK_EX);
    const std::string generator = llama_program("test-llama-archs");
    const std::string stamp = folder + "/complete";
    if (!fs::exists(stamp) || fs::last_write_time(stamp) < fs::last_write_time(generator)) {
        const Outcome outcome = run_program({generator, "-o", folder},
                                            {{"LD_PRELOAD=" KVASIR_PRELOAD_BACKENDS}, {}, 300});
        EXPECT_EQ(outcome.exit_code, 0) << outcome.out << outcome.err;
        for (const auto& entry : fs::directory_iterator(folder)) {
            if (entry.path().filename().string().find("moe") == std::string::npos &&
                entry.path().extension() == ".gguf") {
                fs::remove(entry.path());
            }
        }
        std::ofstream(stamp) << "made by test-llama-archs\n";
    }
    close(lock);
    return folder;
}

std::vector<std::string> toy_names() {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(toys())) {
        if (entry.path().extension() == ".gguf") names.push_back(entry.path().stem().string());
    }
    std::sort(names.begin(), names.end());
    return names;
}

std::vector<std::string> checked_run(const std::string& model, uint32_t prompt) {
    return {"run", "-m", model,          "--workers", "2", "--prompt-tokens", tokens_up_to(prompt),
            "-n",  "6",  "--ignore-eos", "--check"};
}

// True when workers computed all experts with llama.cpp's bits. A machine that stalls makes the
// backbone ask elsewhere, which is right but not what is asked here: then once more.
bool runs_remotely(const std::string& model, uint32_t prompt) {
    Json json;
    for (int attempt = 0; attempt < 3; ++attempt) {
        json = run_json(checked_run(model, prompt));
        if (json.is_null()) return false;
        EXPECT_EQ(json["bit_exact"], true);
        EXPECT_EQ(json["answers"], "exact");
        if (json["retries"] == 0) break;
    }
    EXPECT_GT(json["pairs_remote"], 0);
    EXPECT_EQ(json["pairs_local"], 0);
    EXPECT_EQ(json["workers"].size(), 2U);
    for (const Json& worker : json["workers"]) EXPECT_GT(worker["pairs"], 0) << worker["id"];
    return json["bit_exact"] == true && json["pairs_remote"] > 0 && json["pairs_local"] == 0;
}

void expect_unused(const std::string& model) {
    const Json json = run_json(checked_run(model, 7));
    ASSERT_FALSE(json.is_null());
    EXPECT_EQ(json["bit_exact"], true);
    EXPECT_EQ(json["pairs_remote"], 0);
    EXPECT_EQ(json["pairs_local"], 0);
}

void expect_not_moe(const std::string& model) {
    const Outcome outcome = kvasir(checked_run(model, 7));
    EXPECT_EQ(outcome.exit_code, 3);
    EXPECT_THAT(outcome.err, HasSubstr("not a Mixture-of-Experts model"));
}

TEST(Architectures, AllExpertsRunOnWorkersWithTheSameBits) {
    const auto names = toy_names();
    EXPECT_EQ(names.size(), kFiles);
    size_t remote = 0;
    for (size_t i = 0; i < names.size(); ++i) {
        SCOPED_TRACE(names[i]);
        const std::string model = toys() + "/" + names[i] + ".gguf";
        if (kWithoutExperts.contains(names[i])) {
            expect_not_moe(model);
        } else if (names[i] == kExpertsUnused) {
            expect_unused(model);
        } else {
            remote += runs_remotely(model, kPromptTokens[i % 3]) ? 1 : 0;
        }
    }
    EXPECT_EQ(remote, kWithRemoteExperts);
}

void quantise(const std::string& from, const std::string& to, const std::string& type) {
    const Outcome outcome = run_program({llama_program("llama-quantize"), from, to, type, "1"});
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
}

TEST(Quantised, AllArchitecturesInQ4KM) {
    const ScratchFolder scratch;
    const auto names = toy_names();
    size_t remote = 0;
    for (size_t i = 0; i < names.size(); ++i) {
        if (kWithoutExperts.contains(names[i]) || names[i] == kExpertsUnused) continue;
        SCOPED_TRACE(names[i]);
        const std::string model = scratch.path(names[i] + ".gguf");
        quantise(toys() + "/" + names[i] + ".gguf", model, "Q4_K_M");
        if (names[i] == kNotQuantisable) {
            const Outcome plain =
                kvasir({"run", "-m", model, "--monolithic", "--prompt-tokens", "1,2", "-n", "2"});
            EXPECT_EQ(plain.exit_code, 134) << "llama.cpp runs it now: drop the exception";
        } else {
            remote += runs_remotely(model, kPromptTokens[(i + 1) % 3]) ? 1 : 0;
        }
        fs::remove(model);
    }
    EXPECT_EQ(remote, kWithRemoteExperts - 1);
}

TEST(Quantised, OtherTypes) {
    const ScratchFolder scratch;
    size_t round = 0;
    for (const char* type : {"Q8_0", "Q6_K", "IQ4_XS", "MXFP4_MOE", "Q2_K", "Q5_0"}) {
        for (const char* name : {"qwen3moe-moe", "gpt-oss-moe", "llama4-moe"}) {
            SCOPED_TRACE(std::string(name) + " " + type);
            const std::string model = scratch.path("model.gguf");
            quantise(toys() + "/" + name + ".gguf", model, type);
            EXPECT_TRUE(runs_remotely(model, kPromptTokens[round++ % 3]));
        }
    }
}

}  // namespace
}  // namespace kvasir::e2e
