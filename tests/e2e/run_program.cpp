#include "run_program.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

namespace kvasir::e2e {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

// A file in memory: the program can write as much as it likes without anybody reading meanwhile.
class Capture {
public:
    explicit Capture(const char* name) : fd_(memfd_create(name, MFD_CLOEXEC)) {}
    ~Capture() { close(fd_); }
    Capture(const Capture&) = delete;
    Capture& operator=(const Capture&) = delete;
    int fd() const { return fd_; }
    std::string text() const {
        std::string out;
        char buffer[65536];
        ssize_t count = 0;
        while ((count = pread(fd_, buffer, sizeof(buffer), static_cast<off_t>(out.size()))) > 0) {
            out.append(buffer, static_cast<size_t>(count));
        }
        return out;
    }

private:
    int fd_;
};

[[noreturn]] void run_child(const std::vector<char*>& arguments, const ProgramOptions& options,
                            int in_fd, int out_fd, int err_fd) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (const std::string& variable : options.environment) {
        putenv(const_cast<char*>(variable.c_str()));
    }
    if (!options.stdout_path.empty()) out_fd = open(options.stdout_path.c_str(), O_WRONLY);
    dup2(in_fd >= 0 ? in_fd : open("/dev/null", O_RDONLY), STDIN_FILENO);
    dup2(out_fd, STDOUT_FILENO);
    dup2(err_fd, STDERR_FILENO);
    execv(arguments[0], arguments.data());
    _exit(127);
}

// A swarm may survive a program that a sanitizer ended; the test must not.
void expect_no_finding(const std::string& err) {
    for (const char* sign : {"Sanitizer: ", "runtime error: "}) {
        const size_t at = err.find(sign);
        if (at == std::string::npos) continue;
        ADD_FAILURE() << "a sanitizer's finding: " << err.substr(err.rfind('\n', at) + 1, 8000);
        return;
    }
}

}  // namespace

size_t count_of(const std::string& text, std::string_view wanted) {
    size_t count = 0;
    for (size_t at = text.find(wanted); at != std::string::npos; at = text.find(wanted, at + 1)) {
        ++count;
    }
    return count;
}

struct Program::Impl {
    Capture out{"stdout"};
    Capture err{"stderr"};
    pid_t pid = -1;
    int input = -1;  // the end that is written to
    std::optional<int> exit_code;

    ~Impl() {
        if (input >= 0) close(input);
    }

    bool poll() {
        if (exit_code || pid < 0) return true;
        int status = 0;
        const pid_t done = waitpid(pid, &status, WNOHANG);
        if (done == 0 || (done < 0 && errno == EINTR)) return false;
        exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        return true;
    }
};

Program::Program(const std::vector<std::string>& argv, const ProgramOptions& options)
    : impl_(std::make_unique<Impl>()) {
    std::vector<char*> arguments;
    for (const std::string& argument : argv) {
        arguments.push_back(const_cast<char*>(argument.c_str()));
    }
    arguments.push_back(nullptr);
    int input[2] = {-1, -1};
    if (options.stdin_pipe) {
        EXPECT_EQ(pipe2(input, O_CLOEXEC), 0);
    }
    const pid_t pid = fork();
    if (pid == 0) run_child(arguments, options, input[0], impl_->out.fd(), impl_->err.fd());
    if (input[0] >= 0) close(input[0]);
    impl_->pid = pid;
    impl_->input = input[1];
}

Program::Program(Program&&) noexcept = default;

Program& Program::operator=(Program&& other) noexcept {
    std::swap(impl_, other.impl_);
    return *this;
}

Program::~Program() {
    if (!impl_) return;
    if (!impl_->poll()) {
        signal(SIGKILL);
        waitpid(impl_->pid, nullptr, 0);
    }
    expect_no_finding(impl_->err.text());
}

pid_t Program::pid() const {
    return impl_->pid;
}
std::string Program::out() const {
    return impl_->out.text();
}
std::string Program::err() const {
    return impl_->err.text();
}
bool Program::running() const {
    return !impl_->poll();
}

void Program::signal(int number) const {
    if (impl_->pid > 0 && !impl_->exit_code) kill(impl_->pid, number);
}

void Program::type(std::string_view text) {
    // A program that has ended is a failure of the test, not its end.
    const auto before = ::signal(SIGPIPE, SIG_IGN);
    EXPECT_EQ(write(impl_->input, text.data(), text.size()), static_cast<ssize_t>(text.size()));
    ::signal(SIGPIPE, before);
}

void Program::end_input() {
    if (impl_->input >= 0) close(std::exchange(impl_->input, -1));
}

bool Program::wait_for(std::string_view text, size_t count, unsigned seconds_max) {
    bool there = false;
    eventually(
        [&] {
            const bool ended = !running();  // before reading: its last words count
            there = count_of(out(), text) + count_of(err(), text) >= count;
            return there || ended;
        },
        seconds_max);
    return there;
}

std::string Program::word_after(std::string_view before) const {
    for (const std::string& text : {out(), err()}) {
        const size_t at = text.find(before);
        if (at == std::string::npos) continue;
        const size_t begin = at + before.size();
        return text.substr(begin, text.find_first_of(" \r\n", begin) - begin);
    }
    return {};
}

Outcome Program::wait(unsigned seconds_max) const {
    if (!eventually([this] { return impl_->poll(); }, seconds_max)) {
        signal(SIGKILL);
        eventually([this] { return impl_->poll(); });
    }
    return {impl_->exit_code.value_or(-1), out(), err()};
}

bool eventually(const std::function<bool()>& condition, unsigned seconds_max) {
    const auto deadline = Clock::now() + seconds(seconds_max);
    while (!condition()) {
        if (Clock::now() > deadline) return false;
        // tidy: sleep, polls what another process does; nothing signals it
        std::this_thread::sleep_for(milliseconds(1));
    }
    return true;
}

Outcome run_program(const std::vector<std::string>& argv, const ProgramOptions& options) {
    return Program(argv, options).wait(options.seconds_max);
}

Outcome kvasir(std::vector<std::string> arguments, const ProgramOptions& options) {
    arguments.insert(arguments.begin(), KVASIR_PROGRAM);
    return run_program(arguments, options);
}

std::string demo_model() {
    return std::string(KVASIR_SOURCE_DIR) + "/models/skald-q4_k_m.gguf";
}

}  // namespace kvasir::e2e
