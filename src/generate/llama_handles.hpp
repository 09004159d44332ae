// llama.cpp's objects with owners.
//
// Private to generate/.
// Thread: as llama.cpp: one thread per object at a time.
#pragma once

#include <llama.h>

#include <memory>

#include "engine/runtime.hpp"

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

struct ThreadPoolFree {
    void operator()(ggml_threadpool* pool) const { engine::free_threads(pool); }
};
using ThreadPoolPtr = std::unique_ptr<ggml_threadpool, ThreadPoolFree>;

}  // namespace kvasir::generate
