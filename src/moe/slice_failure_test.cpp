// A slice under its final name is whole, whatever happens to the writer or the disk.
#include <gtest/gtest.h>

#include <csignal>
#include <optional>
#include <random>

#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "moe/segments.hpp"
#include "moe/slice.hpp"
#include "moe/slice_testing.hpp"
#include "moe/verify.hpp"

namespace kvasir::moe {
namespace {

using namespace testing;

constexpr int kNotPermitted = 77;

// Runs `body` in a child process and returns its wait status.
template <class Body>
int run_in_child(Body body) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(body());
    int status = 0;
    while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    return status;
}

class SliceFailure : public ::testing::Test {
protected:
    SliceFailure()
        : model_(open_toy(write_toy(folder_, {.layers = 3, .experts = 8, .bias = true}))),
          segments_(*parse_segments("0-2:1-3,1-2:5-7", model_)),
          out_(folder_ / "s.gguf") {
        auto manifest = compute_manifest(model_);
        KVASIR_CHECK(manifest.has_value());
        manifest_ = std::move(*manifest);
        KVASIR_CHECK(cut(true, folder_ / "whole").has_value());
        whole_ = read_file(folder_ / "whole");
        KVASIR_CHECK(cut(false, folder_ / "whole").has_value());
        whole_without_id_ = read_file(folder_ / "whole");
        std::filesystem::remove(folder_ / "whole");
    }

    Result<SliceReport> cut(bool with_manifest, const std::string& path,
                            SliceObserver observer = {}) const {
        const SliceOptions options{.replace = true, .observer = std::move(observer)};
        return with_manifest ? write_slice(model_, manifest_, segments_, path, options)
                             : write_slice(model_, segments_, path, options);
    }
    const std::vector<uint8_t>& whole(bool with_manifest) const {
        return with_manifest ? whole_ : whole_without_id_;
    }

