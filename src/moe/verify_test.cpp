#include "moe/verify.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include "moe/segments.hpp"
#include "moe/slice.hpp"
#include "moe/slice_testing.hpp"

namespace kvasir::moe {
namespace {

using namespace testing;

class Verify : public ::testing::Test {
protected:
    Verify()
        : model_(open_toy(write_toy(folder_, {.layers = 2,
                                              .experts = 6,
                                              .embd = 32,
                                              .ff = 32,
                                              .type = kF16,
                                              .type_down = kF16,
                                              .scale = true}))),
          path_(folder_ / "s.gguf") {
        const auto manifest = compute_manifest(model_);
        const auto segments = parse_segments("0:1-2,0:4,1:0-4", model_);
        KVASIR_CHECK(write_slice(model_, *manifest, *segments, path_).has_value());
        good_ = read_file(path_);
        slice_ = open_toy(path_);
    }

    // What opening and verifying the bytes say; nullopt if they pass as good.
    std::optional<Error> problem(const std::vector<uint8_t>& bytes) {
        write_file(path_, bytes);
        const auto slice = open_model(path_);
        if (!slice) return slice.error();
        const auto report = verify_slice(*slice);
        if (!report) return report.error();
        return std::nullopt;
    }
    void expect_problem(const std::vector<uint8_t>& bytes, Errc code,
                        std::initializer_list<std::string> words) {
        const auto error = problem(bytes);
        ASSERT_TRUE(error.has_value());
        EXPECT_EQ(error->code, code) << error->detail;
        for (const auto& word : words) {
            EXPECT_NE(error->detail.find(word), std::string::npos) << error->detail;
        }
    }

