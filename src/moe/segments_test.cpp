#include "moe/segments.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <map>
#include <set>

namespace kvasir::moe {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// A model with the banks `experts[key]`; expert bytes differ by layer.
Model model_of(const std::map<LayerKey, uint32_t>& experts) {
    Model model;
    for (const auto& [key, count] : experts) {
        ExpertBank bank;
        bank.key = key;
        bank.experts = count;
        for (uint32_t i = 0; i < count; ++i) bank.global_ids.push_back(i);
        SlabTensor tensor;
        tensor.slab_bytes = 100 + 7 * key.layer;
        bank.tensors.push_back(tensor);
        model.banks.push_back(bank);
    }
    return model;
}

// Layers 0-3 and 7 with 16 experts, 5 and 6 dense, a second bank of 4 in layers 1 and 2.
Model example() {
    return model_of({{{0, 0}, 16},
                     {{1, 0}, 16},
                     {{1, 1}, 4},
                     {{2, 0}, 16},
                     {{2, 1}, 4},
                     {{3, 0}, 16},
                     {{7, 0}, 16}});
}

TEST(Segments, ParsesTheGrammar) {
    const Model model = example();
    const auto text_of = [&](const char* text) {
        const auto segments = parse_segments(text, model);
        return segments ? to_string(*segments) : "error: " + segments.error().detail;
    };
    EXPECT_EQ(text_of("0:3"), "0:3");
    EXPECT_EQ(text_of("0-3:0-15,7:2-3"), "0-3:0-15,7:2-3");
    EXPECT_EQ(text_of("0-7:*"), "0-3:0-15,7:0-15");
    EXPECT_EQ(text_of("2-6:1"), "2-3:1");
    EXPECT_EQ(text_of("7:4,7:5,7:6"), "7:4-6");
    EXPECT_EQ(text_of("7:4-9,7:2-5,7:12"), "7:2-9,7:12");
    EXPECT_EQ(text_of("1c:0-3"), "1c:0-3");
    EXPECT_EQ(text_of("0-7c:*"), "1-2c:0-3");
    EXPECT_EQ(text_of("1c-2c:2"), "1-2c:2");
    EXPECT_EQ(text_of("1:0,1c:0"), "1:0,1c:0");
}

TEST(Segments, RefusesNamingTheItem) {
    const Model model = example();
    for (const char* item : {"",      "0",    "0:",     ":0",    "0:x",           "x:0",    "0:3-1",
                             "3-1:0", "0:-1", "-1:0",   "0:0-",  "0:16",          "0:0-16", "5:0",
                             "5-6:*", "9:*",  "0c:0",   "1c:4",  "0:4294967296",  "0 :1",   "0:1 ",
                             "0:0x1", "c:1",  "1c-2:0", "0:*-3", "0:0-4294967295"}) {
        for (const std::string& text : {std::string(item), "0:1," + std::string(item)}) {
            const auto segments = parse_segments(text, model);
            ASSERT_FALSE(segments) << text;
            EXPECT_EQ(segments.error().code, Errc::kUsage);
            EXPECT_THAT(segments.error().detail, HasSubstr("'" + std::string(item) + "'"));
        }
    }
}

TEST(Segments, LayersBehindTheModelsEndAreRefused) {
    Model model = example();
    const auto expect_refused = [&](const char* text, const char* why) {
        const auto segments = parse_segments(text, model);
        ASSERT_FALSE(segments) << text;
        EXPECT_EQ(segments.error().code, Errc::kUsage);
        EXPECT_THAT(segments.error().detail, HasSubstr(why));
    };
    expect_refused("0-9:0", "'0-9:0': there is no layer 9, the model's layers are 0 to 7");
    expect_refused("0-8:*", "no layer 8");
    expect_refused("0-8c:*", "no layer 8");
    expect_refused("0:0,7-4294967295:1", "no layer 4294967295");
    // Behind the last layer with experts there may be dense ones.
    model.layers_total = 9;
    EXPECT_TRUE(parse_segments("0-8:0", model));
    expect_refused("0-9:0", "layers are 0 to 8");
}

TEST(Segments, ASliceIsNamedByGlobalIds) {
    Model slice = model_of({{{4, 0}, 3}});
    slice.banks[0].global_ids = {2, 3, 9};
    EXPECT_EQ(to_string(*parse_segments("4:*", slice)), "4:2-3,4:9");
    EXPECT_EQ(to_string(*parse_segments("4:9", slice)), "4:9");
    EXPECT_FALSE(parse_segments("4:2-9", slice));
    EXPECT_FALSE(parse_segments("4:0", slice));
    EXPECT_THAT(all_segments(slice), ElementsAre(Segment{{4, 0}, 2, 4}, Segment{{4, 0}, 9, 10}));
    const auto parts = split_evenly(slice, 2);
    EXPECT_EQ(to_string(parts[0]) + " " + to_string(parts[1]), "4:2-3 4:9");
}

TEST(Segments, AllOfTheExample) {
    EXPECT_EQ(to_string(all_segments(example())), "0-3:0-15,7:0-15,1-2c:0-3");
}

rc::Gen<std::map<LayerKey, uint32_t>> banks() {
    return rc::gen::container<std::map<LayerKey, uint32_t>>(
        rc::gen::construct<LayerKey>(rc::gen::inRange(0u, 12u), rc::gen::inRange(0u, 2u)),
        rc::gen::inRange(1u, 40u));
}

using Cells = std::set<std::tuple<uint32_t, uint32_t, uint32_t>>;
Cells cells(const std::vector<Segment>& segments) {
    Cells out;
    for (const Segment& segment : segments) {
        for (uint32_t i = segment.begin; i < segment.end; ++i) {
            out.emplace(segment.layer.layer, segment.layer.bank, i);
        }
    }
    return out;
}

std::vector<Segment> some_segments(const Model& model) {
    std::vector<Segment> out;
    if (model.banks.empty()) return out;
    const auto count = *rc::gen::inRange(1, 12);
    for (int i = 0; i < count; ++i) {
        const ExpertBank& bank = model.banks[*rc::gen::inRange<size_t>(0, model.banks.size())];
        const auto a = *rc::gen::inRange(0u, bank.experts + 1);
        const auto b = *rc::gen::inRange(0u, bank.experts + 1);
        out.push_back({bank.key, std::min(a, b), std::max(a, b)});
    }
    return out;
}

RC_GTEST_PROP(SegmentsProperty, NormaliseKeepsTheSetAndIsIdempotent, ()) {
    const Model model = model_of(*banks());
    const auto segments = some_segments(model);
    const auto once = normalise(segments);
    RC_ASSERT(cells(once) == cells(segments));
    RC_ASSERT(normalise(once) == once);
    for (size_t i = 0; i < once.size(); ++i) {
        RC_ASSERT(once[i].begin < once[i].end);
        // Disjoint and not even touching. (RC_ASSERT does not short-circuit.)
        if (i == 0) continue;
        const bool is_apart =
            once[i - 1].layer < once[i].layer ||
            (once[i - 1].layer == once[i].layer && once[i - 1].end < once[i].begin);
        RC_ASSERT(is_apart);
    }
}

RC_GTEST_PROP(SegmentsProperty, TextRoundTrips, ()) {
    const Model model = model_of(*banks());
    const auto segments = normalise(some_segments(model));
    RC_PRE(!segments.empty());
    const auto parsed = parse_segments(to_string(segments), model);
    RC_ASSERT(parsed.has_value());
    RC_ASSERT(*parsed == segments);
}

RC_GTEST_PROP(SegmentsProperty, SplitEvenlyCoversEachExpertOnce, ()) {
    const Model model = model_of(*banks());
    const auto count = *rc::gen::inRange(1u, 9u);
    const auto parts = split_evenly(model, count);
    RC_ASSERT(parts.size() == count);
    uint64_t bytes_min = UINT64_MAX;
    uint64_t bytes_max = 0;
    uint64_t expert_max = 0;
    size_t total = 0;
    Cells all;
    for (const auto& part : parts) {
        uint64_t bytes = 0;
        std::map<LayerKey, int> ranges;
        for (const Segment& segment : part) {
            bytes += segment.count() * model.find_bank(segment.layer)->expert_bytes();
            // One contiguous range of each bank.
            RC_ASSERT(++ranges[segment.layer] == 1);
        }
        bytes_min = std::min(bytes_min, bytes);
        bytes_max = std::max(bytes_max, bytes);
        total += cells(part).size();
        all.merge(cells(part));
    }
    for (const ExpertBank& bank : model.banks)
        expert_max = std::max(expert_max, bank.expert_bytes());
    RC_ASSERT(total == all.size());
    RC_ASSERT(all == cells(all_segments(model)));
    RC_ASSERT(bytes_max - bytes_min <= expert_max);
}

}  // namespace
}  // namespace kvasir::moe
