#include "generate/backends.hpp"

#include <ggml-backend.h>
#include <llama.h>

#include "engine/runtime.hpp"
#include "generate/llama_log.hpp"

namespace kvasir::generate {

Status load_backends() {
    install_llama_log();
    return engine::load_ggml();
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
