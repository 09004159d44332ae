#include "engine/runtime.hpp"

#include <dlfcn.h>

#include <cstring>
#include <filesystem>

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

namespace kvasir::engine {
namespace {

template <class F>
F cpu_function(const char* name) {
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (device == nullptr) return nullptr;
    ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(device);
    return reinterpret_cast<F>(ggml_backend_reg_get_proc_address(registry, name));
}

std::string folder_of_libggml() {
    Dl_info info{};
    if (dladdr(reinterpret_cast<void*>(&ggml_backend_load), &info) == 0 || !info.dli_fname)
        return ".";
    std::error_code error;
    const auto path = std::filesystem::canonical(info.dli_fname, error);
    return error ? "." : path.parent_path().string();
}

bool has_feature(const char* wanted) {
    auto get = cpu_function<ggml_backend_get_features_t>("ggml_backend_get_features");
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (get == nullptr || device == nullptr) return false;
    for (auto* f = get(ggml_backend_dev_backend_reg(device)); f && f->name; ++f) {
        if (std::strcmp(f->name, wanted) == 0) return true;
    }
    return false;
}

}  // namespace

Status load_ggml() {
    if (ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) != nullptr) return {};
    const std::string folder = folder_of_libggml();
    // Not GGML_BACKEND_PATH: that names our own plugin, which this program has built in.
    for (const auto& entry : std::filesystem::directory_iterator(
             folder, std::filesystem::directory_options::skip_permission_denied)) {
        const std::string name = entry.path().filename().string();
        if (name.starts_with("libggml-cpu") && name.ends_with(".so")) {
            ggml_backend_load(entry.path().c_str());
        }
        if (ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) != nullptr) return {};
    }
    return fail(Errc::kEnvironment, "ggml has no CPU backend: no usable libggml-cpu*.so in " +
                                        folder + " (was llama.cpp built for another processor?)");
}

Result<ggml_backend_device*> find_device(const std::string& name) {
    if (name.empty()) {
        if (auto* cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)) return cpu;
        return fail(Errc::kEnvironment, "ggml has no CPU device");
    }
    if (auto* device = ggml_backend_dev_by_name(name.c_str())) return device;
    std::string known;
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        known += (i ? ", " : "") + std::string(ggml_backend_dev_name(ggml_backend_dev_get(i)));
    }
    return fail(Errc::kUsage, "no ggml device is named " + name + "; there is: " + known);
}

Fingerprint fingerprint() {
    Fingerprint print;
    print.engine = std::string("ggml ") + ggml_version();
    auto get = cpu_function<ggml_backend_get_features_t>("ggml_backend_get_features");
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (get != nullptr && device != nullptr) {
        for (auto* f = get(ggml_backend_dev_backend_reg(device)); f && f->name; ++f) {
            if (std::strcmp(f->value, "1") != 0) continue;
            print.isa += (print.isa.empty() ? "" : " ") + std::string(f->name);
        }
    }
#ifdef __clang__
    print.compiler = "clang " __clang_version__;
#else
    print.compiler = "gcc " __VERSION__;
#endif
    print.kernels = "ggml-cpu";
    return print;
}

bool repack_is_safe() {
    return !has_feature("AMX_INT8");
}

ggml_threadpool* set_threads(ggml_backend* backend, int threads) {
    if (auto set = cpu_function<ggml_backend_set_n_threads_t>("ggml_backend_set_n_threads")) {
        set(backend, threads);
    }
    auto make = cpu_function<decltype(&ggml_threadpool_new)>("ggml_threadpool_new");
    auto attach =
        cpu_function<decltype(&ggml_backend_cpu_set_threadpool)>("ggml_backend_cpu_set_threadpool");
    if (make == nullptr || attach == nullptr) return nullptr;
    ggml_threadpool_params params = ggml_threadpool_params_default(threads);
    params.poll = 0;  // sleep between graphs: a spinning worker ruins its neighbour
    ggml_threadpool* pool = make(&params);
    if (pool != nullptr) attach(backend, pool);
    return pool;
}

void free_threads(ggml_threadpool* pool) {
    if (pool == nullptr) return;
    if (auto release = cpu_function<decltype(&ggml_threadpool_free)>("ggml_threadpool_free"))
        release(pool);
}

}  // namespace kvasir::engine
