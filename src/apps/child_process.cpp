#include "apps/child_process.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>

#include "base/log.hpp"

namespace kvasir::apps {
namespace {

using SteadyClock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kDestructorGrace{2000};

void close_fd(int& fd) {
    if (fd >= 0) close(fd);
    fd = -1;
}

// What the child runs between fork and exec: only async-signal-safe calls. Reports errno through
// `status_fd` (closed by a successful exec).
[[noreturn]] void become(const char* program, char* const* argv, char* const* environment,
                         int stderr_fd, int status_fd, int null_fd, pid_t parent,
                         const cpu_set_t* cpus) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);  // it died before prctl
    if (cpus != nullptr) sched_setaffinity(0, sizeof(*cpus), cpus);
    dup2(null_fd, STDIN_FILENO);
    dup2(null_fd, STDOUT_FILENO);
    dup2(stderr_fd, STDERR_FILENO);
    struct sigaction action {};
    action.sa_handler = SIG_DFL;
    sigaction(SIGPIPE, &action, nullptr);  // ignored signals are inherited through exec
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    execve(program, argv, environment);
    const int error = errno;
    const ssize_t written = write(status_fd, &error, sizeof(error));
    _exit(written == sizeof(error) ? 127 : 126);
}

ChildExit decode_wait(int status) {
    ChildExit out;
    if (WIFEXITED(status)) out.code = WEXITSTATUS(status);
    if (WIFSIGNALED(status)) out.signal = WTERMSIG(status);
    return out;
}

}  // namespace

struct ChildProcess::Impl {
    // Constant after start()
    std::string label;
    std::function<void(std::string_view)> on_line;
    pid_t pid = -1;
    int stderr_fd = -1;
    int wake_fd = -1;  // eventfd: the reader should end
    std::thread reader;

    // Owner only
    std::optional<ChildExit> ended;

    mutable std::mutex mu;
    // Guarded by mu
    std::string tail;

    ~Impl() {
        end_reader();
        close_fd(stderr_fd);
        close_fd(wake_fd);
    }

    void end_reader() {
        if (!reader.joinable()) return;
        const uint64_t one = 1;
        if (write(wake_fd, &one, sizeof(one)) != sizeof(one)) {
            log(LogLevel::kWarn, "child", std::string("eventfd: ") + std::strerror(errno));
        }
        reader.join();
    }

    void keep(std::string_view bytes) {
        const std::lock_guard lock(mu);
        tail.append(bytes);
        if (tail.size() > kTailBytesMax) tail.erase(0, tail.size() - kTailBytesMax);
    }

    void take_lines(std::string& partial, std::string_view bytes) const {
        for (const char c : bytes) {
            if (c != '\n' && partial.size() < 1000) {
                partial.push_back(c);
            } else if (c == '\n') {
                log(LogLevel::kDebug, label, printable(partial, 1000));
                if (on_line) on_line(partial);
                partial.clear();
            }
        }
    }

    // Until end of file (the child and everybody it passed stderr to are gone), or until woken;
    // then takes what is already there.
    void read_stderr() {
        std::array<char, 4096> buffer;
        std::string partial;
        for (;;) {
            std::array<pollfd, 2> wanted = {{{stderr_fd, POLLIN, 0}, {wake_fd, POLLIN, 0}}};
            if (::poll(wanted.data(), wanted.size(), -1) < 0 && errno != EINTR) return;
            const ssize_t count = read(stderr_fd, buffer.data(), buffer.size());
            if (count > 0) {
                const std::string_view bytes(buffer.data(), static_cast<size_t>(count));
                keep(bytes);
                take_lines(partial, bytes);
                continue;
            }
            const bool nothing_yet = count < 0 && (errno == EAGAIN || errno == EINTR);
            if (!nothing_yet || (wanted[1].revents & POLLIN) != 0) return;
        }
    }
};

std::string ChildExit::describe() const {
    if (signal == 0) return "exit code " + std::to_string(code);
    return "signal " + std::to_string(signal) + " (" + strsignal(signal) + ")";
}

