// Backbone and worker behind a NAT of their own each, that lets nothing in; market and relay in the
// open on port 443, the only port that is not dropped.
//
//   backbone 10.1.0.2 - 10.1.0.1 router 10.0.1.2 -+
//                                                 +- 10.0.1.1 / 10.0.2.1 open (port 443)
//   worker   10.2.0.2 - 10.2.0.1 router 10.0.2.2 -+
//
// Needs root, `ip` with namespaces and `iptables`; says so and skips where they are missing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "network_testing.hpp"

namespace kvasir::e2e {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string found(const std::string& program) {
    for (const char* folder : {"/usr/sbin/", "/sbin/", "/usr/bin/", "/bin/"}) {
        if (::access((folder + program).c_str(), X_OK) == 0) return folder + program;
    }
    return {};
}

// The five namespaces and what is between them; gone with the object.
class Nets {
public:
    Nets() : prefix_("kv" + std::to_string(::getpid())) {
        for (const char* space : {"open", "r1", "r2", "n1", "n2"}) {
            if (!ip({"netns", "add", name(space)})) return;
            if (!in(space, {"ip", "link", "set", "lo", "up"})) return;
        }
        is_up_ = join("open", "10.0.1.1", "r1", "10.0.1.2") &&
                 join("open", "10.0.2.1", "r2", "10.0.2.2") &&
                 join("r1", "10.1.0.1", "n1", "10.1.0.2") &&
                 join("r2", "10.2.0.1", "n2", "10.2.0.2") && route("n1", "10.1.0.1") &&
                 route("n2", "10.2.0.1") && route("r1", "10.0.1.1") && route("r2", "10.0.2.1") &&
                 translate("r1", "10.0.1.2") && translate("r2", "10.0.2.2") && close_open();
    }
    ~Nets() {
        for (const char* space : {"open", "r1", "r2", "n1", "n2"}) {
            run_program({found("ip"), "netns", "del", name(space)});
        }
    }
    Nets(const Nets&) = delete;
    Nets& operator=(const Nets&) = delete;
    bool is_up() const { return is_up_; }
    const std::string& why() const { return why_; }