    ScratchFolder folder_;
    Model model_;
    std::vector<Segment> segments_;
    std::string out_;
    Manifest manifest_;
    std::vector<uint8_t> whole_;
    std::vector<uint8_t> whole_without_id_;
};

TEST_F(SliceFailure, KilledAtAnyStepItLeavesTheOldFileOrTheWholeNewOne) {
    const std::vector<uint8_t> old = {'o', 'l', 'd'};
    for (const bool with_manifest : {true, false}) {
        for (int kill_at = 0;; ++kill_at) {
            write_file(out_, old);
            const int status = run_in_child([&] {
                int step = 0;
                const auto result = cut(with_manifest, out_, [&](SliceStep, uint64_t, uint64_t) {
                    if (step++ == kill_at) ::kill(::getpid(), SIGKILL);
                });
                return result ? 0 : 1;
            });
            if (WIFEXITED(status)) {  // it had fewer steps than that
                EXPECT_EQ(WEXITSTATUS(status), 0);
                EXPECT_GE(kill_at, 5);
                break;
            }
            ASSERT_EQ(WTERMSIG(status), SIGKILL);
            const bool committed = kill_at == 4;  // created, copying, copied, header, committed
            EXPECT_EQ(read_file(out_), committed ? whole(with_manifest) : old) << kill_at;
            // The dead writer's temporary is swept by the next one.
            EXPECT_EQ(folder_.names().size(), committed ? 2u : 3u);
            ASSERT_TRUE(cut(with_manifest, out_).has_value());
            EXPECT_EQ(folder_.names(), (std::vector<std::string>{"s.gguf", "toy.gguf"}));
            EXPECT_EQ(read_file(out_), whole(with_manifest));
        }
    }
}

TEST_F(SliceFailure, KilledAtAnyMomentItLeavesNothingOrAWholeFile) {
    std::minstd_rand random(7);
    int killed_before = 0;
    for (int i = 0; i < 60; ++i) {
        std::filesystem::remove(out_);
        const pid_t child = ::fork();
        if (child == 0) ::_exit(cut(i % 2 == 0, out_) ? 0 : 1);
        ::usleep(static_cast<useconds_t>(random() % 12'000));  // tidy: sleep, a random moment
        ::kill(child, SIGKILL);
        int status = 0;
        while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
        }
        if (!std::filesystem::exists(out_)) {
            ++killed_before;
            continue;
        }
        EXPECT_EQ(read_file(out_), whole(i % 2 == 0));
    }
    EXPECT_GT(killed_before, 0);  // else the kills came too late to show anything
}

TEST_F(SliceFailure, AFileSizeLimitIsAnErrorThatLeavesNothing) {
    // In a child, because the limit holds for the process. Exit status: the number of the first
    // expectation that failed.
    const auto size = whole_.size();
    std::vector<rlim_t> limits = {0, 1, 31, 32, 4096, size / 2, size - 4096, size - 33};
    for (rlim_t below = 32; below > 0; --below) limits.push_back(size - below);
    const std::vector<uint8_t> old = {'o', 'l', 'd'};
    write_file(out_, old);
    const int status = run_in_child([&] {
        rlimit limit = {};
        ::getrlimit(RLIMIT_FSIZE, &limit);
        for (const rlim_t bytes : limits) {
            limit.rlim_cur = bytes;
            if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 1;
            const auto result = cut(true, out_);
            if (result) return 2;
            if (result.error().code != Errc::kNoSpace) return 3;
            if (result.error().detail.find("ulimit -f") == std::string::npos) return 4;
            if (result.error().detail.find("s.gguf") == std::string::npos) return 5;
            if (read_file(out_) != old || folder_.names().size() != 2) return 6;
        }
        limit.rlim_cur = size;
        ::setrlimit(RLIMIT_FSIZE, &limit);
        return cut(true, out_) && read_file(out_) == whole_ ? 0 : 7;
    });
    ASSERT_TRUE(WIFEXITED(status)) << "killed by signal " << WTERMSIG(status);
    EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(SliceFailure, AFullDiskIsAnErrorThatLeavesNothing) {
    const std::string disk = folder_ / "disk";
    std::filesystem::create_directory(disk);
    const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    const size_t pages_needed = (whole_.size() + page - 1) / page;
    const int status = run_in_child([&] {
        // A mount of our own, seen and ended by this child alone.
        if (::unshare(CLONE_NEWNS) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) {
            return kNotPermitted;
        }
        const std::string size = "size=" + std::to_string((pages_needed + 4) * page);
        if (::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
            ::mount("none", disk.c_str(), "tmpfs", 0, size.c_str()) != 0) {
            return kNotPermitted;
        }
        const std::string out = disk + "/s.gguf";
        int full = 0;
        bool fitted = false;
        // Less and more room, page by page around what is needed. One page holds the old file.
        for (size_t filled = pages_needed; filled-- > 0;) {
            if (filled > 8 && filled % 16 != 0) continue;
            write_file(out, {'o', 'l', 'd'});
            write_file(disk + "/filler", std::vector<uint8_t>(filled * page, 1));
            const auto result = cut(filled % 2 == 0, out);
            std::error_code ignored;
            const auto files = std::distance(std::filesystem::directory_iterator(disk, ignored),
                                             std::filesystem::directory_iterator());
            if (files != 2) return 2;
            if (result) {
                if (read_file(out) != whole(filled % 2 == 0)) return 3;
                fitted = true;
                continue;
            }
            if (result.error().code != Errc::kNoSpace) return 4;
            if (result.error().detail.find("disk is full") == std::string::npos) return 5;
            if (read_file(out) != std::vector<uint8_t>{'o', 'l', 'd'}) return 6;
            ++full;
        }
        return full >= 4 && fitted ? 0 : 7;
    });
    ASSERT_TRUE(WIFEXITED(status)) << "killed by signal " << WTERMSIG(status);
    if (WEXITSTATUS(status) == kNotPermitted) {
        GTEST_SKIP() << "mounting is not permitted here; the file size limit test covers the path";
    }
    EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace kvasir::moe
