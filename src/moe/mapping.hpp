// Read-only memory mapping of a model's or slice's shards: where slab bytes live in memory.
//
// Used by the engine (weights without a copy), manifest and verify. Pages are touched on demand, so
// a model larger than RAM can be mapped. Thread: immutable after make(); reads from any thread.
// Owns: the mappings and the open files; spans handed out are valid while it lives. A file that
// shrinks under a mapping raises SIGBUS, so sizes are re-checked against fstat when mapping; one
// that is written to changes what is computed, which unchanged() tells.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "moe/file.hpp"
#include "moe/model.hpp"

namespace kvasir::moe {

class Mapping {
public:
    // Errors: kEnvironment (open/mmap), kBadInput (file shorter than its header says).
    static Result<Mapping> make(const Model& model);
    Mapping(Mapping&&) noexcept;
    Mapping& operator=(Mapping&&) noexcept;
    ~Mapping();

    // Has no file been written to since it was mapped? One fstat a shard. A file that was replaced
    // by renaming or removed is unchanged: the mapping keeps the old one. Errors: kBadInput (names
    // the file).
    Status unchanged() const;

    std::span<const uint8_t> shard(uint32_t index) const { return shards_[index]; }
    // All `experts` slabs of a stacked tensor, contiguous. Precondition: tensor of the same model.
    std::span<const uint8_t> tensor(const ExpertBank& bank, const SlabTensor& tensor) const;
    std::span<const uint8_t> slab(const SlabTensor& tensor, uint32_t expert) const;

private:
    Mapping() = default;
    struct Watched {
        Fd fd;
        std::string path;
        uint64_t bytes = 0;
        int64_t written_s = 0;  // st_mtim when it was mapped
        int64_t written_ns = 0;
    };
    static Result<std::span<const uint8_t>> map_shard(const GgufHeader& header, Watched& watched);

    std::vector<std::span<const uint8_t>> shards_;
    std::vector<Watched> watched_;
};

}  // namespace kvasir::moe
