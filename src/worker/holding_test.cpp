// What a worker may hold: parts of a model or slices of it, in no more ranges than a HELLO takes.
#include "worker/holding.hpp"

#include <gtest/gtest.h>

#include "engine/engine_testing.hpp"
#include "moe/slice.hpp"

namespace kvasir::worker {
namespace {

namespace toy = engine::testing;

// Every other expert of `layers` layers of 1,024.
std::string scattered(uint32_t layers) {
    std::string out;
    for (uint32_t id = 0; id < 1024; id += 2) {
        out += (id == 0 ? "0-" : ",0-") + std::to_string(layers - 1) + ":" + std::to_string(id);
    }
    return out;
}

TEST(HoldingTest, MoreRangesThanAHelloTakesAreRefusedNotFatal) {
    const toy::Folder folder;
    auto spec = toy::toy_spec();
    spec.layers = 9;
    spec.experts = 1024;
    spec.embd = spec.ff = 16;
    spec.type = 0;
    spec.sparse = true;
    HoldingOptions options;
    options.model_path = toy::write_toy(folder, "wide.gguf", spec);
    options.cache_dir = folder / "cache";
    options.experts = scattered(8);
    const auto most = Holding::open(options);
    ASSERT_TRUE(most) << most.error().detail;
    EXPECT_EQ((*most)->segments().size(), wire::kSegmentsMax);
    wire::Hello hello;
    hello.segments = (*most)->segments();
    EXPECT_FALSE(wire::encode_hello(hello).empty());
    options.experts = scattered(9);
    const auto more = Holding::open(options);
    ASSERT_FALSE(more);
    EXPECT_EQ(more.error().code, Errc::kLimit);
    EXPECT_NE(more.error().detail.find("wide.gguf"), std::string::npos) << more.error().detail;
    EXPECT_NE(more.error().detail.find("4608"), std::string::npos) << more.error().detail;

    const toy::Toy model(options.model_path);
    HoldingOptions slice;
    slice.slice_path = folder / "slice.gguf";
    std::vector<Segment> segments;
    for (uint32_t layer = 0; layer < 9; ++layer) {
        for (uint32_t id = 0; id < 1024; id += 2) segments.push_back({{layer, 0}, id, id + 1});
    }
    ASSERT_TRUE(moe::write_slice(model.model, segments, slice.slice_path));
    const auto too_wide = Holding::open(slice);
    ASSERT_FALSE(too_wide);
    EXPECT_EQ(too_wide.error().code, Errc::kLimit);
    EXPECT_NE(too_wide.error().detail.find("slice.gguf"), std::string::npos);
}

}  // namespace
}  // namespace kvasir::worker
