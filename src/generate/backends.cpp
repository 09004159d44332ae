#include "generate/backends.hpp"

#include <dlfcn.h>
#include <ggml-backend.h>
#include <llama.h>

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <system_error>

#include "generate/llama_log.hpp"

namespace kvasir::generate {
namespace {

bool has_cpu() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) != nullptr;
}

// The folder that libggml.so was loaded from; empty when it is linked statically into the program.
std::string ggml_folder() {
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

}  // namespace

Status load_backends() {
    install_llama_log();
    if (has_cpu()) return {};
    const HiddenVariable hidden("GGML_BACKEND_PATH");
    const std::string beside = ggml_folder();
    if (!beside.empty()) ggml_backend_load_all_from_path(beside.c_str());
    if (!has_cpu()) ggml_backend_load_all_from_path(KVASIR_LLAMA_LIB);
    if (has_cpu()) return {};
    return fail(Errc::kEnvironment,
                "no ggml CPU backend found in '" + beside +
                    "' or '" KVASIR_LLAMA_LIB
                    "': libggml-cpu*.so must lie beside libggml.so (./run build makes it)");
}

Result<std::string> add_rpc_server(const std::string& endpoint) {
    ggml_backend_reg_t registry = ggml_backend_reg_by_name("RPC");
    if (registry == nullptr) {
        return fail(Errc::kEnvironment,
                    "this llama.cpp has no RPC backend (libggml-rpc.so beside libggml.so)");
    }
    using AddServer = ggml_backend_reg_t (*)(const char*);
    const auto add_server = reinterpret_cast<AddServer>(
        ggml_backend_reg_get_proc_address(registry, "ggml_backend_rpc_add_server"));
    if (add_server == nullptr) {
        return fail(Errc::kEnvironment, "this RPC backend cannot add servers: it is not v0.5.0");
    }
    ggml_backend_reg_t server = add_server(endpoint.c_str());
    if (server == nullptr || ggml_backend_reg_dev_count(server) == 0) {
        return fail(Errc::kEnvironment, "no ggml device behind the RPC server at " + endpoint);
    }
    ggml_backend_register(server);
    return std::string(ggml_backend_dev_name(ggml_backend_reg_dev_get(server, 0)));
}

std::string llama_version_text() {
    return llama_version();
}

std::string llama_system_text() {
    return llama_print_system_info();
}

}  // namespace kvasir::generate
