#include "apps/child_process.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <mutex>
#include <thread>

#include "apps/local_workers.hpp"
#include "apps/machine.hpp"

namespace kvasir::apps {
namespace {

using std::chrono::milliseconds;

ChildProcess shell(const std::string& script, int cpu = -1) {
    auto child = ChildProcess::start({"/bin/sh", {"-c", script}, "test child", cpu});
    EXPECT_TRUE(child) << child.error().detail;
    return std::move(*child);
}

// Waits for something the child does; the deadline only bounds a failing test.
template <class Condition>
bool eventually(Condition condition) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!condition()) {
        if (std::chrono::steady_clock::now() > deadline) return false;
        // tidy: sleep, there is nothing to wait on but the condition itself
        std::this_thread::sleep_for(milliseconds(2));
    }
    return true;
}

bool is_gone(pid_t pid) {
    return kill(pid, 0) != 0 && errno == ESRCH;
}

TEST(ChildProcess, EndIsReportedWithCodeAndLastWords) {
    ChildProcess child = shell("echo one >&2; echo two >&2; printf 'th\\033ree' >&2; exit 3");
    ASSERT_TRUE(eventually([&] { return child.poll().has_value(); }));
    const ChildExit end = child.stop(milliseconds(0));
    EXPECT_EQ(end.code, 3);
    EXPECT_EQ(end.describe(), "exit code 3");
    EXPECT_EQ(child.last_words(2), "two | th?ree");
    EXPECT_EQ(child.last_words(), "one | two | th?ree");
}

TEST(ChildProcess, StopTerminatesThenKills) {
    ChildProcess polite = shell("echo up >&2; exec sleep 100");
    ASSERT_TRUE(eventually([&] { return polite.last_words() == "up"; }));
    EXPECT_FALSE(polite.poll());
    EXPECT_EQ(polite.stop(milliseconds(5000)).signal, SIGTERM);
    EXPECT_TRUE(is_gone(polite.pid()));

    ChildProcess deaf = shell("trap '' TERM; echo up >&2; while :; do sleep 0.01; done");
    ASSERT_TRUE(eventually([&] { return deaf.last_words() == "up"; }));
    EXPECT_EQ(deaf.stop(milliseconds(50)).signal, SIGKILL);
    EXPECT_EQ(deaf.stop(milliseconds(50)).signal, SIGKILL);  // again: no harm
}

TEST(ChildProcess, AStoppedChildIsEndedToo) {
    ChildProcess child = shell("echo up >&2; exec sleep 100");
    ASSERT_TRUE(eventually([&] { return child.last_words() == "up"; }));
    kill(child.pid(), SIGSTOP);
    EXPECT_EQ(child.stop(milliseconds(5000)).signal, SIGTERM);
}

TEST(ChildProcess, AChattyChildNeitherBlocksNorFillsMemory) {
    ChildProcess child =
        shell("i=0; while [ $i -lt 20000 ]; do echo line $i >&2; i=$((i+1)); done; exit 0");
    ASSERT_TRUE(eventually([&] { return child.poll().has_value(); }));
    child.stop(milliseconds(0));
    EXPECT_EQ(child.last_words(1), "line 19999");
    EXPECT_LE(child.last_words(1U << 20).size(), 2 * kTailBytesMax);
}

TEST(ChildProcess, LinesAreToldAsTheyCome) {
    std::mutex mu;
    std::vector<std::string> lines;
    ChildOptions options{
        "/bin/sh", {"-c", "printf 'one\\ntw' >&2; printf 'o\\nrest' >&2"}, "lines"};
    options.on_line = [&](std::string_view line) {
        const std::lock_guard lock(mu);
        lines.emplace_back(line);
    };
    auto child = ChildProcess::start(options);
    ASSERT_TRUE(child) << child.error().detail;
    ASSERT_TRUE(eventually([&] { return child->poll().has_value(); }));
    child->stop(milliseconds(0));
    EXPECT_EQ(lines, (std::vector<std::string>{"one", "two"})) << "without an end it is no line";
}

TEST(ChildProcess, StderrHeldOpenByAGrandchildDoesNotHangTheStop) {
    ChildProcess child = shell("sleep 3 & echo up >&2; exit 0");
    ASSERT_TRUE(eventually([&] { return child.poll().has_value(); }));
    const auto start = std::chrono::steady_clock::now();
    child.stop(milliseconds(0));
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
}

TEST(ChildProcess, MissingProgramIsAnEnvironmentError) {
    const auto child = ChildProcess::start({"/no/such/program", {}, "x", -1});
    ASSERT_FALSE(child);
    EXPECT_EQ(child.error().code, Errc::kEnvironment);
    EXPECT_NE(child.error().detail.find("/no/such/program"), std::string::npos);
}

