#include "plugin/device.hpp"

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "base/log.hpp"
#include "engine/runtime.hpp"
#include "ggml-backend-impl.h"
#include "ggml-cpp.h"
#include "moe/classify.hpp"
#include "plugin/capture.hpp"

namespace kvasir::plugin {
namespace {

constexpr char kName[] = "KVASIR";

// ---- buffer type: ordinary host memory under our own name ------------------------------------

struct DeviceContext {
    backbone::Backbone* backbone = nullptr;
};
DeviceContext g_device;  // ggml's registry is process-wide and wants static objects

const char* kvasir_buft_get_name(ggml_backend_buffer_type_t) noexcept {
    return kName;
}

ggml_backend_dev_t cpu_device() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

ggml_backend_buffer_t kvasir_buft_alloc_buffer(ggml_backend_buffer_type_t buft,
                                               size_t size) noexcept {
    ggml_backend_buffer_t buffer =
        ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(cpu_device()), size);
    if (buffer != nullptr) buffer->buft = buft;
    return buffer;
}

size_t kvasir_buft_get_alignment(ggml_backend_buffer_type_t) noexcept {
    return ggml_backend_buft_get_alignment(ggml_backend_dev_buffer_type(cpu_device()));
}

bool kvasir_buft_is_host(ggml_backend_buffer_type_t) noexcept {
    return true;
}

extern ggml_backend_device g_ggml_device;

ggml_backend_buffer_type g_buffer_type = {
    /* .iface   = */ {
        /* .get_name       = */ kvasir_buft_get_name,
        /* .alloc_buffer   = */ kvasir_buft_alloc_buffer,
        /* .get_alignment  = */ kvasir_buft_get_alignment,
        /* .get_max_size   = */ nullptr,
        /* .get_alloc_size = */ nullptr,
        /* .is_host        = */ kvasir_buft_is_host,
    },
    /* .device  = */ &g_ggml_device,
    /* .context = */ nullptr,
};

// ---- backend: one per llama_context -----------------------------------------------------------

struct BackendContext {
    ggml_backend_ptr cpu;  // computes whole graphs that do not go to workers
    ggml_threadpool* pool = nullptr;
    int threads = 0;
    std::unique_ptr<backbone::Lane> lane;  // null without a backbone
    backbone::LayerBatch batch;            // reused
    ~BackendContext() {
        cpu.reset();
        engine::free_threads(pool);
    }
};

BackendContext& context_of(ggml_backend_t backend) {
    return *static_cast<BackendContext*>(backend->context);
}

const char* kvasir_get_name(ggml_backend_t) noexcept {
    return kName;
}

void kvasir_free(ggml_backend_t backend) noexcept {
    delete static_cast<BackendContext*>(backend->context);
    delete backend;
}

uint64_t pair_count(ggml_cgraph* graph) {
    uint64_t pairs = 0;
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor* node = ggml_graph_node(graph, i);
        if (node->op != GGML_OP_MUL_MAT_ID) continue;
        const auto name = moe::parse_expert_name(node->src[0]->name);
        if (name && name->role == moe::SlabRole::kDown)
            pairs += static_cast<uint64_t>(ggml_nelements(node->src[2]));
    }
    return pairs;
}

ggml_status compute_locally(BackendContext& context, ggml_cgraph* graph) {
    if (context.lane) context.lane->note_local(pair_count(graph));
    return ggml_backend_graph_compute(context.cpu.get(), graph);
}

// Fills `batch` from the graph's tensors; false when something is not as the program assumes.
bool fill_batch(const Captured& captured, backbone::LayerBatch& batch) {
    const ggml_tensor* input = captured.input;
    const ggml_tensor* ids = captured.ids;
    const ggml_tensor* output = captured.output;
    int64_t experts = 0;  // of the smallest stack of matrices
    for (const ggml_tensor* weights : captured.weights) {
        if (weights == nullptr || weights->ne[2] <= 1) continue;
        experts = experts == 0 ? weights->ne[2] : std::min(experts, weights->ne[2]);
    }
    if (experts == 0 || input->type != GGML_TYPE_F32 || ids->type != GGML_TYPE_I32) return false;
    if (input->data == nullptr || ids->data == nullptr || output->data == nullptr) return false;
    if (!ggml_is_contiguous(input) || output->nb[0] != sizeof(float) || input->ne[3] != 1)
        return false;
    if (input->ne[2] != ids->ne[1] || output->ne[1] != ids->ne[0] || output->ne[2] != ids->ne[1])
        return false;
    const int64_t used = ids->ne[0];
    const int64_t tokens = ids->ne[1];
    const int64_t rows_per_token = input->ne[1];
    if (rows_per_token < 1 || used % rows_per_token != 0) return false;
    batch.layer = captured.layer;
    batch.program = &captured.program;
    batch.weights = captured.weights;
    batch.rows = static_cast<const uint8_t*>(input->data);
    batch.row_stride = input->nb[1];
    batch.row_count = static_cast<uint32_t>(rows_per_token * tokens);
    batch.used = static_cast<uint32_t>(used);
    batch.pairs.resize(static_cast<size_t>(used * tokens));
    size_t n = 0;
    for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t k = 0; k < used; ++k) {
            const auto* id = reinterpret_cast<const int32_t*>(static_cast<const char*>(ids->data) +
                                                              k * ids->nb[0] + t * ids->nb[1]);
            if (*id < 0 || *id >= experts) return false;
            auto* out = reinterpret_cast<float*>(static_cast<char*>(output->data) +
                                                 k * output->nb[1] + t * output->nb[2]);
            batch.pairs[n++] = {static_cast<uint32_t>(k % rows_per_token + t * rows_per_token),
                                static_cast<uint32_t>(*id), out};
        }
    }
    return true;
}

