// What the tests of this module share: a scratch folder and a GGUF file read back through gguf.h.
// Used by *_test.cpp only. Thread: one. Owns: the folder, removed at the end.
#pragma once

#include <ggml.h>
#include <gguf.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace kvasir::synth {

class ScratchFolder {
public:
    ScratchFolder() {
        std::string name = (std::filesystem::temp_directory_path() / "synth_test.XXXXXX").string();
        path_ = mkdtemp(name.data());
    }
    ScratchFolder(const ScratchFolder&) = delete;
    ScratchFolder& operator=(const ScratchFolder&) = delete;
    ~ScratchFolder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    std::string operator/(const std::string& name) const { return path_ + "/" + name; }
    size_t files() const {
        return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(path_), {}));
    }
    const std::string& path() const { return path_; }

private:
    std::string path_;
};

inline std::vector<uint8_t> read_bytes(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

// The header of a file; tensor bytes on demand, so that sparse giants can be opened too.
class GgufFile {
public:
    explicit GgufFile(const std::string& path) : path_(path) {
        ggml_context* shapes = nullptr;
        gguf_.reset(gguf_init_from_file(path.c_str(), {true, &shapes}));
        shapes_.reset(shapes);
    }
    bool open() const { return gguf_ != nullptr; }
    gguf_context* get() const { return gguf_.get(); }
    int64_t key(const std::string& name) const { return gguf_find_key(gguf_.get(), name.c_str()); }
    bool has(const std::string& tensor) const { return gguf_find_tensor(gguf_.get(), tensor.c_str()) >= 0; }
    // -1 when the key is missing or not a u32.
    int64_t u32(const std::string& name) const {
        const int64_t id = key(name);
        if (id < 0 || gguf_get_kv_type(gguf_.get(), id) != GGUF_TYPE_UINT32) return -1;
        return gguf_get_val_u32(gguf_.get(), id);
    }
    // A tensor of zero size when there is none of that name.
    const ggml_tensor* tensor(const std::string& name) const {
        static const ggml_tensor kNone = {};
        const ggml_tensor* found = ggml_get_tensor(shapes_.get(), name.c_str());
        return found != nullptr ? found : &kNone;
    }
    std::vector<std::string> names() const {
        std::vector<std::string> names;
        for (int64_t i = 0; i < gguf_get_n_tensors(gguf_.get()); ++i) {
            names.emplace_back(gguf_get_tensor_name(gguf_.get(), i));
        }
        return names;
    }
    uint64_t offset(const std::string& name) const {
        return gguf_get_data_offset(gguf_.get()) +
               gguf_get_tensor_offset(gguf_.get(), gguf_find_tensor(gguf_.get(), name.c_str()));
    }
    std::vector<uint8_t> data(const std::string& name) const {
        std::vector<uint8_t> bytes(gguf_get_tensor_size(gguf_.get(), gguf_find_tensor(gguf_.get(), name.c_str())));
        std::ifstream in(path_, std::ios::binary);
        in.seekg(static_cast<std::streamoff>(offset(name)));
        in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
        return in ? bytes : std::vector<uint8_t>();
    }
    std::vector<float> values(const std::string& name) const {
        const ggml_tensor* shape = tensor(name);
        const std::vector<uint8_t> bytes = data(name);
        std::vector<float> values(static_cast<size_t>(ggml_nelements(shape)));
        if (shape->type == GGML_TYPE_F32) {
            std::copy(bytes.begin(), bytes.end(), reinterpret_cast<uint8_t*>(values.data()));
        } else {
            ggml_get_type_traits(shape->type)->to_float(bytes.data(), values.data(), ggml_nelements(shape));
        }
        return values;
    }
    // Every tensor of the file by name.
    std::map<std::string, std::vector<uint8_t>> all() const {
        std::map<std::string, std::vector<uint8_t>> tensors;
        for (const std::string& name : names()) tensors[name] = data(name);
        return tensors;
    }

private:
    struct Free {
        void operator()(gguf_context* context) const { gguf_free(context); }
        void operator()(ggml_context* context) const { ggml_free(context); }
    };
    std::string path_;
    std::unique_ptr<gguf_context, Free> gguf_;
    std::unique_ptr<ggml_context, Free> shapes_;
};

}  // namespace kvasir::synth
