// A file that appears whole or not at all: temporary name, fsync, rename.
//
// Used by writer.cpp. Written front to back through a buffer; a hole can be left at the end. Until
// commit() the file has a temporary name beside its final one; destroying an uncommitted OutputFile
// removes it. Thread: one. Owns: the descriptor and the temporary file.
// Limits: only regular files are ever replaced.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.hpp"

namespace kvasir::synth {

class OutputFile {
public:
    // kUsage: the path names something other than a regular file; kEnvironment: it cannot be made.
    static Result<OutputFile> create(const std::string& path);

    OutputFile(OutputFile&& other) noexcept;
    OutputFile& operator=(OutputFile&&) = delete;
    ~OutputFile();

    uint64_t offset() const { return offset_; }
    Status write(std::span<const uint8_t> data);
    Status pad_to(uint64_t offset, uint8_t value);
    // Ends the data at `bytes`: what was not written reads as zeros and takes no space.
    Status leave_hole_to(uint64_t bytes);
    // Everything is written (and with `sync` on the disk), still under the temporary name.
    Status finish(bool sync);
    // The final name; call finish() first.
    Status commit();

private:
    OutputFile(std::string path, std::string temporary, int fd);
    Status flush();
    tl::unexpected<Error> broken(const char* what) const;

    std::string path_;
    std::string temporary_;  // empty once committed
    int fd_ = -1;
    uint64_t offset_ = 0;
    std::vector<uint8_t> buffer_;
};

}  // namespace kvasir::synth
