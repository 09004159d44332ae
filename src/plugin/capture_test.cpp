// What capture() makes of hand-made graphs, and which nodes the backend claims.
#include "plugin/capture.hpp"

#include <gtest/gtest.h>

#include <string>

#include "ggml-backend-impl.h"
#include "ggml-cpp.h"
#include "ggml-impl.h"
#include "ggml.h"
#include "moe/classify.hpp"
#include "plugin/device.hpp"

namespace kvasir::plugin {
namespace {

using moe::OpKind;
using moe::SlabPart;
using moe::SlabRole;

constexpr int64_t kIn = 64, kHidden = 32, kExperts = 4, kUsed = 2, kTokens = 3;

moe::ProgramOp op(OpKind kind, SlabRole role, uint8_t a, uint8_t b = 0, uint8_t sub = 0) {
    moe::ProgramOp out;
    out.kind = kind;
    out.role = role;
    out.a = a;
    out.b = b;
    out.sub = sub;
    return out;
}
moe::ProgramOp product(SlabRole role, uint8_t a) {
    return op(OpKind::kMatMul, role, a);
}
moe::ProgramOp glu(uint8_t a, uint8_t b, moe::GluKind kind = moe::GluKind::kSwiglu) {
    return op(OpKind::kGlu, SlabRole::kGate, a, b, static_cast<uint8_t>(kind));
}

class Graph {
public:
    Graph() {
        const ggml_init_params params = {size_t{4} << 20, nullptr, true};
        context_.reset(ggml_init(params));
        graph_ = ggml_new_graph(context_.get());
        x = ggml_new_tensor_3d(c(), GGML_TYPE_F32, kIn, 1, kTokens);
        ids = ggml_new_tensor_2d(c(), GGML_TYPE_I32, kUsed, kTokens);
    }
    ggml_context* c() const { return context_.get(); }
    ggml_cgraph* get() const { return graph_; }

    ggml_tensor* weight(const std::string& name, int64_t in, int64_t out) const {
        ggml_tensor* tensor = ggml_new_tensor_3d(c(), GGML_TYPE_F32, in, out, kExperts);
        ggml_set_name(tensor, name.c_str());
        return tensor;
    }
    ggml_tensor* bias(const std::string& name, int64_t out) const {
        ggml_tensor* tensor = ggml_new_tensor_2d(c(), GGML_TYPE_F32, out, kExperts);
        ggml_set_name(tensor, name.c_str());
        return tensor;
    }
    ggml_tensor* product_of(const std::string& name, ggml_tensor* a, int64_t out) const {
        return ggml_mul_mat_id(c(), weight(name, a->ne[0], out), a, ids);
    }
    ggml_tensor* gate(int layer = 0) const { return product_of(blk(layer, "gate"), x, kHidden); }
    ggml_tensor* up(int layer = 0) const { return product_of(blk(layer, "up"), x, kHidden); }
    ggml_tensor* down(ggml_tensor* h, int layer = 0) const {
        return product_of(blk(layer, "down"), h, kIn);
    }
    ggml_tensor* scaled(ggml_tensor* value, const std::string& name) const {
        ggml_tensor* scale = ggml_new_tensor_1d(c(), GGML_TYPE_F32, kExperts);
        ggml_set_name(scale, name.c_str());
        ggml_tensor* all = ggml_repeat_4d(c(), ggml_reshape_3d(c(), scale, 1, kExperts, 1), 1,
                                          kExperts, kTokens, 1);
        return ggml_mul(c(), value, ggml_get_rows(c(), all, ids));
    }
    static std::string blk(int layer, const std::string& role) {
        return "blk." + std::to_string(layer) + ".ffn_" + role + "_exps.weight";
    }
    Result<std::vector<Captured>> captured(ggml_tensor* output) {
        ggml_build_forward_expand(graph_, output);
        return capture(graph_);
    }
    // As the scheduler does it: a view of the nodes up to and including `last`, of a graph that
    // goes on.
    Result<std::vector<Captured>> captured_until(ggml_tensor* last) {
        int end = 0;
        while (ggml_graph_node(graph_, end) != last) ++end;
        ggml_cgraph view = ggml_graph_view(graph_, 0, end + 1);
        return capture(&view);
    }

