// Fuzz target: expert programs from a peer, as far as ggml's graph.
//
// What decodes must encode to the same bytes; what validates over a toy bank must be computable,
// for one row and for several, since ggml aborts on shapes that do not fit.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <vector>

#include "engine/engine_testing.hpp"

namespace {

using namespace kvasir;
namespace toy = engine::testing;

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "program_fuzz: %s\n", what);
    std::abort();
}

struct World {
    World() {
        auto spec = toy::toy_spec();
        spec.layers = 1;
        spec.arch = "gpt-oss";  // has biases
        spec.type = 8;
        model = std::make_unique<toy::Toy>(toy::write_toy(folder, "toy.gguf", spec));
        engine = toy::make_engine();
    }
    toy::Folder folder;
    std::unique_ptr<toy::Toy> model;
    std::unique_ptr<engine::ExpertEngine> engine;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static World world;
    auto program = moe::decode_program({data, size});
    if (!program) {
        require(!program.error().detail.empty(), "an error without words");
        return 0;
    }
    const auto again = moe::encode(*program);
    require(std::equal(again.begin(), again.end(), data, data + size),
            "two encodings of one program");
    const moe::ExpertBank& meta = world.model->model.banks.front();
    const auto shape = moe::validate(*program, meta);
    if (!shape) return 0;
    auto weights = engine::BankWeights::map(meta, world.model->mapping, toy::cpu());
    require(weights.has_value(), "weights");
    auto bank = world.engine->prepare(meta, std::move(*weights), *program);
    if (!bank) return 0;
    const std::vector<float> rows(size_t{3} * shape->input(), 0.5f);
    for (const uint32_t row_count : {1u, 3u}) {
        const std::vector<engine::PairIn> pairs = {{0, 1}, {row_count - 1, 7}, {0, 1}};
        auto out = world.engine->compute(
            **bank, engine::kRowF32, row_count,
            toy::as_bytes(rows).first(size_t{row_count} * shape->input() * sizeof(float)), pairs);
        require(out.has_value() && out->size() == pairs.size() * shape->output(), "not computable");
    }
    return 0;
}
