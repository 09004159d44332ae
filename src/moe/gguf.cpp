#include "moe/gguf.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <numeric>

#include "base/bytes.hpp"
#include "base/log.hpp"
#include "ggml.h"
#include "moe/file.hpp"
#include "moe/gguf_fields.hpp"

namespace kvasir::moe {
namespace {

constexpr uint64_t kKeyBytesMin = 8 + 1 + 4 + 1;         // length, name, type, smallest value
constexpr uint64_t kTensorBytesMin = 8 + 1 + 4 + 4 + 8;  // length, name, dims, type, offset

// Bytes of one element; 0 for strings, arrays and unknown types.
uint64_t scalar_bytes(uint32_t type) {
    switch (static_cast<GgufValueType>(type)) {
        case GgufValueType::kU8:
        case GgufValueType::kI8:
        case GgufValueType::kBool:
            return 1;
        case GgufValueType::kU16:
        case GgufValueType::kI16:
            return 2;
        case GgufValueType::kU32:
        case GgufValueType::kI32:
        case GgufValueType::kF32:
            return 4;
        case GgufValueType::kU64:
        case GgufValueType::kI64:
        case GgufValueType::kF64:
            return 8;
        default:
            return 0;
    }
}

GgufValue decode_scalar(GgufValueType type, std::span<const uint8_t> data) {
    ByteReader reader(data);
    switch (type) {
        case GgufValueType::kU8:
            return uint64_t{reader.u8()};
        case GgufValueType::kI8:
            return int64_t{static_cast<int8_t>(reader.u8())};
        case GgufValueType::kU16:
            return uint64_t{reader.u16()};
        case GgufValueType::kI16:
            return int64_t{static_cast<int16_t>(reader.u16())};
        case GgufValueType::kU32:
            return uint64_t{reader.u32()};
        case GgufValueType::kI32:
            return int64_t{reader.i32()};
        case GgufValueType::kF32:
            return double{reader.f32()};
        case GgufValueType::kBool:
            return reader.u8() != 0;
        case GgufValueType::kU64:
            return reader.u64();
        case GgufValueType::kI64:
            return static_cast<int64_t>(reader.u64());
        default:
            return std::bit_cast<double>(reader.u64());
    }
}

class HeaderParser {
public:
    HeaderParser(Source& source, uint64_t file_bytes, const std::string& path)
        : reader_(source, file_bytes, path) {
        header_.path = path;
        header_.file_bytes = file_bytes;
    }

    Result<GgufHeader> run() {
        read_magic();
        const uint64_t tensor_count = reader_.u64("tensor count");
        const uint64_t key_count = reader_.u64("key count");
        check_count(key_count, kGgufKeysMax, kKeyBytesMin, "key count");
        check_count(tensor_count, kGgufTensorsMax, kTensorBytesMin, "tensor count");
        for (uint64_t i = 0; i < key_count && reader_.ok(); ++i) read_key(i);
        read_alignment();
        for (uint64_t i = 0; i < tensor_count && reader_.ok(); ++i) read_tensor(i);
        if (reader_.ok()) place_tensors();
        if (reader_.ok()) check_names();
        if (reader_.ok()) check_overlap();
        if (!reader_.ok()) return tl::unexpected<Error>(reader_.error());
        return std::move(header_);
    }

private:
    void read_magic() {
        const auto magic = reader_.bytes(4, "magic");
        if (!reader_.ok()) return;
        const std::string_view text(reinterpret_cast<const char*>(magic.data()), magic.size());
        if (text != "GGUF") {
            std::string hint = "give a .gguf file";
            if (text == "vers")
                hint = "this is a Git LFS pointer: fetch the real file with git lfs pull";
            if (text == "ggml" || text == "ggjt" || text == "lmgg" || text == "tjgg") {
                hint = "this is a model from before GGUF: convert it again";
            }
            reader_.refuse(Errc::kBadInput,
                           "not a GGUF file (magic '" + printable(text) + "'); " + hint);
        }
        header_.version = reader_.u32("version");
        if (!reader_.ok() || header_.version == 2 || header_.version == 3) return;
        const bool swapped = (header_.version & 0xffff) == 0;
        reader_.refuse(Errc::kBadInput,
                       "GGUF version " + std::to_string(header_.version) +
                           (swapped ? " (big-endian file?)" : "") +
                           " is not supported; 2 and 3 are: convert the model again");
    }

    void check_count(uint64_t count, uint64_t count_max, uint64_t bytes_each, const char* field) {
        if (!reader_.ok()) return;
        if (count > reader_.remaining() / bytes_each) {
            reader_.refuse(Errc::kBadInput, std::string(field) + " " + std::to_string(count) +
                                                " cannot fit in the " +
                                                std::to_string(reader_.remaining()) +
                                                " bytes that remain (truncated or damaged)");
        } else if (count > count_max) {
            reader_.refuse(Errc::kLimit, std::string(field) + " " + std::to_string(count) +
                                             " is above the supported " +
                                             std::to_string(count_max));
        }
    }

