// The KVASIR ggml device: registered in-process by `kvasir`, or loaded as libggml-kvasir.so.
//
// llama.cpp asks ACCEL devices' buffer types first, so expert tensors land in ours (host memory,
// mapped in place) and the expert FFN of each MoE layer comes to graph_compute as one split. Device
// and buffer type are named "KVASIR".
//
// Thread: registration once, before models are loaded; ggml calls the rest. Owns: nothing; the
// backbone must outlive every context made after registration.
#pragma once

#include "backbone/backbone.hpp"

struct ggml_backend_reg;

namespace kvasir::plugin {

// The registry object, made for `backbone` (null: everything is computed locally). One per process.
ggml_backend_reg* make_registry(backbone::Backbone* backbone) noexcept;
// make_registry + ggml_backend_register.
void register_device(backbone::Backbone* backbone) noexcept;

}  // namespace kvasir::plugin
