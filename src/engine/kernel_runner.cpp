#include "engine/kernel_runner.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "base/check.hpp"
#include "engine/kernels/gelu.hpp"
#include "engine/pool.hpp"
#include "engine/q8k.hpp"

namespace kvasir::engine {
namespace {

using kernels::NumericClass;
using kernels::Row;
using kernels::RowKind;

constexpr uint64_t kLine = 64;
constexpr uint32_t kGroupRowsMax = 64;      // rows of an expert that go through the phases together
constexpr uint64_t kRunBytes = 128 * 1024;  // of weights: what a thread takes at a time

uint64_t lines(uint64_t bytes) {
    return (bytes + kLine - 1) / kLine * kLine;
}

// Where the parts of a quantised row are.
struct RowLayoutBytes {
    explicit RowLayoutBytes(const QuantisedRows& rows) {
        const uint64_t blocks = rows.width / kernels::block_width(rows.arranged_for);
        const bool super = kernels::row_kind(rows.arranged_for) == RowKind::kQ8_K;
        d = lines(rows.width);
        sums = d + lines(blocks * sizeof(float));
        pairs = sums + (super ? lines(blocks * 16 * sizeof(int16_t)) : 0);
        bytes = pairs + (super ? lines(blocks * 8 * sizeof(int16_t)) : 0);
    }
    Row at(uint8_t* base) const {
        return {reinterpret_cast<int8_t*>(base), reinterpret_cast<float*>(base + d),
                reinterpret_cast<int16_t*>(base + sums), reinterpret_cast<int16_t*>(base + pairs)};
    }
    uint64_t d, sums, pairs, bytes;
};

// Memory in cache lines, given out from the front.
class Arena {
public:
    void reset(uint64_t bytes) {
        const uint64_t needed = bytes / kLine + 1;
        if (lines_.size() < needed) lines_.resize(needed);
        used_ = 0;
    }
    uint8_t* take(uint64_t bytes) {
        uint8_t* at = reinterpret_cast<uint8_t*>(lines_.data()) + used_;
        used_ += lines(bytes);
        KVASIR_DCHECK(used_ <= lines_.size() * kLine);
        return at;
    }

private:
    struct alignas(kLine) Line {
        uint8_t bytes[kLine];
    };
    std::vector<Line> lines_;
    uint64_t used_ = 0;
};

void quantise(const kernels::Kernels& kernels, const QuantisedRows& rows, const float* x,
              const Row& out) {
    auto* q = const_cast<int8_t*>(out.q);
    auto* d = const_cast<float*>(out.d);
    if (kernels::row_kind(rows.arranged_for) == RowKind::kQ8_0) {
        kernels.elementwise.quantise_q8_0(rows.width, x, q, d);
    } else {
        kernels.elementwise.quantise_q8_k(rows.width, x, q, d, const_cast<int16_t*>(out.sums),
                                          const_cast<int16_t*>(out.pairs));
    }
    kernels.arrange(rows.arranged_for, rows.width, q);
}

// A row of block_q8_K as it travels: f32 d, int8 q[256], int16 sums[16].
void take_apart(const kernels::Kernels& kernels, const QuantisedRows& rows, const uint8_t* in,
                const Row& out) {
    auto* q = const_cast<int8_t*>(out.q);
    auto* sums = const_cast<int16_t*>(out.sums);
    auto* pairs = const_cast<int16_t*>(out.pairs);
    const uint32_t blocks = rows.width / kQ8KBlock;
    for (uint32_t b = 0; b < blocks; ++b, in += kQ8KBlockBytes) {
        const_cast<float*>(out.d)[b] = kernels::load_f32(in);
        std::memcpy(q + b * kQ8KBlock, in + 4, kQ8KBlock);
        std::memcpy(sums + b * 16, in + 4 + kQ8KBlock, 16 * sizeof(int16_t));
    }
    for (uint32_t i = 0; i < blocks * 8; ++i) {
        pairs[i] = static_cast<int16_t>(sums[2 * i] + sums[2 * i + 1]);
    }
    kernels.arrange(rows.arranged_for, rows.width, q);
}

struct RowOp {
    const RowStep& step;
    const kernels::Kernels& kernels;
    NumericClass numeric;
    uint32_t expert;

