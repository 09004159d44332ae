// The quota of the cache: what counts, what goes, and what stays.
#include "worker/cache.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "moe/slice_testing.hpp"

namespace kvasir::worker {
namespace {

using moe::testing::ScratchFolder;
using moe::testing::write_file;
namespace fs = std::filesystem;

constexpr uint64_t kSlice = 64 << 10;  // bytes of each, whole blocks on any disk

class CacheTest : public ::testing::Test {
protected:
    SliceCache open(uint64_t bytes_max) {
        auto cache = SliceCache::open(folder_ / "cache", bytes_max);
        KVASIR_CHECK(cache.has_value());
        return std::move(*cache);
    }
    // A slice that was last used at that second.
    static std::string add(const SliceCache& cache, uint32_t number, int64_t used,
                           const std::string& end = "") {
        const std::string path = cache.slice_path(Sha256{}, {Segment{{number, 0}, 0, 1}}) + end;
        write_file(path, std::vector<uint8_t>(kSlice, static_cast<uint8_t>(number)));
        const timespec at = {used, 0};
        const timespec times[] = {at, at};
        KVASIR_CHECK(::utimensat(AT_FDCWD, path.c_str(), times, 0) == 0);
        return path;
    }
    ScratchFolder folder_;
};

TEST_F(CacheTest, TheLongestUnusedGoFirstAndNoMoreThanNeeded) {
    SliceCache cache = open(4 * kSlice);
    const std::string newest = add(cache, 1, 3000);
    const std::string oldest = add(cache, 2, 1000);
    const std::string middle = add(cache, 3, 2000);
    EXPECT_EQ(cache.bytes_used(), 3 * kSlice);
    ASSERT_TRUE(cache.make_room(kSlice, {}));
    EXPECT_EQ(cache.bytes_used(), 3 * kSlice) << "there is room";
    ASSERT_TRUE(cache.make_room(2 * kSlice, {}));
    EXPECT_FALSE(fs::exists(oldest));
    EXPECT_TRUE(fs::exists(middle) && fs::exists(newest));
    cache.touch(middle);
    ASSERT_TRUE(cache.make_room(3 * kSlice, {}));
    EXPECT_FALSE(fs::exists(newest)) << "the other one was used since";
    EXPECT_TRUE(fs::exists(middle));
    EXPECT_EQ(cache.bytes_used(), kSlice);
}

TEST_F(CacheTest, WhatIsKeptStaysWithItsPartAndTheFlagIsNamed) {
    SliceCache cache = open(4 * kSlice);
    const std::string served = add(cache, 1, 1000);
    const std::string fetching = add(cache, 2, 1001, ".part");
    const std::string other = add(cache, 3, 3000);
    const std::string target = fetching.substr(0, fetching.size() - 5);
    EXPECT_EQ(cache.bytes_of(target), kSlice);
    const Status full = cache.make_room(3 * kSlice, {served, target});
    ASSERT_FALSE(full);
    EXPECT_EQ(full.error().code, Errc::kNoSpace);
    EXPECT_NE(full.error().detail.find("--cache-max"), std::string::npos) << full.error().detail;
    EXPECT_NE(full.error().detail.find(std::to_string(4 * kSlice)), std::string::npos);
    EXPECT_TRUE(fs::exists(served) && fs::exists(fetching));
    EXPECT_FALSE(fs::exists(other)) << "all that may go has gone";
    EXPECT_TRUE(cache.make_room(2 * kSlice, {served, target}));
    EXPECT_TRUE(cache.make_room(3 * kSlice, {target})) << "the served one may go, too";
    EXPECT_FALSE(fs::exists(served));
    EXPECT_TRUE(fs::exists(fetching));
}

TEST_F(CacheTest, OnlyItsOwnFilesCountAndGo) {
    SliceCache cache = open(kSlice);
    const std::string slice = add(cache, 1, 1000);
    const std::vector<std::string> others = {
        folder_ / "cache/key", folder_ / "cache/notes.gguf", folder_ / "cache/0123.part",
        folder_ / "cache/0123456789abcdef.0123456789ABCDEF.gguf"};
    for (const std::string& path : others) write_file(path, std::vector<uint8_t>(kSlice, 1));
    const std::string elsewhere = folder_ / "elsewhere";
    write_file(elsewhere, std::vector<uint8_t>(kSlice, 1));
    const std::string link = cache.slice_path(Sha256{}, {Segment{{9, 0}, 0, 1}});
    fs::create_symlink(elsewhere, link);
    EXPECT_EQ(cache.bytes_used(), kSlice);
    EXPECT_TRUE(cache.make_room(kSlice, {}));
    EXPECT_FALSE(fs::exists(slice));
    EXPECT_EQ(cache.remove_others({}), 0u);
    for (const std::string& path : others) EXPECT_TRUE(fs::exists(path)) << path;
    EXPECT_TRUE(fs::exists(elsewhere) && fs::is_symlink(link));
}

TEST_F(CacheTest, RemovingOthersSaysWhatItFreed) {
    SliceCache cache = open(100 * kSlice);
    const std::string served = add(cache, 1, 1000);
    add(cache, 1, 1000, ".part");
    add(cache, 2, 2000);
    add(cache, 3, 3000, ".part");
    EXPECT_EQ(cache.remove_others({served}), 2 * kSlice);
    EXPECT_EQ(cache.bytes_used(), 2 * kSlice);
}

// A slice that has begun is a file with holes: what the disk holds counts.
TEST_F(CacheTest, HolesDoNotCount) {
    const SliceCache cache = open(100 * kSlice);
    const std::string path = add(cache, 1, 1000, ".part");
    ASSERT_EQ(::truncate(path.c_str(), 1 << 30), 0);
    EXPECT_EQ(cache.bytes_used(), kSlice);
}

}  // namespace
}  // namespace kvasir::worker
