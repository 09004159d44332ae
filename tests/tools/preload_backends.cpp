// Preloaded into llama.cpp's test-llama-archs: loads the ggml backends before main().
//
// With GGML_BACKEND_DL the CPU backend is a module that a program has to load; that generator of
// toy models never does. Used by the architecture tests only.
#include "ggml-backend.h"

namespace {
[[gnu::constructor]] void load_backends() {
    ggml_backend_load_all();
}
}  // namespace
