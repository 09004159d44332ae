#include "moe/slice.hpp"

#include <gguf.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <set>

#include "crypto/hash.hpp"
#include "moe/segments.hpp"
#include "moe/slice_metadata.hpp"
#include "moe/slice_testing.hpp"
#include "moe/verify.hpp"

namespace kvasir::moe {
namespace {

using namespace testing;

// Every expert of the model put into one of `parts` slices at random: several ranges in a bank.
std::vector<std::vector<Segment>> any_cuts(const Model& model, uint32_t parts) {
    std::vector<std::vector<Segment>> cuts(parts);
    for (const ExpertBank& bank : model.banks) {
        for (uint32_t id = 0; id < bank.experts; ++id) {
            const auto part = *rc::gen::inRange<uint32_t>(0, parts);
            cuts[part].push_back({bank.key, id, id + 1});
        }
    }
    std::erase_if(cuts, [](const auto& cut) { return cut.empty(); });
    return cuts;
}

// ggml's own reader agrees with ours on every tensor, and the file ends where it should.
void check_with_ggml(const Model& slice) {
    const GgufHeader& header = slice.shards.front();
    gguf_context* file = gguf_init_from_file(header.path.c_str(), {.no_alloc = true, .ctx = {}});
    const bool readable = file != nullptr;
    RC_ASSERT(readable);
    RC_ASSERT(gguf_get_n_tensors(file) == static_cast<int64_t>(header.tensors.size()));
    const uint64_t data = gguf_get_data_offset(file);
    RC_ASSERT(data % kSliceAlignment == 0u);
    uint64_t end = data;
    for (const GgufTensor& tensor : header.tensors) {
        const int64_t id = gguf_find_tensor(file, tensor.name.c_str());
        RC_ASSERT(id >= 0);
        RC_ASSERT(data + gguf_get_tensor_offset(file, id) == tensor.offset);
        RC_ASSERT(gguf_get_tensor_size(file, id) == tensor.bytes);
        RC_ASSERT(static_cast<uint32_t>(gguf_get_tensor_type(file, id)) == tensor.type);
        RC_ASSERT(tensor.offset % kSliceAlignment == 0u);
        end = std::max(end, (tensor.offset + tensor.bytes + 31) / 32 * 32);
    }
    RC_ASSERT(end == header.file_bytes);
    gguf_free(file);
}

TEST(Slice, CutsThatCoverTheModelGiveBackEverySlab) {
    EXPECT_TRUE(rc::check("random cuts of random toys", [] {
        const ScratchFolder folder;
        const Model model = open_toy(write_toy(folder, any_shape()));
        const auto manifest = compute_manifest(model);
        RC_ASSERT(manifest.has_value());
        const auto cuts = any_cuts(model, *rc::gen::inRange<uint32_t>(1, 5));
        std::set<std::pair<ExpertId, std::string>> seen;
        uint64_t slabs = 0;
        for (size_t i = 0; i < cuts.size(); ++i) {
            const std::string path = folder / ("s" + std::to_string(i) + ".gguf");
            const bool has_manifest = *rc::gen::arbitrary<bool>();
            const auto report = has_manifest ? write_slice(model, *manifest, cuts[i], path)
                                             : write_slice(model, cuts[i], path);
            RC_ASSERT(report.has_value());
            const Model slice = open_toy(path);
            RC_ASSERT(slice.is_slice);
            RC_ASSERT(slice.slice_model_id == (has_manifest ? to_hex(manifest->model_id) : ""));
            RC_ASSERT(slice.arch == model.arch);
            RC_ASSERT(all_segments(slice) == normalise(cuts[i]));
            RC_ASSERT(report->bytes_file == read_file(path).size());
            check_with_ggml(slice);
            RC_ASSERT(verify_slice(slice).has_value());
            const auto against = verify_slice_against(slice, model);
            RC_ASSERT(against.has_value());
            RC_ASSERT(against->bytes == report->bytes_slabs);
            const auto own = slice_manifest(slice);
            RC_ASSERT(own.has_value());
            for (const Segment& segment : all_segments(slice)) {
                RC_ASSERT(own->segment_digest(segment) == manifest->segment_digest(segment));
            }
            for (const ExpertBank& bank : slice.banks) {
                const ExpertBank& source = *model.find_bank(bank.key);
                RC_ASSERT(bank.is_mtp == source.is_mtp);
                RC_ASSERT(bank.layout_name() == source.layout_name());
                for (const SlabTensor& tensor : bank.tensors) {
                    const SlabTensor& from = *source.find(tensor.role, tensor.part);
                    for (uint32_t e = 0; e < bank.experts; ++e) {
                        const uint32_t id = bank.global_ids[e];
                        RC_ASSERT(slab(slice, tensor, e) == slab(model, from, id));
                        slabs += seen.insert({{bank.key, id}, tensor.name}).second ? 1 : 0;
                    }
                }
            }
        }
        uint64_t expected = 0;
        for (const ExpertBank& bank : model.banks) expected += bank.tensors.size() * bank.experts;
        RC_ASSERT(slabs == expected);
    }));
}

TEST(Slice, SplitsOrderAndAlignmentOfTheModelDoNotChangeItsBytes) {
    const ScratchFolder folder;
    std::set<Sha256> slices;
    std::set<Sha256> ids;
    int number = 0;
    for (const uint32_t splits : {1u, 2u, 3u, 12u}) {
        for (const uint32_t alignment : {8u, 32u, 512u}) {
            ToyShape shape{.bias = true, .chunk = true, .splits = splits, .alignment = alignment};
            auto plan = toy_plan(shape);
            if (alignment == 512) std::reverse(plan.tensors.begin(), plan.tensors.end());
            const auto toy = synth::write_plan(plan, folder / (std::to_string(++number) + ".gguf"));
            ASSERT_TRUE(toy.has_value()) << toy.error().detail;
            const Model model = open_toy(toy->paths.back());
            const auto manifest = compute_manifest(model);
            ASSERT_TRUE(manifest.has_value());
            ids.insert(manifest->model_id);
            const auto segments = parse_segments("0-1:1-2,1c:0", model);
            ASSERT_TRUE(segments.has_value()) << segments.error().detail;
            ASSERT_TRUE(write_slice(model, *manifest, *segments, folder / "s").has_value());
            slices.insert(crypto::sha256(read_file(folder / "s")));
        }
    }
    EXPECT_EQ(slices.size(), 1u);
    EXPECT_EQ(ids.size(), 1u);
}

TEST(Slice, KeepsTheSmallKeysAndLeavesTheTokenizerOut) {
    const ScratchFolder folder;
    const Model model = open_toy(write_toy(folder, {.splits = 2}));
    const auto manifest = compute_manifest(model);
    ASSERT_TRUE(write_slice(model, *manifest, all_segments(model), folder / "s").has_value());
    const Model slice = open_toy(folder / "s");
    const GgufHeader& header = slice.shards.front();
    for (const auto& [key, value] : model.shards.front().keys) {
        const bool kept = !key.starts_with("tokenizer.") && !key.starts_with("split.") &&
                          key != "general.license.text" && key != "general.alignment";
        EXPECT_EQ(header.keys.contains(key), kept) << key;
        if (!kept) continue;
        const auto whole = read_file(model.shards.front().path);
        const auto part = read_file(folder / "s");
        const GgufKey& copy = header.keys.find(key)->second;
        EXPECT_TRUE(std::equal(whole.begin() + static_cast<long>(value.offset),
                               whole.begin() + static_cast<long>(value.offset + value.bytes),
                               part.begin() + static_cast<long>(copy.offset),
                               part.begin() + static_cast<long>(copy.offset + copy.bytes)))
            << key;
    }
    EXPECT_EQ(header.get_u64("kvasir.version"), 1u);
    EXPECT_EQ(header.get_text("kvasir.model_id"), to_hex(manifest->model_id));
    EXPECT_EQ(header.get_u64("qwen3moe.expert_count"), 4u);
}

TEST(Slice, AdjacentExpertsAreOneRange) {
    const ScratchFolder folder;
    const Model model = open_toy(write_toy(folder, {.layers = 1, .experts = 8}));
    const auto segments = parse_segments("0:0-2,0:3,0:6-7", model);
    const auto report = write_slice(model, *segments, folder / "s");
    ASSERT_TRUE(report.has_value());
    EXPECT_EQ(report->experts, 6u);
    EXPECT_EQ(report->ranges, 2u * 3u);
}

TEST(Slice, ASliceCanBeCutAgain) {
    const ScratchFolder folder;
    const Model model = open_toy(write_toy(folder, {.experts = 8, .scale = true}));
    const auto manifest = compute_manifest(model);
    const auto outer = parse_segments("0-1:1-6", model);
    ASSERT_TRUE(write_slice(model, *manifest, *outer, folder / "a").has_value());
    const Model first = open_toy(folder / "a");
    const auto own = slice_manifest(first);
    ASSERT_TRUE(own.has_value());
    const auto inner = parse_segments("1:3,1:5-6", first);
    ASSERT_TRUE(inner.has_value()) << inner.error().detail;
    ASSERT_TRUE(write_slice(first, *own, *inner, folder / "b").has_value());
    ASSERT_TRUE(write_slice(model, *manifest, *inner, folder / "c").has_value());
    EXPECT_EQ(read_file(folder / "b"), read_file(folder / "c"));
}

TEST(Slice, RefusesWhatMakesNoSense) {
    const ScratchFolder folder;
    const std::string path = write_toy(folder, {});
    const Model model = open_toy(path);
    const auto before = read_file(path);
    const auto check = [&](const Result<SliceReport>& result, Errc code, const char* word) {
        ASSERT_FALSE(result.has_value());
        EXPECT_EQ(result.error().code, code) << result.error().detail;
        EXPECT_NE(result.error().detail.find(word), std::string::npos) << result.error().detail;
    };
    const std::vector<Segment> some = {{{0, 0}, 0, 2}};
    check(write_slice(model, {}, folder / "s"), Errc::kUsage, "no experts");
    check(write_slice(model, {{{0, 0}, 0, 5}}, folder / "s"), Errc::kUsage, "no expert 4");
    check(write_slice(model, {{{7, 0}, 0, 1}}, folder / "s"), Errc::kUsage, "layer 7");
    check(write_slice(model, some, path), Errc::kUsage, "choose another");
    check(write_slice(model, some, folder.path()), Errc::kUsage, "regular file");
    check(write_slice(model, some, "/dev/null"), Errc::kUsage, "regular file");
    check(write_slice(model, some, folder / "none/s"), Errc::kIo, "none/s");
    const Manifest other;
    check(write_slice(model, other, some, folder / "s"), Errc::kMismatch, "another model");
    EXPECT_EQ(folder.names(), std::vector<std::string>{"toy.gguf"});
    EXPECT_EQ(read_file(path), before);
}

TEST(Slice, WithoutReplaceAnExistingFileStays) {
    const ScratchFolder folder;
    const Model model = open_toy(write_toy(folder, {}));
    write_file(folder / "s", {1, 2, 3});
    const auto result =
        write_slice(model, all_segments(model), folder / "s", {.replace = false, .observer = {}});
    ASSERT_FALSE(result.has_value());
    EXPECT_EQ(result.error().code, Errc::kUsage);
    EXPECT_EQ(read_file(folder / "s"), (std::vector<uint8_t>{1, 2, 3}));
    EXPECT_EQ(folder.names(), (std::vector<std::string>{"s", "toy.gguf"}));
    ASSERT_TRUE(write_slice(model, all_segments(model), folder / "s").has_value());
    EXPECT_TRUE(verify_slice(open_toy(folder / "s")).has_value());
}

TEST(Slice, ASymlinkKeepsPointingAtTheFileThatIsReplaced) {
    const ScratchFolder folder;
    const Model model = open_toy(write_toy(folder, {}));
    write_file(folder / "real", {1});
    std::filesystem::create_symlink("real", folder / "link");
    ASSERT_TRUE(write_slice(model, all_segments(model), folder / "link").has_value());
    EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
    EXPECT_TRUE(verify_slice(open_toy(folder / "real")).has_value());
}

TEST(Slice, AModelThatChangedItsSizeIsNotCut) {
    const ScratchFolder folder;
    const std::string path = write_toy(folder, {});
    const Model model = open_toy(path);
    std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
    const auto result = write_slice(model, all_segments(model), folder / "s");
    ASSERT_FALSE(result.has_value());
    EXPECT_EQ(result.error().code, Errc::kBadInput);
    EXPECT_NE(result.error().detail.find("toy.gguf"), std::string::npos);
    EXPECT_EQ(folder.names(), std::vector<std::string>{"toy.gguf"});
}

// Offsets beyond 2 and 4 GiB: a sparse model with only the slabs' own bytes filled.
TEST(Slice, OffsetsPastTwoAndFourGigabytes) {
    constexpr uint64_t kGiB = uint64_t{1} << 30;
    const ScratchFolder folder;
    ToyShape shape{
        .layers = 1, .experts = 4, .embd = 32, .ff = 32, .type = kF16, .type_down = kF16};
    auto plan = toy_plan(shape);
    plan.sparse = true;
    // Fillers of F16 rows, so that each expert tensor begins at or near the offset asked for.
    std::vector<synth::TensorPlan> placed;
    const uint64_t targets[] = {2 * kGiB - 64, 4 * kGiB - 64, 5 * kGiB};
    uint64_t position = 0;
    size_t next = 0;
    for (auto& tensor : plan.tensors) {
        if (tensor.name.find("exps") != std::string::npos) {
            synth::Plan filler;
            const uint64_t rows = (targets[next] - position) / 64;
            add_toy_tensor(filler, "blk.0.filler_" + std::to_string(next) + ".weight", kF16,
                           {32, rows});
            filler.tensors[0].name =
                std::array{"output.weight", "token_types.weight", "position_embd.weight"}[next];
            placed.push_back(filler.tensors[0]);
            position = targets[next++] + 32 * 32 * 2 * 4;
        }
        placed.push_back(tensor);
    }
    plan.tensors = placed;
    const auto toy = synth::write_plan(plan, folder / "big.gguf");
    ASSERT_TRUE(toy.has_value()) << toy.error().detail;
    const Model model = open_toy(folder / "big.gguf");
    std::fstream file(folder / "big.gguf", std::ios::binary | std::ios::in | std::ios::out);
    uint64_t highest = 0;
    for (const SlabTensor& tensor : model.banks[0].tensors) {
        highest = std::max(highest, tensor.offset);
        for (uint32_t e = 0; e < 4; ++e) {
            std::vector<char> mark(tensor.slab_bytes,
                                   static_cast<char>(16 * static_cast<int>(tensor.role) + e + 1));
            file.seekp(static_cast<std::streamoff>(tensor.offset + e * tensor.slab_bytes));
            file.write(mark.data(), static_cast<std::streamsize>(mark.size()));
        }
    }
    file.close();
    ASSERT_GT(highest, 5 * kGiB - 1);
    // Without a manifest: hashed at the far offsets here, and at the slice's near ones by verify.
    const auto report = write_slice(model, {{{0, 0}, 1, 2}, {{0, 0}, 3, 4}}, folder / "s");
    ASSERT_TRUE(report.has_value()) << report.error().detail;
    const Model slice = open_toy(folder / "s");
    ASSERT_EQ(slice.banks[0].tensors.size(), 3u);
    for (const SlabTensor& tensor : slice.banks[0].tensors) {
        for (uint32_t e = 0; e < 2; ++e) {
            const auto mark = static_cast<uint8_t>(16 * static_cast<int>(tensor.role) +
                                                   slice.banks[0].global_ids[e] + 1);
            EXPECT_EQ(slab(slice, tensor, e), std::vector<uint8_t>(tensor.slab_bytes, mark));
        }
    }
    EXPECT_TRUE(verify_slice(slice).has_value());
    EXPECT_TRUE(verify_slice_against(slice, model).has_value());
}

}  // namespace
}  // namespace kvasir::moe
