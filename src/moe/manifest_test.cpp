#include "moe/manifest.hpp"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <chrono>
#include <map>

#include "base/bytes.hpp"
#include "crypto/hash.hpp"
#include "moe/file.hpp"
#include "moe/slice_testing.hpp"

namespace kvasir::moe {
namespace {

using namespace testing;

// The formula of the header, written down again from the raw files.
Sha256 model_id_by_hand(const Model& model) {
    struct Tensor {
        GgufTensor info;
        std::vector<uint8_t> data;
        uint64_t slab_bytes = 0;
    };
    std::map<std::string, Tensor> tensors;
    for (const GgufHeader& header : model.shards) {
        const auto file = read_file(header.path);
        for (const GgufTensor& info : header.tensors) {
            const auto begin = file.begin() + static_cast<long>(info.offset);
            tensors[info.name] = {info, {begin, begin + static_cast<long>(info.bytes)}, 0};
        }
    }
    for (const ExpertBank& bank : model.banks) {
        for (const SlabTensor& tensor : bank.tensors) {
            tensors[tensor.name].slab_bytes = tensor.slab_bytes;
        }
    }
    ByteWriter out;
    out.text("kvasir-model-1");
    out.u8(0);
    out.u64(tensors.size());
    for (const auto& [name, tensor] : tensors) {
        out.u32(static_cast<uint32_t>(name.size()));
        out.text(name);
        out.u32(tensor.info.type);
        for (int i = 0; i < 4; ++i) out.u64(tensor.info.ne[static_cast<size_t>(i)]);
        out.u64(tensor.info.bytes);
    }
    for (const auto& [name, tensor] : tensors) {
        if (tensor.slab_bytes == 0) {
            out.bytes(crypto::sha256(tensor.data));
            continue;
        }
        ByteWriter slabs;
        for (size_t at = 0; at < tensor.data.size(); at += tensor.slab_bytes) {
            slabs.bytes(crypto::sha256(std::span(tensor.data).subspan(at, tensor.slab_bytes)));
        }
        out.bytes(crypto::sha256(slabs.data()));
    }
    return crypto::sha256(out.data());
}

TEST(Manifest, FollowsTheFormula) {
    const ScratchFolder folder;
    for (const uint32_t splits : {1u, 5u}) {
        const Model model = open_toy(write_toy(
            folder, {.bias = true, .scale = true, .chunk = true, .splits = splits}, "f.gguf"));
        for (const unsigned threads : {1u, 3u}) {
            const auto manifest = compute_manifest(model, {.threads = threads, .progress = {}});
            ASSERT_TRUE(manifest.has_value());
            EXPECT_EQ(to_hex(manifest->model_id), to_hex(model_id_by_hand(model)));
            for (size_t b = 0; b < model.banks.size(); ++b) {
                const ExpertBank& bank = model.banks[b];
                for (size_t t = 0; t < bank.tensors.size(); ++t) {
                    for (uint32_t e = 0; e < bank.experts; ++e) {
                        EXPECT_EQ(manifest->banks[b].slabs[t][e],
                                  crypto::sha256(slab(model, bank.tensors[t], e)));
                    }
                }
            }
        }
    }
}

TEST(Manifest, AnotherByteOrNameGivesAnotherId) {
    const ScratchFolder folder;
    const std::string path = write_toy(folder, {});
    const auto id = compute_manifest(open_toy(path))->model_id;
    auto bytes = read_file(path);
    bytes.back() ^= 1;  // inside the last tensor: sizes here are multiples of the alignment
    write_file(path, bytes);
    EXPECT_NE(compute_manifest(open_toy(path))->model_id, id);
    bytes.back() ^= 1;
    write_file(path, bytes);
    EXPECT_EQ(compute_manifest(open_toy(path))->model_id, id);
    auto plan = toy_plan({});
    for (auto& tensor : plan.tensors) {
        // Same data (the stream is the old name), other name.
        if (tensor.name == "token_embd.weight") tensor.name = "output.weight";
    }
    ASSERT_TRUE(synth::write_plan(plan, folder / "renamed.gguf").has_value());
    EXPECT_NE(compute_manifest(open_toy(folder / "renamed.gguf"))->model_id, id);
}

TEST(Manifest, SegmentDigestIsExpertByExpert) {
    const ScratchFolder folder;
    const Model model = open_toy(write_toy(folder, {.experts = 5}));
    const auto manifest = compute_manifest(model);
    ByteWriter digests;
    for (const uint32_t e : {1u, 2u, 3u}) {
        for (const auto& tensor : manifest->banks[1].slabs) digests.bytes(tensor[e]);
    }
    EXPECT_EQ(manifest->segment_digest({{1, 0}, 1, 4}), crypto::sha256(digests.data()));
    EXPECT_TRUE(manifest->holds({{1, 0}, 0, 5}));
    EXPECT_FALSE(manifest->holds({{1, 0}, 0, 6}));
    EXPECT_FALSE(manifest->holds({{2, 0}, 0, 1}));
    EXPECT_FALSE(manifest->holds({{1, 0}, 4, 3}));
}

TEST(Manifest, HolesHaveTheDigestOfZeros) {
    const ScratchFolder folder;
    auto plan = toy_plan({.layers = 2});
    plan.sparse = true;
    ASSERT_TRUE(synth::write_plan(plan, folder / "sparse.gguf").has_value());
    // Data in the middle, so that holes lie before and behind it.
    auto bytes = read_file(folder / "sparse.gguf");
    const Model model = open_toy(folder / "sparse.gguf");
    const auto at = model.banks[0].tensors[1].offset + model.banks[0].tensors[1].slab_bytes / 2;
    {
        const Fd fd(::open((folder / "sparse.gguf").c_str(), O_WRONLY));
        ASSERT_EQ(::pwrite(fd.get(), "x", 1, static_cast<off_t>(at)), 1);
    }
    bytes[at] = 'x';
    write_file(folder / "dense.gguf", bytes);
    const Model dense = open_toy(folder / "dense.gguf");
    const auto id = compute_manifest(dense)->model_id;
    EXPECT_EQ(id, model_id_by_hand(dense));
    EXPECT_EQ(compute_manifest(model)->model_id, id);
}

TEST(Manifest, ProgressEndsAtTheTotalAndCancellingStops) {
    const ScratchFolder folder;
    const Model model = open_toy(write_toy(folder, {}));
    uint64_t last = 0;
    uint64_t total = 0;
    ASSERT_TRUE(compute_manifest(model, {.threads = 2,
                                         .progress =
                                             [&](uint64_t done, uint64_t all) {
                                                 EXPECT_GE(done, last);
                                                 last = done;
                                                 total = all;
                                             }})
                    .has_value());
    EXPECT_EQ(last, model.bytes_total());
    EXPECT_EQ(total, model.bytes_total());
    const std::atomic<bool> cancelled = true;
    const auto result =
        compute_manifest(model, {.threads = 1, .progress = {}, .cancelled = &cancelled});
    ASSERT_FALSE(result.has_value());
    EXPECT_EQ(result.error().code, Errc::kClosed);
}

TEST(Manifest, AFileThatShrankIsNamed) {
    const ScratchFolder folder;
    const std::string path = write_toy(folder, {});
    const Model model = open_toy(path);
    std::filesystem::resize_file(path, 100);
    const auto result = compute_manifest(model);
    ASSERT_FALSE(result.has_value());
    EXPECT_EQ(result.error().code, Errc::kBadInput);
    EXPECT_NE(result.error().detail.find("toy.gguf"), std::string::npos);
    std::filesystem::remove(path);
    EXPECT_EQ(compute_manifest(model).error().code, Errc::kEnvironment);
}

class ManifestCache : public ::testing::Test {
protected:
    ManifestCache() : path_(write_toy(folder_, {.splits = 3})), cache_(folder_ / "c/d") {}