    void unary(const float* x, float* y) const {
        const bool v4 = numeric == NumericClass::kX86V4;
        switch (static_cast<moe::UnaryKind>(step.op.sub)) {
            case moe::UnaryKind::kSilu:
                return (v4 ? kernels.elementwise.silu_v4 : kernels.elementwise.silu_v3)(
                    step.width, x, nullptr, y);
            case moe::UnaryKind::kGelu:
                return kernels::gelu(step.width, x, nullptr, y);
            default:  // kRelu: the plan has no others
                for (uint32_t i = 0; i < step.width; ++i) y[i] = x[i] > 0.0f ? x[i] : 0.0f;
        }
    }

    void glu(const float* x, const float* g, float* y) const {
        const bool v4 = numeric == NumericClass::kX86V4;
        switch (static_cast<moe::GluKind>(step.op.sub)) {
            case moe::GluKind::kSwiglu:
                return (v4 ? kernels.elementwise.swiglu_v4 : kernels.elementwise.swiglu_v3)(
                    step.width, x, g, y);
            case moe::GluKind::kSwigluOai:
                return kernels.elementwise.swiglu_oai(step.width, x, g, step.op.f0, step.op.f1, y);
            case moe::GluKind::kGeglu:
                return kernels::gelu(step.width, x, g, y);
            default:  // kReglu: the plan has no others
                for (uint32_t i = 0; i < step.width; ++i) y[i] = x[i] > 0.0f ? x[i] * g[i] : 0.0f;
        }
    }

    const float* table() const {
        return reinterpret_cast<const float*>(step.table + expert * step.expert_stride);
    }

    // a, b: the operands' rows.
    void run(const float* a, const float* b, float* y) const {
        const moe::ProgramOp& op = step.op;
        const uint32_t n = step.width;
        switch (op.kind) {
            case moe::OpKind::kAddBias:
                for (uint32_t i = 0; i < n; ++i) y[i] = a[i] + table()[i];
                break;
            case moe::OpKind::kMulScale:
                for (uint32_t i = 0; i < n; ++i) y[i] = a[i] * table()[0];
                break;
            case moe::OpKind::kUnary:
                return unary(a, y);
            case moe::OpKind::kGlu:
                return glu(a, b, y);
            case moe::OpKind::kMul:
                for (uint32_t i = 0; i < n; ++i) y[i] = a[i] * b[i];
                break;
            case moe::OpKind::kAdd:
                for (uint32_t i = 0; i < n; ++i) y[i] = a[i] + b[i];
                break;
            case moe::OpKind::kScale:
                if (op.f1 == 0.0f) {
                    for (uint32_t i = 0; i < n; ++i) y[i] = a[i] * op.f0;
                } else {
                    for (uint32_t i = 0; i < n; ++i) y[i] = std::fma(a[i], op.f0, op.f1);
                }
                break;
            case moe::OpKind::kClamp:
                for (uint32_t i = 0; i < n; ++i) {
                    const float low = a[i] < op.f1 ? a[i] : op.f1;
                    y[i] = low > op.f0 ? low : op.f0;
                }
                break;
            case moe::OpKind::kSqr:
                for (uint32_t i = 0; i < n; ++i) y[i] = a[i] * a[i];
                break;
            case moe::OpKind::kView:
                std::memcpy(y, a + op.view_begin, n * sizeof(float));
                break;
            case moe::OpKind::kMatMul:
                KVASIR_CHECK(false);
        }
    }
};

}  // namespace

struct KernelRunner::Scratch {
    explicit Scratch(uint32_t threads) : pool(threads) {}
    Pool pool;
    Arena shared;  // the input's rows, all groups' rows where several threads run
    Arena group;   // one group's rows where one thread runs
    std::vector<float> out;
    std::vector<uint32_t> order;   // pairs by expert
    std::vector<uint32_t> counts;  // rows of each expert
};

// One call of compute().
class KernelRunner::Call {
public:
    Call(const KernelPlan& plan, const kernels::Kernels& kernels, Scratch& scratch,
         std::span<const PairIn> pairs)
        : plan_(plan), kernels_(kernels), scratch_(scratch), pairs_(pairs) {
        for (const QuantisedRows& input : plan.inputs()) layouts_.emplace_back(input);
    }

