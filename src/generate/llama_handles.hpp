// llama.cpp's objects with owners, and the non-spinning thread pool.
//
// Private to generate/.
// Thread: as llama.cpp: one thread per object at a time.
#pragma once

#include <ggml-cpu.h>
#include <llama.h>

#include <memory>

namespace kvasir::generate {

struct ModelFree {
    void operator()(llama_model* model) const { llama_model_free(model); }
};
struct ContextFree {
    void operator()(llama_context* context) const { llama_free(context); }
};
struct SamplerFree {
    void operator()(llama_sampler* sampler) const { llama_sampler_free(sampler); }
};
using ModelPtr = std::unique_ptr<llama_model, ModelFree>;
using ContextPtr = std::unique_ptr<llama_context, ContextFree>;
using SamplerPtr = std::unique_ptr<llama_sampler, SamplerFree>;

// ggml's thread pool with polling off: its threads sleep between graphs. The functions come through
// the CPU backend's registry because that backend may be a plugin of ggml itself.
struct ThreadPoolFree {
    decltype(&ggml_threadpool_free) free = nullptr;
    void operator()(ggml_threadpool* pool) const { free(pool); }
};
using ThreadPoolPtr = std::unique_ptr<ggml_threadpool, ThreadPoolFree>;

inline ThreadPoolPtr make_thread_pool(int threads) {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (cpu == nullptr) return {};
    ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(cpu);
    const auto make = reinterpret_cast<decltype(&ggml_threadpool_new)>(
        ggml_backend_reg_get_proc_address(registry, "ggml_threadpool_new"));
    const auto free = reinterpret_cast<decltype(&ggml_threadpool_free)>(
        ggml_backend_reg_get_proc_address(registry, "ggml_threadpool_free"));
    if (make == nullptr || free == nullptr) return {};
    ggml_threadpool_params params = ggml_threadpool_params_default(threads);
    params.poll = 0;
    return ThreadPoolPtr(make(&params), ThreadPoolFree{free});
}

}  // namespace kvasir::generate