    // True if the whole model was hashed.
    bool computes() {
        bool hashed = false;
        const auto manifest = load_or_compute_manifest(open_toy(path_), cache_,
                                                       [&](uint64_t, uint64_t) { hashed = true; });
        KVASIR_CHECK(manifest.has_value());
        const auto fresh = compute_manifest(open_toy(path_));
        EXPECT_EQ(manifest->model_id, fresh->model_id);
        EXPECT_EQ(manifest->banks[0].slabs, fresh->banks[0].slabs);
        EXPECT_EQ(manifest->banks[0].global_ids, fresh->banks[0].global_ids);
        return hashed;
    }
    std::string cache_file() const {
        return std::filesystem::directory_iterator(cache_)->path().string();
    }

    ScratchFolder folder_;
    std::string path_;
    std::string cache_;
};

TEST_F(ManifestCache, TheSecondTimeNothingIsHashed) {
    EXPECT_FALSE(cached_manifest(open_toy(path_), cache_));
    EXPECT_TRUE(computes());
    EXPECT_FALSE(computes());
    EXPECT_TRUE(cached_manifest(open_toy(path_), cache_));
}

TEST_F(ManifestCache, ADamagedFileIsReplaced) {
    EXPECT_TRUE(computes());
    const auto good = read_file(cache_file());
    for (size_t i = 0; i < good.size(); i += 1 + good.size() / 50) {
        auto bad = good;
        bad[i] ^= static_cast<uint8_t>(1 << (i % 8));
        write_file(cache_file(), bad);
        EXPECT_TRUE(computes()) << i;
        EXPECT_EQ(read_file(cache_file()), good);
        EXPECT_FALSE(computes());
    }
    for (const size_t size :
         {size_t{0}, size_t{31}, size_t{32}, good.size() - 1, good.size() + 1}) {
        auto bad = good;
        bad.resize(size);
        write_file(cache_file(), bad);
        EXPECT_TRUE(computes()) << size;
    }
}

TEST_F(ManifestCache, AChangedModelIsHashedAgainEvenWithItsOldTime) {
    EXPECT_TRUE(computes());
    const std::string shard = open_toy(path_).shards[1].path;
    struct stat before = {};
    ASSERT_EQ(::stat(shard.c_str(), &before), 0);
    auto bytes = read_file(shard);
    bytes.back() ^= 4;
    write_file(shard, bytes);
    const timespec times[2] = {before.st_atim, before.st_mtim};
    ASSERT_EQ(::utimensat(AT_FDCWD, shard.c_str(), times, 0), 0);
    EXPECT_TRUE(computes());
    EXPECT_FALSE(computes());
    // Another file under the same name.
    write_file(folder_ / "copy", bytes);
    std::filesystem::rename(folder_ / "copy", shard);
    EXPECT_TRUE(computes());
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(cache_), {}), 1);
}