    ggml_tensor* x;
    ggml_tensor* ids;

private:
    ggml_context_ptr context_;
    ggml_cgraph* graph_;
};

void expect_program(const Result<std::vector<Captured>>& got,
                    const std::vector<moe::ProgramOp>& ops) {
    ASSERT_TRUE(got) << got.error().detail;
    ASSERT_EQ(got->size(), 1u);
    ASSERT_EQ(got->front().program.ops.size(), ops.size());
    for (size_t i = 0; i < ops.size(); ++i)
        EXPECT_EQ(got->front().program.ops[i], ops[i]) << "operation " << i;
}

void expect_local(const Result<std::vector<Captured>>& got, const std::string& word) {
    ASSERT_FALSE(got);
    EXPECT_EQ(got.error().code, Errc::kUnsupported);
    EXPECT_NE(got.error().detail.find(word), std::string::npos) << got.error().detail;
}

TEST(Capture, Swiglu) {
    Graph g;
    ggml_tensor* gate = g.gate();
    ggml_tensor* out = g.down(ggml_swiglu_split(g.c(), gate, g.up()));
    const auto got = g.captured(out);
    expect_program(got, {product(SlabRole::kGate, 0), product(SlabRole::kUp, 0), glu(1, 2),
                         product(SlabRole::kDown, 3)});
    const Captured& bank = got->front();
    EXPECT_EQ(bank.layer, (LayerKey{0, 0}));
    EXPECT_EQ(bank.input, g.x);
    EXPECT_EQ(bank.ids, g.ids);
    EXPECT_EQ(bank.output, out);
    EXPECT_EQ(bank.weights[engine::BankWeights::index(SlabRole::kGate, SlabPart::kWeight)],
              gate->src[0]);
    EXPECT_EQ(bank.weights[engine::BankWeights::index(SlabRole::kGateUp, SlabPart::kWeight)],
              nullptr);
}

TEST(Capture, FusedWithViews) {
    Graph g;
    ggml_tensor* both = g.product_of(Graph::blk(5, "gate_up"), g.x, 2 * kHidden);
    const auto half = [&](int64_t begin) {
        return ggml_view_3d(g.c(), both, kHidden, kUsed, kTokens, both->nb[1], both->nb[2],
                            static_cast<size_t>(begin) * sizeof(float));
    };
    ggml_tensor* low = half(0);
    ggml_tensor* high = half(kHidden);
    const auto got = g.captured(g.down(ggml_swiglu_split(g.c(), low, high), 5));
    moe::ProgramOp view_low = op(OpKind::kView, SlabRole::kGate, 1);
    view_low.view_count = kHidden;
    moe::ProgramOp view_high = view_low;
    view_high.view_begin = kHidden;
    expect_program(got, {product(SlabRole::kGateUp, 0), view_low, view_high, glu(2, 3),
                         product(SlabRole::kDown, 4)});
}

TEST(Capture, BiasesScalesClampsAndOai) {
    Graph g;
    ggml_tensor* gate =
        ggml_add_id(g.c(), g.gate(), g.bias("blk.0.ffn_gate_exps.bias", kHidden), g.ids);
    ggml_tensor* up = ggml_clamp(g.c(), g.scaled(g.up(), "blk.0.ffn_up_exps.scale"), -7, 7);
    ggml_tensor* down = g.down(ggml_swiglu_oai(g.c(), gate, up, 1.702f, 7));
    ggml_tensor* out = ggml_add_id(g.c(), down, g.bias("blk.0.ffn_down_exps.bias", kIn), g.ids);
    moe::ProgramOp clamp = op(OpKind::kClamp, SlabRole::kGate, 4);
    clamp.f0 = -7;
    clamp.f1 = 7;
    moe::ProgramOp oai = glu(2, 5, moe::GluKind::kSwigluOai);
    oai.f0 = 1.702f;
    oai.f1 = 7;
    expect_program(g.captured(out),
                   {product(SlabRole::kGate, 0), op(OpKind::kAddBias, SlabRole::kGate, 1),
                    product(SlabRole::kUp, 0), op(OpKind::kMulScale, SlabRole::kUp, 3), clamp, oai,
                    product(SlabRole::kDown, 6), op(OpKind::kAddBias, SlabRole::kDown, 7)});
}

TEST(Capture, SquaredRelu) {
    Graph g;
    expect_program(
        g.captured(g.down(ggml_sqr(g.c(), ggml_relu(g.c(), g.up())))),
        {product(SlabRole::kUp, 0),
         op(OpKind::kUnary, SlabRole::kGate, 1, 0, static_cast<uint8_t>(moe::UnaryKind::kRelu)),
         op(OpKind::kSqr, SlabRole::kGate, 2), product(SlabRole::kDown, 3)});
}

TEST(Capture, TwoBanksOfOneSplit) {
    Graph g;
    ggml_tensor* first = g.down(ggml_swiglu_split(g.c(), g.gate(), g.up()));
    ggml_build_forward_expand(g.get(), first);
    const auto got = g.captured(g.down(ggml_swiglu_split(g.c(), g.gate(1), g.up(1)), 1));
    ASSERT_TRUE(got) << got.error().detail;
    ASSERT_EQ(got->size(), 2u);
    EXPECT_EQ((*got)[0].layer.layer, 0u);
    EXPECT_EQ((*got)[1].layer.layer, 1u);
    EXPECT_EQ((*got)[0].program, (*got)[1].program);
}

TEST(Capture, PartialGraphsStayLocal) {
    {
        Graph g;
        expect_local(g.captured(g.gate()), "no last product");
    }
    {
        Graph g;
        expect_local(
            g.captured(g.down(ggml_new_tensor_3d(g.c(), GGML_TYPE_F32, kHidden, kUsed, kTokens))),
            "last product");
    }
    {
        Graph g;
        ggml_build_forward_expand(g.get(), g.gate());  // read by nobody here
        expect_local(g.captured(g.down(ggml_relu(g.c(), g.up()))), "leaves the chain");
    }
    {
        Graph g;
        ggml_tensor* two = ggml_new_tensor_3d(g.c(), GGML_TYPE_F32, kIn, 1, kTokens);
        ggml_tensor* up = g.product_of(Graph::blk(0, "up"), two, kHidden);
        expect_local(g.captured(g.down(ggml_swiglu_split(g.c(), g.gate(), up))),
                     "two different inputs");
    }
}

TEST(Capture, OtherOperationsAndNamesStayLocal) {
    {
        Graph g;
        expect_local(g.captured(g.down(ggml_elu(g.c(), g.up()))), "not on the list");
    }
    {
        Graph g;
        expect_local(g.captured(g.product_of("blk.0.attn_q.weight", g.x, kIn)), "other weights");
    }
    {
        Graph g;  // another layer's down
        expect_local(g.captured(g.down(ggml_relu(g.c(), g.up(0)), 1)), "");
    }
    {
        Graph g;
        ggml_tensor* h =
            ggml_add_id(g.c(), g.up(), g.bias("blk.1.ffn_up_exps.bias", kHidden), g.ids);
        expect_local(g.captured(g.down(h)), "another layer");
    }
}

// Whatever reads a value that workers do not return keeps the layer here.
TEST(Capture, IntermediateValuesThatAreWantedElsewhereStayLocal) {
    {
        Graph g;
        ggml_tensor* h = ggml_swiglu_split(g.c(), g.gate(), g.up());
        ggml_set_output(h);
        expect_local(g.captured(g.down(h)), "is an output");
    }
    {
        Graph g;  // the result is an output too
        ggml_tensor* gate = g.gate();
        ggml_set_output(gate);
        ggml_tensor* out = g.down(ggml_swiglu_split(g.c(), gate, g.up()));
        ggml_set_output(out);
        expect_local(g.captured(out), "is an output");
    }
    {
        Graph g;  // a low-rank adapter of the last product, computed in another split
        ggml_tensor* h = ggml_swiglu_split(g.c(), g.gate(), g.up());
        ggml_tensor* out = g.down(h);
        ggml_tensor* low = g.product_of("blk.0.ffn_down_exps.weight.lora_a", h, 8);
        ggml_tensor* add = g.product_of("blk.0.ffn_down_exps.weight.lora_b", low, kIn);
        ggml_build_forward_expand(g.get(), ggml_add(g.c(), out, add));
        expect_local(g.captured_until(out), "is read elsewhere");
    }
    {
        Graph g;  // a view of an intermediate value
        ggml_tensor* gate = g.gate();
        ggml_tensor* out = g.down(ggml_swiglu_split(g.c(), gate, g.up()));
        ggml_build_forward_expand(g.get(), out);
        ggml_build_forward_expand(g.get(), ggml_sum(g.c(), ggml_view_1d(g.c(), gate, 4, 0)));
        expect_local(g.captured_until(out), "is read elsewhere");
    }
    Graph g;  // the result may be read by anybody
    ggml_tensor* out = g.down(ggml_swiglu_split(g.c(), g.gate(), g.up()));
    ggml_set_output(out);
    ggml_build_forward_expand(
        g.get(), ggml_sum(g.c(), ggml_add(g.c(), out,
                                          ggml_view_3d(g.c(), out, kIn, kUsed, kTokens, out->nb[1],
                                                       out->nb[2], 0))));
    EXPECT_TRUE(g.captured_until(out));
}

TEST(Claims, OnlyTheExpertFfn) {
    Graph g;
    ggml_tensor* gate = g.gate();
    ggml_tensor* up = g.up();
    ggml_tensor* h = ggml_swiglu_split(g.c(), gate, up);
    ggml_tensor* out = g.down(h);
    ggml_tensor* weights = ggml_new_tensor_3d(g.c(), GGML_TYPE_F32, 1, kUsed, kTokens);
    ggml_tensor* dense = ggml_new_tensor_2d(g.c(), GGML_TYPE_F32, kIn, kIn);
    ggml_tensor* plain = ggml_mul_mat(g.c(), dense, ggml_reshape_2d(g.c(), g.x, kIn, kTokens));
    ggml_tensor* lora = g.product_of("blk.0.ffn_up_exps.weight.lora_a", g.x, kHidden);
    ggml_tensor* gate_bias = g.bias("blk.0.ffn_gate_exps.bias", kHidden);
    ggml_tensor* other_bias = g.bias("blk.0.attn_q.bias", kHidden);
    struct Case {
        const char* what;
        ggml_tensor* node;
        bool ours;
    };
    const Case cases[] = {
        {"gate", gate, true},
        {"GLU", h, true},
        {"down", out, true},
        {"bias of gate", ggml_add_id(g.c(), gate, gate_bias, g.ids), true},
        {"clamp of up", ggml_clamp(g.c(), up, -1, 1), true},
        {"product of two chains", ggml_mul(g.c(), ggml_sigmoid(g.c(), gate), up), true},
        {"scale of the result", g.scaled(out, "blk.0.ffn_down_exps.scale"), true},
        {"weighting", ggml_mul(g.c(), out, weights), false},
        {"weighting of the activation", ggml_mul(g.c(), h, weights), false},
        {"sum of the result", ggml_add(g.c(), out, out), false},
        {"activation of the result", ggml_relu(g.c(), out), false},
        {"router", plain, false},
        {"activation of a dense value", ggml_silu(g.c(), plain), false},
        {"dense GLU", ggml_swiglu_split(g.c(), plain, plain), false},
        {"softmax of the router", ggml_soft_max(g.c(), plain), false},
        {"norm", ggml_rms_norm(g.c(), gate, 1e-5f), false},
        {"adapter", lora, false},
        {"sum with an adapter", ggml_add(g.c(), up, lora), false},
        {"foreign bias", ggml_add_id(g.c(), gate, other_bias, g.ids), false},
    };
    for (const Case& c : cases) EXPECT_EQ(is_expert_op(c.node), c.ours) << c.what;
}

TEST(Names, OnlyTheExpertsOwn) {
    const auto name = moe::parse_expert_name("blk.7.ffn_gate_up_exps.weight");
    ASSERT_TRUE(name);
    EXPECT_EQ(name->key, (LayerKey{7, 0}));
    EXPECT_EQ(name->role, SlabRole::kGateUp);
    EXPECT_EQ(moe::parse_expert_name("blk.3.ffn_down_chexps.weight")->key, (LayerKey{3, 1}));
    EXPECT_EQ(moe::parse_expert_name("blk.3.ffn_down_exps.bias")->part, SlabPart::kBias);
    EXPECT_EQ(moe::parse_expert_name("blk.3.ffn_down_exps.scale")->part, SlabPart::kScale);
    for (const char* other :
         {"", "blk.", "blk.1", "blk.1.", "blk.x.ffn_up_exps.weight", "blk.-1.ffn_up_exps.weight",
          "blk.99999999999.ffn_up_exps.weight", "blk.1.ffn_up_exps", "blk.1.ffn_up_exps.",
          "blk.1.ffn_up_exps.weight.lora_a", "blk.1.ffn_up_shexp.weight", "blk.1.ffn_up.weight",
          "blk.1.ffn_gate_inp.weight", "blk.1.ffn_up_exps.weigh", "a.blk.1.ffn_up_exps.weight"}) {
        EXPECT_FALSE(moe::parse_expert_name(other)) << other;
    }
}

}  // namespace
}  // namespace kvasir::plugin
