#include "engine/expert_engine.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <random>
#include <string>

#include "base/check.hpp"
#include "base/log.hpp"
#include "engine/graph.hpp"
#include "engine/kernel_plan.hpp"
#include "engine/kernel_runner.hpp"
#include "engine/q8k.hpp"
#include "engine/runtime.hpp"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

namespace kvasir::engine {
namespace {

constexpr uint32_t kCachedPairsMax = 64;       // graphs for more pairs are built for the one call
constexpr uint64_t kCachedBytesMax = 8 << 20;  // of graphs kept
std::atomic<uint64_t> g_next_bank_id{1};

// Would the product of `weights` with a row of `width` values take Q8_K rows as they are? ggml says
// so through supports_op: MUL_MAT accepts src1 in the type that its dot product uses.
bool product_takes_q8k(ggml_backend_dev_t device, ggml_type weight_type, int64_t width) {
    if (width % ggml_blck_size(GGML_TYPE_Q8_K) != 0) return false;
    const ggml_init_params params = {ggml_tensor_overhead() * 4, nullptr, true};
    ggml_context_ptr context(ggml_init(params));
    if (!context) return false;
    ggml_tensor* a = ggml_new_tensor_2d(context.get(), weight_type, width, 1);
    ggml_tensor* b = ggml_new_tensor_2d(context.get(), GGML_TYPE_Q8_K, width, 1);
    return ggml_backend_dev_supports_op(device, ggml_mul_mat(context.get(), a, b));
}

bool bank_takes_q8k(ggml_backend_dev_t device, const Bank& bank) {
    bool any = false;
    for (const moe::ProgramOp& op : bank.program.ops) {
        const bool reads_input =
            op.a == 0 || ((op.kind == moe::OpKind::kGlu || op.kind == moe::OpKind::kMul ||
                           op.kind == moe::OpKind::kAdd) &&
                          op.b == 0);
        if (!reads_input) continue;
        if (op.kind != moe::OpKind::kMatMul) return false;
        const ggml_tensor* weights = bank.weights.get(op.role, moe::SlabPart::kWeight);
        if (depends_on_grouping(static_cast<uint32_t>(weights->type))) return false;
        if (!product_takes_q8k(device, weights->type, weights->ne[0])) return false;
        any = true;
    }
    return any;
}

class GgmlEngine final : public ExpertEngine {
public:
    GgmlEngine(ggml_backend_dev_t device, ggml_backend_ptr backend, ggml_threadpool* pool,
               std::unique_ptr<KernelRunner> runner)
        : device_(device), backend_(std::move(backend)), pool_(pool), runner_(std::move(runner)) {
        host_memory_ = ggml_backend_buft_is_host(ggml_backend_dev_buffer_type(device_));
    }
    ~GgmlEngine() override {
        backend_.reset();
        free_threads(pool_);
    }

    Result<std::shared_ptr<const Bank>> prepare(const moe::ExpertBank& meta, BankWeights weights,
                                                const moe::Program& program,
                                                kernels::NumericClass numeric) override {
        auto shape = moe::validate(program, meta);
        if (!shape) return tl::unexpected(shape.error());
        for (const moe::SlabTensor& slab : meta.tensors) {
            if (slab.part == moe::SlabPart::kWeight) continue;
            // Biases and scales are read as f32 by ggml's row-wise operations.
            if (slab.type != GGML_TYPE_F32) {
                return fail(Errc::kUnsupported, slab.name + " is not f32");
            }
        }
        auto bank = std::make_shared<Bank>(Bank{std::move(weights), program, std::move(*shape),
                                                meta.experts, g_next_bank_id.fetch_add(1)});
        PairGraph probe = build_graph(*bank, kRowF32, RowLayout::kPerPair, 1);
        for (int i = 0; i < ggml_graph_n_nodes(probe.graph); ++i) {
            const ggml_tensor* node = ggml_graph_node(probe.graph, i);
            if (!ggml_backend_dev_supports_op(device_, node)) {
                return fail(Errc::kUnsupported, std::string("device ") +
                                                    ggml_backend_dev_name(device_) +
                                                    " cannot run " + ggml_op_desc(node));
            }
        }
        bank->takes_q8k = bank_takes_q8k(device_, *bank);
        plan(*bank, numeric);
        return std::shared_ptr<const Bank>(std::move(bank));
    }

    Result<std::span<const float>> compute(const Bank& bank, uint32_t row_type, uint32_t row_count,
                                           std::span<const uint8_t> rows,
                                           std::span<const PairIn> pairs) override {
        const uint64_t bytes = row_bytes(row_type, bank.shape.input());
        if (Status ok = check(bank, row_type, row_count, rows, pairs, bytes); !ok) {
            return tl::unexpected(ok.error());
        }
        if (pairs.empty()) return std::span<const float>{};
        if (bank.plan != nullptr && runner_ != nullptr) {
            return runner_->compute(*bank.plan, row_type, row_count, rows, pairs);
        }
        return compute_graph(bank, row_type, row_count, rows, pairs);
    }

    ComputeWith with() const override {
        return runner_ != nullptr ? ComputeWith::kKernels : ComputeWith::kGraph;
    }