    std::vector<std::string> command(const std::string& space,
                                     const std::vector<std::string>& argv) const {
        std::vector<std::string> all = {found("ip"), "netns", "exec", name(space)};
        all.insert(all.end(), argv.begin(), argv.end());
        return all;
    }
    // Whether a TCP connection from `space` gets through, tried for two seconds.
    bool reaches(const std::string& space, const std::string& address, int port) const {
        const std::string to = "/dev/tcp/" + address + "/" + std::to_string(port);
        return run_program(command(space, {"timeout", "2", "bash", "-c", "exec 3<>" + to}))
                   .exit_code == 0;
    }

private:
    std::string name(const std::string& space) const { return prefix_ + space; }
    bool ip(std::vector<std::string> arguments) {
        arguments.insert(arguments.begin(), found("ip"));
        return check(arguments);
    }
    bool in(const std::string& space, const std::vector<std::string>& argv) {
        return check(command(space, argv));
    }
    bool check(const std::vector<std::string>& argv) {
        const Outcome outcome = run_program(argv);
        if (outcome.exit_code == 0) return true;
        for (const std::string& word : argv) why_ += word + " ";
        why_ += "-> " + outcome.err;
        return false;
    }
    bool join(const std::string& a, const std::string& address_a, const std::string& b,
              const std::string& address_b) {
        return ip({"link", "add", "to_" + b, "netns", name(a), "type", "veth", "peer", "name",
                   "to_" + a, "netns", name(b)}) &&
               in(a, {"ip", "addr", "add", address_a + "/24", "dev", "to_" + b}) &&
               in(b, {"ip", "addr", "add", address_b + "/24", "dev", "to_" + a}) &&
               in(a, {"ip", "link", "set", "to_" + b, "up"}) &&
               in(b, {"ip", "link", "set", "to_" + a, "up"});
    }
    bool route(const std::string& space, const std::string& via) {
        return in(space, {"ip", "route", "add", "default", "via", via});
    }
    // A home router: what goes out is masqueraded, and nothing new comes in.
    bool translate(const std::string& router, const std::string& own) {
        return in(router, {"bash", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"}) &&
               in(router, {"iptables", "-t", "nat", "-A", "POSTROUTING", "-o", "to_open", "-j",
                           "MASQUERADE"}) &&
               in(router, {"iptables", "-A", "FORWARD", "-i", "to_open", "-m", "conntrack", "!",
                           "--ctstate", "ESTABLISHED,RELATED", "-j", "DROP"}) &&
               in(router, {"iptables", "-A", "INPUT", "-d", own, "-m", "conntrack", "!",
                           "--ctstate", "ESTABLISHED,RELATED", "-j", "DROP"});
    }
    bool close_open() {
        return in("open", {"iptables", "-A", "INPUT", "-i", "lo", "-j", "ACCEPT"}) &&
               in("open", {"iptables", "-A", "INPUT", "-m", "conntrack", "--ctstate",
                           "ESTABLISHED,RELATED", "-j", "ACCEPT"}) &&
               in("open",
                  {"iptables", "-A", "INPUT", "-p", "tcp", "--dport", "443", "-j", "ACCEPT"}) &&
               in("open", {"iptables", "-P", "INPUT", "DROP"});
    }

    const std::string prefix_;
    bool is_up_ = false;
    std::string why_;
};

// A CA, and a certificate of it for 10.0.1.1 and 10.0.2.1.
void make_certificates(const ScratchFolder& scratch) {
    std::ofstream(scratch.path("names")) << "subjectAltName=IP:10.0.1.1,IP:10.0.2.1\n";
    const auto openssl = [&](std::vector<std::string> arguments) {
        arguments.insert(arguments.begin(), found("openssl"));
        const Outcome outcome = run_program(arguments);
        EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    };
    const std::vector<std::string> curve = {"-newkey", "ec", "-pkeyopt",
                                            "ec_paramgen_curve:prime256v1", "-nodes"};
    std::vector<std::string> ca = {"req",     "-x509",
                                   "-days",   "2",
                                   "-subj",   "/CN=test CA",
                                   "-keyout", scratch.path("ca.key"),
                                   "-out",    scratch.path("ca.pem")};
    ca.insert(ca.end(), curve.begin(), curve.end());
    openssl(ca);
    std::vector<std::string> request = {"req",
                                        "-subj",
                                        "/CN=market",
                                        "-keyout",
                                        scratch.path("key.pem"),
                                        "-out",
                                        scratch.path("request")};
    request.insert(request.end(), curve.begin(), curve.end());
    openssl(request);
    openssl({"x509", "-req", "-days", "2", "-in", scratch.path("request"), "-CA",
             scratch.path("ca.pem"), "-CAkey", scratch.path("ca.key"), "-CAcreateserial",
             "-extfile", scratch.path("names"), "-out", scratch.path("cert.pem")});
}

TEST(Nat, BehindTwoNats) {
    if (::geteuid() != 0) GTEST_SKIP() << "needs root, for network namespaces";
    for (const char* program : {"ip", "iptables", "openssl", "timeout", "bash"}) {
        if (found(program).empty()) {
            GTEST_SKIP() << "needs the program " << program
                         << " (packages iproute2, iptables, openssl)";
        }
    }
    const Nets nets;
    if (!nets.is_up()) GTEST_SKIP() << "this machine allows no such networks: " << nets.why();
    const ScratchFolder scratch;
    make_certificates(scratch);
    const std::vector<std::string> prompt = {"-p", "Once upon a time", "-n", "64"};

    Program market(nets.command(
        "open", {KVASIR_PROGRAM, "market", "-m", demo_model(), "--listen", "0.0.0.0:443",
                 "--tls-cert", scratch.path("cert.pem"), "--tls-key", scratch.path("key.pem"),
                 "--public-url", "https://10.0.1.1", "--state", scratch.path("state"),
                 "--print-invite", "worker", "--print-invite", "backbone"}));
    ASSERT_TRUE(market.wait_for("invite backbone: ")) << market.err();
    const auto worker_in = [&](const std::string& name) {
        return Program(nets.command(
            "n2",
            {KVASIR_PROGRAM, "worker", "--join", "https://10.0.2.1", "--invite",
             market.word_after("invite worker: "), "--budget", "12M", "--cache", scratch.path(name),
             "--name", name, "--ca", scratch.path("ca.pem"), "--log-level", "info"}));
    };
    const Program a = worker_in("a");
    const Program b = worker_in("b");
    Program backbone(nets.command(
        "n1", {KVASIR_PROGRAM, "run", "-m", demo_model(), "--join", "https://10.0.1.1", "--invite",
               market.word_after("invite backbone: "), "--state", scratch.path("backbone"), "--ca",
               scratch.path("ca.pem"), "--json", "-p", "Once upon a time", "-n", "64"}));
    const Json json = report_of(backbone);
    ASSERT_FALSE(json.is_null()) << a.err() << b.err() << market.err();
    EXPECT_EQ(json["logits_sha256"], reference_digest(demo_model(), prompt));
    EXPECT_EQ(json["answers"], "exact");
    EXPECT_GT(pairs_of(json, "a"), 0u);
    EXPECT_GT(pairs_of(json, "b"), 0u);
    if (json["retries"] == 0) {
        EXPECT_EQ(json["pairs_local"], 0);
    }

    // Nobody could have come in: nothing listens behind the NATs, and what would is not reached.
    for (const char* space : {"n1", "n2"}) {
        const Outcome listening =
            run_program(nets.command(space, {"cat", "/proc/net/tcp", "/proc/net/tcp6"}));
        EXPECT_THAT(listening.out, Not(HasSubstr(" 0A "))) << "a listening socket in " << space;
    }
    Program echo(
        nets.command("n2", {KVASIR_PROGRAM, "relay", "--open", "--listen", "0.0.0.0:443"}));
    ASSERT_TRUE(echo.wait_for("listening on ")) << echo.err();
    EXPECT_TRUE(nets.reaches("r2", "10.2.0.2", 443)) << "the probe itself";
    EXPECT_FALSE(nets.reaches("n1", "10.2.0.2", 443));
    EXPECT_FALSE(nets.reaches("n1", "10.0.2.2", 443));
    EXPECT_FALSE(nets.reaches("open", "10.0.2.2", 443));
    EXPECT_FALSE(nets.reaches("open", "10.2.0.2", 443));
    EXPECT_TRUE(nets.reaches("n2", "10.0.2.1", 443));
    EXPECT_FALSE(nets.reaches("n2", "10.0.2.1", 22));
}

// A certificate of an unknown CA, or for other addresses, is refused with the reason.
TEST(Nat, TheCertificateOfACaIsCheckedByName) {
    const ScratchFolder scratch;
    if (found("openssl").empty()) GTEST_SKIP() << "needs the program openssl";
    make_certificates(scratch);  // for other addresses than 127.0.0.1
    Program market({KVASIR_PROGRAM, "market", "-m", demo_model(), "--listen", "127.0.0.1:0",
                    "--tls-cert", scratch.path("cert.pem"), "--tls-key", scratch.path("key.pem"),
                    "--state", scratch.path("state"), "--print-invite", "worker"});
    ASSERT_TRUE(market.wait_for("invite worker: ")) << market.err();
    const std::string url = market.word_after("market: ");
    const std::string invite = market.word_after("invite worker: ");
    const Outcome unknown = join_worker(url, invite, "w", scratch.path("w")).wait(60);
    EXPECT_EQ(unknown.exit_code, 1) << unknown.err;
    EXPECT_THAT(unknown.err, HasSubstr("certificate"));
    EXPECT_THAT(unknown.err, HasSubstr("--ca FILE"));
    EXPECT_THAT(unknown.err, HasSubstr("--invite"));
    const Outcome misnamed =
        join_worker(url, invite, "w", scratch.path("w"),
                    {.budget = "12M", .more = {"--ca", scratch.path("ca.pem")}})
            .wait(60);
    EXPECT_EQ(misnamed.exit_code, 1) << misnamed.err;
    EXPECT_THAT(misnamed.err, HasSubstr("127.0.0.1"));
    EXPECT_THAT(misnamed.err, Not(HasSubstr("--ca FILE"))) << "its CA is known";
}

}  // namespace
}  // namespace kvasir::e2e
