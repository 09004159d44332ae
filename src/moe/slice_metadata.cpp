#include "moe/slice_metadata.hpp"

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <string_view>

#include <ggml.h>
#include <gguf.h>

#include "base/bytes.hpp"
#include "base/check.hpp"
#include "base/log.hpp"
#include "crypto/hash.hpp"
#include "moe/file.hpp"
#include "moe/slice.hpp"

namespace kvasir::moe {
namespace {

constexpr std::string_view kHeaderDigestKey = "kvasir.header_sha256";
constexpr size_t kHexDigits = 64;

struct FreeGguf {
    void operator()(gguf_context* context) const { gguf_free(context); }
};
struct FreeGgml {
    void operator()(ggml_context* context) const { ggml_free(context); }
};
using GgufPtr = std::unique_ptr<gguf_context, FreeGguf>;
using GgmlPtr = std::unique_ptr<ggml_context, FreeGgml>;

// Text for a C interface: nullopt if it holds a zero byte.
std::optional<std::string> c_text(std::string_view text) {
    if (text.find('\0') != std::string_view::npos) return std::nullopt;
    return std::string(text);
}

void set_array(gguf_context* out, const std::string& key, ByteReader& in) {
    const auto type = static_cast<gguf_type>(in.u32());
    const uint64_t count = in.u64();
    if (type == GGUF_TYPE_STRING) {
        std::vector<std::string> texts;
        while (texts.size() < count && !in.failed()) {
            const auto text = c_text(in.text(in.u64()));
            if (!text) return;
            texts.push_back(*text);
        }
        std::vector<const char*> pointers;
        for (const std::string& text : texts) pointers.push_back(text.c_str());
        if (in.finished()) gguf_set_arr_str(out, key.c_str(), pointers.data(), pointers.size());
        return;
    }
    // Nested arrays and types of a later version are left out: nothing in a slice needs them.
    const size_t element_bytes =
        type == GGUF_TYPE_ARRAY || type >= GGUF_TYPE_COUNT
            ? 0
            : std::array<size_t, 13>{
                  1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8}[static_cast<size_t>(type)];
    if (element_bytes == 0 || count > in.remaining() / element_bytes) return;
    const auto data = in.bytes(count * element_bytes);
    if (in.finished()) gguf_set_arr_data(out, key.c_str(), type, data.data(), count);
}

// Copies one key/value record (gguf layout: u64 length, key, u32 type, value).
void set_kept_key(gguf_context* out, std::span<const uint8_t> record) {
    ByteReader in(record);
    const auto name = c_text(in.text(in.u64()));
    const auto type = static_cast<gguf_type>(in.u32());
    if (!name || in.failed()) return;
    const char* key = name->c_str();
    switch (type) {
        case GGUF_TYPE_UINT8:
            gguf_set_val_u8(out, key, in.u8());
            break;
        case GGUF_TYPE_INT8:
            gguf_set_val_i8(out, key, static_cast<int8_t>(in.u8()));
            break;
        case GGUF_TYPE_UINT16:
            gguf_set_val_u16(out, key, in.u16());
            break;
        case GGUF_TYPE_INT16:
            gguf_set_val_i16(out, key, static_cast<int16_t>(in.u16()));
            break;
        case GGUF_TYPE_UINT32:
            gguf_set_val_u32(out, key, in.u32());
            break;
        case GGUF_TYPE_INT32:
            gguf_set_val_i32(out, key, in.i32());
            break;
        case GGUF_TYPE_FLOAT32:
            gguf_set_val_f32(out, key, in.f32());
            break;
        case GGUF_TYPE_UINT64:
            gguf_set_val_u64(out, key, in.u64());
            break;
        case GGUF_TYPE_INT64:
            gguf_set_val_i64(out, key, static_cast<int64_t>(in.u64()));
            break;
        case GGUF_TYPE_FLOAT64:
            gguf_set_val_f64(out, key, std::bit_cast<double>(in.u64()));
            break;
        case GGUF_TYPE_BOOL:
            gguf_set_val_bool(out, key, in.u8() != 0);
            break;
        case GGUF_TYPE_STRING:
            if (const auto text = c_text(in.text(in.u64()))) {
                gguf_set_val_str(out, key, text->c_str());
            }
            break;
        case GGUF_TYPE_ARRAY:
            set_array(out, *name, in);
            break;
        default:
            break;
    }
}

void set_own_keys(gguf_context* out, const SliceSpec& spec) {
    gguf_set_val_u32(out, "kvasir.version", kSliceVersion);
    if (!spec.model_id.empty()) gguf_set_val_str(out, "kvasir.model_id", spec.model_id.c_str());
    gguf_set_arr_data(out, "kvasir.banks", GGUF_TYPE_UINT32, spec.banks.data(), spec.banks.size());
    gguf_set_arr_data(out, "kvasir.expert_ids", GGUF_TYPE_UINT32, spec.expert_ids.data(),
                      spec.expert_ids.size());
    std::vector<std::string> texts;
    std::vector<const char*> pointers;
    for (const Sha256& digest : spec.digests) texts.push_back(to_hex(digest));
    for (const std::string& text : texts) pointers.push_back(text.c_str());
    gguf_set_arr_str(out, "kvasir.slab_sha256", pointers.data(), pointers.size());
    // Filled in by serialise(), once all the other bytes are there.
    gguf_set_val_str(out, std::string(kHeaderDigestKey).c_str(),
                     std::string(kHexDigits, '0').c_str());
}

Status add_tensors(gguf_context* out, ggml_context* shapes, const SliceSpec& spec) {
    for (const SliceTensorSpec& tensor : spec.tensors) {
        if (tensor.name.size() >= GGML_MAX_NAME) {
            return fail(Errc::kUnsupported,
                        "tensor '" + printable(tensor.name) + "': its name is longer than the " +
                            std::to_string(GGML_MAX_NAME - 1) + " bytes that GGUF readers take");
        }
        int64_t ne[4];
        for (int i = 0; i < 4; ++i) ne[i] = static_cast<int64_t>(tensor.ne[i]);
        ggml_tensor* shape =
            ggml_new_tensor(shapes, static_cast<ggml_type>(tensor.type), GGML_MAX_DIMS, ne);
        ggml_set_name(shape, tensor.name.c_str());
        if (ggml_nbytes(shape) != tensor.bytes) {
            return fail(Errc::kBadInput, "tensor '" + printable(tensor.name) +
                                             "': " + std::to_string(tensor.bytes) +
                                             " bytes do not fit its type and shape");
        }
        gguf_add_tensor(out, shape);
    }
    return {};
}

Result<SliceMetadata> serialise(const gguf_context* out, const SliceSpec& spec) {
    SliceMetadata metadata;
    metadata.bytes.resize(gguf_get_meta_size(out));
    gguf_get_meta_data(out, metadata.bytes.data());
    metadata.file_bytes = metadata.bytes.size();
    for (size_t i = 0; i < spec.tensors.size(); ++i) {
        metadata.offsets.push_back(metadata.bytes.size() +
                                   gguf_get_tensor_offset(out, static_cast<int64_t>(i)));
        const uint64_t end = metadata.offsets.back() + spec.tensors[i].bytes;
        metadata.file_bytes = (end + kSliceAlignment - 1) / kSliceAlignment * kSliceAlignment;
    }
    const auto header =
        parse_gguf_header(metadata.bytes, metadata.file_bytes, "the new slice's own header");
    if (!header) return tl::unexpected(header.error());
    const auto key = header->keys.find(kHeaderDigestKey);
    KVASIR_CHECK(key != header->keys.end());
    const uint64_t value_offset = key->second.offset + key->second.bytes - kHexDigits;
    const std::string digest = to_hex(header_digest(metadata.bytes, value_offset));
    std::copy(digest.begin(), digest.end(),
              metadata.bytes.begin() + static_cast<ptrdiff_t>(value_offset));
    return metadata;
}

}  // namespace

bool is_kept_key(std::string_view key, uint64_t record_bytes) {
    for (std::string_view prefix : {"tokenizer.", "split.", "kvasir."}) {
        if (key.starts_with(prefix)) return false;
    }
    return key != "general.alignment" && record_bytes <= kKeptKeyBytesMax;
}

Result<std::vector<std::vector<uint8_t>>> read_kept_keys(const Model& model) {
    std::vector<std::vector<uint8_t>> records;
    const GgufHeader& header = model.shards.front();
    const auto fd = open_for_reading(header.path);
    if (!fd) return tl::unexpected(fd.error());
    for (const auto& [key, value] : header.keys) {
        if (!is_kept_key(key, value.bytes)) continue;
        std::vector<uint8_t> record(static_cast<size_t>(value.bytes));
        auto status = read_exactly(fd->get(), header.path, value.offset, record);
        if (!status) return tl::unexpected(std::move(status.error()));
        records.push_back(std::move(record));
    }
    return records;
}

Result<SliceMetadata> make_slice_metadata(const SliceSpec& spec) {
    try {
        const GgufPtr out(gguf_init_empty());
        const GgmlPtr shapes(
            ggml_init({.mem_size = (spec.tensors.size() + 1) * ggml_tensor_overhead(),
                       .mem_buffer = nullptr,
                       .no_alloc = true}));
        if (!out || !shapes) return fail(Errc::kEnvironment, "not enough memory for the header");
        for (const auto& record : spec.kept_keys) set_kept_key(out.get(), record);
        set_own_keys(out.get(), spec);
        if (auto status = add_tensors(out.get(), shapes.get(), spec); !status) {
            return tl::unexpected(std::move(status.error()));
        }
        return serialise(out.get(), spec);
    } catch (const std::exception& error) {  // ggml's GGUF writer is C++ inside
        return fail(Errc::kEnvironment,
                    std::string("making the slice's header failed: ") + error.what());
    }
}

Sha256 header_digest(std::span<const uint8_t> header, uint64_t value_offset) {
    KVASIR_CHECK(value_offset <= header.size() && header.size() - value_offset >= kHexDigits);
    const auto begin = static_cast<size_t>(value_offset);
    const std::vector<uint8_t> blank(kHexDigits, '0');
    crypto::Hasher hasher;
    hasher.update(header.first(begin));
    hasher.update(blank);
    hasher.update(header.subspan(begin + kHexDigits));
    return hasher.finish();
}

}  // namespace kvasir::moe