    std::string read_name(const char* kind, uint64_t index) {
        reader_.set_record(std::string(kind) + " number " + std::to_string(index));
        std::string name = reader_.text(kGgufNameBytesMax, "name");
        if (!reader_.ok()) return name;
        if (name.empty()) reader_.refuse(Errc::kBadInput, "name is empty");
        if (name.find('\0') != std::string::npos) {
            reader_.refuse(Errc::kBadInput, "name '" + printable(name) + "' holds a zero byte");
        }
        reader_.set_record(std::string(kind) + " '" + printable(name) + "'");
        return name;
    }

    void keep(uint64_t count) {
        kept_bytes_ += count;
        if (kept_bytes_ > kGgufKeptBytesMax) {
            reader_.refuse(Errc::kLimit, "the metadata holds more than " +
                                             std::to_string(kGgufKeptBytesMax) +
                                             " bytes of strings and arrays outside the vocabulary");
        }
    }

    void read_key(uint64_t index) {
        GgufKey key;
        key.offset = reader_.position();
        const std::string name = read_name("key", index);
        const uint32_t type = reader_.u32("value type");
        if (!reader_.ok()) return;
        if (const uint64_t width = scalar_bytes(type); width > 0) {
            key.value =
                decode_scalar(static_cast<GgufValueType>(type), reader_.bytes(width, "value"));
        } else if (type == static_cast<uint32_t>(GgufValueType::kString)) {
            std::string text = reader_.text(kGgufTextBytesMax, "value");
            keep(text.size());
            key.value = std::move(text);
        } else if (type == static_cast<uint32_t>(GgufValueType::kArray)) {
            key.value = read_array(name);
        } else {
            reader_.refuse(Errc::kBadInput,
                           "value type " + std::to_string(type) + " does not exist");
        }
        if (!reader_.ok()) return;
        key.bytes = reader_.position() - key.offset;
        if (!header_.keys.emplace(name, std::move(key)).second) {
            reader_.refuse(Errc::kBadInput, "the key appears twice");
        }
    }

    GgufArray read_array(std::string_view name) {
        GgufArray array;
        const uint32_t element = reader_.u32("element type");
        array.count = reader_.u64("array length");
        if (!reader_.ok()) return array;
        array.element = static_cast<GgufValueType>(element);
        const bool is_text = array.element == GgufValueType::kString;
        const uint64_t width =
            is_text ? 8 : scalar_bytes(element);  // 8: the length of an empty one
        if (width == 0) {
            const bool nested = array.element == GgufValueType::kArray;
            reader_.refuse(Errc::kBadInput,
                           nested ? "an array of arrays is not supported by ggml"
                                  : "element type " + std::to_string(element) + " does not exist");
        } else if (array.count > reader_.remaining() / width) {
            reader_.refuse(Errc::kBadInput, "array length " + std::to_string(array.count) +
                                                " cannot fit in the " +
                                                std::to_string(reader_.remaining()) +
                                                " bytes that remain (truncated or damaged)");
        }
        const uint64_t kept = name.starts_with("kvasir.") ? kGgufOwnArrayKept : kGgufArrayKept;
        if (is_text) {
            for (uint64_t i = 0; i < array.count && reader_.ok(); ++i) {
                reader_.skip(reader_.u64("string length"), "string");
            }
        } else if (array.count <= kept) {
            keep(array.count * 8);
            for (uint64_t i = 0; i < array.count && reader_.ok(); ++i) read_element(array, width);
        } else {
            reader_.skip(array.count * width, "array");  // count <= remaining / width: no overflow
        }
        return array;
    }

    void read_element(GgufArray& array, uint64_t width) {
        const auto data = reader_.bytes(width, "array element");
        if (!reader_.ok()) return;
        const GgufValue value = decode_scalar(array.element, data);
        if (const auto* real = std::get_if<double>(&value)) {
            array.reals.push_back(*real);
        } else if (const auto* natural = std::get_if<uint64_t>(&value)) {
            if (*natural > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
                reader_.refuse(Errc::kLimit, "array element " + std::to_string(*natural) +
                                                 " does not fit in 63 bits");
                return;
            }
            array.integers.push_back(static_cast<int64_t>(*natural));
        } else if (const auto* integer = std::get_if<int64_t>(&value)) {
            array.integers.push_back(*integer);
        } else {
            array.integers.push_back(std::get<bool>(value) ? 1 : 0);
        }
    }

