#include "run_program.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <thread>

namespace kvasir::e2e {
namespace {

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
        char buffer[4096];
        ssize_t count = 0;
        while ((count = pread(fd_, buffer, sizeof(buffer), static_cast<off_t>(out.size()))) > 0) {
            out.append(buffer, static_cast<size_t>(count));
        }
        return out;
    }

private:
    int fd_;
};

}  // namespace

Outcome run_program(const std::vector<std::string>& argv, const ProgramOptions& options) {
    const Capture out("stdout");
    const Capture err("stderr");
    std::vector<char*> arguments;
    for (const std::string& argument : argv)
        arguments.push_back(const_cast<char*>(argument.c_str()));
    arguments.push_back(nullptr);
    const pid_t pid = fork();
    if (pid == 0) {
        for (const std::string& variable : options.environment) {
            putenv(const_cast<char*>(variable.c_str()));
        }
        int out_fd = out.fd();
        if (!options.stdout_path.empty()) out_fd = open(options.stdout_path.c_str(), O_WRONLY);
        dup2(open("/dev/null", O_RDONLY), STDIN_FILENO);
        dup2(out_fd, STDOUT_FILENO);
        dup2(err.fd(), STDERR_FILENO);
        execv(arguments[0], arguments.data());
        _exit(127);
    }
    Outcome outcome;
    if (pid < 0) return outcome;
    const auto deadline =
        std::chrono::steady_clock::now() + std::chrono::seconds(options.seconds_max);
    int status = 0;
    bool killed = false;
    for (;;) {
        const pid_t done = waitpid(pid, &status, WNOHANG);
        if (done == pid || (done < 0 && errno != EINTR)) break;
        if (!killed && std::chrono::steady_clock::now() > deadline) {
            kill(pid, SIGKILL);
            killed = true;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    outcome.out = out.text();
    outcome.err = err.text();
    return outcome;
}

Outcome kvasir(std::vector<std::string> arguments, const ProgramOptions& options) {
    arguments.insert(arguments.begin(), KVASIR_PROGRAM);
    return run_program(arguments, options);
}

std::string demo_model() {
    return std::string(KVASIR_SOURCE_DIR) + "/models/skald-q4_k_m.gguf";
}

}  // namespace kvasir::e2e
