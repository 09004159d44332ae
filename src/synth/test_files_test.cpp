#include "synth/test_files.hpp"

#include <ggml.h>
#include <gguf.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <iterator>

namespace kvasir::synth {

ScratchFolder::ScratchFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "synth_test.XXXXXX").string();
    path_ = mkdtemp(name.data());
}

ScratchFolder::~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
}

size_t ScratchFolder::files() const {
    return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(path_), {}));
}

std::vector<uint8_t> read_bytes(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

void GgufFile::Free::operator()(gguf_context* context) const {
    gguf_free(context);
}
void GgufFile::Free::operator()(ggml_context* context) const {
    ggml_free(context);
}

GgufFile::GgufFile(const std::string& path) : path_(path) {
    ggml_context* shapes = nullptr;
    gguf_.reset(gguf_init_from_file(path.c_str(), {true, &shapes}));
    shapes_.reset(shapes);
}

int64_t GgufFile::key(const std::string& name) const {
    return gguf_find_key(gguf_.get(), name.c_str());
}

bool GgufFile::has(const std::string& tensor) const {
    return gguf_find_tensor(gguf_.get(), tensor.c_str()) >= 0;
}

int64_t GgufFile::u32(const std::string& name) const {
    const int64_t id = key(name);
    if (id < 0 || gguf_get_kv_type(gguf_.get(), id) != GGUF_TYPE_UINT32) return -1;
    return gguf_get_val_u32(gguf_.get(), id);
}

const ggml_tensor* GgufFile::tensor(const std::string& name) const {
    static const ggml_tensor kNone = {};
    const ggml_tensor* found = ggml_get_tensor(shapes_.get(), name.c_str());
    return found != nullptr ? found : &kNone;
}

std::vector<std::string> GgufFile::names() const {
    std::vector<std::string> names;
    for (int64_t i = 0; i < gguf_get_n_tensors(gguf_.get()); ++i) {
        names.emplace_back(gguf_get_tensor_name(gguf_.get(), i));
    }
    return names;
}

uint64_t GgufFile::offset(const std::string& name) const {
    const int64_t id = gguf_find_tensor(gguf_.get(), name.c_str());
    return gguf_get_data_offset(gguf_.get()) + gguf_get_tensor_offset(gguf_.get(), id);
}

std::vector<uint8_t> GgufFile::data(const std::string& name) const {
    const int64_t id = gguf_find_tensor(gguf_.get(), name.c_str());
    std::vector<uint8_t> bytes(gguf_get_tensor_size(gguf_.get(), id));
    std::ifstream in(path_, std::ios::binary);
    in.seekg(static_cast<std::streamoff>(offset(name)));
    in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    return in ? bytes : std::vector<uint8_t>();
}

std::map<std::string, std::vector<uint8_t>> GgufFile::all() const {
    std::map<std::string, std::vector<uint8_t>> tensors;
    for (const std::string& name : names()) tensors[name] = data(name);
    return tensors;
}

}  // namespace kvasir::synth