TEST(ChildProcess, DestructorEndsIt) {
    pid_t pid = 0;
    {
        ChildProcess child = shell("exec sleep 100");
        pid = child.pid();
    }
    EXPECT_TRUE(is_gone(pid));
}

TEST(ChildProcess, DiesWithItsParent) {
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    const pid_t parent = fork();
    ASSERT_GE(parent, 0);
    if (parent == 0) {
        auto child = ChildProcess::start({"/bin/sleep", {"100"}, "orphan", -1});
        const pid_t pid = child ? child->pid() : -1;
        if (write(ends[1], &pid, sizeof(pid)) != sizeof(pid)) _exit(1);
        kill(getpid(), SIGKILL);  // no destructor runs
    }
    pid_t orphan = -1;
    ASSERT_EQ(read(ends[0], &orphan, sizeof(orphan)), static_cast<ssize_t>(sizeof(orphan)));
    waitpid(parent, nullptr, 0);
    ASSERT_GT(orphan, 0);
    // Whoever inherits it may not reap it: a zombie is dead as well.
    EXPECT_TRUE(eventually([&] {
        if (is_gone(orphan)) return true;
        std::ifstream in("/proc/" + std::to_string(orphan) + "/stat");
        std::string text;
        std::getline(in, text);
        return text.empty() || text.find(") Z") != std::string::npos;
    }));
    close(ends[0]);
    close(ends[1]);
}

TEST(ChildProcess, RunsOnTheChosenCpu) {
    const std::vector<int> cpus = allowed_cpus();
    ASSERT_FALSE(cpus.empty());
    ChildProcess child = shell("grep Cpus_allowed_list /proc/self/status >&2", cpus.back());
    ASSERT_TRUE(eventually([&] { return child.poll().has_value(); }));
    child.stop(milliseconds(0));
    EXPECT_EQ(child.last_words(), "Cpus_allowed_list:?" + std::to_string(cpus.back()));
}

// A program that plays `kvasir worker`: prints its arguments.
class LocalWorkersTest : public ::testing::Test {
protected:
    void SetUp() override {
        path_ = "/tmp/kvasir-fake-worker-" + std::to_string(getpid());
        std::ofstream(path_) << "#!/bin/sh\necho \"$@\" >&2\n"
                                "case \"$5\" in 0:bad) exit 7;; esac\nexec sleep 100\n";
        ASSERT_EQ(chmod(path_.c_str(), 0755), 0);
        options_.program = path_;
        options_.model_path = "m.gguf";
        options_.connect = "ws://127.0.0.1:9";
        options_.threads = 2;
    }
    void TearDown() override { unlink(path_.c_str()); }
    std::string path_;
    LocalWorkersOptions options_;
};

TEST_F(LocalWorkersTest, StartsOnePerShareAndStopsAll) {
    options_.experts = {"0:0-3", "0:4-7"};
    auto workers = LocalWorkers::start(options_);
    ASSERT_TRUE(workers) << workers.error().detail;
    ASSERT_EQ(workers->count(), 2U);
    EXPECT_TRUE(workers->check());
    const pid_t first = workers->pid(0);
    const pid_t second = workers->pid(1);
    workers->stop();
    EXPECT_TRUE(is_gone(first));
    EXPECT_TRUE(is_gone(second));
    workers->stop();
}

TEST_F(LocalWorkersTest, AnEarlyEndIsReportedWithItsWords) {
    options_.experts = {"0:0-3", "0:bad"};
    options_.log_level = "debug";
    auto workers = LocalWorkers::start(options_);
    ASSERT_TRUE(workers) << workers.error().detail;
    ASSERT_TRUE(eventually([&] { return !workers->check(); }));
    const Status status = workers->check();
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().code, Errc::kClosed);
    EXPECT_EQ(status.error().detail,
              "local worker 1 ended with exit code 7: worker --model m.gguf --experts 0:bad "
              "--connect ws://127.0.0.1:9 --threads 2 --log-level debug");
}

TEST_F(LocalWorkersTest, NoneRemainWhenOneCannotStart) {
    options_.program = "/no/such/program";
    options_.experts = {"0:0-3"};
    const auto workers = LocalWorkers::start(options_);
    ASSERT_FALSE(workers);
    EXPECT_EQ(workers.error().code, Errc::kEnvironment);
}

TEST(OwnProgram, IsThisTest) {
    const auto path = own_program();
    ASSERT_TRUE(path);
    EXPECT_NE(path->find("apps_test"), std::string::npos);
}

}  // namespace
}  // namespace kvasir::apps
