// A backbone that comes back to its market: by which key it recognises that when it has no invite
// code any more.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <csignal>
#include <filesystem>

#include "network_testing.hpp"

namespace kvasir::e2e {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class ComeBack : public ::testing::Test {
protected:
    Outcome lead(const std::string& url, const std::string& coverage,
                 const std::string& invite = {}) {
        std::vector<std::string> arguments = {"run",
                                              "-m",
                                              demo_model(),
                                              "--join",
                                              url,
                                              "--state",
                                              scratch_.path("b"),
                                              "--prompt-tokens",
                                              "1,2",
                                              "-n",
                                              "1",
                                              "--wait-coverage",
                                              coverage};
        if (!invite.empty()) arguments.insert(arguments.end(), {"--invite", invite});
        return kvasir(arguments);
    }

    const ScratchFolder scratch_;
    MarketProgram market_{demo_model(), scratch_.path("state")};
};

TEST_F(ComeBack, TheUrlIsEnoughOnceItHasJoined) {
    const Outcome stranger = lead(market_.url(), "0%");
    EXPECT_EQ(stranger.exit_code, 1);
    EXPECT_THAT(stranger.err, AllOf(HasSubstr("certificate is not accepted"),
                                    HasSubstr("--ca FILE"), HasSubstr("--invite")));
    const Outcome first = lead(market_.url(), "0%", market_.backbone_invite());
    EXPECT_EQ(first.exit_code, 0) << first.err;
    const Outcome plain = lead("http://127.0.0.1:" + market_.port(), "0%");
    EXPECT_EQ(plain.exit_code, 2);
    EXPECT_THAT(plain.err, HasSubstr("https://HOST:PORT"));
    struct stat info = {};
    ASSERT_EQ(::stat(scratch_.path("b/market.pins").c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0600u);
    // At the relay, too.
    const Program worker =
        join_worker(market_.url(), market_.worker_invite(), "w", scratch_.path("w"));
    const Outcome again = lead(market_.url(), "1%");
    EXPECT_EQ(again.exit_code, 0) << again.err << worker.err();
}

TEST_F(ComeBack, AnotherKeyIsRefusedUntilANewInviteNamesIt) {
    const Outcome first = lead(market_.url(), "0%", market_.backbone_invite());
    EXPECT_EQ(first.exit_code, 0) << first.err;
    market_.kill();
    for (const char* file : {"state/dev-key.pem", "state/dev-cert.pem"})
        ASSERT_TRUE(std::filesystem::remove(scratch_.path(file)));
    market_.restart();
    const Outcome refused = lead(market_.url(), "0%");
    EXPECT_EQ(refused.exit_code, 1);
    EXPECT_THAT(refused.err,
                AllOf(HasSubstr("not the pinned one"), HasSubstr(scratch_.path("b/market.pins")),
                      HasSubstr("--invite")));
    const Outcome anew = lead(market_.url(), "0%", market_.backbone_invite());
    EXPECT_EQ(anew.exit_code, 0) << anew.err;
    const Outcome again = lead(market_.url(), "0%");
    EXPECT_EQ(again.exit_code, 0) << again.err;
}

// Behind the same TLS key, over the same database: docs/operations.md says who needs a new code.
TEST_F(ComeBack, AnotherMarketKeyWantsNewInvitesOfWorkersOnly) {
    const std::string worker_invite = market_.worker_invite();
    const std::string backbone_invite = market_.backbone_invite();
    Program before = join_worker(market_.url(), worker_invite, "w", scratch_.path("w"));
    const Outcome first = lead(market_.url(), "1%", backbone_invite);
    EXPECT_EQ(first.exit_code, 0) << first.err << before.err();
    before.signal(SIGTERM);
    EXPECT_EQ(before.wait(60).exit_code, 0) << before.err();
    market_.kill();
    ASSERT_TRUE(std::filesystem::remove(scratch_.path("state/market.key")));
    market_.restart();
    const Outcome again = lead(market_.url(), "0%");
    EXPECT_EQ(again.exit_code, 0) << again.err;
    const Outcome old_code = lead(market_.url(), "0%", backbone_invite);
    EXPECT_EQ(old_code.exit_code, 1);
    EXPECT_THAT(old_code.err, HasSubstr("not the one that made this invite code"));
    const Outcome refused =
        join_worker(market_.url(), worker_invite, "w", scratch_.path("w")).wait(60);
    EXPECT_EQ(refused.exit_code, 1);
    EXPECT_THAT(refused.err, HasSubstr("has another key than the invite code names"));
    Program after = join_worker(market_.url(), market_.worker_invite(), "w", scratch_.path("w"));
    ASSERT_TRUE(after.wait_for("worker: serving ")) << after.err();
    EXPECT_THAT(after.err(), HasSubstr("slice ready: 0 bytes fetched"));
    const Json nodes = Operator(market_.url(), scratch_.path("state")).get("/api/v1/nodes");
    EXPECT_EQ(nodes["nodes"].size(), 2u) << "known nodes with their own keys";
}

// Its pin would not be looked at.
TEST_F(ComeBack, AnInviteWithAPinIsNotSentWithoutTls) {
    const Outcome plain =
        lead("http://127.0.0.1:" + market_.port(), "0%", market_.backbone_invite());
    EXPECT_EQ(plain.exit_code, 2);
    EXPECT_THAT(plain.err, HasSubstr("https://HOST:PORT"));
}

}  // namespace
}  // namespace kvasir::e2e