// compute_locally for a split with one bank; the log says which, as tests count these lines.
ggml_status compute_as_graph(BackendContext& context, ggml_cgraph* graph, LayerKey layer) {
    if (log_enabled(LogLevel::kDebug)) {
        log(LogLevel::kDebug, "plugin",
            "computed locally: layer " + to_string(layer) + " as ggml's graph");
    }
    return compute_locally(context, graph);
}

ggml_status compute_split(BackendContext& context, ggml_cgraph* graph) {
    auto banks = capture(graph);
    if (!banks || banks->size() != 1) {
        // Several banks in one split: the first may be an input of the second, so the graph runs as
        // it is.
        log(LogLevel::kDebug, "plugin",
            "computed locally: " + (banks ? "several banks in one split" : banks.error().detail));
        return compute_locally(context, graph);
    }
    const LayerKey layer = banks->front().layer;
    if (!fill_batch(banks->front(), context.batch)) return compute_as_graph(context, graph, layer);
    auto done = context.lane->compute(context.batch);
    if (!done) {
        log(LogLevel::kError, "plugin", done.error().detail);
        return compute_locally(context, graph);
    }
    if (!*done) return compute_as_graph(context, graph, layer);
    return GGML_STATUS_SUCCESS;
}

ggml_status kvasir_graph_compute(ggml_backend_t backend, ggml_cgraph* graph) noexcept {
    BackendContext& context = context_of(backend);
    if (!context.lane) return compute_locally(context, graph);
    const auto start = std::chrono::steady_clock::now();
    const ggml_status status = compute_split(context, graph);
    context.lane->note_time(std::chrono::steady_clock::now() - start);
    return status;
}

// Called for every split when a graph is planned, reservations included: programs are known before
// any work.
void kvasir_graph_optimize(ggml_backend_t, ggml_cgraph* graph,
                           ggml_backend_graph_optimize_params*) noexcept {
    if (g_device.backbone == nullptr) return;
    auto banks = capture(graph);
    if (!banks) return;
    for (const Captured& captured : *banks)
        g_device.backbone->learn(captured.layer, captured.program);
}

void kvasir_set_n_threads(ggml_backend_t backend, int n_threads) noexcept {
    BackendContext& context = context_of(backend);
    if (n_threads == context.threads || n_threads < 1) return;
    context.threads = n_threads;
    // The CPU backend touches its old pool when it gets the new one.
    ggml_threadpool* old = context.pool;
    context.pool = engine::set_threads(context.cpu.get(), n_threads);
    engine::free_threads(old);
    if (context.lane) context.lane->set_threads(static_cast<uint32_t>(n_threads));
}

ggml_guid_t kvasir_guid() noexcept {
    static ggml_guid guid = {0x6b, 0x76, 0x61, 0x73, 0x69, 0x72, 0x2d, 0x65,
                             0x78, 0x70, 0x65, 0x72, 0x74, 0x73, 0x2d, 0x31};
    return &guid;
}

constexpr ggml_backend_i kBackendInterface = {
    /* .get_name            = */ kvasir_get_name,
    /* .free                = */ kvasir_free,
    /* .set_tensor_async    = */ nullptr,
    /* .get_tensor_async    = */ nullptr,
    /* .set_tensor_2d_async = */ nullptr,
    /* .get_tensor_2d_async = */ nullptr,
    /* .cpy_tensor_async    = */ nullptr,
    /* .synchronize         = */ nullptr,
    /* .graph_plan_create   = */ nullptr,
    /* .graph_plan_free     = */ nullptr,
    /* .graph_plan_update   = */ nullptr,
    /* .graph_plan_compute  = */ nullptr,
    /* .graph_compute       = */ kvasir_graph_compute,
    /* .event_record        = */ nullptr,
    /* .event_wait          = */ nullptr,
    /* .graph_optimize      = */ kvasir_graph_optimize,
};

// ---- device ---------------------------------------------------------------------------------

