// Replays a corpus through a fuzz target: every file once, and every file cut short at a few
// places.
//
// Used in all presets but fuzz, where libFuzzer brings its own main(). Fails when the corpus is
// missing or empty, so that the test cannot pass by reading nothing.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

// A copy of exactly the size, so that a read past the end is seen by the address sanitizer.
void run(const std::vector<uint8_t>& bytes, size_t size) {
    const std::vector<uint8_t> exact(bytes.begin(), bytes.begin() + static_cast<long>(size));
    LLVMFuzzerTestOneInput(exact.data(), exact.size());
}

void replay(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    const std::vector<uint8_t> bytes(std::istreambuf_iterator<char>(file), {});
    run(bytes, bytes.size());
    const size_t step = std::max<size_t>(1, bytes.size() / 16);
    for (size_t size = 0; size < bytes.size(); size += step) run(bytes, size);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2 || !std::filesystem::is_directory(argv[1])) {
        std::fprintf(stderr, "usage: %s CORPUS_FOLDER\n", argv[0]);
        return 2;
    }
    std::vector<std::filesystem::path> paths;
    for (const auto& entry : std::filesystem::directory_iterator(argv[1])) {
        if (entry.is_regular_file()) paths.push_back(entry.path());
    }
    std::sort(paths.begin(), paths.end());
    for (const auto& path : paths) replay(path);
    std::printf("%zu inputs of %s replayed\n", paths.size(), argv[1]);
    return paths.empty() ? 1 : 0;
}
