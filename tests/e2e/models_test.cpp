// Models in every arrangement: fused, dense here and there, split, sliced, in other types, in
// batches of every size. The same weights give the same bits and the same identity.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "swarm_testing.hpp"

namespace kvasir::e2e {
namespace {

using ::testing::HasSubstr;

// Two workers, checked against plain llama.cpp; the digest of the logits. A stalling machine may
// make the backbone ask elsewhere: then once more.
std::string checked(const std::string& model, uint64_t pairs = 0,
                    std::vector<std::string> more = {}) {
    std::vector<std::string> arguments = {"run", "-m",      model,         "--workers",
                                          "2",   "--check", "--ignore-eos"};
    if (more.empty()) more = {"--prompt-tokens", tokens_up_to(8), "-n", "6"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    Json json;
    for (int attempt = 0; attempt < 3; ++attempt) {
        json = run_json(arguments);
        if (json.is_null()) return {};
        EXPECT_EQ(json["bit_exact"], true);
        if (json["retries"] == 0) break;
    }
    EXPECT_EQ(json["pairs_local"], 0);
    EXPECT_GT(json["pairs_remote"], 0);
    if (pairs != 0) {
        EXPECT_EQ(json["pairs_remote"], pairs);
    }
    return json["logits_sha256"].get<std::string>();
}

TEST(Models, FusedOrApartTheSameBitsAndSwappedHalvesOthers) {
    const ScratchFolder scratch;
    for (const char* arch : {"qwen35moe", "hy_v3"}) {
        SCOPED_TRACE(arch);
        const auto digest = [&](std::vector<std::string> flags) {
            flags.insert(flags.begin(), {"--arch", arch});
            return checked(synth(scratch.path("m.gguf"), flags));
        };
        const std::string apart = digest({});
        EXPECT_EQ(digest({"--fused"}), apart);
        EXPECT_EQ(digest({"--fused-mask", "0101"}), apart);
        EXPECT_NE(digest({"--fused", "--fused-swap"}), apart) << "or this test sees nothing";
    }
}

TEST(Models, DenseLayersWhereverTheyAre) {
    const ScratchFolder scratch;
    // 13 rows of 2 experts in each layer that has experts; only the tensors say which have.
    const struct {
        const char* mask;
        uint64_t layers;
    } cases[] = {{"1000", 3}, {"0101", 2}, {"1110", 1}, {"0000", 4}, {"1010", 2}};
    for (const auto& c : cases) {
        SCOPED_TRACE(c.mask);
        std::set<std::string> digests;
        for (const char* key : {"", "none", "2"}) {
            std::vector<std::string> flags = {"--arch", "hy_v3", "--dense-mask", c.mask};
            if (*key != '\0') flags.insert(flags.end(), {"--dense-key", key});
            const std::string model = synth(scratch.path("m.gguf"), flags);
            digests.insert(checked(model, c.layers * 13 * 2));
            EXPECT_EQ(run_json({"inspect", model})["layers"], c.layers);
        }
        EXPECT_EQ(digests.size(), 1U) << "what the file claims changes nothing";
    }
    const std::string dense =
        synth(scratch.path("dense.gguf"), {"--arch", "hy_v3", "--dense-mask", "1111"});
    const Outcome outcome = kvasir({"run", "-m", dense, "--prompt-tokens", "1"});
    EXPECT_EQ(outcome.exit_code, 3);
    EXPECT_THAT(outcome.err, HasSubstr("not a Mixture-of-Experts model"));
}

struct Arrangement {
    std::string first, last;  // parts
};

std::vector<Arrangement> arrangements(const ScratchFolder& scratch) {
    const auto split = [&](const std::string& count) {
        const std::string stem = scratch.path("s" + count);
        const std::string first = synth(stem, {"--splits", count, "--tensor-order", "shuffle"});
        const std::string number = std::string(5 - count.size(), '0') + count;
        return Arrangement{first, stem + "-" + number + "-of-" + number + ".gguf"};
    };
    const std::string whole = synth(scratch.path("whole.gguf"), {});
    return {{whole, whole}, split("3"), split("12")};
}

TEST(Models, SplitsAreTheSameModel) {
    const ScratchFolder scratch;
    std::set<std::string> digests, ids;
    const auto all = arrangements(scratch);
    for (size_t i = 0; i < all.size(); ++i) {
        for (const std::string& part : {all[i].first, all[i].last}) {
            SCOPED_TRACE(part);
            digests.insert(checked(part));
            const Json slice = run_json({"slice", part, "--experts", "0-3:0-3", "-o",
                                         scratch.path("slice.gguf"), "--force"});
            ids.insert(slice["model_id"].get<std::string>());
        }
    }
    EXPECT_EQ(digests.size(), 1U);
    EXPECT_EQ(ids.size(), 1U);
}

TEST(Models, ASliceOfOneArrangementServesAnother) {
    const ScratchFolder scratch;
    const auto all = arrangements(scratch);
    const std::vector<std::string> work = {"--prompt-tokens", tokens_up_to(8), "-n", "6",
                                           "--ignore-eos"};
    std::vector<std::string> plain = {"run", "-m", all[0].first, "--monolithic"};
    plain.insert(plain.end(), work.begin(), work.end());
    const Json expected = run_json(plain);
    for (size_t cut = 0; cut < all.size(); ++cut) {
        const std::string slice = scratch.path("slice" + std::to_string(cut) + ".gguf");
        run_json({"slice", all[cut].first, "--experts", "0-3:*", "-o", slice});
        std::vector<std::string> flags = work;
        flags.insert(flags.end(), {"--wait-coverage", "100%"});
        ListeningRun run(all[(cut + 1) % all.size()].first, flags);
        const Program worker = start_slice_worker(run.url(), "slice", slice);
        const Json json = run.result();
        ASSERT_FALSE(json.is_null()) << worker.err();
        EXPECT_EQ(json["logits_sha256"], expected["logits_sha256"]);
        EXPECT_GT(json["pairs_remote"], 0);
    }
}

TEST(Models, AnotherQuantisationIsRefusedWithBothIds) {
    const ScratchFolder scratch;
    const std::string model = synth(scratch.path("q4.gguf"), {});
    const std::string other = synth(scratch.path("q8.gguf"), {"--type", "q8_0"});
    const std::string other_slice = scratch.path("q8-slice.gguf");
    const std::string slice = scratch.path("q4-slice.gguf");
    const Json theirs = run_json({"slice", other, "--experts", "0-3:*", "-o", other_slice});
    const Json ours = run_json({"slice", model, "--experts", "0-3:*", "-o", slice});
    ListeningRun run(model, {"--prompt-tokens", "1,2", "-n", "4", "--wait-coverage", "100%"});
    Program refused = start_slice_worker(run.url(), "other", other_slice);
    EXPECT_EQ(refused.wait().exit_code, 1) << "no later attempt could succeed";
    for (const Json& id : {theirs["model_id"], ours["model_id"]}) {
        EXPECT_THAT(refused.err(), HasSubstr(id.get<std::string>().substr(0, 16)));
        EXPECT_THAT(run.log(), HasSubstr(id.get<std::string>().substr(0, 16)));
    }
    const Program good = start_slice_worker(run.url(), "good", slice);
    const Json json = run.result();
    ASSERT_FALSE(json.is_null());
    EXPECT_EQ(json["workers"].size(), 1U);
    EXPECT_GT(pairs_of(json, "good"), 0U);
}

// Sizes of a computed batch around every threshold of the engine and of llama.cpp.
TEST(Models, BatchSizesAroundTheThresholds) {
    const ScratchFolder scratch;
    const std::string model = synth(scratch.path("m.gguf"), {"--arch", "qwen3moe"});
    for (const uint32_t ubatch : {1U, 2U, 31U, 32U, 33U, 127U, 128U, 129U, 512U}) {
        std::set<uint32_t> prompts = {1, ubatch, ubatch + 1, 3 * ubatch};
        if (ubatch > 1) prompts.insert(ubatch - 1);
        for (const uint32_t prompt : prompts) {
            SCOPED_TRACE("ubatch " + std::to_string(ubatch) + ", prompt " + std::to_string(prompt));
            checked(model, 0,
                    {"--prompt-tokens", tokens_up_to(prompt), "-n", "2", "--ubatch",
                     std::to_string(ubatch), "--batch", std::to_string(2 * ubatch)});
        }
    }
}

// Experts of another width than the hidden state, biases, scales, shared experts, an MTP layer.
TEST(Models, OtherShapes) {
    const ScratchFolder scratch;
    const std::vector<std::vector<std::string>> cases = {
        {"--arch", "gpt-oss", "--type", "mxfp4"},
        {"--arch", "qwen35moe", "--scale", "--ff", "512"},
        {"--arch", "qwen35moe", "--mtp"},
        {"--arch", "deepseek2", "--experts", "7", "--used", "3"},
        {"--arch", "llama", "--type", "q6_k", "--embd", "512", "--alignment", "4096"},
        {"--arch", "qwen3moe", "--type", "f16", "--type-down", "q5_0", "--ff", "96"},
        {"--arch", "qwen3moe", "--type", "iq4_nl", "--tensor-order", "reverse"},
    };
    for (const auto& flags : cases) {
        SCOPED_TRACE(flags[1]);
        checked(synth(scratch.path("m.gguf"), flags));
    }
}

}  // namespace
}  // namespace kvasir::e2e
