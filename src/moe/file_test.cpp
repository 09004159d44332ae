#include "moe/file.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <fcntl.h>
#include <sys/file.h>
#include <cerrno>

#include "moe/slice_testing.hpp"

namespace kvasir::moe {
namespace {

using testing::read_file;
using testing::ScratchFolder;
using testing::write_file;

// What the replaced system calls do next; one copy at a time.
struct Script {
    size_t step_max = SIZE_MAX;     // most bytes any call moves
    int copy_error = 0;             // copy_file_range fails with this...
    uint64_t copy_error_after = 0;  // ...once it has moved so much
    bool copy_gives_zero = false;
    int read_error = 0;
    int write_error = 0;
    bool interrupt = false;  // every other call is interrupted
    uint64_t calls = 0;
    uint64_t copied = 0;
};
Script script;

bool interrupted() {
    if (!script.interrupt || ++script.calls % 2 == 0) return false;
    errno = EINTR;
    return true;
}

const CopyCalls kScripted = {
    [](int in, off_t* in_offset, int out, off_t* out_offset, size_t bytes) -> ssize_t {
        if (interrupted()) return -1;
        if (script.copy_gives_zero) return 0;
        if (script.copy_error != 0 && script.copied >= script.copy_error_after) {
            errno = script.copy_error;
            return -1;
        }
        const ssize_t moved =
            ::copy_file_range(in, in_offset, out, out_offset, std::min(bytes, script.step_max), 0);
        if (moved > 0) script.copied += static_cast<uint64_t>(moved);
        return moved;
    },
    [](int fd, void* data, size_t bytes, off_t offset) -> ssize_t {
        if (interrupted()) return -1;
        errno = script.read_error;
        return script.read_error != 0 ? -1
                                      : ::pread(fd, data, std::min(bytes, script.step_max), offset);
    },
    [](int fd, const void* data, size_t bytes, off_t offset) -> ssize_t {
        if (interrupted()) return -1;
        errno = script.write_error;
        return script.write_error != 0
                   ? -1
                   : ::pwrite(fd, data, std::min(bytes, script.step_max), offset);
    },
};

class CopyTest : public ::testing::Test {
protected:
    CopyTest() {
        std::vector<uint8_t> data(300'000);
        for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(i * 7 + i / 251);
        write_file(folder_ / "in", data);
        source_ = std::move(data);
        in_ = Fd(::open((folder_ / "in").c_str(), O_RDONLY | O_CLOEXEC));
        script = {};
    }
    Status copy(uint64_t from, uint64_t to, uint64_t bytes) {
        write_file(folder_ / "out", {});
        const Fd out(::open((folder_ / "out").c_str(), O_RDWR | O_CLOEXEC));
        return copy_bytes({in_.get(), "in", from}, {out.get(), "out", to}, bytes, kScripted);
    }
    void expect_copied(uint64_t from, uint64_t to, uint64_t bytes) {
        const auto out = read_file(folder_ / "out");
        ASSERT_EQ(out.size(), to + bytes);
        EXPECT_TRUE(std::equal(source_.begin() + static_cast<long>(from),
                               source_.begin() + static_cast<long>(from + bytes),
                               out.begin() + static_cast<long>(to)));
    }

    ScratchFolder folder_;
    std::vector<uint8_t> source_;
    Fd in_;
};

TEST_F(CopyTest, ShortCountsAndInterruptionsAreLoopedOver) {
    for (const bool by_kernel : {true, false}) {
        for (const size_t step : {1009ul, 4096ul, 65536ul}) {
            script = {};
            script.step_max = step;
            script.interrupt = true;
            script.copy_error = by_kernel ? 0 : EXDEV;
            ASSERT_TRUE(copy(123, 45, 250'000).has_value());
            expect_copied(123, 45, 250'000);
        }
    }
}

TEST_F(CopyTest, WhatTheKernelCannotCopyGoesThroughMemoryFromWhereItStopped) {
    for (const int error : {ENOSYS, EXDEV, EINVAL, EOPNOTSUPP, EPERM}) {
        for (const uint64_t after : {uint64_t{0}, uint64_t{100'000}}) {
            script = {};
            script.step_max = 50'000;
            script.copy_error = error;
            script.copy_error_after = after;
            ASSERT_TRUE(copy(1, 2, 299'999).has_value());
            EXPECT_EQ(script.copied, after);
            expect_copied(1, 2, 299'999);
        }
    }
    script = {};
    script.copy_gives_zero = true;
    ASSERT_TRUE(copy(0, 0, 300'000).has_value());
    expect_copied(0, 0, 300'000);
}

TEST_F(CopyTest, ErrorsNameTheFileAndWhatToDo) {
    const struct {
        int copy_error, read_error, write_error;
        Errc code;
        const char* file;
        const char* words;
    } cases[] = {
        {ENOSPC, 0, 0, Errc::kNoSpace, "out", "disk is full"},
        {EFBIG, 0, 0, Errc::kNoSpace, "out", "ulimit -f"},
        {EDQUOT, 0, 0, Errc::kNoSpace, "out", "quota"},
        {EIO, 0, 0, Errc::kIo, "out", "storage device"},
        {EXDEV, EIO, 0, Errc::kIo, "in", "storage device"},
        {EXDEV, 0, ENOSPC, Errc::kNoSpace, "out", "disk is full"},
        {EXDEV, 0, EROFS, Errc::kIo, "out", "read-only"},
    };
    for (const auto& c : cases) {
        script = {};
        script.copy_error = c.copy_error;
        script.read_error = c.read_error;
        script.write_error = c.write_error;
        const auto status = copy(0, 0, 1000);
        ASSERT_FALSE(status.has_value()) << c.words;
        EXPECT_EQ(status.error().code, c.code) << c.words;
        EXPECT_TRUE(status.error().detail.starts_with(c.file)) << status.error().detail;
        EXPECT_NE(status.error().detail.find(c.words), std::string::npos) << status.error().detail;
    }
}

TEST_F(CopyTest, ASourceThatEndsEarlyIsBadInput) {
    for (const int error : {0, EXDEV}) {
        script = {};
        script.copy_error = error;
        const auto status = copy(299'990, 0, 11);
        ASSERT_FALSE(status.has_value());
        EXPECT_EQ(status.error().code, Errc::kBadInput);
        EXPECT_NE(status.error().detail.find("in:"), std::string::npos) << status.error().detail;
    }
}

TEST(AtomicFileTest, AppearsOnlyOnCommit) {
    const ScratchFolder folder;
    write_file(folder / "f", {9});
    const std::vector<uint8_t> data = {1, 2, 3};
    {
        auto file = AtomicFile::create(folder / "f");
        ASSERT_TRUE(file.has_value());
        ASSERT_TRUE(file->write(0, data).has_value());
        EXPECT_EQ(folder.names().size(), 2u);
    }
    EXPECT_EQ(folder.names(), std::vector<std::string>{"f"});
    EXPECT_EQ(read_file(folder / "f"), std::vector<uint8_t>{9});
    auto file = AtomicFile::create(folder / "f");
    ASSERT_TRUE(file->write(0, data).has_value());
    ASSERT_TRUE(file->commit(true).has_value());
    EXPECT_EQ(folder.names(), std::vector<std::string>{"f"});
    EXPECT_EQ(read_file(folder / "f"), data);
}

TEST(AtomicFileTest, RemovesTheTemporariesOfDeadWritersOnly) {
    const ScratchFolder folder;
    auto alive = AtomicFile::create(folder / "f");
    ASSERT_TRUE(alive.has_value());
    const auto alive_name = folder.names().front();
    const std::vector<std::string> strangers = {"f.0123456.tmp", "f.0123456g.tmp", "f.tmp",
                                                "g.01234567.tmp", "f.01234567.tmpx"};
    for (const auto& name : strangers) write_file(folder / name, {1});
    write_file(folder / "f.01234567.tmp", {1});
    { auto other = AtomicFile::create(folder / "f"); }
    auto expected = strangers;
    expected.push_back(alive_name);
    std::sort(expected.begin(), expected.end());
    EXPECT_EQ(folder.names(), expected);
    ASSERT_TRUE(alive->commit(true).has_value());
}

TEST(AtomicFileTest, ClosedItWaitsForItsCommit) {
    for (const bool sync : {true, false}) {
        const ScratchFolder folder;
        {
            auto dropped = AtomicFile::create(folder / "f");
            ASSERT_TRUE(dropped->close(sync).has_value());
        }
        EXPECT_TRUE(folder.names().empty());
        auto file = AtomicFile::create(folder / "f");
        ASSERT_TRUE(file->write(0, std::vector<uint8_t>{1, 2, 3}).has_value());
        ASSERT_TRUE(file->resize(5).has_value());
        ASSERT_TRUE(file->close(sync).has_value());
        EXPECT_NE(folder.names(), std::vector<std::string>{"f"});
        ASSERT_TRUE(file->commit(true).has_value());
        EXPECT_EQ(folder.names(), std::vector<std::string>{"f"});
        EXPECT_EQ(read_file(folder / "f"), (std::vector<uint8_t>{1, 2, 3, 0, 0}));
    }
}

TEST(AtomicFileTest, NoReplaceKeepsTheExistingFile) {
    const ScratchFolder folder;
    write_file(folder / "f", {9});
    auto file = AtomicFile::create(folder / "f");
    const auto status = file->commit(false);
    ASSERT_FALSE(status.has_value());
    EXPECT_EQ(status.error().code, Errc::kUsage);
    EXPECT_EQ(read_file(folder / "f"), std::vector<uint8_t>{9});
    auto fresh = AtomicFile::create(folder / "g");
    EXPECT_TRUE(fresh->commit(false).has_value());
}

}  // namespace
}  // namespace kvasir::moe
