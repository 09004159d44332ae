#include "moe/outline.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <chrono>
#include <functional>

#include "base/bytes.hpp"
#include "crypto/hash.hpp"
#include "moe/segments.hpp"
#include "moe/slice.hpp"
#include "moe/slice_testing.hpp"

namespace kvasir::moe {
namespace {

using namespace testing;
using Bytes = std::vector<uint8_t>;

// Some experts of the model, at least one, in any order and with doubles.
std::vector<Segment> any_segments(const Model& model) {
    std::vector<Segment> segments;
    const auto count = *rc::gen::inRange<size_t>(1, 8);
    for (size_t i = 0; i < count; ++i) {
        const ExpertBank& bank = model.banks[*rc::gen::inRange<size_t>(0, model.banks.size())];
        const auto begin = *rc::gen::inRange<uint32_t>(0, bank.experts);
        const auto end = *rc::gen::inRange<uint32_t>(begin + 1, bank.experts + 1);
        segments.push_back({bank.key, begin, end});
    }
    return segments;
}

// The file that a plan describes, its ranges read from the shards in `folder`.
Bytes fill(const SlicePlan& plan, const Outline& outline, const std::string& folder) {
    Bytes file(plan.file_bytes, 0);
    std::ranges::copy(plan.header, file.begin());
    for (const SliceRange& range : plan.ranges) {
        std::ifstream in(folder + "/" + outline.model.shards[range.shard].path, std::ios::binary);
        in.seekg(static_cast<std::streamoff>(range.from));
        in.read(reinterpret_cast<char*>(file.data() + range.to),
                static_cast<std::streamsize>(range.bytes));
        KVASIR_CHECK(in.good());
    }
    return file;
}

// Ranges and slabs ascend, cover the same bytes, and the slabs' digests are those of the file.
void check_plan(const SlicePlan& plan, const Outline& outline, const Bytes& file) {
    uint64_t end = plan.header.size();
    size_t next = 0;
    uint64_t bytes = 0;
    for (const SliceRange& range : plan.ranges) {
        RC_ASSERT(range.to >= end);
        end = range.to + range.bytes;
        for (uint64_t at = range.to; at < end; ++next) {
            RC_ASSERT(next < plan.slabs.size());
            const SliceSlab& slab = plan.slabs[next];
            RC_ASSERT(slab.to == at);
            at += slab.bytes;
            RC_ASSERT(at <= end);
            RC_ASSERT(slab.digest == crypto::sha256(std::span(file).subspan(slab.to, slab.bytes)));
            const ExpertBank* bank = outline.model.find_bank(slab.expert.layer);
            RC_ASSERT(bank != nullptr && slab.tensor < bank->tensors.size());
            RC_ASSERT(slab.bytes == bank->tensors[slab.tensor].slab_bytes);
            bytes += slab.bytes;
        }
    }
    RC_ASSERT(next == plan.slabs.size());
    RC_ASSERT(bytes == plan.bytes_slabs);
    RC_ASSERT(end <= plan.file_bytes);
}

TEST(Outline, PlansTheVeryFileThatIsCutFromTheModel) {
    EXPECT_TRUE(rc::check("random segments of random toys", [] {
        const ScratchFolder folder;
        const Model model = open_toy(write_toy(folder, any_shape()));
        const auto manifest = compute_manifest(model);
        RC_ASSERT(manifest.has_value());
        const auto made = make_outline(model, *manifest);
        RC_ASSERT(made.has_value());
        const Bytes encoded = encode_outline(*made);
        const auto outline = decode_outline(encoded);
        RC_ASSERT(outline.has_value());
        RC_ASSERT(encode_outline(*outline) == encoded);
        for (int round = 0; round < 3; ++round) {
            const auto segments = any_segments(model);
            const auto report = write_slice(model, *manifest, segments, folder / "cut.slice");
            RC_ASSERT(report.has_value());
            const auto plan = plan_slice(*outline, segments);
            RC_ASSERT(plan.has_value());
            const Bytes file = fill(*plan, *outline, folder.path());
            RC_ASSERT(file == read_file(folder / "cut.slice"));
            RC_ASSERT(plan->ranges.size() == report->ranges);
            RC_ASSERT(plan->bytes_slabs == report->bytes_slabs);
            check_plan(*plan, *outline, file);
        }
    }));
}

void expect_same_banks(const Model& a, const Model& b) {
    ASSERT_EQ(a.banks.size(), b.banks.size());
    for (size_t i = 0; i < a.banks.size(); ++i) {
        EXPECT_EQ(a.banks[i].key, b.banks[i].key);
        EXPECT_EQ(a.banks[i].experts, b.banks[i].experts);
        EXPECT_EQ(a.banks[i].global_ids, b.banks[i].global_ids);
        EXPECT_EQ(a.banks[i].is_mtp, b.banks[i].is_mtp);
        ASSERT_EQ(a.banks[i].tensors.size(), b.banks[i].tensors.size());
        for (size_t t = 0; t < a.banks[i].tensors.size(); ++t) {
            const SlabTensor& x = a.banks[i].tensors[t];
            const SlabTensor& y = b.banks[i].tensors[t];
            EXPECT_TRUE(x.name == y.name && x.role == y.role && x.part == y.part &&
                        x.type == y.type && x.n_in == y.n_in && x.n_out == y.n_out &&
                        x.shard == y.shard && x.offset == y.offset && x.slab_bytes == y.slab_bytes)
                << x.name;
        }
    }
}

struct Made {
    ScratchFolder folder;
    Model model;
    Manifest manifest;
    Outline outline;