    void read_alignment() {
        if (!reader_.ok()) return;
        reader_.set_record("key 'general.alignment'");
        if (!header_.keys.contains("general.alignment")) return;
        const auto value = header_.get_u64("general.alignment");
        if (!value || !std::has_single_bit(*value) || *value > (uint64_t{1} << 31)) {
            reader_.refuse(Errc::kBadInput, "the alignment must be a power of two (32 is usual)");
            return;
        }
        header_.alignment = *value;
    }

    void read_tensor(uint64_t index) {
        GgufTensor tensor;
        tensor.name = read_name("tensor", index);
        const uint32_t dims = reader_.u32("n_dims");
        if (!reader_.ok()) return;
        if (dims > kGgufDimsMax) {
            reader_.refuse(Errc::kBadInput, "n_dims " + std::to_string(dims) + " is above " +
                                                std::to_string(kGgufDimsMax));
            return;
        }
        tensor.dims = std::max(dims, uint32_t{1});
        for (uint32_t i = 0; i < dims; ++i) tensor.ne[i] = reader_.u64("ne");
        tensor.type = reader_.u32("type");
        tensor.offset = reader_.u64("offset");
        if (reader_.ok()) measure(tensor);
        if (reader_.ok()) header_.tensors.push_back(std::move(tensor));
    }

    // Fills `bytes`; every product is checked before it is made.
    void measure(GgufTensor& tensor) {
        constexpr auto kElementsMax = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
        uint64_t elements = 1;
        for (uint32_t i = 0; i < tensor.dims; ++i) {
            const std::string field =
                "ne[" + std::to_string(i) + "] = " + std::to_string(tensor.ne[i]);
            if (tensor.ne[i] == 0 || tensor.ne[i] > kElementsMax) {
                reader_.refuse(Errc::kBadInput, field + " is not a size (1 .. 2^63-1)");
                return;
            }
            if (tensor.ne[i] > kElementsMax / elements) {
                reader_.refuse(Errc::kBadInput, field + " makes the number of elements overflow");
                return;
            }
            elements *= tensor.ne[i];
        }
        const auto info = type_info(tensor.type);
        if (!info) {
            reader_.refuse(Errc::kBadInput,
                           "type " + std::to_string(tensor.type) +
                               " is unknown, retired or has no size in this ggml; if the file is a "
                               "blob of another runtime, its type numbers may mean other things: "
                               "convert the model with llama.cpp");
        } else if (tensor.ne[0] % info->block != 0) {
            reader_.refuse(Errc::kBadInput, "ne[0] = " + std::to_string(tensor.ne[0]) +
                                                " is not a multiple of the " +
                                                std::to_string(info->block) + " elements of a " +
                                                std::string(info->name) + " block");
        } else if (elements / info->block > kElementsMax / info->block_bytes) {
            reader_.refuse(Errc::kBadInput, "ne: the size in bytes overflows");
        } else {
            tensor.bytes = elements / info->block * info->block_bytes;
        }
    }

    // Relative offsets become absolute ones, inside the file.
    void place_tensors() {
        const uint64_t mask = header_.alignment - 1;
        header_.data_offset = (reader_.position() + mask) & ~mask;  // position <= 2^30
        for (GgufTensor& tensor : header_.tensors) {
            reader_.set_record("tensor '" + printable(tensor.name) + "'");
            const std::string field = "offset " + std::to_string(tensor.offset);
            const uint64_t data_bytes =
                header_.file_bytes - std::min(header_.data_offset, header_.file_bytes);
            if ((tensor.offset & mask) != 0) {
                reader_.refuse(Errc::kBadInput, field + " is not a multiple of the alignment " +
                                                    std::to_string(header_.alignment));
            } else if (tensor.offset > data_bytes || tensor.bytes > data_bytes - tensor.offset) {
                reader_.refuse(Errc::kBadInput, field + " and size " +
                                                    std::to_string(tensor.bytes) +
                                                    " end outside the file, which has " +
                                                    std::to_string(data_bytes) +
                                                    " bytes of data (truncated? fetch it again)");
            }
            if (!reader_.ok()) return;
            tensor.offset += header_.data_offset;
        }
    }

    std::vector<uint32_t> sorted_tensors(auto less) const {
        std::vector<uint32_t> order(header_.tensors.size());
        std::iota(order.begin(), order.end(), uint32_t{0});
        std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
            return less(header_.tensors[a], header_.tensors[b]);
        });
        return order;
    }

