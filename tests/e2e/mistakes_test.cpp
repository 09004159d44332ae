// What people do wrong with the program: one sentence that names the culprit, a hint, and an exit
// code by kind: 2 usage, 3 bad input, 4 environment.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "swarm_testing.hpp"

namespace kvasir::e2e {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

struct Mistake {
    std::vector<std::string> arguments;
    int exit_code;
    std::vector<std::string> says;
};

void expect(const Mistake& mistake) {
    const Outcome outcome = kvasir(mistake.arguments);
    std::string shown;
    for (const std::string& argument : mistake.arguments) shown += argument + " ";
    SCOPED_TRACE(shown);
    EXPECT_EQ(outcome.exit_code, mistake.exit_code) << outcome.err;
    for (const std::string& word : mistake.says) EXPECT_THAT(outcome.err, HasSubstr(word));
    EXPECT_THAT(outcome.err, HasSubstr("kvasir: "));
    EXPECT_TRUE(outcome.out.empty() || Json::accept(outcome.out)) << outcome.out;
}

class Mistakes : public ::testing::Test {
protected:
    static void SetUpTestSuite() {
        scratch_ = new ScratchFolder;
        fs::copy_file(demo_model(), path("cut.gguf"));
        fs::resize_file(path("cut.gguf"), fs::file_size(demo_model()) - 1000);
        fs::copy_file(demo_model(), path("header.gguf"));
        fs::resize_file(path("header.gguf"), 100);
        std::ofstream(path("empty.gguf")) << "";
        std::ofstream(path("text.gguf")) << "this is no model at all, but long enough to be one\n";
        run_json({"slice", demo_model(), "--experts", "0-7:0-3", "-o", path("slice.gguf")});
        synth(path("dense.gguf"), {"--arch", "hy_v3", "--dense-mask", "1111"});
        fs::remove(synth(path("split"), {"--splits", "3"}));
    }
    static void TearDownTestSuite() {
        delete scratch_;
        scratch_ = nullptr;
    }
    static std::string path(const std::string& name) { return scratch_->path(name); }