    void sort() {
        uint32_t experts = 0;
        for (const PairIn& pair : pairs_) experts = std::max(experts, pair.expert + 1);
        std::vector<uint32_t>& counts = scratch_.counts;
        counts.assign(experts + 1, 0);
        for (const PairIn& pair : pairs_) ++counts[pair.expert + 1];
        for (uint32_t e = 0; e < experts; ++e) counts[e + 1] += counts[e];
        scratch_.order.resize(pairs_.size());
        for (uint32_t i = 0; i < pairs_.size(); ++i) {
            scratch_.order[counts[pairs_[i].expert]++] = i;
        }
        // Now counts[e] is the end of expert e in the order.
        for (uint32_t begin = 0; begin < pairs_.size();) {
            const uint32_t expert = pairs_[scratch_.order[begin]].expert;
            const uint32_t end = counts[expert];
            const uint32_t expert_rows = end - begin;
            for (; begin < end; begin += std::min(kGroupRowsMax, end - begin)) {
                groups_.push_back(
                    {expert, expert_rows, begin, std::min(kGroupRowsMax, end - begin), {}, {}});
            }
        }
    }

    uint64_t group_bytes(uint32_t rows) const {
        uint64_t bytes = 0;
        for (size_t r = 1; r < plan_.width().size(); ++r) {
            bytes += lines(uint64_t{rows} * plan_.width()[r] * sizeof(float));
        }
        for (size_t i = 0; i < layouts_.size(); ++i) {
            if (plan_.inputs()[i].reg != 0) bytes += rows * layouts_[i].bytes;
        }
        return bytes;
    }

    uint64_t input_bytes(uint32_t row_count) const {
        uint64_t bytes = 0;
        for (size_t i = 0; i < layouts_.size(); ++i) {
            if (plan_.inputs()[i].reg == 0) bytes += row_count * layouts_[i].bytes;
        }
        return bytes;
    }

    void prepare_input(uint32_t row_type, uint32_t row_count, std::span<const uint8_t> rows) {
        const uint64_t stride = rows.size() / row_count;
        input_rows_.resize(layouts_.size());
        std::vector<bool> wanted(row_count);
        for (const PairIn& pair : pairs_) wanted[pair.row] = true;
        for (size_t i = 0; i < layouts_.size(); ++i) {
            const QuantisedRows& input = plan_.inputs()[i];
            if (input.reg != 0) continue;
            input_rows_[i].resize(row_count);
            for (uint32_t r = 0; r < row_count; ++r) {
                if (!wanted[r]) continue;
                const Row row = layouts_[i].at(scratch_.shared.take(layouts_[i].bytes));
                const uint8_t* in = rows.data() + r * stride;
                if (row_type == kRowQ8K) {
                    take_apart(kernels_, input, in, row);
                } else {
                    aligned_.resize(input.width);
                    std::memcpy(aligned_.data(), in, input.width * sizeof(float));
                    quantise(kernels_, input, aligned_.data(), row);
                }
                input_rows_[i][r] = row;
            }
        }
    }

    void run_one_thread(float* out) {
        uint32_t most = 0;
        for (const Group& group : groups_) most = std::max(most, group.rows);
        for (Group& group : groups_) {
            scratch_.group.reset(group_bytes(most));
            place(group, scratch_.group);
            for (const Phase& phase : plan_.phases()) {
                for (const ProductStep& step : phase.products) {
                    multiply(group, step, 0, step.width_out);
                }
                follow(group, phase);
            }
            scatter(group, out);
        }
    }