    Status quantise(const float* rows, uint32_t count, uint32_t width, uint8_t* out) override {
        const uint64_t bytes = row_bytes(kRowQ8K, width);
        if (bytes == 0)
            return fail(Errc::kUnsupported,
                        "rows of " + std::to_string(width) + " values do not fit Q8_K");
        for (uint32_t r = 0; r < count; ++r)
            quantise_q8k(rows + uint64_t{r} * width, width, out + r * bytes);
        return {};
    }

private:
    Result<std::span<const float>> compute_graph(const Bank& bank, uint32_t row_type,
                                                 uint32_t row_count, std::span<const uint8_t> rows,
                                                 std::span<const PairIn> pairs) {
        const uint64_t bytes = row_bytes(row_type, bank.shape.input());
        const auto count = static_cast<uint32_t>(pairs.size());
        const RowLayout layout = row_count == 1 ? RowLayout::kShared : RowLayout::kPerPair;
        auto graph = find_graph(bank, row_type, layout, count);
        if (!graph) return tl::unexpected(graph.error());
        fill(**graph, layout, rows, bytes, pairs);
        if (ggml_backend_graph_compute(backend_.get(), (*graph)->graph) != GGML_STATUS_SUCCESS) {
            return fail(Errc::kEnvironment, "the ggml device failed to compute");
        }
        const size_t floats = size_t{count} * bank.shape.output();
        if (host_memory_) {
            return std::span<const float>(static_cast<const float*>((*graph)->output->data),
                                          floats);
        }
        staging_.resize(floats);
        ggml_backend_tensor_get((*graph)->output, staging_.data(), 0, floats * sizeof(float));
        return std::span<const float>(staging_);
    }

    // Gives the bank a plan for the kernels, where there can be one. If they are to give the bits
    // of this very ggml, one row through one expert is compared first.
    void plan(Bank& bank, kernels::NumericClass numeric) {
        if (runner_ == nullptr || numeric == kernels::NumericClass::kOther) {
            bank.why_graph = runner_ == nullptr ? "kernels are off" : "another kind of backbone";
            return;
        }
        bank.why_graph = KernelPlan::obstacle(bank.program, bank.shape, bank.weights);
        if (!bank.why_graph.empty()) return;
        auto plan = std::make_shared<const KernelPlan>(
            KernelPlan::make(bank.program, bank.shape, bank.weights, numeric));
        if (numeric != numeric_class() || agrees(bank, *plan)) {
            bank.plan = std::move(plan);
            return;
        }
        bank.why_graph = "the kernels give other bits than this ggml";
        log(LogLevel::kWarn, "engine", bank.why_graph + ": not used");
    }

    bool agrees(const Bank& bank, const KernelPlan& plan) {
        std::minstd_rand random(1);
        std::uniform_real_distribution<float> uniform(-1, 1);
        std::vector<float> row(bank.shape.input());
        for (float& value : row) value = uniform(random);
        const std::span<const uint8_t> bytes(reinterpret_cast<const uint8_t*>(row.data()),
                                             row.size() * sizeof(float));
        const PairIn pair{0, 0};
        const auto kernels = runner_->compute(plan, kRowF32, 1, bytes, {&pair, 1});
        const auto graph = compute_graph(bank, kRowF32, 1, bytes, {&pair, 1});
        return graph && kernels.size() == graph->size() &&
               std::memcmp(kernels.data(), graph->data(), kernels.size_bytes()) == 0;
    }

    static Status check(const Bank& bank, uint32_t row_type, uint32_t row_count,
                        std::span<const uint8_t> rows, std::span<const PairIn> pairs,
                        uint64_t bytes) {
        if (row_type != kRowF32 && !(row_type == kRowQ8K && bank.takes_q8k)) {
            return fail(Errc::kProtocol,
                        "rows of type " + std::to_string(row_type) + " are not taken by this bank");
        }
        if (bytes == 0 || rows.size() != bytes * row_count) {
            return fail(Errc::kProtocol, std::to_string(row_count) + " rows have " +
                                             std::to_string(rows.size()) + " bytes, expected " +
                                             std::to_string(bytes * row_count));
        }
        for (const PairIn& pair : pairs) {
            if (pair.row >= row_count) {
                return fail(Errc::kProtocol, "pair names row " + std::to_string(pair.row) + " of " +
                                                 std::to_string(row_count));
            }
            if (pair.expert >= bank.experts) {
                return fail(Errc::kNotHeld, "pair names local expert " +
                                                std::to_string(pair.expert) + " of " +
                                                std::to_string(bank.experts));
            }
        }
        return {};
    }

    // Scratch memory for at least `bytes`; moving it invalidates every placed graph.
    Status grow(uint64_t bytes) {
        if (arena_ && ggml_backend_buffer_get_size(arena_.get()) >= bytes) return {};
        forget_graphs();
        arena_.reset();
        arena_.reset(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(device_),
                                                    bytes + bytes / 4));
        if (!arena_) {
            return fail(Errc::kEnvironment,
                        "out of memory: " + std::to_string(bytes) + " bytes of scratch");
        }
        return {};
    }

