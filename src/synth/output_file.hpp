// One file of a set that appears together or not at all, written front to back.
//
// Used by writer.cpp. A buffer in front of moe::AtomicFile, which has the temporary name, fsync and
// rename. A hole can be left at the end. Thread: one. Owns: the temporary file until commit().
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "moe/file.hpp"

namespace kvasir::synth {

class OutputFile {
public:
    // Errors of this and of every call: those of AtomicFile.
    static Result<OutputFile> create(const std::string& path);

    Status write(std::span<const uint8_t> data);
    Status pad_to(uint64_t offset, uint8_t value);
    // Ends the data at `bytes`: what was not written reads as zeros and takes no space.
    Status leave_hole_to(uint64_t bytes);
    // Everything is written (and with `sync` on the disk), still under the temporary name.
    Status finish(bool sync);
    // The final name; call finish() first.
    Status commit() { return file_.commit(true); }

private:
    explicit OutputFile(moe::AtomicFile file);
    Status flush();

    moe::AtomicFile file_;
    uint64_t offset_ = 0;  // where the next byte goes
    std::vector<uint8_t> buffer_;
};

}  // namespace kvasir::synth
