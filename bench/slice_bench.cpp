// How fast a slice is cut, beside `cp` of the same bytes: slice_bench MODEL EXPERTS FOLDER [RUNS]
//
// Alternates four ways of making the same file in FOLDER, with everything in the page cache: cp; cp
// and fsync; kvasir's cut with a manifest at hand (which includes fsync); the cut that must hash
// what it copies. Prints medians in seconds and the ratios as JSON. `ratio_durable` compares like
// with like.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "moe/manifest.hpp"
#include "moe/segments.hpp"
#include "moe/slice.hpp"

namespace {

using namespace kvasir;

double seconds(const std::function<bool()>& work) {
    const auto begin = std::chrono::steady_clock::now();
    if (!work()) return -1;
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

bool copy_with_cp(const std::string& from, const std::string& to) {
    const char* arguments[] = {"cp", from.c_str(), to.c_str(), nullptr};
    pid_t child = 0;
    if (posix_spawnp(&child, "cp", nullptr, nullptr, const_cast<char**>(arguments), environ) != 0) {
        return false;
    }
    int status = 0;
    return waitpid(child, &status, 0) == child && status == 0;
}

bool flush(const std::string& path) {
    const int fd = open(path.c_str(), O_RDONLY);
    const bool done = fd >= 0 && fsync(fd) == 0;
    if (fd >= 0) close(fd);
    return done;
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 4) {
        std::fprintf(stderr, "usage: slice_bench MODEL EXPERTS FOLDER [RUNS]\n");
        return 2;
    }
    const auto model = moe::open_model(argv[1]);
    if (!model) return std::fprintf(stderr, "%s\n", model.error().detail.c_str()), 3;
    const auto segments = moe::parse_segments(argv[2], *model);
    if (!segments) return std::fprintf(stderr, "%s\n", segments.error().detail.c_str()), 2;
    const int runs = argc > 4 ? std::max(1, std::atoi(argv[4])) : 9;
    const std::string folder = argv[3];
    const std::string slice = folder + "/slice_bench.gguf";
    const std::string other = folder + "/slice_bench_other.gguf";
    const auto manifest = moe::load_or_compute_manifest(*model);
    if (!manifest) return std::fprintf(stderr, "%s\n", manifest.error().detail.c_str()), 4;
    const auto first = moe::write_slice(*model, *manifest, *segments, slice);
    if (!first) return std::fprintf(stderr, "%s\n", first.error().detail.c_str()), 4;

    const std::vector<std::function<bool()>> ways = {
        [&] { return copy_with_cp(slice, other); },
        [&] { return copy_with_cp(slice, other) && flush(other); },
        [&] { return moe::write_slice(*model, *manifest, *segments, other).has_value(); },
        [&] { return moe::write_slice(*model, *segments, other).has_value(); },
    };
    std::vector<std::vector<double>> times(ways.size());
    for (int run = 0; run < runs; ++run) {
        for (size_t way = 0; way < ways.size(); ++way) {
            unlink(other.c_str());
            times[way].push_back(seconds(ways[way]));
            if (times[way].back() < 0) return std::fprintf(stderr, "a copy failed\n"), 4;
            flush(other);  // so that no run pays for the one before
        }
    }
    unlink(other.c_str());
    unlink(slice.c_str());
    const double cp = median(times[0]);
    const double cp_flushed = median(times[1]);
    const double cut = median(times[2]);
    const double cut_hashing = median(times[3]);
    std::printf(
        "{\"bytes\": %llu, \"cp_s\": %.4f, \"cp_fsync_s\": %.4f, \"slice_s\": %.4f, "
        "\"slice_hashing_s\": %.4f, \"ratio\": %.3f, \"ratio_durable\": %.3f, "
        "\"ratio_durable_hashing\": %.3f}\n",
        static_cast<unsigned long long>(first->bytes_file), cp, cp_flushed, cut, cut_hashing,
        cp / cut, cp_flushed / cut, cp_flushed / cut_hashing);
    return 0;
}