    ScratchFolder folder_;
    Model model_;
    std::string path_;
    std::vector<uint8_t> good_;
    Model slice_;
};

TEST_F(Verify, AGoodSlicePasses) {
    EXPECT_FALSE(problem(good_));
    const auto report = verify_slice(open_toy(path_));
    ASSERT_TRUE(report.has_value());
    EXPECT_EQ(report->slabs, 8u * 6u);  // gate, up, down, each with its scale
    EXPECT_EQ(report->bytes, slice_.bytes_experts());
}

TEST_F(Verify, NoSingleBitOfTheFileCanFlipUnseen) {
    const auto data_offset = slice_.shards.front().data_offset;
    // Every byte of the header, and a sample of the data with all gaps between tensors.
    for (size_t i = 0; i < good_.size(); i += i < data_offset ? 1 : 97) {
        auto bytes = good_;
        bytes[i] ^= static_cast<uint8_t>(1 << (i % 8));
        const auto error = problem(bytes);
        ASSERT_TRUE(error.has_value()) << "byte " << i;
        EXPECT_NE(error->detail.find("s.gguf"), std::string::npos) << error->detail;
    }
    for (const GgufTensor& tensor : slice_.shards.front().tensors) {
        auto bytes = good_;
        const auto end = static_cast<size_t>(tensor.offset + tensor.bytes);
        if (end % kSliceAlignment == 0) continue;
        bytes[end] ^= 1;
        expect_problem(bytes, Errc::kMismatch, {"padding"});
    }
}

TEST_F(Verify, AFlippedBitIsNamedByTensorAndExpert) {
    EXPECT_TRUE(rc::check("any bit of any slab", [this] {
        const auto b = *rc::gen::inRange<size_t>(0, slice_.banks.size());
        const ExpertBank& bank = slice_.banks[b];
        const auto t = *rc::gen::inRange<size_t>(0, bank.tensors.size());
        const auto e = *rc::gen::inRange<uint32_t>(0, bank.experts);
        const SlabTensor& tensor = bank.tensors[t];
        const auto at = *rc::gen::inRange<uint64_t>(0, tensor.slab_bytes);
        auto bytes = good_;
        bytes[tensor.offset + e * tensor.slab_bytes + at] ^=
            static_cast<uint8_t>(1 << *rc::gen::inRange(0, 8));
        const auto error = problem(bytes);
        RC_ASSERT(error.has_value());
        RC_ASSERT(error->code == Errc::kMismatch);
        const std::string name =
            "tensor '" + tensor.name + "', expert " + std::to_string(bank.global_ids[e]) + " ";
        RC_ASSERT(error->detail.find(name) != std::string::npos);
        const auto against = verify_slice_against(open_toy(path_), model_);
        RC_ASSERT(!against.has_value());
        RC_ASSERT(against.error().detail.find(name) != std::string::npos);
    }));
}

TEST_F(Verify, SwappedSlabsAreNamedWithWhatTheyAre) {
    const SlabTensor& tensor = *slice_.banks[1].find(SlabRole::kUp, SlabPart::kWeight);
    auto bytes = good_;
    const auto first = bytes.begin() + static_cast<long>(tensor.offset);
    const auto size = static_cast<long>(tensor.slab_bytes);
    std::swap_ranges(first + size, first + 2 * size, first + 3 * size);
    expect_problem(bytes, Errc::kMismatch,
                   {tensor.name, "expert 1 ", "are those of expert 3", "and 1 more"});
}

TEST_F(Verify, TruncatedAndExtendedFilesAreRefused) {
    for (size_t size = 0; size < good_.size(); size += 1 + good_.size() / 61) {
        auto bytes = good_;
        bytes.resize(size);
        ASSERT_TRUE(problem(bytes).has_value()) << size;
    }
    for (const size_t cut : {1u, 31u, 32u, 33u}) {
        auto bytes = good_;
        bytes.resize(good_.size() - cut);
        ASSERT_TRUE(problem(bytes).has_value()) << cut;
    }
    for (const size_t more : {1u, 31u, 32u, 4096u}) {
        auto bytes = good_;
        bytes.resize(good_.size() + more);
        expect_problem(bytes, Errc::kBadInput, {"s.gguf", std::to_string(bytes.size())});
    }
}

TEST_F(Verify, AModelIsNotASlice) {
    const auto report = verify_slice(model_);
    ASSERT_FALSE(report.has_value());
    EXPECT_EQ(report.error().code, Errc::kBadInput);
    EXPECT_NE(report.error().detail.find("not a slice"), std::string::npos);
}

TEST_F(Verify, OtherModelsAreToldApart) {
    ToyShape shape{.layers = 2,
                   .experts = 6,
                   .embd = 32,
                   .ff = 32,
                   .type = kF16,
                   .type_down = kF16,
                   .scale = true};
    const auto against = [&](const ToyShape& other) {
        const Model model = open_toy(write_toy(folder_, other, "other.gguf"));
        const auto report = verify_slice_against(slice_, model);
        KVASIR_CHECK(!report.has_value());
        EXPECT_EQ(report.error().code, Errc::kMismatch);
        return report.error().detail;
    };
    shape.seed = 2;  // same names and shapes, other bytes
    EXPECT_NE(against(shape).find("expert 1 differs"), std::string::npos);
    shape.type = kF32;
    EXPECT_NE(against(shape).find("'blk.0.ffn_gate_exps.weight'"), std::string::npos);
    shape.type = kF16;
    shape.scale = false;
    EXPECT_NE(against(shape).find("another model"), std::string::npos);
    ToyShape fewer = {.layers = 2,
                      .experts = 4,
                      .embd = 32,
                      .ff = 32,
                      .type = kF16,
                      .type_down = kF16,
                      .scale = true};
    EXPECT_NE(against(fewer).find("no such expert"), std::string::npos);
    ToyShape shallow = {.layers = 1,
                        .experts = 6,
                        .embd = 32,
                        .ff = 32,
                        .type = kF16,
                        .type_down = kF16,
                        .scale = true};
    EXPECT_NE(against(shallow).find("blk.1."), std::string::npos);
}

}  // namespace
}  // namespace kvasir::moe