ChildProcess::ChildProcess(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ChildProcess::ChildProcess(ChildProcess&&) noexcept = default;
ChildProcess& ChildProcess::operator=(ChildProcess&& other) noexcept {
    if (this != &other) {
        if (impl_ != nullptr) stop(kDestructorGrace);
        impl_ = std::move(other.impl_);
    }
    return *this;
}
ChildProcess::~ChildProcess() {
    if (impl_ != nullptr) stop(kDestructorGrace);
}

Result<ChildProcess> ChildProcess::start(const ChildOptions& options) {
    std::array<int, 2> errors = {-1, -1};
    std::array<int, 2> status = {-1, -1};
    int null_fd = -1;
    auto impl = std::make_unique<Impl>();
    impl->label = options.label;
    impl->on_line = options.on_line;
    const auto give_up = [&](int error, const std::string& what) {
        for (int* fd : {&errors[0], &errors[1], &status[0], &status[1], &null_fd}) close_fd(*fd);
        return fail(Errc::kEnvironment, what + ": " + std::strerror(error));
    };
    null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    impl->wake_fd = eventfd(0, EFD_CLOEXEC);
    if (null_fd < 0 || impl->wake_fd < 0 || pipe2(errors.data(), O_CLOEXEC) != 0 ||
        pipe2(status.data(), O_CLOEXEC) != 0) {
        return give_up(errno, "cannot prepare " + options.label);
    }
    fcntl(errors[0], F_SETFL, O_NONBLOCK);

    // Everything that allocates happens before fork: other threads may hold the allocator's lock.
    std::vector<char*> argv = {const_cast<char*>(options.program.c_str())};
    for (const std::string& argument : options.arguments) {
        argv.push_back(const_cast<char*>(argument.c_str()));
    }
    argv.push_back(nullptr);
    std::vector<char*> environment;
    for (const std::string& variable : options.environment) {
        environment.push_back(const_cast<char*>(variable.c_str()));
    }
    for (char** variable = environ; *variable != nullptr; ++variable) {
        const std::string_view name(*variable, std::strcspn(*variable, "=") + 1);
        const bool replaced = std::ranges::any_of(
            options.environment, [&](const std::string& own) { return own.starts_with(name); });
        if (!replaced) environment.push_back(*variable);
    }
    environment.push_back(nullptr);
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    if (options.cpu >= 0 && options.cpu < CPU_SETSIZE) CPU_SET(options.cpu, &cpus);
    const pid_t parent = getpid();
    const pid_t pid = fork();
    if (pid < 0) return give_up(errno, "cannot start " + options.label);
    if (pid == 0) {
        become(options.program.c_str(), argv.data(), environment.data(), errors[1], status[1],
               null_fd, parent, options.cpu >= 0 ? &cpus : nullptr);
    }
    close_fd(errors[1]);
    close_fd(status[1]);
    int exec_error = 0;
    ssize_t count = 0;
    do {
        count = read(status[0], &exec_error, sizeof(exec_error));
    } while (count < 0 && errno == EINTR);
    if (count > 0) {
        waitpid(pid, nullptr, 0);
        return give_up(exec_error, "cannot run '" + printable(options.program) + "'");
    }
    close_fd(status[0]);
    close_fd(null_fd);
    impl->pid = pid;
    impl->stderr_fd = errors[0];
    Impl* raw = impl.get();
    impl->reader = std::thread([raw] { raw->read_stderr(); });
    return ChildProcess(std::move(impl));
}

pid_t ChildProcess::pid() const {
    return impl_->pid;
}

std::optional<ChildExit> ChildProcess::poll() {
    if (impl_->ended) return impl_->ended;
    int status = 0;
    const pid_t done = waitpid(impl_->pid, &status, WNOHANG);
    if (done == impl_->pid) impl_->ended = decode_wait(status);
    return impl_->ended;
}

ChildExit ChildProcess::stop(std::chrono::milliseconds grace) {
    if (!poll()) {
        kill(impl_->pid, SIGTERM);
        kill(impl_->pid, SIGCONT);  // a stopped process acts on SIGTERM only when continued
        const auto deadline = SteadyClock::now() + grace;
        while (!poll() && SteadyClock::now() < deadline) {
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
        }
    }
    if (!poll()) {
        kill(impl_->pid, SIGKILL);
        int status = 0;
        while (waitpid(impl_->pid, &status, 0) < 0 && errno == EINTR) {
        }
        impl_->ended = decode_wait(status);
    }
    impl_->end_reader();
    return *impl_->ended;
}

std::string ChildProcess::last_words(size_t lines_max) const {
    const std::lock_guard lock(impl_->mu);
    std::vector<std::string> lines;
    size_t begin = 0;
    const std::string& text = impl_->tail;
    while (begin < text.size()) {
        size_t end = text.find('\n', begin);
        if (end == std::string::npos) end = text.size();
        if (end > begin) lines.push_back(printable(text.substr(begin, end - begin)));
        begin = end + 1;
    }
    std::string out;
    for (size_t i = lines.size() > lines_max ? lines.size() - lines_max : 0; i < lines.size();
         ++i) {
        if (!out.empty()) out += " | ";
        out += lines[i];
    }
    return out;
}

}  // namespace kvasir::apps
