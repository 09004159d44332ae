// The outline: all a node must know of a model to fetch and check parts of it, without the model.
//
// Made by the market from model and manifest, signed, sent to nodes. It has the shards' sizes, the
// small metadata keys that every slice carries, the expert tensors' places, and the SHA-256 of each
// slab. decode_outline() gives back a Model whose banks are those of the original (shard, offset,
// slab_bytes; no other tensors) and its manifest, so that plan_slice() cuts the same slices from
// it, byte for byte, as from the model itself. 49 layers x 256 experts x 3 slabs are 1.2 MB.
//   "kvasir-outline-1\0" | 32 model id | text name | u32 shards: {text file name, u64 bytes}
//   | u32 kept keys: {u32 bytes, gguf record} | text arch | u32 experts_used | u64 n_embd
//   | u32 banks: {u32 layer, u32 bank, u32 experts, u8 is_mtp, u32 tensors: {text name, u8 role,
//   u8 part, u32 type, u64 n_in, u64 n_out, u32 shard, u64 offset, u64 slab_bytes,
//   experts x 32 sha256}}                                  text = u16 bytes + bytes
// Thread: values. Limits: kOutlineBytesMax; every count is checked against the bytes that are
// there.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "moe/manifest.hpp"
#include "moe/model.hpp"

namespace kvasir::moe {

constexpr uint64_t kOutlineBytesMax = uint64_t{256} << 20;

struct Outline {
    Model model;  // banks and shards only; shards[i].path is the file's name, without a folder
    Manifest manifest;
    std::vector<std::vector<uint8_t>>
        kept_keys;  // gguf key/value records, as read_kept_keys() gives
};

// Errors: those of read_kept_keys(); kUsage for a slice or a manifest without a model id.
Result<Outline> make_outline(const Model& model, const Manifest& manifest);
std::vector<uint8_t> encode_outline(const Outline& outline);
// Errors: kBadInput naming the field, kLimit. Slabs lie inside their shard, are block-aligned and
// do not overlap within a shard; names are GGUF-legal; the layout is one that lay_out_banks()
// accepts.
Result<Outline> decode_outline(std::span<const uint8_t> bytes);

// One byte range of a shard and where it goes in the slice; adjacent experts of a tensor are one.
struct SliceRange {
    uint32_t shard = 0;
    uint64_t from = 0;  // in the shard
    uint64_t to = 0;    // in the slice
    uint64_t bytes = 0;
};
struct SliceSlab {
    uint64_t to = 0;  // in the slice
    uint64_t bytes = 0;
    Sha256 digest = {};
    ExpertId expert;      // global id
    uint32_t tensor = 0;  // index into ExpertBank::tensors
};
// A slice before its bytes are there.
struct SlicePlan {
    std::vector<uint8_t> header;     // written at 0
    uint64_t file_bytes = 0;         // padding included; what no range covers is zero
    std::vector<SliceRange> ranges;  // ordered by `to`
    std::vector<SliceSlab> slabs;    // ordered by `to`; ranges are made of whole slabs
    uint64_t bytes_slabs = 0;
};
// The file that write_slice() would write for the same experts. Errors: kUsage (experts it lacks).
Result<SlicePlan> plan_slice(const Outline& outline, const std::vector<Segment>& segments);

}  // namespace kvasir::moe