const char* kvasir_dev_get_name(ggml_backend_dev_t) noexcept {
    return kName;
}
const char* kvasir_dev_get_description(ggml_backend_dev_t) noexcept {
    return "expert workers of a Kvasir swarm";
}
void kvasir_dev_get_memory(ggml_backend_dev_t, size_t* free, size_t* total) noexcept {
    *free = *total = 0;
}
enum ggml_backend_dev_type kvasir_dev_get_type(ggml_backend_dev_t) noexcept {
    return GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

void kvasir_dev_get_props(ggml_backend_dev_t dev, ggml_backend_dev_props* props) noexcept {
    props->name = kvasir_dev_get_name(dev);
    props->description = kvasir_dev_get_description(dev);
    props->type = kvasir_dev_get_type(dev);
    kvasir_dev_get_memory(dev, &props->memory_free, &props->memory_total);
    props->caps = {/* .async = */ false, /* .host_buffer = */ false,
                   /* .buffer_from_host_ptr = */ true,
                   /* .events = */ false, /* .mmap_support = */ true};
}

ggml_backend_t kvasir_dev_init_backend(ggml_backend_dev_t dev, const char*) noexcept {
    auto context = std::make_unique<BackendContext>();
    context->cpu.reset(ggml_backend_dev_init(cpu_device(), nullptr));
    if (!context->cpu) return nullptr;
    if (g_device.backbone != nullptr) context->lane = g_device.backbone->open_lane();
    return new ggml_backend{kvasir_guid(), kBackendInterface, dev, context.release()};
}

ggml_backend_buffer_type_t kvasir_dev_get_buffer_type(ggml_backend_dev_t) noexcept {
    return &g_buffer_type;
}

ggml_backend_buffer_t kvasir_dev_buffer_from_host_ptr(ggml_backend_dev_t, void* ptr, size_t size,
                                                      size_t max_tensor_size) noexcept {
    ggml_backend_buffer_t buffer =
        ggml_backend_dev_buffer_from_host_ptr(cpu_device(), ptr, size, max_tensor_size);
    if (buffer != nullptr) buffer->buft = &g_buffer_type;
    return buffer;
}

bool kvasir_dev_supports_op(ggml_backend_dev_t, const ggml_tensor* op) noexcept {
    return is_expert_op(op) && ggml_backend_dev_supports_op(cpu_device(), op);
}

bool kvasir_dev_supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t buft) noexcept {
    return ggml_backend_buft_is_host(buft);
}

ggml_backend_device g_ggml_device = {
    /* .iface   = */ {
        /* .get_name             = */ kvasir_dev_get_name,
        /* .get_description      = */ kvasir_dev_get_description,
        /* .get_memory           = */ kvasir_dev_get_memory,
        /* .get_type             = */ kvasir_dev_get_type,
        /* .get_props            = */ kvasir_dev_get_props,
        /* .init_backend         = */ kvasir_dev_init_backend,
        /* .get_buffer_type      = */ kvasir_dev_get_buffer_type,
        /* .get_host_buffer_type = */ nullptr,
        /* .buffer_from_host_ptr = */ kvasir_dev_buffer_from_host_ptr,
        /* .supports_op          = */ kvasir_dev_supports_op,
        /* .supports_buft        = */ kvasir_dev_supports_buft,
        /* .offload_op           = */ nullptr,
        /* .event_new            = */ nullptr,
        /* .event_free           = */ nullptr,
        /* .event_synchronize    = */ nullptr,
    },
    /* .reg     = */ nullptr,
    /* .context = */ nullptr,
};

// ---- registry ---------------------------------------------------------------------------------

const char* kvasir_reg_get_name(ggml_backend_reg_t) noexcept {
    return kName;
}
size_t kvasir_reg_get_device_count(ggml_backend_reg_t) noexcept {
    return 1;
}
ggml_backend_dev_t kvasir_reg_get_device(ggml_backend_reg_t, size_t) noexcept {
    return &g_ggml_device;
}

void* kvasir_reg_get_proc_address(ggml_backend_reg_t, const char* name) noexcept {
    if (std::string_view(name) == "ggml_backend_set_n_threads") {
        return reinterpret_cast<void*>(&kvasir_set_n_threads);
    }
    return nullptr;
}

ggml_backend_reg g_registry = {
    /* .api_version = */ GGML_BACKEND_API_VERSION,
    /* .iface       = */
    {
        /* .get_name         = */ kvasir_reg_get_name,
        /* .get_device_count = */ kvasir_reg_get_device_count,
        /* .get_device       = */ kvasir_reg_get_device,
        /* .get_proc_address = */ kvasir_reg_get_proc_address,
    },
    /* .context     = */ nullptr,
};

}  // namespace

ggml_backend_reg* make_registry(backbone::Backbone* backbone) noexcept {
    g_device.backbone = backbone;
    g_ggml_device.reg = &g_registry;
    return &g_registry;
}

void register_device(backbone::Backbone* backbone) noexcept {
    ggml_backend_register(make_registry(backbone));
}

}  // namespace kvasir::plugin
