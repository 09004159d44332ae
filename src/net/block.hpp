// Block: memory from malloc(), whose bytes nobody sets before they are needed.
//
// Used by the buffers of a connection, which hand it to each other. Thread: not thread-safe.
// Owns: the memory. Limits: the caller's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace kvasir::net {

struct BlockFree {
    void operator()(uint8_t* data) const { std::free(data); }
};
using Block = std::unique_ptr<uint8_t, BlockFree>;

// Null: no memory.
inline Block allocate_block(size_t bytes) {
    return Block(static_cast<uint8_t*>(std::malloc(bytes)));
}

}  // namespace kvasir::net
