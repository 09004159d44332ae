// How much memory a backbone and a worker really take: weights stay in the file's pages.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>

#include "swarm_testing.hpp"

namespace kvasir::e2e {
namespace {

// A field of /proc/PID/status in bytes; 0 when the process is gone.
uint64_t status_bytes(pid_t pid, const std::string& field) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/status");
    for (std::string line; std::getline(file, line);) {
        if (line.rfind(field + ":", 0) == 0)
            return std::stoull(line.substr(field.size() + 1)) << 10;
    }
    return 0;
}

uint64_t file_bytes(const std::string& path) {
    struct stat info {};
    EXPECT_EQ(stat(path.c_str(), &info), 0) << path;
    return static_cast<uint64_t>(info.st_size);
}

// 1.8 GB of experts: they are read where they lie, so a model larger than the memory runs.
TEST(Memory, TheBackbonesExpertsStayInTheFile) {
    const ScratchFolder scratch;
    const std::string model = synth(
        scratch.path("big.gguf"), {"--arch", "qwen3moe", "--embd", "1024", "--ff", "1024",
                                   "--experts", "256", "--used", "8", "--layers", "4", "--sparse"});
    ASSERT_GT(file_bytes(model), uint64_t{1} << 30);
    Program run({KVASIR_PROGRAM, "run", "-m", model, "--workers", "0", "--prompt-tokens",
                 tokens_up_to(64), "-n", "4", "--json"});
    uint64_t anonymous = 0;
    uint64_t in_file = 0;
    eventually([&] {
        anonymous = std::max(anonymous, status_bytes(run.pid(), "RssAnon"));
        in_file = std::max(in_file, status_bytes(run.pid(), "RssFile"));
        return !run.running();
    });
    const Outcome outcome = run.wait();
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_GT(Json::parse(outcome.out)["pairs_local"], 0);
    std::printf("backbone: %.1f MiB anonymous, %.1f MiB of files\n",
                static_cast<double>(anonymous) / 1048576, static_cast<double>(in_file) / 1048576);
    EXPECT_GT(in_file, uint64_t{16} << 20) << "it was not seen at work";
    EXPECT_LT(anonymous, uint64_t{128} << 20);
}

TEST(Memory, AWorkerTakesItsSliceAndLittleMore) {
    const ScratchFolder scratch;
    const std::string model =
        synth(scratch.path("m.gguf"), {"--arch", "qwen3moe", "--embd", "1024", "--ff", "1024",
                                       "--type-dense", "q8_0", "--vocab", "600"});
    const std::string slice = scratch.path("slice.gguf");
    run_json({"slice", model, "--experts", "0-3:0-3", "-o", slice});
    ListeningRun run(model, {"--prompt-tokens", tokens_up_to(512), "-n", "16", "--ignore-eos",
                             "--wait-coverage", "50%"});
    const Program worker = start_slice_worker(run.url(), "slice", slice);
    const Json json = run.result();
    ASSERT_FALSE(json.is_null());
    EXPECT_GT(json["pairs_remote"], 1000);
    const uint64_t most = status_bytes(worker.pid(), "VmHWM");
    const uint64_t weights = file_bytes(slice);
    std::printf("worker: %.1f MiB at most for a slice of %.1f MiB\n",
                static_cast<double>(most) / 1048576, static_cast<double>(weights) / 1048576);
    EXPECT_GT(most, weights) << "it verified the slice, so it has read all of it";
    EXPECT_LE(most, weights + (uint64_t{24} << 20));
}

}  // namespace
}  // namespace kvasir::e2e
