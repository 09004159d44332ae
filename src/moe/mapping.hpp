// Read-only memory mapping of a model's or slice's shards: where slab bytes live in memory.
//
// Used by the engine (weights without a copy), manifest and verify. Pages are touched on demand, so
// a model larger than RAM can be mapped. Thread: immutable after make(); reads from any thread.
// Owns: the mappings; spans handed out are valid while it lives. A file that shrinks under a
// mapping raises SIGBUS, so sizes are re-checked against fstat when mapping.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.hpp"
#include "moe/model.hpp"

namespace kvasir::moe {

class Mapping {
public:
    // Errors: kEnvironment (open/mmap), kBadInput (file shorter than its header says).
    static Result<Mapping> make(const Model& model);
    Mapping(Mapping&&) noexcept;
    Mapping& operator=(Mapping&&) noexcept;
    ~Mapping();

    std::span<const uint8_t> shard(uint32_t index) const { return shards_[index]; }
    // All `experts` slabs of a stacked tensor, contiguous. Precondition: tensor of the same model.
    std::span<const uint8_t> tensor(const ExpertBank& bank, const SlabTensor& tensor) const;
    std::span<const uint8_t> slab(const SlabTensor& tensor, uint32_t expert) const;

private:
    Mapping() = default;
    std::vector<std::span<const uint8_t>> shards_;
};

}  // namespace kvasir::moe
