// What a relay costs, beside a direct connection and beside nginx as a TCP proxy, in one run.
//
//   relay_bench [--seconds S] [--idle N] [--json FILE] [--no-nginx] [--only paths|fairness|idle]
//               [--rounds N] [--flood-piece BYTES] [--flood-frame BYTES]
//
//   latency   4 KB request, 4 KB answer: direct, through the relay, through nginx; plain and TLS
//   bulk      256 KiB frames one way over the same paths
//   idle      memory of a relay with N attached nodes that say nothing; plain and TLS
//   fairness  a healthy pair alone, beside a flooder, beside a neighbour that sends as hard but to
//             itself, beside a reader that stopped: N rounds in which these take turns, S seconds
//             each; the ratios of a round's p99, and their median, least and largest. The company
//             sends frames of --flood-frame bytes, --flood-piece of them a system call
//
// Every party is a process of its own. Paths take turns within a run, so that a busy machine is
// unfair to none. nginx terminates TLS and forwards plain bytes (one worker); it needs nginx and
// its stream module installed (Debian: nginx-light, libnginx-mod-stream), else it is left out.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "relay_parties.hpp"

namespace {

using namespace kvasir;
using namespace kvasir::bench;

// ---- measuring ----

struct Path {
    std::string name;
    Node client;
    uint16_t peer = 0;
    std::vector<double> us;
    double bulk_bytes = 0;
    double bulk_seconds = 0;
};

Node dial_patiently(const Target& target) {
    const auto end = net::Clock::now() + std::chrono::seconds(10);
    while (true) {
        auto dialed = net::dial(target.endpoint, {}, {}, target.tls);
        if (dialed) return Node(std::move(*dialed));
        require(net::Clock::now() < end, dialed.error().detail.c_str());
        ::usleep(20000);
    }
}

double exchange(Path& path, const Bytes& payload, uint32_t id) {
    const Bytes frame = make_frame(FrameType::kCompute, path.peer, id, payload);
    const auto start = net::Clock::now();
    require(path.client.stream.enqueue(frame) && path.client.stream.flush_until(in(kPatience)),
            "send");
    while (true) {
        const auto got = path.client.stream.receive(in(kPatience));
        require(got.has_value(), "receive");
        if (got->size() == frame.size() && (*got)[0] == uint8_t(FrameType::kResult)) break;
    }
    return std::chrono::duration<double, std::micro>(net::Clock::now() - start).count();
}

void bulk(Path& path, uint64_t count) {
    ByteWriter token;
    token.u64(count);
    const auto start = net::Clock::now();
    path.client.say(make_frame(FrameType::kPing, path.peer, 1, token.data()));
    for (uint64_t i = 0; i < count; ++i) {
        const auto got = path.client.stream.receive(in(kPatience));
        require(got.has_value() && got->size() == kBulkFrame + 16, "bulk");
    }
    path.bulk_seconds += std::chrono::duration<double>(net::Clock::now() - start).count();
    path.bulk_bytes += static_cast<double>(count * kBulkFrame);
}

double quantile(std::vector<double> values, double q) {
    std::sort(values.begin(), values.end());
    return values.empty() ? 0 : values[static_cast<size_t>(q * (values.size() - 1))];
}

uint64_t resident_kib(pid_t pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/status");
    std::string word;
    while (file >> word) {
        uint64_t value = 0;
        if (word == "VmRSS:" && file >> value) return value;
    }
    return 0;
}

// ---- the report ----

class Report {
public:
    void number(const std::string& name, double value, const char* format = "%.1f") {
        char text[64];
        std::snprintf(text, sizeof(text), format, value);
        std::printf("  %-34s %12s\n", name.c_str(), text);
        std::fflush(stdout);
        json_ += (json_.empty() ? "" : ",\n") + std::string("  \"") + name + "\": " + text;
    }
    void head(const char* text) { std::printf("%s\n", text); }
    std::string json() const { return "{\n" + json_ + "\n}\n"; }

private:
    std::string json_;
};

struct Options {
    double seconds = 4;
    int rounds = 9;
    Flood flood;
    uint32_t idle = 10000;
    std::string json, only;
    bool nginx = true;
};

void compare(bool tls, const Options& options, Report& report) {
    const std::string suffix = tls ? "_tls" : "_plain";
    const Child direct = start_direct(tls);
    const Child plain_origin = start_direct(false);  // behind nginx
    const Child relay = start_relay(tls);
    const Target at_relay = target_at(relay.value(), tls);
    const Child worker = start_worker(at_relay);
    std::vector<Path> paths;
    paths.push_back({"direct", dial_patiently(target_at(direct.value(), tls)), 0, {}});
    paths.push_back({"relay", Node::attach(at_relay, Role::kBackbone), 0, {}});
    paths.back().peer = paths.back().client.peer();
    std::optional<Child> nginx;
    if (options.nginx && have_nginx()) {
        const uint16_t port = free_port();
        nginx.emplace(start_nginx(port, plain_origin.value(), tls));
        paths.push_back({"nginx", dial_patiently(target_at(port, tls)), 0, {}});
    }
    const Bytes payload(kSmall, 7);
    uint32_t id = 0;
    for (Path& path : paths) {
        for (int i = 0; i < 300; ++i) (void)exchange(path, payload, ++id);
        bulk(path, 40);
        path.bulk_bytes = path.bulk_seconds = 0;
    }
    const auto end = net::Clock::now() + std::chrono::duration<double>(options.seconds);
    while (net::Clock::now() < end) {
        for (Path& path : paths) {
            for (int i = 0; i < 300; ++i) path.us.push_back(exchange(path, payload, ++id));
        }
        for (Path& path : paths) bulk(path, 200);
    }
    report.head(tls ? "TLS" : "plain");
    for (const Path& path : paths) {
        report.number(path.name + suffix + "_p50_us", quantile(path.us, 0.5));
        report.number(path.name + suffix + "_p99_us", quantile(path.us, 0.99));
        report.number(path.name + suffix + "_bulk_mb_s", path.bulk_bytes / path.bulk_seconds / 1e6);
    }
    const double added = quantile(paths[1].us, 0.5) - quantile(paths[0].us, 0.5);
    report.number("relay" + suffix + "_added_round_trip_us", added);
    report.number("relay" + suffix + "_added_per_hop_us", added / 2);  // there, and back
    if (paths.size() > 2) {
        report.number("relay" + suffix + "_bulk_of_nginx",
                      (paths[1].bulk_bytes / paths[1].bulk_seconds) /
                          (paths[2].bulk_bytes / paths[2].bulk_seconds),
                      "%.2f");
    }
}

void idle(bool tls, const Options& options, Report& report) {
    const Child relay = start_relay(tls);
    const Target target = target_at(relay.value(), tls);
    { (void)Node::attach(target, Role::kWorker); }
    const uint64_t before = resident_kib(relay.pid());
    // In two processes, so that no process needs more than half of the descriptors.
    std::vector<Child> crowds;
    for (int i = 0; i < 2; ++i) {
        crowds.emplace_back([&](int fd) {
            rlimit limit = {};
            ::getrlimit(RLIMIT_NOFILE, &limit);
            limit.rlim_cur = limit.rlim_max;
            ::setrlimit(RLIMIT_NOFILE, &limit);
            std::vector<Node> nodes;
            for (uint32_t n = 0; n < options.idle / 2; ++n) {
                nodes.push_back(Node::attach(target, Role::kWorker));
                nodes.back().stream.release_idle_buffers();
            }
            ready(fd, nodes.size());
            while (true) ::pause();
        });
    }
    // The relay gives buffers back two seconds after the last byte.
    uint64_t after = resident_kib(relay.pid());
    for (int i = 0; i < 30; ++i) {
        ::usleep(100000);
        after = resident_kib(relay.pid());
    }
    const std::string name = tls ? "idle_tls_" : "idle_plain_";
    report.number(name + "nodes", crowds[0].value() + crowds[1].value(), "%.0f");
    report.number(name + "relay_mb", static_cast<double>(after) * 1024 / 1e6);
    report.number(name + "kib_per_node", static_cast<double>(after - before) / options.idle,
                  "%.2f");
}

// ---- fairness ----

// One way to have company, as all rounds measured it.
struct Company {
    std::string name;
    std::vector<double> p50_us = {}, p99_us = {};
    double bytes = 0;  // that the company itself got through
    double seconds = 0;