    void check_names() {
        const auto order = sorted_tensors(
            [](const GgufTensor& a, const GgufTensor& b) { return a.name < b.name; });
        for (size_t i = 1; i < order.size(); ++i) {
            const GgufTensor& tensor = header_.tensors[order[i]];
            if (tensor.name != header_.tensors[order[i - 1]].name) continue;
            reader_.set_record("tensor '" + printable(tensor.name) + "'");
            reader_.refuse(Errc::kBadInput, "the name appears twice in the tensor table");
        }
    }

    void check_overlap() {
        const auto order = sorted_tensors(
            [](const GgufTensor& a, const GgufTensor& b) { return a.offset < b.offset; });
        for (size_t i = 1; i < order.size(); ++i) {
            const GgufTensor& before = header_.tensors[order[i - 1]];
            const GgufTensor& tensor = header_.tensors[order[i]];
            if (tensor.offset >= before.offset + before.bytes) continue;
            reader_.set_record("tensor '" + printable(tensor.name) + "'");
            reader_.refuse(Errc::kBadInput, "offset: its data overlaps that of tensor '" +
                                                printable(before.name) + "'");
        }
    }

    FieldReader reader_;
    GgufHeader header_;
    uint64_t kept_bytes_ = 0;
};

}  // namespace

std::optional<TypeInfo> type_info(uint32_t ggml_type) {
    if (ggml_type >= static_cast<uint32_t>(GGML_TYPE_COUNT)) return std::nullopt;
    const auto type = static_cast<enum ggml_type>(ggml_type);
    const ggml_type_traits* traits = ggml_get_type_traits(type);
    if (traits == nullptr || traits->type_name == nullptr || traits->blck_size <= 0 ||
        traits->type_size == 0) {
        return std::nullopt;
    }
    return TypeInfo{traits->type_name, static_cast<uint64_t>(traits->blck_size),
                    static_cast<uint64_t>(traits->type_size)};
}

std::optional<uint64_t> GgufHeader::get_u64(std::string_view key) const {
    const auto found = keys.find(key);
    if (found == keys.end()) return std::nullopt;
    if (const auto* natural = std::get_if<uint64_t>(&found->second.value)) return *natural;
    const auto* integer = std::get_if<int64_t>(&found->second.value);
    if (integer == nullptr || *integer < 0) return std::nullopt;
    return static_cast<uint64_t>(*integer);
}

std::optional<double> GgufHeader::get_f64(std::string_view key) const {
    const auto found = keys.find(key);
    if (found == keys.end()) return std::nullopt;
    const auto* real = std::get_if<double>(&found->second.value);
    return real == nullptr ? std::nullopt : std::optional<double>(*real);
}

std::optional<std::string_view> GgufHeader::get_text(std::string_view key) const {
    const auto found = keys.find(key);
    if (found == keys.end()) return std::nullopt;
    const auto* text = std::get_if<std::string>(&found->second.value);
    return text == nullptr ? std::nullopt : std::optional<std::string_view>(*text);
}

std::optional<bool> GgufHeader::get_bool(std::string_view key) const {
    const auto found = keys.find(key);
    if (found == keys.end()) return std::nullopt;
    const auto* flag = std::get_if<bool>(&found->second.value);
    return flag == nullptr ? std::nullopt : std::optional<bool>(*flag);
}

const GgufArray* GgufHeader::get_array(std::string_view key) const {
    const auto found = keys.find(key);
    return found == keys.end() ? nullptr : std::get_if<GgufArray>(&found->second.value);
}

Result<GgufHeader> read_gguf_header(const std::string& path) {
    const std::string shown = printable(path, 400);
    // O_NONBLOCK: opening a FIFO must not hang before it is refused.
    const Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (!fd.is_open()) {
        const int code = errno;
        return fail(Errc::kEnvironment, shown + ": cannot open: " + strerror(code) +
                                            (code == ENOENT   ? "; check the path"
                                             : code == EACCES ? "; check its owner and mode"
                                                              : ""));
    }
    struct stat info = {};
    if (fstat(fd.get(), &info) != 0) {
        return fail(Errc::kEnvironment, shown + ": cannot stat: " + strerror(errno));
    }
    if (S_ISDIR(info.st_mode)) {
        return fail(Errc::kBadInput, shown + ": is a folder; name one .gguf file in it");
    }
    if (!S_ISREG(info.st_mode)) return fail(Errc::kBadInput, shown + ": is not a regular file");
    const auto file_bytes = static_cast<uint64_t>(info.st_size);
    FileSource source(fd.get(), file_bytes);
    return HeaderParser(source, file_bytes, path).run();
}

Result<GgufHeader> parse_gguf_header(std::span<const uint8_t> prefix, uint64_t file_bytes,
                                     const std::string& path) {
    MemorySource source(prefix.first(std::min<uint64_t>(prefix.size(), file_bytes)));
    return HeaderParser(source, file_bytes, path).run();
}

}  // namespace kvasir::moe
