// The bounded GGUF reader: headers of untrusted files, nothing allocated from a claimed length.
//
// Used by model.cpp, the slice loader and the fuzzers. Reads the header (versions 2 and 3) of one
// shard, in chunks of 256 KiB; tensor data is never touched. Every count, length, product and sum
// is checked in 64 bits against what the file can still hold *before* use; each error names the
// file and the key or tensor. Thread: values. Owns: the parsed header. Limits: see the constants; a
// header beyond them is refused with kLimit.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/result.hpp"

namespace kvasir::moe {

constexpr uint64_t kGgufHeaderBytesMax = uint64_t{1} << 30;  // 1 GiB of key/values and tensor table
constexpr uint64_t kGgufTensorsMax = 1 << 20;
constexpr uint64_t kGgufKeysMax = 1 << 16;
constexpr uint64_t kGgufNameBytesMax = 512;  // of a key or a tensor name
constexpr uint32_t kGgufDimsMax = 4;
constexpr uint64_t kGgufTextBytesMax = 1 << 20;   // of one string value that is kept
constexpr uint64_t kGgufKeptBytesMax = 32 << 20;  // of all string and array values that are kept

// ggml's numbering of value types in a GGUF file.
enum class GgufValueType : uint32_t {
    kU8 = 0,
    kI8 = 1,
    kU16 = 2,
    kI16 = 3,
    kU32 = 4,
    kI32 = 5,
    kF32 = 6,
    kBool = 7,
    kString = 8,
    kArray = 9,
    kU64 = 10,
    kI64 = 11,
    kF64 = 12,
};

// An array value: scalars are kept when there are at most kGgufArrayKept of them (in keys of our
// own, "kvasir.*", kGgufOwnArrayKept), string arrays (vocabularies) are skipped; `count` is always
// the real count. Arrays of arrays are refused, as ggml does.
constexpr uint64_t kGgufArrayKept = 4096;
constexpr uint64_t kGgufOwnArrayKept = 1 << 20;
struct GgufArray {
    GgufValueType element = GgufValueType::kU8;
    uint64_t count = 0;
    std::vector<int64_t> integers;  // integer and bool elements, if kept (u64 ones that fit)
    std::vector<double> reals;      // float elements, if kept
};
using GgufValue = std::variant<int64_t, uint64_t, double, bool, std::string, GgufArray>;

struct GgufKey {
    GgufValue value;
    uint64_t offset = 0;  // of the whole key/value record in the file, for byte-exact copies
    uint64_t bytes = 0;
};

struct GgufTensor {
    std::string name;
    uint32_t type = 0;  // ggml type number, known to be a live type
    uint32_t dims = 0;  // 1..4 (a scalar, 0 dimensions, counts as 1)
    std::array<uint64_t, 4> ne = {1, 1, 1,
                                  1};  // elements per dimension, ne[0] contiguous; all >= 1
    uint64_t offset = 0;               // absolute, in bytes from the start of the shard file
    uint64_t bytes = 0;                // exact, offset + bytes <= file size
};

// Block size (elements) and bytes per block of a ggml type; nullopt for unknown, retired or
// zero-sized type numbers. Wraps ggml's own table.
struct TypeInfo {
    std::string_view name;
    uint64_t block = 1;
    uint64_t block_bytes = 0;
};
std::optional<TypeInfo> type_info(uint32_t ggml_type);

struct GgufHeader {
    std::string path;
    uint32_t version = 3;
    uint64_t file_bytes = 0;
    uint64_t alignment = 32;
    uint64_t data_offset = 0;  // where tensor data begins
    std::map<std::string, GgufKey, std::less<>> keys;
    std::vector<GgufTensor> tensors;  // in file order; names are unique, data does not overlap

    // Typed look-ups; nullopt when absent or of another type. Integers of any width convert if they
    // fit.
    std::optional<uint64_t> get_u64(std::string_view key) const;
    std::optional<double> get_f64(std::string_view key) const;
    std::optional<std::string_view> get_text(std::string_view key) const;
    std::optional<bool> get_bool(std::string_view key) const;
    const GgufArray* get_array(std::string_view key) const;
};

// Reads the header of the file at `path`. Errors: kEnvironment (cannot open/read), kBadInput
// (malformed: names key or tensor and field), kLimit.
Result<GgufHeader> read_gguf_header(const std::string& path);

// The same over bytes in memory, where `file_bytes` is the size of the whole file that `prefix`
// starts (for remote files and the fuzzer). kLimit with "needs more bytes" in the detail when the
// header is longer than the prefix.
Result<GgufHeader> parse_gguf_header(std::span<const uint8_t> prefix, uint64_t file_bytes,
                                     const std::string& path);

}  // namespace kvasir::moe