TEST_F(ManifestCache, AFolderThatCannotBeWrittenIsNotAFailure) {
    write_file(folder_ / "file", {1});
    cache_ = folder_ / "file/sub";
    EXPECT_TRUE(computes());
    EXPECT_TRUE(computes());
    cache_ = "/proc/self/none";
    EXPECT_TRUE(computes());
}

TEST_F(ManifestCache, TheOldestManifestsGoAndNothingElse) {
    std::filesystem::create_directories(cache_);
    const auto name = [](size_t i) {
        const std::string digits = std::to_string(i);
        return std::string(32 - digits.size(), 'a') + digits + ".manifest";
    };
    const auto now = std::filesystem::file_time_type::clock::now();
    for (size_t i = 0; i < kCacheFilesMax + 3; ++i) {
        write_file(cache_ + "/" + name(i), {1});
        std::filesystem::last_write_time(cache_ + "/" + name(i), now - std::chrono::hours(i + 1));
    }
    write_file(cache_ + "/lock", {1});
    write_file(cache_ + "/mine.manifest", {1});
    EXPECT_TRUE(computes());
    EXPECT_FALSE(computes());
    for (size_t i = 0; i < kCacheFilesMax + 3; ++i) {
        EXPECT_EQ(std::filesystem::exists(cache_ + "/" + name(i)), i + 1 < kCacheFilesMax) << i;
    }
    EXPECT_TRUE(std::filesystem::exists(cache_ + "/lock"));
    EXPECT_TRUE(std::filesystem::exists(cache_ + "/mine.manifest"));
}

TEST_F(ManifestCache, TheFolderFollowsTheEnvironment) {
    cache_.clear();
    const char* home = std::getenv("HOME");
    const std::string home_before = home == nullptr ? "" : home;
    ::setenv("XDG_CACHE_HOME", (folder_ / "xdg").c_str(), 1);
    EXPECT_TRUE(computes());
    EXPECT_TRUE(std::filesystem::exists(folder_ / "xdg/kvasir"));
    ::unsetenv("XDG_CACHE_HOME");
    ::setenv("HOME", (folder_ / "home").c_str(), 1);
    EXPECT_TRUE(computes());
    EXPECT_FALSE(computes());
    EXPECT_TRUE(std::filesystem::exists(folder_ / "home/.cache/kvasir"));
    ::setenv("HOME", home_before.c_str(), 1);
}

}  // namespace
}  // namespace kvasir::moe