    void take(std::vector<double> us) {
        std::sort(us.begin(), us.end());
        p50_us.push_back(us[us.size() / 2]);
        p99_us.push_back(us[us.size() * 99 / 100]);
    }
};

void healthy(Path& path, double seconds, std::vector<double>* us) {
    const Bytes payload(kSmall, 7);
    const auto end = net::Clock::now() + std::chrono::duration<double>(seconds);
    while (net::Clock::now() < end) {
        const double one = exchange(path, payload, 1);
        if (us != nullptr) us->push_back(one);
    }
}

void measure(Path& path, const Options& options, Company& company, const Tally& tally) {
    healthy(path, 0.1, nullptr);  // whatever has just begun is under way
    const uint64_t before = tally.bytes();
    const auto start = net::Clock::now();
    std::vector<double> us;
    healthy(path, options.seconds, &us);
    company.take(std::move(us));
    company.seconds += std::chrono::duration<double>(net::Clock::now() - start).count();
    company.bytes += static_cast<double>(tally.bytes() - before);
}

void report_ratio(Report& report, const Company& what, const Company& of) {
    std::vector<double> ratios;
    for (size_t i = 0; i < what.p99_us.size(); ++i) {
        ratios.push_back(what.p99_us[i] / of.p99_us[i]);
    }
    const std::string name = what.name + "_p99_of_" + of.name;
    report.number(name, quantile(ratios, 0.5), "%.2f");
    report.number(name + "_least", quantile(ratios, 0), "%.2f");
    report.number(name + "_most", quantile(ratios, 1), "%.2f");
}

// The relay has a processor of its own; everybody else shares the other, where the company runs
// only when the healthy pair has nothing to do. What the company costs without the relay is seen
// beside the neighbour. Nobody is a real-time process: those keep the kernel's network threads
// waiting, and with them their own messages.
void fairness(const Options& options, Report& report) {
    const Cores cores = two_cores();
    std::optional<Pinned> pinned(std::in_place, cores.relay);
    const Child relay = start_relay(false);
    pinned.reset();
    pinned.emplace(cores.others);
    const Target target = target_at(relay.value(), false);
    const Child worker = start_worker(target);
    Path path{"relay", Node::attach(target, Role::kBackbone), 0, {}};
    path.peer = path.client.peer();
    healthy(path, 0.5, nullptr);
    const Tally tally;
    Company alone{"alone"}, neighbour{"neighbour"}, flooder{"flooder"}, slow{"slow"};
    for (int round = 0; round < options.rounds; ++round) {
        measure(path, options, alone, tally);
        {
            Child beside = start_flooder(target, tally, options.flood);
            measure(path, options, flooder, tally);
            require(beside.running(), "the flooder ended");
        }
        {
            Child beside = start_neighbour(tally, options.flood);
            measure(path, options, neighbour, tally);
            require(beside.running(), "the neighbour ended");
        }
        {
            Child beside = start_slow(target);
            measure(path, options, slow, tally);
            require(beside.running(), "the slow ended");
        }
    }
    report.head("fairness");
    if (cores.relay < 0) report.head("  (one processor only: nothing is pinned)");
    for (const Company* company : {&alone, &neighbour, &flooder, &slow}) {
        report.number(company->name + "_p50_us", quantile(company->p50_us, 0.5));
        report.number(company->name + "_p99_us", quantile(company->p99_us, 0.5));
        if (company->bytes == 0) continue;
        report.number(company->name + "_mb_s", company->bytes / company->seconds / 1e6);
    }
    report_ratio(report, flooder, alone);
    report_ratio(report, flooder, neighbour);
    report_ratio(report, neighbour, alone);
    report_ratio(report, slow, alone);
}

Options parse(int argc, char** argv) {
    Options options;
    for (int i = 1; i < argc; ++i) {
        const std::string flag = argv[i];
        const char* value = i + 1 < argc ? argv[i + 1] : nullptr;
        if (flag == "--no-nginx") {
            options.nginx = false;
        } else if (value == nullptr) {
            std::fprintf(stderr, "relay_bench: unknown flag %s, or it lacks its value\n", argv[i]);
            std::exit(2);
        } else {
            if (flag == "--seconds") options.seconds = std::atof(value);
            if (flag == "--rounds") options.rounds = std::atoi(value);
            if (flag == "--flood-piece")
                options.flood.piece_bytes = std::strtoull(value, nullptr, 10);
            if (flag == "--flood-frame") {
                options.flood.payload_bytes = std::strtoull(value, nullptr, 10);
            }
            if (flag == "--idle") options.idle = static_cast<uint32_t>(std::atoi(value));
            if (flag == "--json") options.json = value;
            if (flag == "--only") options.only = value;
            ++i;
        }
    }
    return options;
}

}  // namespace

int main(int argc, char** argv) {
    const Options options = parse(argc, argv);
    char folder[] = "/tmp/relay_bench_XXXXXX";
    require(::mkdtemp(folder) != nullptr, "mkdtemp");
    g_folder = folder;
    (void)server_tls(true);  // made once, before the children
    if (options.nginx && !have_nginx()) {
        std::printf("nginx with its stream module is not installed: left out\n");
    }
    Report report;
    if (options.only.empty() || options.only == "paths") {
        compare(false, options, report);
        compare(true, options, report);
    }
    if (options.only.empty() || options.only == "fairness") fairness(options, report);
    if (options.idle != 0 && (options.only.empty() || options.only == "idle")) {
        report.head("idle");
        idle(false, options, report);
        idle(true, options, report);
    }
    if (!options.json.empty()) {
        std::ofstream(options.json) << report.json();
    } else {
        std::printf("%s", report.json().c_str());
    }
    (void)!std::system(("rm -rf " + g_folder).c_str());
    return 0;
}
