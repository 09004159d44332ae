#include "engine/runtime.hpp"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string_view>
#include <system_error>

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include "base/log.hpp"

namespace kvasir::engine {
namespace {

template <class F>
F cpu_function(const char* name) {
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (device == nullptr) return nullptr;
    ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(device);
    return reinterpret_cast<F>(ggml_backend_reg_get_proc_address(registry, name));
}

bool has_cpu() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) != nullptr;
}

// The folder that libggml.so was loaded from; empty when it is linked statically into the program.
std::string folder_of_libggml() {
    Dl_info info{};
    if (dladdr(reinterpret_cast<const void*>(&ggml_backend_load), &info) == 0) return {};
    if (info.dli_fname == nullptr) return {};
    std::error_code error;
    const auto path = std::filesystem::canonical(info.dli_fname, error);
    return error ? std::string{} : path.parent_path().string();
}

// Hides an environment variable while in scope.
class HiddenVariable {
public:
    explicit HiddenVariable(const char* name) : name_(name) {
        if (const char* value = std::getenv(name)) {
            value_ = value;
            unsetenv(name);
        }
    }
    ~HiddenVariable() {
        if (value_) setenv(name_, value_->c_str(), 1);
    }
    HiddenVariable(const HiddenVariable&) = delete;
    HiddenVariable& operator=(const HiddenVariable&) = delete;

private:
    const char* name_;
    std::optional<std::string> value_;
};

// Takes what ggml says while in scope: which files it loads is for the log, not for people.
class QuietGgml {
public:
    QuietGgml() {
        ggml_log_get(&before_, &context_);
        ggml_log_set(
            [](ggml_log_level, const char* text, void*) {
                std::string_view line(text);
                while (line.ends_with('\n')) line.remove_suffix(1);
                if (!line.empty()) log(LogLevel::kDebug, "ggml", std::string(line));
            },
            nullptr);
    }
    ~QuietGgml() { ggml_log_set(before_, context_); }
    QuietGgml(const QuietGgml&) = delete;
    QuietGgml& operator=(const QuietGgml&) = delete;

private:
    ggml_log_callback before_ = nullptr;
    void* context_ = nullptr;
};

}  // namespace

Status load_ggml() {
    if (has_cpu()) return {};
    const QuietGgml quiet;
    const HiddenVariable hidden("GGML_BACKEND_PATH");
    const std::string beside = folder_of_libggml();
    if (!beside.empty()) ggml_backend_load_all_from_path(beside.c_str());
    if (!has_cpu()) ggml_backend_load_all_from_path(KVASIR_LLAMA_LIB);
    if (has_cpu()) return {};
    return fail(Errc::kEnvironment,
                "ggml has no CPU backend: no usable libggml-cpu*.so in '" + beside +
                    "' or '" KVASIR_LLAMA_LIB
                    "' (./run build makes it; was llama.cpp built for another processor?)");
}

std::string ggml_folder() {
    const std::string beside = folder_of_libggml();
    return beside.empty() ? KVASIR_LLAMA_LIB : beside;
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

kernels::NumericClass numeric_class() {
#if defined(__x86_64__)
    const std::string isa = " " + fingerprint().isa + " ";
    const auto has = [&](const char* name) {
        return isa.find(" " + std::string(name) + " ") != std::string::npos;
    };
    if (has("AVX512")) return kernels::NumericClass::kX86V4;
    if (has("AVX2") && has("FMA") && has("F16C")) return kernels::NumericClass::kX86V3;
#endif
    return kernels::NumericClass::kOther;
}

kernels::NumericClass numeric_class_of(uint32_t wire_value) {
    switch (wire_value) {
        case static_cast<uint32_t>(kernels::NumericClass::kX86V3):
            return kernels::NumericClass::kX86V3;
        case static_cast<uint32_t>(kernels::NumericClass::kX86V4):
            return kernels::NumericClass::kX86V4;
        default:
            return kernels::NumericClass::kOther;
    }
}

const char* numeric_class_name(kernels::NumericClass numeric) {
    switch (numeric) {
        case kernels::NumericClass::kX86V3:
            return "x86-v3";
        case kernels::NumericClass::kX86V4:
            return "x86-v4";
        case kernels::NumericClass::kOther:
            break;
    }
    return "other";
}

ggml_threadpool* make_threads(int threads) {
    auto make = cpu_function<decltype(&ggml_threadpool_new)>("ggml_threadpool_new");
    if (make == nullptr) return nullptr;
    ggml_threadpool_params params = ggml_threadpool_params_default(threads);
    params.poll = 0;
    return make(&params);
}

ggml_threadpool* set_threads(ggml_backend* backend, int threads) {
    if (auto set = cpu_function<ggml_backend_set_n_threads_t>("ggml_backend_set_n_threads")) {
        set(backend, threads);
    }
    auto attach =
        cpu_function<decltype(&ggml_backend_cpu_set_threadpool)>("ggml_backend_cpu_set_threadpool");
    if (attach == nullptr) return nullptr;
    ggml_threadpool* pool = make_threads(threads);
    if (pool != nullptr) attach(backend, pool);
    return pool;
}

void free_threads(ggml_threadpool* pool) {
    if (pool == nullptr) return;
    if (auto release = cpu_function<decltype(&ggml_threadpool_free)>("ggml_threadpool_free"))
        release(pool);
}

}  // namespace kvasir::engine