    Result<PairGraph*> find_graph(const Bank& bank, uint32_t row_type, RowLayout layout,
                                  uint32_t count) {
        const Key key{bank.id, row_type, layout, count};
        if (auto found = cache_.find(key); found != cache_.end()) return &found->second;
        PairGraph graph = build_graph(bank, row_type, layout, count);
        if (Status ok = grow(graph.arena_bytes); !ok) return tl::unexpected(ok.error());
        place(graph, arena_.get());
        if (count > kCachedPairsMax) {
            large_ = std::move(graph);
            return &large_;
        }
        if (cached_bytes_ > kCachedBytesMax) forget_graphs();
        cached_bytes_ += ggml_get_mem_size(graph.context.get());
        return &cache_.insert_or_assign(key, std::move(graph)).first->second;
    }

    void forget_graphs() {
        cache_.clear();
        cached_bytes_ = 0;
    }

    void fill(const PairGraph& graph, RowLayout layout, std::span<const uint8_t> rows,
              uint64_t bytes, std::span<const PairIn> pairs) {
        ids_.resize(pairs.size());
        for (size_t i = 0; i < pairs.size(); ++i) ids_[i] = static_cast<int32_t>(pairs[i].expert);
        ggml_backend_tensor_set(graph.ids, ids_.data(), 0, ids_.size() * sizeof(int32_t));
        if (layout == RowLayout::kShared) {
            ggml_backend_tensor_set(graph.input, rows.data(), 0, bytes);
        } else {
            for (size_t i = 0; i < pairs.size(); ++i) {
                ggml_backend_tensor_set(graph.input, rows.data() + pairs[i].row * bytes, i * bytes,
                                        bytes);
            }
        }
        for (const PairGraph::ScaleLeaf& scale : graph.scales) {
            scales_.resize(pairs.size());
            for (size_t i = 0; i < pairs.size(); ++i) {
                ggml_backend_tensor_get(scale.source, &scales_[i], pairs[i].expert * sizeof(float),
                                        sizeof(float));
            }
            ggml_backend_tensor_set(scale.leaf, scales_.data(), 0, scales_.size() * sizeof(float));
        }
    }

    struct Key {
        uint64_t bank;
        uint32_t row_type;
        RowLayout layout;
        uint32_t count;
        auto operator<=>(const Key&) const = default;
    };

    // Constant after construction.
    ggml_backend_dev_t device_;
    ggml_backend_ptr backend_;
    ggml_threadpool* pool_;
    std::unique_ptr<KernelRunner> runner_;  // null: graphs only
    bool host_memory_ = true;
    // Of the computing thread.
    ggml_backend_buffer_ptr arena_;
    std::map<Key, PairGraph> cache_;
    uint64_t cached_bytes_ = 0;
    PairGraph large_;
    std::vector<int32_t> ids_;
    std::vector<float> scales_;
    std::vector<float> staging_;
};

}  // namespace

uint64_t row_bytes(uint32_t row_type, uint32_t width) {
    if (row_type != kRowF32 && row_type != kRowQ8K) return 0;
    const auto type = static_cast<ggml_type>(row_type);
    if (width == 0 || width % ggml_blck_size(type) != 0) return 0;
    return ggml_row_size(type, width);
}

bool depends_on_grouping(uint32_t type) {
    switch (type) {
        case GGML_TYPE_IQ2_XXS:
        case GGML_TYPE_IQ2_XS:
        case GGML_TYPE_IQ2_S:
        case GGML_TYPE_IQ3_XXS:
        case GGML_TYPE_IQ3_S:
        case GGML_TYPE_IQ1_S:
        case GGML_TYPE_IQ1_M:
        case GGML_TYPE_IQ4_XS:
            return true;
        default:
            return false;
    }
}

uint64_t Bank::scratch_bytes_per_pair() const {
    uint64_t floats = 0;
    for (uint32_t width : shape.width) floats += width;
    return floats * sizeof(float) + sizeof(int32_t);
}

std::string Bank::computed_by() const {
    if (plan == nullptr) return "ggml: " + why_graph;
    return std::string("kernels ") + kernels::available_kernels().begin[0]->name + " as " +
           numeric_class_name(plan->numeric());
}

Result<std::unique_ptr<ExpertEngine>> ExpertEngine::make(ggml_backend_device* device,
                                                         uint32_t threads, ComputeWith with,
                                                         const kernels::Kernels* kernels) {
    KVASIR_CHECK(device != nullptr && threads >= 1);
    ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
    if (!backend) {
        return fail(Errc::kEnvironment,
                    std::string("ggml device ") + ggml_backend_dev_name(device) + " did not start");
    }
    ggml_threadpool* pool = nullptr;
    std::unique_ptr<KernelRunner> runner;
    if (ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU) {
        pool = set_threads(backend.get(), static_cast<int>(threads));
        if (with == ComputeWith::kKernels)
            runner = std::make_unique<KernelRunner>(threads, kernels);
    }
    return std::unique_ptr<ExpertEngine>(
        new GgmlEngine(device, std::move(backend), pool, std::move(runner)));
}

}  // namespace kvasir::engine
