// How fast HttpClient downloads, beside the `curl` program: download_bench [MIB] [RUNS] [PARALLEL]
//
// A child process serves MIB (340) of memory over loopback HTTP, by ranges; the client fetches them
// as PARALLEL jobs into memory that is thrown away, curl into /dev/null over one connection, in
// turns. Also our client with one job, which is what curl does. Prints medians in seconds, CPU
// seconds and the ratios as JSON. Without a `curl` program its numbers are missing.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include <netinet/in.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "net/client.hpp"

namespace {

using namespace kvasir;

// ---- the server: one child per connection, GET with or without a range ----

bool send_all(int fd, const char* data, size_t bytes) {
    while (bytes > 0) {
        const ssize_t sent = send(fd, data, bytes, MSG_NOSIGNAL);
        if (sent <= 0) return false;
        data += sent;
        bytes -= static_cast<size_t>(sent);
    }
    return true;
}

void serve_connection(int fd, const std::string& content) {
    std::string unread;
    char buffer[4096];
    for (;;) {
        size_t end = 0;
        while ((end = unread.find("\r\n\r\n")) == std::string::npos) {
            const ssize_t bytes = recv(fd, buffer, sizeof(buffer), 0);
            if (bytes <= 0) return;
            unread.append(buffer, static_cast<size_t>(bytes));
        }
        const std::string head = unread.substr(0, end);
        unread.erase(0, end + 4);
        unsigned long long first = 0, last = content.size() - 1;
        const size_t range = head.find("Range: bytes=");
        if (range != std::string::npos) {
            std::sscanf(head.c_str() + range, "Range: bytes=%llu-%llu", &first, &last);
        }
        if (last >= content.size() || first > last) return;
        char reply[256];
        const int bytes = std::snprintf(
            reply, sizeof(reply),
            "HTTP/1.1 %s\r\nContent-Length: %llu\r\nContent-Range: bytes %llu-%llu/%zu\r\n\r\n",
            range != std::string::npos ? "206 Part" : "200 OK", last - first + 1, first, last,
            content.size());
        if (!send_all(fd, reply, static_cast<size_t>(bytes)) ||
            !send_all(fd, content.data() + first, last - first + 1)) {
            return;
        }
    }
}

[[noreturn]] void serve(int listener, const std::string& content) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    std::signal(SIGCHLD, SIG_IGN);
    for (;;) {
        const int fd = accept(listener, nullptr, nullptr);
        if (fd < 0) _exit(1);
        if (fork() == 0) {
            prctl(PR_SET_PDEATHSIG, SIGTERM);
            serve_connection(fd, content);
            _exit(0);
        }
        close(fd);
    }
}

// ---- the two clients ----

bool run_curl(const std::string& url) {
    const char* arguments[] = {"curl", "-s", "-f", "-o", "/dev/null", url.c_str(), nullptr};
    pid_t child = 0;
    if (posix_spawnp(&child, "curl", nullptr, nullptr, const_cast<char**>(arguments), environ)) {
        return false;
    }
    int status = 0;
    return waitpid(child, &status, 0) == child && status == 0;
}

bool run_client(const std::string& url, uint64_t bytes, uint32_t parallel) {
    auto client = net::HttpClient::make({});
    if (!client) return false;
    std::vector<net::RangeJob> jobs;
    const uint64_t piece = (bytes + parallel - 1) / parallel;
    for (uint64_t at = 0; at < bytes; at += piece) {
        net::RangeJob job;
        job.url = url;
        job.offset = at;
        job.bytes = std::min(piece, bytes - at);
        job.file_bytes = bytes;
        jobs.push_back(job);
    }
    net::RangeOptions options;
    options.parallel = parallel;
    uint64_t got = 0;
    const Status status = (*client)->download(
        jobs, options,
        [&](const net::RangeJob&, uint64_t, std::span<const uint8_t> data) -> Status {
            got += data.size();
            return {};
        },
        [](const net::RangeJob&) -> Status { return {}; });
    if (!status) std::fprintf(stderr, "download_bench: %s\n", status.error().detail.c_str());
    return status && got == bytes;
}

struct Times {
    std::vector<double> wall, cpu;
    bool failed = false;
};

double cpu_seconds(int who) {
    rusage usage = {};
    getrusage(who, &usage);
    return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

void measure(Times& times, int who, const std::function<bool()>& work) {
    const double cpu = cpu_seconds(who);
    const auto begin = std::chrono::steady_clock::now();
    times.failed = !work() || times.failed;
    const auto taken = std::chrono::steady_clock::now() - begin;
    times.wall.push_back(std::chrono::duration<double>(taken).count());
    times.cpu.push_back(cpu_seconds(who) - cpu);
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
    const uint64_t bytes = (argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 340) << 20;
    const int runs = argc > 2 ? std::atoi(argv[2]) : 7;
    const uint32_t parallel = argc > 3 ? static_cast<uint32_t>(std::atoi(argv[3])) : 4;
    if (bytes == 0 || runs < 1 || parallel < 1 || parallel > 64) {
        std::fprintf(stderr, "usage: download_bench [MIB] [RUNS] [PARALLEL]\n");
        return 2;
    }
    const std::string content(bytes, 'k');
    const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    if (bind(listener, generic, size) != 0 || listen(listener, 64) != 0 ||
        getsockname(listener, generic, &size) != 0) {
        std::perror("download_bench: loopback");
        return 4;
    }
    const pid_t server = fork();
    if (server == 0) serve(listener, content);
    const std::string url = "http://127.0.0.1:" + std::to_string(ntohs(address.sin_port)) + "/m";

    Times curl, one, many;
    for (int run = 0; run < runs; ++run) {
        measure(curl, RUSAGE_CHILDREN, [&] { return run_curl(url); });
        measure(one, RUSAGE_SELF, [&] { return run_client(url, bytes, 1); });
        measure(many, RUSAGE_SELF, [&] { return run_client(url, bytes, parallel); });
    }
    kill(server, SIGTERM);
    waitpid(server, nullptr, 0);
    if (one.failed || many.failed) return 1;
    std::printf(
        "{\"mib\": %llu, \"client_1\": %.3f, \"client_1_cpu\": %.3f, "
        "\"client_%u\": %.3f, \"client_%u_cpu\": %.3f",
        static_cast<unsigned long long>(bytes >> 20), median(one.wall), median(one.cpu), parallel,
        median(many.wall), parallel, median(many.cpu));
    if (!curl.failed) {
        std::printf(", \"curl\": %.3f, \"curl_cpu\": %.3f, \"ratio_1\": %.2f, \"ratio_%u\": %.2f",
                    median(curl.wall), median(curl.cpu), median(one.wall) / median(curl.wall),
                    parallel, median(many.wall) / median(curl.wall));
    }
    std::printf("}\n");
    return 0;
}
