// ggml's registry: loading its CPU module, finding devices, naming the build.
//
// Used by worker, backbone, plugin and generate before anything touches ggml. With the official
// kind of build (GGML_BACKEND_DL) the CPU backend is a module beside libggml.so and must be loaded;
// in a build with compiled-in backends there is nothing to load. Thread: load_ggml() once, from
// main().
#pragma once

#include <string>

#include "base/result.hpp"

struct ggml_backend_device;
struct ggml_backend;
struct ggml_threadpool;

namespace kvasir::engine {

// Makes sure that ggml has a CPU device; idempotent. Errors: kEnvironment, saying where it looked.
Status load_ggml();

// The device named `name` (as ggml names it), or the CPU when empty. Errors: kUsage listing what
// there is.
Result<ggml_backend_device*> find_device(const std::string& name);

// What decides bits besides the weights.
struct Fingerprint {
    std::string engine;    // "ggml 0.25.1"
    std::string isa;       // "AVX2 AVX512 ...", ggml's own feature list
    std::string compiler;  // of this program; ggml is built with it by `./run build`
    std::string kernels;   // "ggml-cpu"
};
Fingerprint fingerprint();
// False when ggml was built with AMX kernels, which crash in repacked buffers when built by gcc 12;
// we never use such buffers, but `--repack` must then be refused.
bool repack_is_safe();

// Sets thread count and attaches a pool whose threads sleep between graphs (no polling). The pool
// is null for one thread. Free with free_threads() after the backend.
ggml_threadpool* set_threads(ggml_backend* backend, int threads);
void free_threads(ggml_threadpool* pool);

}  // namespace kvasir::engine
