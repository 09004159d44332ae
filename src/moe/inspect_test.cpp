#include "moe/inspect.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include <nlohmann/json.hpp>

#include "moe/raw_gguf.hpp"

namespace kvasir::moe {
namespace {

using testing::HasSubstr;
using testing::Not;

Model open(const RawGguf& file) {
    const TempFolder folder;
    auto model = open_model(folder.write("m.gguf", file.file()));
    EXPECT_TRUE(model) << model.error().detail;
    return std::move(*model);
}

TEST(Inspect, Numbers) {
    EXPECT_EQ(count_text(0), "0");
    EXPECT_EQ(count_text(999), "999");
    EXPECT_EQ(count_text(1000), "1,000");
    EXPECT_EQ(count_text(12544), "12,544");
    EXPECT_EQ(count_text(1234567), "1,234,567");
}

TEST(Inspect, ReportOfAToy) {
    ToyMoe toy;
    toy.is_moe = {false, true, true, true};
    toy.mtp = 1;
    toy.shared = true;
    const InspectReport report = make_report(open(toy.make()));
    EXPECT_EQ(report.layers, 4u);
    EXPECT_EQ(report.layers_total, 5u);
    EXPECT_EQ(report.mtp_layers, 1u);
    EXPECT_EQ(report.experts_per_layer, 8u);
    EXPECT_EQ(report.experts_total, 32u);
    EXPECT_EQ(report.expert_bytes_mean, 73728.0);
    EXPECT_EQ(report.bytes_experts, 32u * 73728);
    EXPECT_TRUE(report.slabs.ok());
    EXPECT_EQ(report.slabs.slabs, 96u);
    EXPECT_EQ(report.slabs.tensors, 12u);
    EXPECT_TRUE(report.per_layer.back().is_mtp);
    EXPECT_NEAR(report.share_experts, double(report.bytes_experts) / double(report.bytes_total),
                1e-12);
}

// 42 MB holds 8 experts of 5 MB and 42 of 1 MB; whole layers only where all of one fits.
TEST(Inspect, BudgetsFillSmallestFirstAndNeverOver) {
    Model model = open(ToyMoe{}.make());
    for (size_t i = 0; i < model.banks.size(); ++i) {
        model.banks[i].tensors.resize(1);
        model.banks[i].tensors[0].slab_bytes = (i + 1) * 1'000'000;
    }
    const InspectReport report = make_report(model);
    ASSERT_EQ(report.budgets.size(), 3u);
    // 8 of 1 MB, 8 of 2 MB, 6 of 3 MB = 42 MB exactly.
    EXPECT_EQ(report.budgets[0].experts, 22u);
    EXPECT_EQ(report.budgets[0].experts_bytes, 42'000'000u);
    EXPECT_EQ(report.budgets[0].layers, 2u);  // 8 + 16 MB; the third has 24
    EXPECT_EQ(report.budgets[0].layers_bytes, 24'000'000u);
    EXPECT_EQ(report.budgets[2].experts, 32u);
    EXPECT_EQ(report.budgets[2].layers, 4u);
    EXPECT_EQ(report.expert_bytes_min, 1'000'000u);
    EXPECT_EQ(report.expert_bytes_max, 4'000'000u);
}

TEST(Inspect, SlabCheckSeesEachFault) {
    const Model good = open(ToyMoe{}.make());
    Model model = good;
    model.banks[0].tensors[0].offset += 32;
    EXPECT_EQ(make_report(model).slabs.not_contiguous, 8u);
    model = good;
    model.banks[0].tensors[0].slab_bytes += 1;
    EXPECT_EQ(make_report(model).slabs.not_block_aligned, 8u);
    model = good;
    model.shards[0].file_bytes -= 1;
    EXPECT_EQ(make_report(model).slabs.outside_file, 8u);
    EXPECT_FALSE(make_report(model).slabs.ok());
    EXPECT_THAT(inspect_text(make_report(model), false), HasSubstr("8 outside the file"));
}

TEST(Inspect, TextOfTheDemoModel) {
    const auto text = run_inspect({KVASIR_SOURCE_DIR "/models/skald-q4_k_m.gguf", false, false});
    ASSERT_TRUE(text) << text.error().detail;
    EXPECT_THAT(*text, HasSubstr("qwen35moe"));
    EXPECT_THAT(*text, HasSubstr("8 layers with experts"));
    EXPECT_THAT(*text, HasSubstr("32 experts per layer, 4 used; 256 experts in all"));
    EXPECT_THAT(*text, HasSubstr("\n1-2 "));
    EXPECT_THAT(*text, HasSubstr("gate+up+down: q4_K q4_K q8_0"));
    EXPECT_THAT(*text, HasSubstr("contiguous, block-aligned, inside the file"));
    const auto all = run_inspect({KVASIR_SOURCE_DIR "/models/skald-q4_k_m.gguf", false, true});
    ASSERT_TRUE(all);
    EXPECT_THAT(*all, Not(HasSubstr("\n1-2 ")));
    EXPECT_EQ(std::ranges::count(*all, '\n') - std::ranges::count(*text, '\n'), 3);
    std::istringstream lines(*text);
    for (std::string line; std::getline(lines, line);) {
        EXPECT_TRUE(line.size() <= 80 || line.starts_with("model ")) << line;
    }
}

TEST(Inspect, SaysWhichLayersHaveNoKernels) {
    const std::string path = KVASIR_SOURCE_DIR "/models/skald-q4_k_m.gguf";
    const auto all = run_inspect({path, false, false, [](const ExpertBank&) { return true; }});
    ASSERT_TRUE(all);
    EXPECT_NE(all->find("kernels     for all weights"), std::string::npos) << *all;
    EXPECT_NE(all->find("the activation is checked when a worker joins"), std::string::npos);
    const auto odd = [](const ExpertBank& bank) { return bank.key.layer % 2 == 1; };
    const auto some = run_inspect({path, false, false, odd});
    ASSERT_TRUE(some);
    EXPECT_NE(some->find("kernels     none for 4 layers: (q4_K q4_K "), std::string::npos) << *some;
    const auto json = run_inspect({path, true, false, odd});
    ASSERT_TRUE(json);
    EXPECT_NE(json->find("\"kernels\": false"), std::string::npos);
    const auto silent = run_inspect({path, false, false});
    ASSERT_TRUE(silent);
    EXPECT_EQ(silent->find("kernels"), std::string::npos);
}

TEST(Inspect, JsonHasTheAgreedKeys) {
    const auto text = run_inspect({KVASIR_SOURCE_DIR "/models/skald-q4_k_m.gguf", true, false});
    ASSERT_TRUE(text) << text.error().detail;
    const auto json = nlohmann::json::parse(*text);
    EXPECT_EQ(json.at("arch"), "qwen35moe");
    EXPECT_EQ(json.at("layers"), 8);
    EXPECT_EQ(json.at("experts_per_layer"), 32);
    EXPECT_EQ(json.at("experts_used"), 4);
    EXPECT_EQ(json.at("experts_total"), 256);
    EXPECT_EQ(json.at("per_layer").size(), 8u);
    uint64_t bytes = 0;
    for (const auto& layer : json.at("per_layer")) bytes += layer.at("bytes").get<uint64_t>();
    EXPECT_EQ(json.at("bytes_experts"), bytes);
    uint64_t total = 0;
    for (const auto& each : json.at("classes")) total += each.at("bytes").get<uint64_t>();
    EXPECT_EQ(json.at("bytes_total"), total);
    EXPECT_DOUBLE_EQ(json.at("share_experts").get<double>(), double(bytes) / double(total));
    EXPECT_DOUBLE_EQ(json.at("expert_bytes_mean").get<double>(), double(bytes) / 256);
}

TEST(Inspect, ADenseModelSaysSoInOneLine) {
    ToyMoe toy;
    toy.is_moe = {false, false, false, false};
    const InspectReport report = make_report(open(toy.make()));
    EXPECT_THAT(inspect_text(report, true), HasSubstr("not a Mixture-of-Experts model\n"));
    const auto json = nlohmann::json::parse(inspect_json(report));
    EXPECT_EQ(json.at("experts_total"), 0);
    EXPECT_EQ(json.at("expert_bytes_mean"), 0);
    EXPECT_TRUE(json.at("per_layer").empty());
}

TEST(Inspect, UntrustedTextIsMadePrintable) {
    ToyMoe toy;
    toy.arch = "t\x1b[31m\xff";
    const InspectReport report = make_report(open(toy.make()));
    for (const std::string& text : {inspect_text(report, true), inspect_json(report)}) {
        EXPECT_TRUE(
            std::ranges::all_of(text, [](char c) { return c == '\n' || (c >= 32 && c < 127); }));
    }
}

}  // namespace
}  // namespace kvasir::moe
