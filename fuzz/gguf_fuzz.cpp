// Fuzz target: the GGUF reader and everything that inspect derives from a header.
//
// The input is read twice: as a whole file, and as the beginning of a much larger one (so that
// tensor data can "exist" without being in the input). What is accepted must keep the promises that
// the slice cutter and the engine rely on: slabs inside the file, every tensor in one class.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <utility>
#include <vector>

#include "moe/inspect.hpp"
#include "moe/model.hpp"
#include "moe/segments.hpp"

namespace {

using namespace kvasir;
using namespace kvasir::moe;

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "gguf_fuzz: %s\n", what);
    std::abort();
}

void check_header(const GgufHeader& header) {
    for (const GgufTensor& tensor : header.tensors) {
        require(tensor.dims >= 1 && tensor.dims <= kGgufDimsMax, "dims");
        for (const uint64_t size : tensor.ne) require(size >= 1, "ne");
        require(type_info(tensor.type).has_value(), "type");
        require(tensor.bytes > 0 && tensor.bytes <= header.file_bytes &&
                    tensor.offset <= header.file_bytes - tensor.bytes,
                "tensor outside the file");
    }
    for (const auto& [name, key] : header.keys) {
        require(key.offset + key.bytes <= header.file_bytes, "key outside the file");
    }
}

void check_model(const Model& model) {
    uint64_t tensors = 0;
    uint64_t classified = 0;
    for (const GgufHeader& shard : model.shards) tensors += shard.tensors.size();
    for (const ClassTotal& total : model.totals) classified += total.tensors;
    require(tensors == classified, "a tensor in no class or in two");
    uint64_t bytes = 0;
    for (const ExpertBank& bank : model.banks) {
        require(bank.experts > 0 && bank.global_ids.size() == bank.experts, "global ids");
        bytes += bank.expert_bytes() * bank.experts;
    }
    require(bytes == model.bytes_experts(), "slabs do not add up to the expert tensors");
    require(make_report(model).slabs.ok(), "a slab fails its check");
}

void run(std::span<const uint8_t> data, uint64_t file_bytes) {
    auto header = parse_gguf_header(data, file_bytes, "fuzz.gguf");
    if (!header) {
        require(!header.error().detail.empty(), "an error without words");
        return;
    }
    check_header(*header);
    std::vector<GgufHeader> shards;
    shards.push_back(std::move(*header));
    const auto model = lay_out_model(std::move(shards));
    if (!model) return;
    check_model(*model);
    const InspectReport report = make_report(*model);
    require(!inspect_text(report, true).empty() && !inspect_json(report).empty(), "report");
    const auto all = all_segments(*model);
    if (model->experts_total() > 4096 || all.empty()) return;
    const auto parsed = parse_segments(to_string(all), *model);
    require(parsed && *parsed == all, "segments do not round trip");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const std::span<const uint8_t> input(data, size);
    run(input, size);
    run(input, uint64_t{1} << 32);
    return 0;
}