    explicit Made(const ToyShape& shape)
        : model(open_toy(write_toy(folder, shape))),
          manifest(compute_manifest(model).value()),
          outline(make_outline(model, manifest).value()) {}
};

TEST(Outline, TheDecodedModelHasTheOriginalsBanksAndNothingElse) {
    const Made made({.dense = 1, .bias = true, .scale = true, .mtp = true, .splits = 3});
    const auto decoded = decode_outline(encode_outline(made.outline));
    ASSERT_TRUE(decoded.has_value()) << decoded.error().detail;
    expect_same_banks(decoded->model, made.model);
    EXPECT_EQ(decoded->model.arch, "qwen3moe");
    EXPECT_EQ(decoded->model.name, "toy");
    EXPECT_EQ(decoded->model.experts_used, made.model.experts_used);
    EXPECT_EQ(decoded->model.n_embd, made.model.n_embd);
    EXPECT_EQ(decoded->model.bytes_experts(), made.model.bytes_experts());
    EXPECT_EQ(decoded->model.bytes_total(), made.model.bytes_experts());
    EXPECT_EQ(decoded->manifest.model_id, made.manifest.model_id);
    for (const Segment& segment : all_segments(made.model)) {
        EXPECT_EQ(decoded->manifest.segment_digest(segment), made.manifest.segment_digest(segment));
    }
    ASSERT_EQ(decoded->model.shards.size(), 3u);
    for (size_t i = 0; i < 3; ++i) {
        const std::string& name = decoded->model.shards[i].path;
        EXPECT_EQ(name.find('/'), std::string::npos);
        EXPECT_EQ(made.folder / name, made.model.shards[i].path);
        EXPECT_EQ(decoded->model.shards[i].file_bytes, made.model.shards[i].file_bytes);
    }
}

TEST(Outline, IsNotMadeOfASliceNorWithoutAnId) {
    const Made made({});
    Manifest manifest = made.manifest;
    manifest.model_id = {};
    EXPECT_EQ(make_outline(made.model, manifest).error().code, Errc::kUsage);
    manifest = made.manifest;
    manifest.banks.pop_back();
    EXPECT_EQ(make_outline(made.model, manifest).error().code, Errc::kMismatch);
    ASSERT_TRUE(write_slice(made.model, made.manifest, all_segments(made.model),
                            made.folder / "slice.gguf"));
    EXPECT_EQ(make_outline(open_toy(made.folder / "slice.gguf"), made.manifest).error().code,
              Errc::kUsage);
}

TEST(Outline, ExpertsThatTheModelLacksAreNoPlan) {
    const Made made({.layers = 2, .experts = 4});
    const std::vector<std::vector<Segment>> wrong = {
        {},
        {{{0, 0}, 4, 5}},
        {{{0, 0}, 0, UINT32_MAX}},
        {{{2, 0}, 0, 1}},
        {{{0, 1}, 0, 1}},
        {{{0, 0}, 0, 1}, {{9, 0}, 0, 1}},
    };
    for (const auto& segments : wrong) {
        const auto plan = plan_slice(made.outline, segments);
        ASSERT_FALSE(plan.has_value());
        EXPECT_EQ(plan.error().code, Errc::kUsage);
    }
}

TEST(Outline, EveryCutAndEveryExtraByteIsRefused) {
    const Made made({.layers = 1, .experts = 2, .bias = true, .splits = 2});
    const Bytes good = encode_outline(made.outline);
    ASSERT_TRUE(decode_outline(good).has_value());
    for (size_t size = 0; size < good.size(); ++size) {
        const auto decoded = decode_outline(std::span(good).first(size));
        ASSERT_FALSE(decoded.has_value()) << size;
        EXPECT_EQ(decoded.error().code, Errc::kBadInput) << decoded.error().detail;
    }
    Bytes longer = good;
    longer.push_back(0);
    EXPECT_NE(decode_outline(longer).error().detail.find("left over"), std::string::npos);
}

// Whatever one byte becomes, the result is refused or is an outline that says the same when it is
// encoded again; and every plan of it stays inside its shards.
TEST(Outline, EveryChangedByteIsRefusedOrHarmless) {
    const Made made({.layers = 1, .experts = 2, .scale = true, .splits = 2});
    const Bytes good = encode_outline(made.outline);
    for (size_t i = 0; i < good.size(); ++i) {
        for (const int change : {1, 0x80, 0xff, 0x20}) {
            Bytes other = good;
            other[i] = static_cast<uint8_t>(other[i] ^ change);
            const auto decoded = decode_outline(other);
            if (!decoded) {
                EXPECT_FALSE(decoded.error().detail.empty());
                continue;
            }
            ASSERT_EQ(encode_outline(*decoded), other) << i;
            const auto plan = plan_slice(*decoded, all_segments(decoded->model));
            if (!plan) continue;
            for (const SliceRange& range : plan->ranges) {
                const uint64_t size = decoded->model.shards[range.shard].file_bytes;
                ASSERT_LE(range.bytes, size);
                ASSERT_LE(range.from, size - range.bytes);
            }
        }
    }
}

Bytes record(const std::string& key, uint32_t type, const Bytes& value) {
    ByteWriter out;
    out.u64(key.size());
    out.text(key);
    out.u32(type);
    out.bytes(value);
    return out.take();
}

// One edit each of an outline that is right otherwise; the error names the field.
TEST(Outline, AWrongFieldIsNamed) {
    const Made made({.layers = 2, .experts = 2, .splits = 2});
    const auto slab = [](Outline& o) -> SlabTensor& { return o.model.banks[0].tensors[1]; };
    const struct {
        const char* field;
        std::function<void(Outline&)> edit;
    } cases[] = {
        {"model_id", [](Outline& o) { o.manifest.model_id = {}; }},
        {"name", [](Outline& o) { o.model.name.assign(1025, 'n'); }},
        {"shards", [](Outline& o) { o.model.shards.clear(); }},
        {"shards[0].name", [](Outline& o) { o.model.shards[0].path = ""; }},
        {"shards[0].name", [](Outline& o) { o.model.shards[0].path = ".."; }},
        {"shards[0].name", [](Outline& o) { o.model.shards[0].path = "a/b"; }},
        {"shards[0].name", [](Outline& o) { o.model.shards[0].path = "a\\b"; }},
        {"shards[1].name", [](Outline& o) { o.model.shards[1].path = std::string("a\0b", 3); }},
        {"shards[1].name", [](Outline& o) { o.model.shards[1].path = o.model.shards[0].path; }},
        {"shards[1].name", [](Outline& o) { o.model.shards[1].path.assign(256, 'a'); }},
        {"shards[0].bytes", [](Outline& o) { o.model.shards[0].file_bytes = ~uint64_t{0}; }},
        {"shards[1].bytes",
         [](Outline& o) {
             for (auto& shard : o.model.shards) shard.file_bytes = uint64_t{1} << 61;
             o.model.shards[1].file_bytes = (uint64_t{1} << 61) + 1;
         }},
        {"kept keys[0]", [](Outline& o) { o.kept_keys[0].assign(4097, 'k'); }},
        {"kept keys", [](Outline& o) { o.kept_keys[0].clear(); }},
        {"kept keys", [](Outline& o) { std::swap(o.kept_keys[0], o.kept_keys[1]); }},
        {"kept keys", [](Outline& o) { o.kept_keys[1] = o.kept_keys[0]; }},
        {"kept keys", [](Outline& o) { o.kept_keys[0].push_back(0); }},
        {"kept keys", [](Outline& o) { o.kept_keys[0] = record("", 0, {1}); }},
        {"kept keys[0]",
         [](Outline& o) {
             o.kept_keys.insert(o.kept_keys.begin(), record("general.alignment", 4, {32, 0, 0, 0}));
         }},
        {"is no key of a slice",
         [](Outline& o) { o.kept_keys.push_back(record("tokenizer.x", 0, {1})); }},
        {"not in order", [](Outline& o) { o.kept_keys.push_back(record("kvasir.x", 0, {1})); }},
        {"arch", [](Outline& o) { o.model.arch = "llama"; }},
        {"arch", [](Outline& o) { o.model.arch = ""; }},
        {"banks[0].layer", [](Outline& o) { o.model.banks[0].key.layer = 1 << 16; }},
        {"banks[0].bank", [](Outline& o) { o.model.banks[0].key.bank = 2; }},
        {"banks[1].layer", [](Outline& o) { o.model.banks[1].key = o.model.banks[0].key; }},
        {"banks[0].experts", [](Outline& o) { o.model.banks[0].experts = 0; }},
        {"banks[0].experts", [](Outline& o) { o.model.banks[0].experts = (1 << 16) + 1; }},
        {"banks[0].tensors", [](Outline& o) { o.model.banks[0].tensors.clear(); }},
        {"banks[0].tensors[1].name",
         [&](Outline& o) { slab(o).name = "blk.1.ffn_up_exps.weight"; }},
        {"banks[0].tensors[1].name", [&](Outline& o) { slab(o).name = "blk.0.ffn_up.weight"; }},
        {"banks[0].tensors[1].name", [&](Outline& o) { slab(o).name += std::string("\0", 1); }},
        {"banks[0].tensors[1].name", [&](Outline& o) { slab(o).role = SlabRole::kDown; }},
        {"banks[0].tensors[1].name", [&](Outline& o) { slab(o).part = SlabPart::kBias; }},
        {"banks[0].tensors[1].n_in", [&](Outline& o) { slab(o).type = 39999; }},
        {"banks[0].tensors[1].n_in", [&](Outline& o) { slab(o).n_in = 0; }},
        {"banks[0].tensors[1].n_in", [&](Outline& o) { slab(o).n_in += 1; }},
        {"banks[0].tensors[1].n_in", [&](Outline& o) { slab(o).n_in = uint64_t{1} << 63; }},
        {"banks[0].tensors[1].n_in", [&](Outline& o) { slab(o).n_out = 0; }},
        {"banks[0].tensors[1].n_in", [&](Outline& o) { slab(o).n_out = ~uint64_t{0}; }},
        {"banks[0].tensors[1].n_in", [&](Outline& o) { slab(o).n_out = uint64_t{1} << 54; }},
        {"banks[0].tensors[1].offset", [&](Outline& o) { slab(o).n_out = uint64_t{1} << 40; }},
        {"banks[0].tensors[1].shard", [&](Outline& o) { slab(o).shard = 2; }},
        {"banks[0].tensors[1].shard", [&](Outline& o) { slab(o).shard = UINT32_MAX; }},
        {"banks[0].tensors[1].offset", [&](Outline& o) { slab(o).offset = ~uint64_t{0}; }},
        {"banks[0].tensors[1].offset",
         [&](Outline& o) { slab(o).offset = o.model.shards[slab(o).shard].file_bytes - 1; }},
        {"overlaps", [&](Outline& o) { slab(o).offset = o.model.banks[0].tensors[0].offset + 1; }},
        {"banks[0].tensors", [&](Outline& o) { slab(o).slab_bytes += 1; }},
        {"banks[0].tensors",
         [&](Outline& o) {
             std::swap(o.model.banks[0].tensors[0], slab(o));
             std::swap(o.manifest.banks[0].slabs[0], o.manifest.banks[0].slabs[1]);
         }},
        {"missing",  // a bank without its down projection is no bank
         [&](Outline& o) {
             o.model.banks[0].tensors.pop_back();
             o.manifest.banks[0].slabs.pop_back();
         }},
    };
    for (const auto& c : cases) {
        Outline outline = made.outline;
        c.edit(outline);
        const auto decoded = decode_outline(encode_outline(outline));
        ASSERT_FALSE(decoded.has_value()) << c.field;
        EXPECT_TRUE(decoded.error().code == Errc::kBadInput ||
                    decoded.error().code == Errc::kLimit);
        EXPECT_NE(decoded.error().detail.find(c.field), std::string::npos)
            << c.field << " is not in: " << decoded.error().detail;
    }
}

// A count that the bytes cannot hold costs nothing: it is refused before anything is made of it.
TEST(Outline, HugeCountsAreRefusedAtOnce) {
    ByteWriter head;
    head.text(std::string_view("kvasir-outline-1\0", 17));
    for (int i = 0; i < 32; ++i) head.u8(1);
    head.u16(0);
    for (const uint32_t count : {2u, 65535u, 65536u, 0x80000000u, 0xffffffffu}) {
        ByteWriter out = head;
        out.u32(count);
        out.u64(0);
        const auto decoded = decode_outline(out.data());
        ASSERT_FALSE(decoded.has_value()) << count;
        EXPECT_NE(decoded.error().detail.find("shards"), std::string::npos);
    }
}

// 49 layers of 256 experts, as in the largest model this was made for.
TEST(Outline, ALargeModelDecodesAndIsPlannedQuickly) {
    Outline outline = Made({.layers = 1, .experts = 2}).outline;
    const ExpertBank sample = outline.model.banks[0];
    outline.model.banks.clear();
    outline.manifest.banks.clear();
    uint64_t end = 4096;
    for (uint32_t layer = 0; layer < 49; ++layer) {
        ExpertBank bank = sample;
        bank.key.layer = layer;
        bank.experts = 256;
        BankDigests digests{bank.key, 256, {}, {}};
        for (SlabTensor& tensor : bank.tensors) {
            tensor.name.replace(0, tensor.name.find(".ffn"), "blk." + std::to_string(layer));
            tensor.shard = 0;
            tensor.offset = end;
            end += 256 * tensor.slab_bytes;
            digests.slabs.emplace_back(256).front().fill(static_cast<uint8_t>(layer));
        }
        outline.model.banks.push_back(std::move(bank));
        outline.manifest.banks.push_back(std::move(digests));
    }
    outline.model.shards[0].file_bytes = end;
    const Bytes encoded = encode_outline(outline);
    const auto start = std::chrono::steady_clock::now();
    const auto decoded = decode_outline(encoded);
    const auto middle = std::chrono::steady_clock::now();
    ASSERT_TRUE(decoded.has_value()) << decoded.error().detail;
    const auto plan = plan_slice(*decoded, all_segments(decoded->model));
    const auto finish = std::chrono::steady_clock::now();
    ASSERT_TRUE(plan.has_value()) << plan.error().detail;
    EXPECT_EQ(plan->slabs.size(), 49u * 256 * 3);
    EXPECT_EQ(plan->ranges.size(), 49u * 3);
    EXPECT_LT(middle - start, std::chrono::seconds(1));
    EXPECT_LT(finish - middle, std::chrono::seconds(2));
    const auto ms = [](auto span) {
        return std::chrono::duration<double, std::milli>(span).count();
    };
    std::printf("%zu bytes decoded in %.1f ms, planned in %.1f ms\n", encoded.size(),
                ms(middle - start), ms(finish - middle));
}

}  // namespace
}  // namespace kvasir::moe
