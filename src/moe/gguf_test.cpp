#include "moe/gguf.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <unistd.h>

#include <chrono>
#include <memory>

#include "ggml.h"
#include "gguf.h"
#include "moe/mapping.hpp"
#include "moe/raw_gguf.hpp"

namespace kvasir::moe {
namespace {

using testing::HasSubstr;

RawGguf toy() {
    RawGguf out;
    out.add("general.architecture", std::string("toy")).add("toy.block_count", 4u);
    out.add("toy.list", std::vector<uint32_t>{1, 2, 3});
    out.add_tensor("a.weight", {64, 3});
    out.add_tensor("b.weight", {256, 4, 5}, GGML_TYPE_Q4_K);
    return out;
}

Result<GgufHeader> parse(const std::vector<uint8_t>& bytes) {
    return parse_gguf_header(bytes, bytes.size(), "m.gguf");
}

TEST(Gguf, ReadsKeysAndTensors) {
    const auto bytes = toy().file();
    const auto header = parse(bytes);
    ASSERT_TRUE(header) << header.error().detail;
    EXPECT_EQ(header->get_text("general.architecture"), "toy");
    EXPECT_EQ(header->get_u64("toy.block_count"), 4u);
    EXPECT_EQ(header->get_u64("general.architecture"), std::nullopt);
    ASSERT_NE(header->get_array("toy.list"), nullptr);
    EXPECT_EQ(header->get_array("toy.list")->integers, (std::vector<int64_t>{1, 2, 3}));
    ASSERT_EQ(header->tensors.size(), 2u);
    EXPECT_EQ(header->tensors[0].bytes, 64u * 3 * 4);
    EXPECT_EQ(header->tensors[1].bytes, 4u * 5 * 144);
    EXPECT_EQ(header->tensors[1].offset, header->data_offset + 64 * 3 * 4);
    EXPECT_EQ(header->data_offset % 32, 0u);
    // A record can be copied as it stands.
    const GgufKey& key = header->keys.at("toy.block_count");
    EXPECT_EQ(key.bytes, 8u + 15 + 4 + 4);
    EXPECT_EQ(std::string(bytes.begin() + key.offset + 8, bytes.begin() + key.offset + 23),
              "toy.block_count");
}

TEST(Gguf, ReadsEveryScalarType) {
    RawGguf file;
    const auto add = [&](const char* key, uint32_t type, auto put) {
        ByteWriter value;
        put(value);
        file.add_key(key, type, value);
    };
    add("u8", 0, [](ByteWriter& w) { w.u8(200); });
    add("i8", 1, [](ByteWriter& w) { w.u8(0xff); });
    add("u16", 2, [](ByteWriter& w) { w.u16(60000); });
    add("i16", 3, [](ByteWriter& w) { w.u16(0xfffe); });
    add("i32", 5, [](ByteWriter& w) { w.i32(-3); });
    add("f32", 6, [](ByteWriter& w) { w.f32(0.5f); });
    add("bool", 7, [](ByteWriter& w) { w.u8(1); });
    add("u64", 10, [](ByteWriter& w) { w.u64(UINT64_MAX); });
    add("i64", 11, [](ByteWriter& w) { w.u64(static_cast<uint64_t>(-4)); });
    add("f64", 12, [](ByteWriter& w) { w.u64(std::bit_cast<uint64_t>(0.25)); });
    const auto header = parse(file.file());
    ASSERT_TRUE(header) << header.error().detail;
    EXPECT_EQ(header->get_u64("u8"), 200u);
    EXPECT_EQ(std::get<int64_t>(header->keys.at("i8").value), -1);
    EXPECT_EQ(header->get_u64("i8"), std::nullopt);
    EXPECT_EQ(header->get_u64("u16"), 60000u);
    EXPECT_EQ(std::get<int64_t>(header->keys.at("i16").value), -2);
    EXPECT_EQ(std::get<int64_t>(header->keys.at("i32").value), -3);
    EXPECT_EQ(header->get_f64("f32"), 0.5);
    EXPECT_EQ(header->get_bool("bool"), true);
    EXPECT_EQ(header->get_u64("u64"), UINT64_MAX);
    EXPECT_EQ(std::get<int64_t>(header->keys.at("i64").value), -4);
    EXPECT_EQ(header->get_f64("f64"), 0.25);
}

// What ggml reads from a file equals what we read.
void expect_same_as_ggml(const std::string& path) {
    const gguf_init_params params = {/*no_alloc=*/true, /*ctx=*/nullptr};
    const std::unique_ptr<gguf_context, decltype(&gguf_free)> theirs(
        gguf_init_from_file(path.c_str(), params), &gguf_free);
    ASSERT_NE(theirs, nullptr);
    const auto ours = read_gguf_header(path);
    ASSERT_TRUE(ours) << ours.error().detail;
    EXPECT_EQ(ours->version, gguf_get_version(theirs.get()));
    EXPECT_EQ(ours->alignment, gguf_get_alignment(theirs.get()));
    EXPECT_EQ(ours->data_offset, gguf_get_data_offset(theirs.get()));
    ASSERT_EQ(ours->keys.size(), static_cast<size_t>(gguf_get_n_kv(theirs.get())));
    for (int64_t i = 0; i < gguf_get_n_kv(theirs.get()); ++i) {
        const std::string key = gguf_get_key(theirs.get(), i);
        SCOPED_TRACE(key);
        switch (gguf_get_kv_type(theirs.get(), i)) {
            case GGUF_TYPE_STRING:
                EXPECT_EQ(ours->get_text(key), gguf_get_val_str(theirs.get(), i));
                break;
            case GGUF_TYPE_UINT32:
                EXPECT_EQ(ours->get_u64(key), gguf_get_val_u32(theirs.get(), i));
                break;
            case GGUF_TYPE_FLOAT32:
                EXPECT_EQ(ours->get_f64(key), gguf_get_val_f32(theirs.get(), i));
                break;
            case GGUF_TYPE_BOOL:
                EXPECT_EQ(ours->get_bool(key), gguf_get_val_bool(theirs.get(), i));
                break;
            case GGUF_TYPE_ARRAY:
                ASSERT_NE(ours->get_array(key), nullptr);
                EXPECT_EQ(ours->get_array(key)->count, gguf_get_arr_n(theirs.get(), i));
                EXPECT_EQ(static_cast<int>(ours->get_array(key)->element),
                          static_cast<int>(gguf_get_arr_type(theirs.get(), i)));
                break;
            default:
                EXPECT_TRUE(ours->keys.contains(key));
        }
    }
    ASSERT_EQ(ours->tensors.size(), static_cast<size_t>(gguf_get_n_tensors(theirs.get())));
    for (int64_t i = 0; i < gguf_get_n_tensors(theirs.get()); ++i) {
        const GgufTensor& tensor = ours->tensors[static_cast<size_t>(i)];
        EXPECT_EQ(tensor.name, gguf_get_tensor_name(theirs.get(), i));
        EXPECT_EQ(tensor.type, static_cast<uint32_t>(gguf_get_tensor_type(theirs.get(), i)));
        EXPECT_EQ(tensor.offset - ours->data_offset, gguf_get_tensor_offset(theirs.get(), i));
        EXPECT_EQ(tensor.bytes, gguf_get_tensor_size(theirs.get(), i));
    }
}

TEST(Gguf, AgreesWithGgml) {
    expect_same_as_ggml(KVASIR_SOURCE_DIR "/models/skald-q4_k_m.gguf");
    const TempFolder folder;
    expect_same_as_ggml(folder.write("toy.gguf", toy().file()));
    RawGguf aligned = toy();
    aligned.alignment = 256;
    aligned.add("general.alignment", 256u);
    expect_same_as_ggml(folder.write("aligned.gguf", aligned.file()));
}

TEST(Gguf, KnowsTheTypesThatGgmlKnows) {
    for (uint32_t type = 0; type < GGML_TYPE_COUNT; ++type) {
        const auto info = type_info(type);
        const auto ggml = static_cast<ggml_type>(type);
        ASSERT_EQ(info.has_value(), ggml_type_size(ggml) > 0 && ggml_blck_size(ggml) > 0) << type;
        if (!info) continue;
        EXPECT_EQ(info->block, static_cast<uint64_t>(ggml_blck_size(ggml)));
        EXPECT_EQ(info->block_bytes, ggml_type_size(ggml));
    }
}

// --- G1: single-field edits of dimensions and bounds.

struct Edit {
    const char* what;
    const char* field;  // that the message must name
    void (*apply)(RawTensor&);
};

constexpr uint64_t kBig = static_cast<uint64_t>(INT64_MAX);
const Edit kEdits[] = {
    {"ne[0] = 0", "ne[0]", [](RawTensor& t) { t.ne[0] = 0; }},
    {"ne[1] = 0", "ne[1]", [](RawTensor& t) { t.ne[1] = 0; }},
    {"ne[2] = 0", "ne[2]", [](RawTensor& t) { t.ne[2] = 0; }},
    {"ne[3] = 0", "ne[3]", [](RawTensor& t) { t.ne.push_back(0); }},
    {"ne[0] = -1", "ne[0]", [](RawTensor& t) { t.ne[0] = UINT64_MAX; }},
    {"ne[1] = -32", "ne[1]", [](RawTensor& t) { t.ne[1] = static_cast<uint64_t>(-32); }},
    {"ne[2] = 2^63", "ne[2]", [](RawTensor& t) { t.ne[2] = uint64_t{1} << 63; }},
    {"INT64_MAX with a second 2", "ne[1]",
     [](RawTensor& t) {
         t.ne = {kBig, 2};
     }},
    {"2 with a second INT64_MAX", "ne[1]",
     [](RawTensor& t) {
         t.ne = {256, kBig};
     }},
    {"product 2^62", "end outside the file",
     [](RawTensor& t) {
         t.ne = {1u << 31, 1u << 31};
     }},
    {"product 2^63", "ne[1]",
     [](RawTensor& t) {
         t.ne = {uint64_t{1} << 32, 1u << 31};
     }},
    {"product 2^64", "ne[1]",
     [](RawTensor& t) {
         t.ne = {uint64_t{1} << 32, uint64_t{1} << 32};
     }},
    {"product 2^64 in four", "ne[3]",
     [](RawTensor& t) {
         t.ne = {65536, 65536, 65536, 65536};
     }},
    {"bytes wrap, elements do not", "ne",
     [](RawTensor& t) {
         t.type = 0;
         t.ne = {uint64_t{1} << 62};
     }},
    {"n_dims 5", "n_dims", [](RawTensor& t) { t.n_dims = 5; }},
    {"n_dims 9", "n_dims", [](RawTensor& t) { t.n_dims = 9; }},
    {"n_dims 2^32-1", "n_dims", [](RawTensor& t) { t.n_dims = UINT32_MAX; }},
    {"offset 2^64-32", "offset", [](RawTensor& t) { t.offset = UINT64_MAX - 31; }},
    {"offset 2^63", "offset", [](RawTensor& t) { t.offset = uint64_t{1} << 63; }},
    {"offset past the end", "offset", [](RawTensor& t) { t.offset = 1 << 20; }},
    {"offset off the alignment", "offset", [](RawTensor& t) { t.offset = 775; }},
    {"offset into another tensor", "offset", [](RawTensor& t) { t.offset = 0; }},
    {"row not a multiple of the block", "ne[0]", [](RawTensor& t) { t.ne[0] = 255; }},
    {"row shorter than the block", "ne[0]", [](RawTensor& t) { t.ne[0] = 32; }},
    {"one row too many for the file", "end outside the file", [](RawTensor& t) { t.ne[1] += 1; }},
};

TEST(GgufHostile, SingleFieldEditsAreRefusedByTensorAndField) {
    const auto good = toy().file();
    for (const Edit& edit : kEdits) {
        SCOPED_TRACE(edit.what);
        RawGguf file = toy();
        file.tensors[1].name = "victim.weight";
        edit.apply(file.tensors[1]);
        auto bytes = file.header();
        bytes.resize(std::max(bytes.size(), good.size()) + 32);
        bytes.resize(good.size() + 64);
        const auto header = parse(bytes);
        ASSERT_FALSE(header);
        EXPECT_EQ(header.error().code, Errc::kBadInput);
        EXPECT_THAT(header.error().detail, HasSubstr("m.gguf"));
        EXPECT_THAT(header.error().detail, HasSubstr("victim.weight"));
        EXPECT_THAT(header.error().detail, HasSubstr(edit.field));
    }
}

TEST(GgufHostile, OtherHeaderFieldsAreRefusedByName) {
    const auto expect = [](const RawGguf& file, const char* part) {
        const auto header = parse(file.file());
        ASSERT_FALSE(header) << part;
        EXPECT_THAT(header.error().detail, HasSubstr(part));
    };
    for (const uint32_t version : {0u, 1u, 4u, 0x03000000u, UINT32_MAX}) {
        RawGguf file = toy();
        file.version = version;
        expect(file, "version");
    }
    for (const uint32_t alignment : {0u, 3u, 48u, UINT32_MAX}) {
        RawGguf file = toy();
        file.add("general.alignment", alignment);
        expect(file, "general.alignment");
    }
    expect(toy().add("general.alignment", std::string("32")), "general.alignment");
    expect(toy().add("toy.block_count", 5u), "appears twice");
    expect(toy().add("", 5u), "empty");
    expect(toy().add(std::string("a\0b", 3), 5u), "zero byte");
    expect(toy().add(std::string(kGgufNameBytesMax + 1, 'k'), 5u), "name");
    expect(toy().add_key("odd", 13, {}), "value type 13");
    expect(toy().add_tensor("a.weight", {1}), "appears twice");
    expect(toy().add_tensor("", {1}), "empty");
    ByteWriter nested;
    nested.u32(9);
    nested.u64(0);
    expect(toy().add_key("nested", 9, nested), "array of arrays");
}

TEST(GgufHostile, OtherFilesAreRefusedWithAHint) {
    const TempFolder folder;
    const auto refuse = [&](const std::string& text) {
        const auto path = folder.write("x", std::vector<uint8_t>(text.begin(), text.end()));
        const auto header = read_gguf_header(path);
        return header ? std::string("accepted") : header.error().detail;
    };
    EXPECT_THAT(refuse("version https://git-lfs.github.com/spec/v1\n"), HasSubstr("Git LFS"));
    EXPECT_THAT(refuse("ggjt00000000000000000000000"), HasSubstr("before GGUF"));
    EXPECT_THAT(refuse("\x1b[31m"), HasSubstr("?[31"));
    EXPECT_THAT(refuse(""), HasSubstr("magic"));
    const auto missing = read_gguf_header(folder.file("missing"));
    ASSERT_FALSE(missing);
    EXPECT_EQ(missing.error().code, Errc::kEnvironment);
    const auto is_folder = read_gguf_header(folder.file("."));
    ASSERT_FALSE(is_folder);
    EXPECT_THAT(is_folder.error().detail, HasSubstr("folder"));
}

// --- G2: tiny files with huge claims.

using MakeClaim = RawGguf (*)(uint64_t);
struct Claim {
    const char* field;
    MakeClaim make;
};
RawGguf with_array(uint32_t element, uint64_t count) {
    RawGguf out;
    ByteWriter value;
    value.u32(element);
    value.u64(count);
    return out.add_key("k", 9, value);
}
const Claim kClaims[] = {
    {"key count",
     [](uint64_t n) {
         RawGguf f;
         f.key_count = n;
         return f;
     }},
    {"tensor count",
     [](uint64_t n) {
         RawGguf f;
         f.tensor_count = n;
         return f;
     }},
    {"array length", [](uint64_t n) { return with_array(0, n); }},
    {"array length", [](uint64_t n) { return with_array(4, n); }},
    {"array length", [](uint64_t n) { return with_array(8, n); }},
    {"array length", [](uint64_t n) { return with_array(12, n); }},
    {"value",
     [](uint64_t n) {
         RawGguf f;
         ByteWriter length;
         length.u64(n);
         return f.add_key("k", 8, length);
     }},
};

TEST(GgufHostile, HugeClaimsInTinyFilesCostNothing) {
    const TempFolder folder;
    const uint64_t before = resident_bytes();
    const auto start = std::chrono::steady_clock::now();
    for (const uint64_t claim :
         {uint64_t{1} << 20, (uint64_t{1} << 31) - 1, uint64_t{1} << 31, uint64_t{1} << 32,
          uint64_t{1} << 48, uint64_t{1} << 63, UINT64_MAX}) {
        for (const Claim& kind : kClaims) {
            SCOPED_TRACE(std::string(kind.field) + " " + std::to_string(claim));
            auto bytes = kind.make(claim).header();
            bytes.resize(64);
            const auto path = folder.write("tiny.gguf", bytes);
            for (const auto& header : {parse(bytes), read_gguf_header(path)}) {
                ASSERT_FALSE(header);
                EXPECT_THAT(header.error().detail, HasSubstr(kind.field));
                EXPECT_THAT(header.error().detail, HasSubstr(std::to_string(claim)));
            }
            // As the first MiB of a 700 GB file, where 2^20 small elements do fit.
            bytes.resize(1 << 20);
            const auto remote = parse_gguf_header(bytes, 700'000'000'000, "remote");
            ASSERT_TRUE(!remote || claim == uint64_t{1} << 20);
        }
        ByteWriter key_length;
        key_length.text("GGUF");
        key_length.u32(3);
        key_length.u64(0);
        key_length.u64(1);
        key_length.u64(claim);
        auto bytes = key_length.take();
        bytes.resize(64);
        const auto header = parse(bytes);
        ASSERT_FALSE(header);
        EXPECT_THAT(header.error().detail, HasSubstr("key number 0: name claims"));
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    EXPECT_LT(resident_bytes(), before + (32 << 20));
#else
    (void)before;
#endif
}

TEST(GgufHostile, APrefixAsksForMoreBytes) {
    const auto bytes = toy().file();
    const auto header = parse_gguf_header(std::span(bytes).first(100), bytes.size(), "remote");
    ASSERT_FALSE(header);
    EXPECT_EQ(header.error().code, Errc::kLimit);
    EXPECT_THAT(header.error().detail, HasSubstr("needs more bytes"));
    EXPECT_TRUE(
        parse_gguf_header(std::span(bytes).first(toy().header().size()), bytes.size(), "r"));
}

TEST(GgufHostile, EveryTruncationIsAnError) {
    const auto bytes = toy().file();
    for (size_t size = 0; size < toy().header().size(); ++size) {
        const std::vector<uint8_t> cut(bytes.begin(), bytes.begin() + static_cast<long>(size));
        ASSERT_FALSE(parse(cut)) << size;
    }
}

RC_GTEST_PROP(GgufHostile, AnyDamagedByteIsAnErrorOrASaneHeader, ()) {
    auto bytes = toy().file();
    const auto at = *rc::gen::inRange<size_t>(0, toy().header().size());
    bytes[at] = *rc::gen::arbitrary<uint8_t>();
    const auto header = parse(bytes);
    if (!header) return;
    for (const GgufTensor& tensor : header->tensors) {
        RC_ASSERT(tensor.bytes > 0u);
        RC_ASSERT(tensor.offset <= bytes.size() && tensor.bytes <= bytes.size() - tensor.offset);
    }
}

// --- M6: type numbers.

TEST(GgufTypes, RetiredAndUnknownNumbersAreRefusedWithAHint) {
    for (const uint32_t type :
         {4u, 5u, 31u, 32u, 33u, 36u, 37u, 38u, 43u, 99u, 255u, 1u << 31, UINT32_MAX}) {
        SCOPED_TRACE(type);
        EXPECT_FALSE(type_info(type));
        RawGguf file = toy();
        file.tensors[1].type = type;
        const auto header = parse(file.file());
        ASSERT_FALSE(header);
        EXPECT_THAT(header.error().detail, HasSubstr("b.weight"));
        EXPECT_THAT(header.error().detail, HasSubstr("type " + std::to_string(type)));
        EXPECT_THAT(header.error().detail, HasSubstr("another runtime"));
    }
    RawGguf live = toy();
    live.tensors[1].type = 39;  // MXFP4
    const auto header = parse(live.file());
    ASSERT_TRUE(header) << header.error().detail;
    EXPECT_EQ(header->tensors[1].bytes, 256u * 4 * 5 / 32 * 17);
}

// --- G5: offsets past 2 and 4 GiB, in a sparse file.

TEST(GgufLarge, OffsetsPastFourGibibytes) {
    constexpr uint64_t kData = 256;  // bytes per expert tensor: {2, 4, 8} F32
    const uint64_t places[] = {(uint64_t{1} << 31) - 64, (uint64_t{1} << 32) - 64,
                               (uint64_t{1} << 32) + 256, uint64_t{5} << 30};
    RawGguf file;
    file.add("general.architecture", std::string("toy"));
    for (int layer = 0; layer < 2; ++layer) {
        for (const char* role : {"up", "down"}) {
            RawTensor tensor{"blk." + std::to_string(layer) + ".ffn_" + role + "_exps.weight",
                             {2, 2, 16},
                             0,
                             {},
                             {}};
            file.tensors.push_back(tensor);
        }
    }
    const uint64_t data = (file.header().size() + 31) / 32 * 32;
    for (size_t i = 0; i < 4; ++i) file.tensors[i].offset = (places[i] - data) / 32 * 32;
    const TempFolder folder;
    const auto path = folder.write("sparse.gguf", file.header());
    const int fd = open(path.c_str(), O_RDWR);
    ASSERT_EQ(ftruncate(fd, int64_t{6} << 30), 0);
    for (size_t i = 0; i < 4; ++i) {
        const std::vector<uint8_t> bytes(kData, static_cast<uint8_t>(i + 1));
        ASSERT_EQ(
            pwrite(fd, bytes.data(), kData, static_cast<off_t>(data + *file.tensors[i].offset)),
            static_cast<ssize_t>(kData));
    }
    close(fd);
    const auto model = open_model(path);
    ASSERT_TRUE(model) << model.error().detail;
    const auto mapping = Mapping::make(*model);
    ASSERT_TRUE(mapping) << mapping.error().detail;
    for (size_t i = 0; i < 4; ++i) {
        const ExpertBank& bank = model->banks[i / 2];
        const SlabTensor* tensor =
            bank.find(i % 2 == 0 ? SlabRole::kUp : SlabRole::kDown, SlabPart::kWeight);
        ASSERT_NE(tensor, nullptr);
        EXPECT_EQ(tensor->offset, data + *file.tensors[i].offset);
        for (uint32_t expert = 0; expert < bank.experts; ++expert) {
            for (const uint8_t byte : mapping->slab(*tensor, expert)) ASSERT_EQ(byte, i + 1);
        }
        EXPECT_EQ(mapping->tensor(bank, *tensor).size(), kData);
    }
}

TEST(GgufLarge, AVocabularyIsCountedNotKept) {
    RawGguf file = toy();
    ByteWriter tokens;
    tokens.u32(8);
    tokens.u64(248320);
    for (int i = 0; i < 248320; ++i) RawGguf::put_text(tokens, "token number " + std::to_string(i));
    file.add_key("tokenizer.ggml.tokens", 9, tokens);
    const TempFolder folder;
    const auto path = folder.write("vocabulary.gguf", file.file());
    const uint64_t before = resident_bytes();
    const auto header = read_gguf_header(path);
    ASSERT_TRUE(header) << header.error().detail;
    EXPECT_LT(resident_bytes(), before + (2 << 20));
    EXPECT_EQ(header->get_array("tokenizer.ggml.tokens")->count, 248320u);
    EXPECT_EQ(header->tensors.size(), 2u);
}

TEST(GgufLarge, KeptValuesHaveABudget) {
    RawGguf file;
    for (int i = 0; i < 40; ++i) file.add("text" + std::to_string(i), std::string(1 << 20, 'x'));
    const auto header = parse(file.file());
    ASSERT_FALSE(header);
    EXPECT_EQ(header.error().code, Errc::kLimit);
    RawGguf one;
    one.add("text", std::string((1 << 20) + 1, 'x'));
    const auto too_long = parse(one.file());
    ASSERT_FALSE(too_long);
    EXPECT_THAT(too_long.error().detail, HasSubstr("'text'"));
}

}  // namespace
}  // namespace kvasir::moe