    static ScratchFolder* scratch_;
};
ScratchFolder* Mistakes::scratch_ = nullptr;

TEST_F(Mistakes, Models) {
    const struct {
        std::string file;
        int exit_code;
        std::vector<std::string> says;
    } models[] = {
        {"nowhere.gguf", 4, {"nowhere.gguf"}},
        {"cut.gguf", 3, {"cut.gguf"}},
        {"header.gguf", 3, {"header.gguf"}},
        {"empty.gguf", 3, {"empty.gguf"}},
        {"text.gguf", 3, {"text.gguf"}},
        {"slice.gguf", 3, {"slice.gguf", "slice"}},
        {"dense.gguf", 3, {"dense.gguf", "not a Mixture-of-Experts model"}},
        {"split-00002-of-00003.gguf", 3, {"split-00002-of-00003.gguf", "missing: part 1"}},
    };
    for (const auto& model : models) {
        const std::string file = path(model.file);
        for (const char* workers : {"0", "2"}) {
            expect({{"run", "-m", file, "--workers", workers, "--prompt-tokens", "1", "--json"},
                    model.exit_code,
                    model.says});
        }
        expect({{"bench", "-m", file, "--workers", "1", "--json"}, model.exit_code, model.says});
        expect({{"worker", "--model", file, "--experts", "0:0", "--connect", "ws://127.0.0.1:9"},
                model.file == "slice.gguf" ? 2 : model.exit_code,
                {model.file}});
    }
}

TEST_F(Mistakes, Slices) {
    const std::string out = path("out.gguf");
    const std::string model = demo_model();
    const std::vector<Mistake> mistakes = {
        {{"slice", model, "--experts", "0:0-99", "-o", out, "--json"}, 2, {"0:0-99"}},
        {{"slice", model, "--experts", "9:0", "-o", out, "--json"}, 2, {"'9:0'", "0 to 7"}},
        {{"slice", model, "--experts", "0-9:0", "-o", out}, 2, {"'0-9:0'", "no layer 9", "0 to 7"}},
        {{"slice", model, "--experts", "nonsense", "-o", out}, 2, {"nonsense"}},
        {{"slice", model, "--experts", "0:0"}, 2, {"--output"}},
        {{"slice", model, "--experts", "0:0", "-o", path("slice.gguf")}, 2, {"--force"}},
        {{"slice", model, "--experts", "0:0", "-o", "/no/such/folder/s.gguf"}, 4, {"/no/such"}},
        {{"slice", path("cut.gguf"), "--experts", "0:0", "-o", out}, 3, {"cut.gguf"}},
        {{"verify", path("nowhere.gguf"), "--json"}, 4, {"nowhere.gguf"}},
        {{"verify", model, "--json"}, 3, {"slice"}},
        {{"verify", path("text.gguf"), "--json"}, 3, {"text.gguf"}},
        {{"inspect", path("cut.gguf"), "--json"}, 3, {"cut.gguf"}},
        {{"inspect", path("nowhere.gguf"), "--json"}, 4, {"nowhere.gguf"}},
        {{"inspect"}, 2, {}},
        {{"worker", "--slice", model, "--connect", "ws://127.0.0.1:9"}, 2, {"--model"}},
        {{"worker", "--slice", path("nowhere.gguf"), "--connect", "ws://127.0.0.1:9"},
         4,
         {"nowhere"}},
    };
    for (const Mistake& mistake : mistakes) expect(mistake);
    EXPECT_FALSE(fs::exists(out));
}

TEST_F(Mistakes, Addresses) {
    const std::string model = demo_model();
    const std::string slice = path("slice.gguf");
    const auto listen = [&](const std::string& address) {
        return std::vector<std::string>{"run", "-m",       model,   "--prompt-tokens",
                                        "1",   "--listen", address, "--json"};
    };
    ListeningRun other(model, {"--prompt-tokens", "1"});
    const std::vector<Mistake> mistakes = {
        {listen("127.0.0.1:" + other.port()), 4, {other.port(), "in use"}},
        {listen("nonsense"), 2, {"nonsense"}},
        {listen("127.0.0.1:99999"), 2, {"99999"}},
        {listen("203.0.113.7:0"), 4, {"203.0.113.7"}},
        {{"worker", "--slice", slice, "--connect", "ftp://127.0.0.1:9"}, 2, {"ftp://"}},
        {{"worker", "--slice", slice, "--connect", "ws://"}, 2, {"ws://"}},
        {{"worker", "--slice", slice}, 2, {"--connect"}},
        {{"worker", "--connect", "ws://127.0.0.1:9"}, 2, {"--slice"}},
        {{"worker", "--model", model, "--connect", "ws://127.0.0.1:9"}, 2, {"--experts"}},
        {{"worker", "--slice", slice, "--connect", "ws://127.0.0.1:9", "--device", "TPU9"},
         2,
         {"TPU9"}},
    };
    for (const Mistake& mistake : mistakes) expect(mistake);
}

TEST_F(Mistakes, Flags) {
    const std::string model = demo_model();
    const std::vector<Mistake> mistakes = {
        {{"run", "--modle", model, "-p", "x"},
         2,
         {"no flag --modle", "mean --model?", "run --help"}},
        {{"slice", model, "--expert=0:0", "-o", path("out.gguf")}, 2, {"mean --experts?"}},
        {{"run", "-m", model, "-p", "x", "--frobnicate"}, 2, {"no flag --frobnicate"}},
        {{"run", "-m", model, "-p", "x", "y"}, 2, {"does not take 'y'"}},
        {{"run"}, 2, {"--model is required"}},
    };
    for (const Mistake& mistake : mistakes) expect(mistake);
}

// More threads than a machine can use would only make it crawl.
TEST_F(Mistakes, Threads) {
    const std::string model = demo_model();
    const std::string slice = path("slice.gguf");
    for (const char* count : {"0", "-1", "10000000"}) {
        const std::string what = std::string(count) + " threads";
        const std::vector<Mistake> mistakes = {
            {{"run", "-m", model, "-p", "x", "--threads", count}, 2, {"--threads", what}},
            {{"run", "-m", model, "-p", "x", "--workers", "1", "--worker-threads", count},
             2,
             {"--worker-threads", what}},
            {{"bench", "-m", model, "--threads", count}, 2, {"--threads", what}},
            {{"bench", "-m", model, "--worker-threads", count}, 2, {"--worker-threads", what}},
            {{"up", "-m", model, "--plain", "--threads", count}, 2, {"--threads", what}},
            {{"worker", "--slice", slice, "--connect", "ws://127.0.0.1:9", "--threads", count},
             2,
             {"--threads", what}},
        };
        for (const Mistake& mistake : mistakes) expect(mistake);
    }
}

}  // namespace
}  // namespace kvasir::e2e
