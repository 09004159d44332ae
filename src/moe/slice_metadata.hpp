// The bytes of a slice before its tensor data, made by ggml's own GGUF writer.
//
// Used by slice.cpp (writing) and verify.cpp (the header digest). Thread: pure functions apart from
// reading the source model's header again. Owns: nothing.
// Limits: keys of the model longer than kKeptKeyBytesMax are left out.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "moe/model.hpp"

namespace kvasir::moe {

constexpr uint64_t kKeptKeyBytesMax = 4096;

struct SliceTensorSpec {
    std::string name;
    uint32_t type = 0;
    std::array<uint64_t, 4> ne = {1, 1, 1, 1};
    uint64_t bytes = 0;
};

struct SliceSpec {
    std::vector<std::vector<uint8_t>> kept_keys;  // key/value records as they stand in the model
    std::vector<SliceTensorSpec> tensors;         // in file order
    std::vector<uint32_t> banks;                  // layer, bank, experts
    std::vector<uint32_t> expert_ids;
    std::vector<Sha256> digests;  // as kvasir.slab_sha256
    std::string model_id;         // hex, empty: not known
};

struct SliceMetadata {
    std::vector<uint8_t> bytes;     // up to the tensor data, padded
    std::vector<uint64_t> offsets;  // absolute, per tensor
    uint64_t file_bytes = 0;        // of the whole slice, the last tensor's padding included
};

// Whether a slice keeps the key/value record of `record_bytes` bytes under this name.
bool is_kept_key(std::string_view key, uint64_t record_bytes);

// The key/value records of the model that a slice keeps: scalars, strings and flat arrays of at
// most kKeptKeyBytesMax bytes, without tokenizer.*, split.*, kvasir.* and general.alignment,
// sorted. Errors: kEnvironment, kIo, kBadInput.
Result<std::vector<std::vector<uint8_t>>> read_kept_keys(const Model& model);

// Errors: kUnsupported (a tensor name too long for ggml), kBadInput (sizes that do not fit the
// type).
Result<SliceMetadata> make_slice_metadata(const SliceSpec& spec);

// SHA-256 of a header with the 64 digits of its kvasir.header_sha256 value, which begin at
// `value_offset`, replaced by '0'. Precondition (KVASIR_CHECK): they lie inside.
Sha256 header_digest(std::span<const uint8_t> header, uint64_t value_offset);

}  // namespace kvasir::moe
