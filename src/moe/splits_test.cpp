#include "moe/splits.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>

#include "moe/mapping.hpp"
#include "moe/model.hpp"
#include "moe/raw_gguf.hpp"

namespace kvasir::moe {
namespace {

using testing::HasSubstr;

std::string usual_name(uint32_t part, uint32_t count, const std::string& prefix = "toy") {
    char tail[32];
    snprintf(tail, sizeof(tail), "-%05u-of-%05u.gguf", part + 1, count);
    return prefix + tail;
}

// Tensor i lies in part i % count, so that one layer's experts lie in three parts. Only the first
// part has the model's keys, as llama.cpp writes them.
std::vector<std::vector<uint8_t>> split_toy(uint32_t count, uint8_t seed = 0) {
    const auto tensors = ToyMoe{}.tensors();
    std::vector<std::vector<uint8_t>> parts;
    for (uint32_t part = 0; part < count; ++part) {
        RawGguf file = part == 0 ? ToyMoe{}.keys() : RawGguf{};
        file.add("split.no", part).add("split.count", count);
        file.add("split.tensors.count", static_cast<uint32_t>(tensors.size()));
        for (size_t i = part; i < tensors.size(); i += count) file.tensors.push_back(tensors[i]);
        parts.push_back(file.file(seed));
    }
    return parts;
}

struct SplitSet {
    TempFolder folder;
    std::vector<std::string> paths;
    explicit SplitSet(uint32_t count, bool usual_names = true) {
        const auto parts = split_toy(count);
        for (uint32_t i = 0; i < count; ++i) {
            const std::string name = usual_names
                                         ? usual_name(i, count)
                                         : std::string(1, static_cast<char>('z' - i)) + ".gguf";
            paths.push_back(folder.write(name, parts[i]));
        }
    }
};

void expect_whole(const Result<Model>& model, uint32_t parts) {
    ASSERT_TRUE(model) << model.error().detail;
    EXPECT_EQ(model->shards.size(), parts);
    EXPECT_EQ(model->experts_total(), 32u);
    for (uint32_t i = 0; i < parts; ++i) {
        EXPECT_EQ(model->shards[i].get_u64("split.no"), i);
    }
    // Every slab is read from the shard that holds its tensor.
    for (const ExpertBank& bank : model->banks) {
        for (const SlabTensor& slab : bank.tensors) {
            EXPECT_TRUE(
                std::ranges::any_of(model->shards[slab.shard].tensors, [&](const GgufTensor& t) {
                    return t.name == slab.name && t.offset == slab.offset;
                }));
        }
    }
    EXPECT_TRUE(Mapping::make(*model));
}

void expect_refused(const std::string& path, const std::vector<std::string>& parts) {
    const auto model = open_model(path);
    ASSERT_FALSE(model);
    EXPECT_EQ(model.error().code, Errc::kBadInput) << model.error().detail;
    for (const auto& part : parts) EXPECT_THAT(model.error().detail, HasSubstr(part));
}

TEST(Splits, AnyPartOpensTheWholeModel) {
    for (const uint32_t count : {2u, 3u, 12u}) {
        const SplitSet set(count);
        for (const std::string& path : set.paths) expect_whole(open_model(path), count);
    }
}

TEST(Splits, TheOrderComesFromTheKeysNotTheNames) {
    const SplitSet renamed(3, false);
    for (const std::string& path : renamed.paths) expect_whole(open_model(path), 3);
    // Usual names that lie about the number.
    const SplitSet swapped(3);
    std::filesystem::rename(swapped.paths[0], swapped.folder.file("tmp"));
    std::filesystem::rename(swapped.paths[2], swapped.paths[0]);
    std::filesystem::rename(swapped.folder.file("tmp"), swapped.paths[2]);
    for (const std::string& path : swapped.paths) expect_whole(open_model(path), 3);
}

TEST(Splits, OnePartRenamed) {
    const SplitSet set(3);
    std::filesystem::rename(set.paths[1], set.folder.file("middle.gguf"));
    expect_whole(open_model(set.paths[0]), 3);
    expect_whole(open_model(set.folder.file("middle.gguf")), 3);
}

TEST(Splits, OtherFilesOfTheFolderDoNotMatter) {
    const SplitSet set(3);
    set.folder.write("broken.gguf", {'G', 'G', 'U', 'F', 3});
    set.folder.write("whole.gguf", ToyMoe{}.make().file());
    const auto others = split_toy(3, 7);
    for (uint32_t i = 0; i < 3; ++i) set.folder.write(usual_name(i, 3, "other"), others[i]);
    std::filesystem::create_symlink(set.paths[1], set.folder.file("link.gguf"));
    for (const std::string& path : set.paths) {
        const auto model = open_model(path);
        expect_whole(model, 3);
        for (const auto& shard : model->shards) EXPECT_THAT(shard.path, HasSubstr("toy-"));
    }
}

TEST(Splits, MissingPartsAreNamedByNumber) {
    const SplitSet set(12);
    for (const int part : {1, 4}) std::filesystem::remove(set.paths[static_cast<size_t>(part)]);
    for (const int part : {0, 11}) {
        expect_refused(set.paths[static_cast<size_t>(part)], {"12 parts", "missing: part 2, 5;"});
    }
}

TEST(Splits, DoubledPartsAreNamedByNumber) {
    const SplitSet set(3);
    std::filesystem::copy_file(set.paths[1], set.paths[2],
                               std::filesystem::copy_options::overwrite_existing);
    expect_refused(set.paths[0],
                   {"missing: part 3;", "doubled: part 2 (", "toy-00003-of-00003.gguf"});
    const SplitSet renamed(3, false);
    std::filesystem::copy_file(renamed.paths[1], renamed.folder.file("copy.gguf"));
    expect_refused(renamed.paths[0], {"doubled: part 2 (", "copy.gguf"});
}

TEST(Splits, ADamagedPartIsNamed) {
    const SplitSet set(3);
    std::filesystem::resize_file(set.paths[1], 100);
    expect_refused(set.paths[0], {"toy-00002-of-00003.gguf"});
}

TEST(Splits, PartsJoinedByConcatenationAreRecognised) {
    const auto parts = split_toy(2);
    const TempFolder split_folder;
    auto joined = parts[0];
    joined.insert(joined.end(), parts[1].begin(), parts[1].end());
    expect_refused(split_folder.write("joined.gguf", joined),
                   {"plain concatenation", "llama-gguf-split --merge"});
    // A writer that does not pad the end: the second header begins off the alignment.
    RawGguf odd = ToyMoe{}.make();
    odd.add_tensor("odd.weight", {1});
    auto unpadded = odd.file();
    unpadded.resize(unpadded.size() - 28);
    unpadded.insert(unpadded.end(), parts[1].begin(), parts[1].end());
    expect_refused(split_folder.write("odd.gguf", unpadded), {"plain concatenation"});
    // The same with whole files that know nothing of splits.
    const TempFolder folder;
    auto twice = ToyMoe{}.make().file();
    const auto again = twice;
    twice.insert(twice.end(), again.begin(), again.end());
    expect_refused(folder.write("twice.gguf", twice), {"plain concatenation"});
}

TEST(Splits, AMergedFileMayKeepItsSplitKeys) {
    for (const uint32_t count : {0u, 1u}) {
        RawGguf file = ToyMoe{}.make();
        file.add("split.no", 0u).add("split.count", count);
        file.add("split.tensors.count", static_cast<uint32_t>(file.tensors.size()));
        const TempFolder folder;
        const auto model = open_model(folder.write("merged.gguf", file.file()));
        ASSERT_TRUE(model) << model.error().detail;
        EXPECT_EQ(model->shards.size(), 1u);
        EXPECT_TRUE(model->warnings.empty());
    }
}

TEST(Splits, TheTensorTotalMustBeThere) {
    const TempFolder folder;
    const auto tensors = ToyMoe{}.tensors();
    std::string path;
    for (uint32_t part = 0; part < 2; ++part) {
        RawGguf file = part == 0 ? ToyMoe{}.keys() : RawGguf{};
        file.add("split.no", part).add("split.count", 2u);
        file.add("split.tensors.count", static_cast<uint32_t>(tensors.size() + 1));
        for (size_t i = part; i < tensors.size(); i += 2) file.tensors.push_back(tensors[i]);
        path = folder.write(usual_name(part, 2), file.file());
    }
    expect_refused(path, {"split.tensors.count", std::to_string(tensors.size())});
}

TEST(Splits, ATensorInTwoPartsIsRefused) {
    const TempFolder folder;
    std::string path;
    for (uint32_t part = 0; part < 2; ++part) {
        RawGguf file = part == 0 ? ToyMoe{}.keys() : RawGguf{};
        file.add("split.no", part).add("split.count", 2u);
        file.tensors = ToyMoe{}.tensors();
        path = folder.write(usual_name(part, 2), file.file());
    }
    expect_refused(path,
                   {"token_embd.weight", "toy-00001-of-00002.gguf", "toy-00002-of-00002.gguf"});
}

TEST(Splits, AnImpossiblePartNumberIsRefused) {
    for (const uint32_t number : {2u, 3u, UINT32_MAX}) {
        RawGguf file = ToyMoe{}.make();
        file.add("split.no", number).add("split.count", 2u);
        const TempFolder folder;
        expect_refused(folder.write("part.gguf", file.file()), {"split.no"});
    }
    RawGguf many = ToyMoe{}.make();
    many.add("split.no", 0u).add("split.count", 70000u);
    const TempFolder folder;
    const auto model = open_model(folder.write("part.gguf", many.file()));
    ASSERT_FALSE(model);
    EXPECT_EQ(model.error().code, Errc::kLimit);
}

TEST(Splits, RelativePathsAndTheCurrentFolder) {
    const SplitSet set(2);
    const auto before = std::filesystem::current_path();
    std::filesystem::current_path(std::filesystem::path(set.paths[0]).parent_path());
    const auto model = open_model(usual_name(1, 2));
    std::filesystem::current_path(before);
    ASSERT_TRUE(model) << model.error().detail;
    EXPECT_EQ(model->shards[0].path, usual_name(0, 2));
}

}  // namespace
}  // namespace kvasir::moe
