#include "crypto/key_file.hpp"

#include <gtest/gtest.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

namespace kvasir::crypto {
namespace {

namespace fs = std::filesystem;

class KeyFile : public testing::Test {
protected:
    KeyFile() {
        std::string pattern = (fs::temp_directory_path() / "kvasir-keys-XXXXXX").string();
        folder_ = ::mkdtemp(pattern.data());
        path_ = folder_ + "/node.key";
    }
    ~KeyFile() override { fs::remove_all(folder_); }

    void put(std::string_view text, mode_t mode = 0600) {
        fs::remove(path_);
        std::ofstream(path_, std::ios::binary) << text;
        ASSERT_EQ(::chmod(path_.c_str(), mode), 0);
    }
    std::string text() {
        std::ifstream in(path_, std::ios::binary);
        return {std::istreambuf_iterator<char>(in), {}};
    }
    size_t files() {
        return static_cast<size_t>(
            std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
    }

    std::string folder_, path_;
};

TEST_F(KeyFile, IsMadeOnceAndReadFromThenOn) {
    const PublicKey first = load_or_make_key(path_).value().public_key();
    EXPECT_EQ(files(), 1u);
    struct stat info = {};
    ASSERT_EQ(::stat(path_.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 07777, 0600u);
    EXPECT_EQ(text().size(), 13u + 64 + 1);
    EXPECT_TRUE(text().starts_with("kvasir-key-1 ") && text().ends_with("\n"));
    EXPECT_EQ(load_or_make_key(path_).value().public_key(), first);
    EXPECT_NE(load_or_make_key(path_ + "2").value().public_key(), first);
}

TEST_F(KeyFile, TheModeDoesNotDependOnTheUmask) {
    const mode_t before = ::umask(0);
    const bool made = load_or_make_key(path_).has_value();
    ::umask(before);
    ASSERT_TRUE(made);
    EXPECT_TRUE(load_or_make_key(path_));
}

TEST_F(KeyFile, HoldsTheSeedAsTheHeaderSays) {
    put("kvasir-key-1 9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60\n");
    EXPECT_EQ(to_hex(load_or_make_key(path_).value().public_key()),
              "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a");
}

TEST_F(KeyFile, OneThatOthersMayUseIsRefused) {
    for (const mode_t mode : {0640, 0620, 0610, 0604, 0602, 0601, 0644, 0777}) {
        put("kvasir-key-1 9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60\n",
            mode);
        const auto loaded = load_or_make_key(path_);
        ASSERT_FALSE(loaded) << mode;
        EXPECT_EQ(loaded.error().code, Errc::kEnvironment);
        EXPECT_NE(loaded.error().detail.find("chmod 600 " + path_), std::string::npos);
    }
}

TEST_F(KeyFile, AMalformedOneIsKeptAndNamed) {
    const std::string good(64, 'a');
    const std::string cases[] = {
        "",
        "\n",
        "kvasir-key-1",
        "kvasir-key-1 ",
        "kvasir-key-2 " + good + "\n",
        "kvasir-key-1 " + good.substr(1) + "\n",
        "kvasir-key-1 " + good.substr(2) + "\n",
        "kvasir-key-1 " + good + "a\n",
        "kvasir-key-1 " + good + "\n\n",
        "kvasir-key-1 " + good + "\nkvasir-key-1 " + good + "\n",
        "kvasir-key-1 " + good.substr(1) + "A\n",
        "-----BEGIN PRIVATE KEY-----\n",
    };
    for (const std::string& content : cases) {
        put(content);
        const auto loaded = load_or_make_key(path_);
        ASSERT_FALSE(loaded) << content;
        EXPECT_EQ(loaded.error().code, Errc::kBadInput) << content;
        EXPECT_NE(loaded.error().detail.find(path_), std::string::npos);
        EXPECT_EQ(loaded.error().detail.find("aaaa"), std::string::npos) << "shows the secret";
        EXPECT_EQ(text(), content);
    }
}

TEST_F(KeyFile, WhatIsNoFileIsRefusedWithoutWaiting) {
    fs::create_directory(path_);
    EXPECT_EQ(load_or_make_key(path_).error().code, Errc::kBadInput);
    fs::remove(path_);
    ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
    EXPECT_EQ(load_or_make_key(path_).error().code, Errc::kBadInput);
    fs::remove(path_);
    fs::create_symlink(folder_ + "/nowhere", path_);
    EXPECT_EQ(load_or_make_key(path_).error().code, Errc::kEnvironment);
    EXPECT_EQ(load_or_make_key(folder_ + "/none/node.key").error().code, Errc::kEnvironment);
    EXPECT_EQ(files(), 1u);
}

// Runs `body` in a child process; its exit status as waitpid() tells.
template <class Body>
pid_t in_child(Body body) {
    const pid_t child = ::fork();
    if (child == 0) {
        body();
        ::_exit(0);
    }
    return child;
}
int status_of(pid_t child) {
    int status = 0;
    while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    return status;
}

TEST_F(KeyFile, ProcessesThatStartAtOnceEndWithTheSameKey) {
    constexpr int kProcesses = 8;
    for (int round = 0; round < 10; ++round) {
        fs::remove(path_);
        int gate[2], answers[2];
        ASSERT_EQ(::pipe(gate), 0);
        ASSERT_EQ(::pipe(answers), 0);
        std::vector<pid_t> children;
        for (int i = 0; i < kProcesses; ++i) {
            children.push_back(in_child([&] {
                ::close(gate[1]);
                char byte;
                (void)!::read(gate[0], &byte, 1);  // all at once, when the gate is closed
                const auto pair = load_or_make_key(path_);
                if (!pair) ::_exit(1);
                const auto& key = pair->public_key().bytes;
                (void)!::write(answers[1], key.data(), key.size());
            }));
        }
        for (const int fd : {gate[0], gate[1], answers[1]}) ::close(fd);
        for (const pid_t child : children) EXPECT_EQ(status_of(child), 0);
        const PublicKey expected = load_or_make_key(path_).value().public_key();
        for (int i = 0; i < kProcesses; ++i) {
            PublicKey key;
            ASSERT_EQ(::read(answers[0], key.bytes.data(), key.bytes.size()), 32);
            EXPECT_EQ(key, expected);
        }
        ::close(answers[0]);
        EXPECT_EQ(files(), 1u);
    }
}

// The calls of a child that dies just before or just after its n-th one, and writes slowly.
int g_calls_left;
bool g_dies_before;
template <class Call>
auto counted(Call call) {
    const bool last = --g_calls_left == 0;
    if (last && g_dies_before) ::raise(SIGKILL);
    const auto result = call();
    if (last) ::raise(SIGKILL);
    return result;
}
constexpr KeyFileCalls kMortalCalls = {
    [](int fd, const void* data, size_t bytes) {
        return counted([&] { return ::write(fd, data, std::min<size_t>(bytes, 20)); });
    },
    [](int fd) { return counted([&] { return ::fsync(fd); }); },
    [](const char* from, const char* to) { return counted([&] { return ::link(from, to); }); },
    [](const char* from, const char* to) { return counted([&] { return ::rename(from, to); }); },
    [](const char* path) { return counted([&] { return ::unlink(path); }); },
};

TEST_F(KeyFile, AKillBetweenAnyTwoStepsLeavesNoHalfKey) {
    int kills = 0;
    for (int last = 1;; ++last) {
        int finished = 0;
        for (const bool before : {true, false}) {
            fs::remove(path_);
            const int status = status_of(in_child([&] {
                g_calls_left = last;
                g_dies_before = before;
                if (!load_or_make_key(path_, kMortalCalls)) ::_exit(1);
            }));
            if (WIFEXITED(status)) {
                EXPECT_EQ(WEXITSTATUS(status), 0);
                ++finished;
            } else {
                ++kills;
            }
            const bool there = fs::exists(path_);
            const std::string left = there ? text() : "";
            const auto pair = load_or_make_key(path_);
            ASSERT_TRUE(pair) << pair.error().detail;
            if (there) {
                EXPECT_EQ(text(), left);
            }
        }
        if (finished == 2) break;
    }
    EXPECT_EQ(kills, 2 * (4 + 1 + 1 + 1 + 1));  // writes, sync, link, unlink, sync of the folder
}

int g_link_error;
int g_rename_error;
int no_link(const char*, const char*) {
    errno = g_link_error;
    return -1;
}
int no_rename(const char*, const char*) {
    errno = g_rename_error;
    return -1;
}
int fails_to_sync(int) {
    errno = EIO;
    return -1;
}

TEST_F(KeyFile, WithoutHardLinksARenameDoes) {
    for (const int error : {EPERM, EACCES, EOPNOTSUPP, EMLINK}) {
        g_link_error = error;
        KeyFileCalls calls = kernel_key_file_calls();
        calls.link = no_link;
        fs::remove(path_);
        const auto pair = load_or_make_key(path_, calls);
        ASSERT_TRUE(pair) << pair.error().detail;
        EXPECT_EQ(load_or_make_key(path_).value().public_key(), pair->public_key());
        EXPECT_EQ(files(), 1u);
        g_rename_error = EINVAL;
        calls.rename_if_free = no_rename;
        fs::remove(path_);
        EXPECT_EQ(load_or_make_key(path_, calls).error().code, Errc::kEnvironment);
        EXPECT_EQ(files(), 0u);
    }
}

int g_write_error;
ssize_t fails_in_the_middle(int fd, const void* data, size_t bytes) {
    if (bytes < 70) {
        errno = g_write_error;
        return -1;
    }
    return ::write(fd, data, 10);
}

TEST_F(KeyFile, AFailureLeavesNothingAndHasItsCode) {
    const struct {
        int error;
        Errc code;
    } cases[] = {{ENOSPC, Errc::kNoSpace}, {EDQUOT, Errc::kNoSpace}, {EIO, Errc::kEnvironment}};
    for (const auto& c : cases) {
        g_write_error = c.error;
        KeyFileCalls calls = kernel_key_file_calls();
        calls.write = fails_in_the_middle;
        const auto pair = load_or_make_key(path_, calls);
        ASSERT_FALSE(pair);
        EXPECT_EQ(pair.error().code, c.code) << pair.error().detail;
        EXPECT_EQ(files(), 0u);
    }
    KeyFileCalls calls = kernel_key_file_calls();
    calls.sync = fails_to_sync;
    EXPECT_FALSE(load_or_make_key(path_, calls));
    EXPECT_EQ(files(), 0u);
}

}  // namespace
}  // namespace kvasir::crypto
