// ggml's registry: loading its backend modules, finding devices, naming the build.
//
// Used by worker, backbone, plugin and generate before anything touches ggml. With the official
// kind of build (GGML_BACKEND_DL) even the CPU backend is a module beside libggml.so and must be
// loaded; in a build with compiled-in backends there is nothing to load. Thread: load_ggml() from
// one thread, before others start; the rest from any.
#pragma once

#include <string>

#include "base/result.hpp"
#include "engine/kernels/numeric.hpp"

struct ggml_backend_device;
struct ggml_backend;
struct ggml_threadpool;

namespace kvasir::engine {

// Makes sure that ggml has a CPU device: loads the backends beside libggml.so (else those of the
// folder that this program was built against), of several variants of one the best for this
// machine. Idempotent. GGML_BACKEND_PATH is ignored: it would load the plugin into the very program
// that compares against plain llama.cpp. Errors: kEnvironment, saying where it looked.
Status load_ggml();
// The folder of ggml's libraries (and of llama.cpp's programs, where those were built).
std::string ggml_folder();

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

// Which class of bits the CPU backend of this process computes; kOther when the kernels imitate no
// such backend. load_ggml() first.
kernels::NumericClass numeric_class();
// Of a number on the wire: kOther for one that is not known here.
kernels::NumericClass numeric_class_of(uint32_t wire_value);
const char* numeric_class_name(kernels::NumericClass numeric);  // "x86-v4"

// A pool whose threads sleep between graphs (no polling): a spinning worker ruins its neighbour.
// Null when the CPU backend has no pools. Free with free_threads() after whatever uses it.
ggml_threadpool* make_threads(int threads);
// Sets the thread count of a CPU backend and attaches such a pool, which is returned.
ggml_threadpool* set_threads(ggml_backend* backend, int threads);
void free_threads(ggml_threadpool* pool);

}  // namespace kvasir::engine