    void run_threads(float* out) {
        for (Group& group : groups_) place(group, scratch_.shared);
        std::vector<Run> runs;
        state_ = std::make_unique<State[]>(groups_.size() * plan_.phases().size());
        for (uint32_t p = 0; p < plan_.phases().size(); ++p) {
            for (uint32_t g = 0; g < groups_.size(); ++g) add_runs(p, g, runs);
        }
        const std::function<void(uint32_t)> task = [&](uint32_t i) {
            const Run& run = runs[i];
            if (run.phase > 0) wait_for(state(run.phase - 1, run.group));
            Group& group = groups_[run.group];
            const Phase& phase = plan_.phases()[run.phase];
            multiply(group, phase.products[run.product], run.begin, run.end);
            State& mine = state(run.phase, run.group);
            if (mine.left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
            follow(group, phase);
            if (run.phase + 1 == plan_.phases().size()) scatter(group, out);
            mine.done.store(1, std::memory_order_release);
            mine.done.notify_all();
        };
        scratch_.pool.run(static_cast<uint32_t>(runs.size()), task);
    }

    // Waking a thread takes longer than multiplying a run of weights.
    bool worth_threads() const {
        uint64_t bytes = 0;
        for (const Phase& phase : plan_.phases()) {
            for (const ProductStep& step : phase.products) {
                bytes += step.row_stride * step.width_out;
            }
        }
        return bytes * pairs_.size() > kRunBytes;
    }

    uint64_t all_groups_bytes() const {
        uint64_t bytes = 0;
        for (const Group& group : groups_) bytes += group_bytes(group.rows);
        return bytes;
    }

private:
    // Rows of one expert that go through the phases together.
    struct Group {
        uint32_t expert;
        uint32_t expert_rows;  // in all groups
        uint32_t begin;        // in the order by expert
        uint32_t rows;
        std::vector<float*> registers;
        std::vector<std::vector<Row>> inputs;  // by index into plan.inputs()
    };
    // A run of weight rows of one product.
    struct Run {
        uint32_t phase, group, product, begin, end;
    };
    // Of one phase of one group.
    struct State {
        std::atomic<uint32_t> left{0};  // runs
        std::atomic<uint32_t> done{0};  // and what follows them
    };

    State& state(uint32_t phase, uint32_t group) { return state_[phase * groups_.size() + group]; }

    static void wait_for(State& state) {
        while (state.done.load(std::memory_order_acquire) == 0) {
            state.done.wait(0, std::memory_order_acquire);
        }
    }

    void add_runs(uint32_t p, uint32_t g, std::vector<Run>& runs) {
        const Phase& phase = plan_.phases()[p];
        uint32_t count = 0;
        for (uint32_t i = 0; i < phase.products.size(); ++i) {
            const ProductStep& step = phase.products[i];
            const auto wanted =
                static_cast<uint32_t>(std::max<uint64_t>(1, kRunBytes / step.row_stride));
            const uint32_t pieces = (step.width_out + wanted - 1) / wanted;
            const uint32_t piece = (step.width_out + pieces - 1) / pieces;
            for (uint32_t begin = 0; begin < step.width_out; begin += piece) {
                runs.push_back({p, g, i, begin, std::min(begin + piece, step.width_out)});
                ++count;
            }
        }
        state(p, g).left.store(count, std::memory_order_relaxed);
    }

    void place(Group& group, Arena& arena) {
        group.registers.assign(plan_.width().size(), nullptr);
        for (size_t r = 1; r < plan_.width().size(); ++r) {
            group.registers[r] = reinterpret_cast<float*>(
                arena.take(uint64_t{group.rows} * plan_.width()[r] * sizeof(float)));
        }
        group.inputs.assign(layouts_.size(), {});
        for (size_t i = 0; i < layouts_.size(); ++i) {
            group.inputs[i].reserve(group.rows);
            for (uint32_t k = 0; k < group.rows; ++k) {
                if (plan_.inputs()[i].reg == 0) {
                    const uint32_t row = pairs_[scratch_.order[group.begin + k]].row;
                    group.inputs[i].push_back(input_rows_[i][row]);
                } else {
                    group.inputs[i].push_back(layouts_[i].at(arena.take(layouts_[i].bytes)));
                }
            }
        }
    }

    // Weight rows begin .. end of a product, for all rows of a group.
    void multiply(const Group& group, const ProductStep& step, uint32_t begin, uint32_t end) const {
        const uint8_t* weights =
            step.weights + group.expert * step.expert_stride + begin * step.row_stride;
        const bool panel = kernels::takes_panel(step.type, step.width_out, group.expert_rows);
        const kernels::DotRows dot =
            panel ? kernels_.dot_panel : kernels_.dot[kernels::index_of(step.type)];
        dot(step.width_in, weights, step.row_stride, end - begin, group.inputs[step.input].data(),
            group.rows, group.registers[step.out] + begin, step.width_out);
    }

    // What comes after the products of a phase.
    void follow(const Group& group, const Phase& phase) const {
        for (const RowStep& step : phase.rows) {
            const RowOp op{step, kernels_, plan_.numeric(), group.expert};
            // Operations of one operand have register 0 as the other, which has no floats here.
            const uint8_t other = step.op.b == 0 ? step.op.a : step.op.b;
            const uint32_t width_a = plan_.width()[step.op.a], width_b = plan_.width()[other];
            for (uint32_t k = 0; k < group.rows; ++k) {
                op.run(group.registers[step.op.a] + uint64_t{k} * width_a,
                       group.registers[other] + uint64_t{k} * width_b,
                       group.registers[step.out] + uint64_t{k} * step.width);
            }
        }
        for (uint32_t i : phase.to_quantise) {
            const QuantisedRows& input = plan_.inputs()[i];
            for (uint32_t k = 0; k < group.rows; ++k) {
                quantise(kernels_, input,
                         group.registers[input.reg] + uint64_t{k} * plan_.width()[input.reg],
                         group.inputs[i][k]);
            }
        }
    }

    void scatter(const Group& group, float* out) const {
        const uint64_t width = plan_.width().back();
        for (uint32_t k = 0; k < group.rows; ++k) {
            std::memcpy(out + scratch_.order[group.begin + k] * width,
                        group.registers.back() + k * width, width * sizeof(float));
        }
    }

    const KernelPlan& plan_;
    const kernels::Kernels& kernels_;
    Scratch& scratch_;
    std::span<const PairIn> pairs_;
    std::vector<RowLayoutBytes> layouts_;  // of plan.inputs()
    std::vector<std::vector<Row>> input_rows_;
    std::vector<float> aligned_;
    std::vector<Group> groups_;
    std::unique_ptr<State[]> state_;
};

KernelRunner::KernelRunner(uint32_t threads, const kernels::Kernels* kernels)
    : kernels_(kernels != nullptr ? kernels : kernels::available_kernels().begin[0]),
      threads_(threads),
      scratch_(std::make_unique<Scratch>(threads)) {}

KernelRunner::~KernelRunner() = default;

std::span<const float> KernelRunner::compute(const KernelPlan& plan, uint32_t row_type,
                                             uint32_t row_count, std::span<const uint8_t> rows,
                                             std::span<const PairIn> pairs) {
    Call call(plan, *kernels_, *scratch_, pairs);
    call.sort();
    const bool several = threads_ > 1 && call.worth_threads();
    scratch_->shared.reset(call.input_bytes(row_count) + (several ? call.all_groups_bytes() : 0));
    scratch_->out.resize(pairs.size() * plan.width().back());
    call.prepare_input(row_type, row_count, rows);
    if (several) {
        call.run_threads(scratch_->out.data());
    } else {
        call.run_one_thread(scratch_->out.data());
    }
    return scratch_->out;
}

}  // namespace kvasir::engine
