// What the tests of this module share: a scratch folder and a GGUF file read back through gguf.h.
// Used by *_test.cpp only. Thread: one. Owns: the folder, removed at the end.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

struct gguf_context;
struct ggml_context;
struct ggml_tensor;

namespace kvasir::synth {

class ScratchFolder {
public:
    ScratchFolder();
    ScratchFolder(const ScratchFolder&) = delete;
    ScratchFolder& operator=(const ScratchFolder&) = delete;
    ~ScratchFolder();
    std::string operator/(const std::string& name) const { return path_ + "/" + name; }
    size_t files() const;
    const std::string& path() const { return path_; }

private:
    std::string path_;
};

std::vector<uint8_t> read_bytes(const std::string& path);

// The header of a file; tensor bytes on demand, so that sparse giants can be opened too.
class GgufFile {
public:
    explicit GgufFile(const std::string& path);
    bool open() const { return gguf_ != nullptr; }
    gguf_context* get() const { return gguf_.get(); }
    int64_t key(const std::string& name) const;
    bool has(const std::string& tensor) const;
    // -1 when the key is missing or not a u32.
    int64_t u32(const std::string& name) const;
    // A tensor of zero size when there is none of that name.
    const ggml_tensor* tensor(const std::string& name) const;
    std::vector<std::string> names() const;
    uint64_t offset(const std::string& name) const;  // absolute
    std::vector<uint8_t> data(const std::string& name) const;
    // Every tensor of the file by name.
    std::map<std::string, std::vector<uint8_t>> all() const;

private:
    struct Free {
        void operator()(gguf_context* context) const;
        void operator()(ggml_context* context) const;
    };
    std::string path_;
    std::unique_ptr<gguf_context, Free> gguf_;
    std::unique_ptr<ggml_context, Free> shapes_;
};

}  // namespace kvasir::synth
