#include "apps/unknown_flag.hpp"

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>

namespace kvasir::apps {
namespace {

TEST(UnknownFlag, TheClosestNameIsMeant) {
    const std::vector<std::string> known = {"--model", "--monolithic", "--json", "--workers"};
    EXPECT_EQ(closest("--modle", known), "--model");
    EXPECT_EQ(closest("--worker", known), "--workers");
    EXPECT_EQ(closest("--jsno", known), "--json");
    EXPECT_EQ(closest("--frobnicate", known), std::nullopt);
    EXPECT_EQ(closest("-x", known), std::nullopt);
    EXPECT_EQ(closest("", known), std::nullopt);
}

std::optional<std::string> said_to(std::vector<const char*> words) {
    CLI::App app{"", "kvasir"};
    app.fallthrough();
    app.require_subcommand(1);
    std::string level, model, file;
    app.add_option("--log-level", level);
    CLI::App* run = app.add_subcommand("run", "");
    run->add_option("-m,--model", model)->required();
    run->add_option("file", file);
    words.insert(words.begin(), "kvasir");
    try {
        app.parse(static_cast<int>(words.size()), words.data());
        ADD_FAILURE() << "parsed";
    } catch (const CLI::ParseError&) {
    }
    return describe_unknown(app);
}

TEST(UnknownFlag, IsNamedBeforeWhatIsMissingBecauseOfIt) {
    EXPECT_EQ(said_to({"run", "--modle", "x"}),
              "kvasir run has no flag --modle; did you mean --model?");
    EXPECT_EQ(said_to({"run", "--modle=x"}),
              "kvasir run has no flag --modle; did you mean --model?");
    EXPECT_EQ(said_to({"run", "-m", "x", "--log-levle", "info"}),
              "kvasir run has no flag --log-levle; did you mean --log-level?");
    EXPECT_EQ(said_to({"run", "-m", "x", "--frobnicate"}), "kvasir run has no flag --frobnicate");
    EXPECT_EQ(said_to({"run", "-m", "x", "a", "b"}), "kvasir run does not take 'b'");
    EXPECT_EQ(said_to({"run"}), std::nullopt) << "it is the model that is missing";
}

}  // namespace
}  // namespace kvasir::apps
