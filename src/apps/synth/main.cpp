// kvasir-synth: makes GGUF model files for tests and benchmarks. Flags and wiring only; the work is
// in src/synth. Exit status: 0, 2 (usage), 4 (environment), 1 (other).
#include <CLI/CLI.hpp>

#include <chrono>
#include <cstdio>
#include <optional>
#include <string>

#include "base/result.hpp"
#include "synth/spec.hpp"
#include "synth/writer.hpp"

namespace {

using kvasir::Errc;
using kvasir::Result;
using kvasir::synth::SynthSpec;

struct Flags {
    std::string preset = "tiny";
    std::string output;
    std::optional<std::string> arch, type, type_down, type_dense, fused_mask, dense_mask, dense_key;
    std::optional<uint32_t> layers, embd, ff, experts, used, vocab, shared, dense_first;
    uint32_t splits = 1;
    uint32_t alignment = 32;
    uint32_t pad_byte = 0;
    uint64_t seed = 1;
    std::string order = "file";
    bool fused = false, fused_swap = false, bias = false, scale = false, sparse = false;
    bool mtp = false, no_mtp = false, no_sync = false;
};

void add_flags(CLI::App& app, Flags& flags) {
    app.add_option("--preset", flags.preset, "tiny (default) or qwen3.5-122b")->option_text("P");
    app.add_option("-o,--output", flags.output, "file to write (splits: its stem)")->required();
    app.add_option(
        "--layers", flags.layers,
        "trunk layers (tiny: 4; 122b: the first N of 48, then without the MTP layer unless --mtp)");
    app.add_flag("--mtp", flags.mtp, "add the MTP (nextn) layer (default for the whole 122b)");
    app.add_flag("--no-mtp", flags.no_mtp, "leave the MTP layer out");
    app.add_option("--seed", flags.seed, "same flags and seed, same bytes (default 1)");
    app.add_flag("--sparse", flags.sparse, "real header, tensor data as holes");
    app.add_flag("--no-sync", flags.no_sync, "do not wait for the disk (scratch files)");
    app.add_option("--splits", flags.splits, "write N files <stem>-00001-of-0000N.gguf");
    app.add_option("--alignment", flags.alignment, "general.alignment (default 32)");
    app.add_option("--tensor-order", flags.order, "file (default), reverse or shuffle");
    app.add_option("--pad-byte", flags.pad_byte, "value of the bytes between tensors (default 0)");

    auto* tiny = app.add_option_group("tiny preset");
    std::string archs = "architecture:";
    for (const auto& arch : kvasir::synth::architectures()) {
        archs += "\n" + std::string(arch.name) + ": " + std::string(arch.what);
    }
    std::string types = "type of gate/up experts (default q4_k):";
    for (const auto& name : kvasir::synth::type_names()) types += " " + name;
    tiny->add_option("--arch", flags.arch, archs);
    tiny->add_option("--type", flags.type, types);
    tiny->add_option("--type-down", flags.type_down, "type of down experts (default: as --type)");
    tiny->add_option(
        "--type-dense", flags.type_dense,
        "type of all other matrices (default f16, also where rows are not whole blocks)");
    tiny->add_option("--embd", flags.embd, "hidden width (256)");
    tiny->add_option("--ff", flags.ff, "width of one expert (256)");
    tiny->add_option("--experts", flags.experts, "experts per layer (8)");
    tiny->add_option("--used", flags.used, "experts per token (2)");
    tiny->add_option("--vocab", flags.vocab, "vocabulary (512)");
    tiny->add_option("--shared", flags.shared, "shared experts");
    tiny->add_flag("--fused", flags.fused,
                   "gate and up experts in one tensor, same values as apart");
    tiny->add_option("--fused-mask", flags.fused_mask, "the same for chosen layers, e.g. 0101");
    tiny->add_flag("--fused-swap", flags.fused_swap,
                   "exchange the halves of fused tensors (a wrong model)");
    tiny->add_flag("--bias", flags.bias, "per-expert biases (gpt-oss always has them)");
    tiny->add_flag("--scale", flags.scale, "per-expert scales");
    tiny->add_option("--dense-first", flags.dense_first, "leading layers with a dense FFN");
    tiny->add_option("--dense-mask", flags.dense_mask,
                     "dense layers, one 0 or 1 a layer, e.g. 1010");
    tiny->add_option("--dense-key", flags.dense_key, "leading_dense_block_count to claim, or none");
}

tl::unexpected<kvasir::Error> usage(std::string detail) {
    return kvasir::fail(Errc::kUsage, std::move(detail));
}

// The masks, whose length is the number of layers.
kvasir::Status apply_masks(const Flags& flags, SynthSpec& spec) {
    if (flags.fused && flags.fused_mask) return usage("give --fused or --fused-mask, not both");
    if (flags.dense_first && flags.dense_mask)
        return usage("give --dense-first or --dense-mask, not both");
    if (spec.layers > kvasir::synth::kLayersMax) return {};  // check_spec() says so
    if (flags.fused) spec.fused.assign(spec.layers, '1');
    if (flags.fused_mask) {
        auto mask = kvasir::synth::parse_mask("--fused-mask", *flags.fused_mask, spec.layers);
        if (!mask) return tl::unexpected(mask.error());
        spec.fused = *mask;
    }
    if (flags.dense_first) {
        if (*flags.dense_first > spec.layers) {
            return usage("--dense-first " + std::to_string(*flags.dense_first) +
                         " is more than the " + std::to_string(spec.layers) + " layers");
        }
        spec.dense = std::string(*flags.dense_first, '1') +
                     std::string(spec.layers - *flags.dense_first, '0');
    }
    if (flags.dense_mask) {
        auto mask = kvasir::synth::parse_mask("--dense-mask", *flags.dense_mask, spec.layers);
        if (!mask) return tl::unexpected(mask.error());
        spec.dense = *mask;
    }
    return {};
}

kvasir::Status apply_types(const Flags& flags, SynthSpec& spec) {
    const auto apply = [](const std::optional<std::string>& text, auto& target) -> kvasir::Status {
        if (!text) return {};
        auto type = kvasir::synth::parse_type(*text);
        if (!type) return tl::unexpected(type.error());
        target = *type;
        return {};
    };
    if (auto ok = apply(flags.type, spec.type); !ok) return ok;
    if (auto ok = apply(flags.type_down, spec.type_down); !ok) return ok;
    return apply(flags.type_dense, spec.type_dense);
}

kvasir::Status apply_order(const Flags& flags, SynthSpec& spec) {
    if (flags.order == "reverse") spec.order = kvasir::synth::TensorOrder::kReverse;
    if (flags.order == "shuffle") spec.order = kvasir::synth::TensorOrder::kShuffle;
    if (flags.order != "file" && flags.order != "reverse" && flags.order != "shuffle") {
        return usage("--tensor-order is file, reverse or shuffle");
    }
    if (flags.pad_byte > 255) return usage("--pad-byte is one byte, 0 to 255");
    spec.pad_byte = static_cast<uint8_t>(flags.pad_byte);
    if (!flags.dense_key) return {};
    if (*flags.dense_key == "none") {
        spec.dense_key = -1;
        return {};
    }
    if (flags.dense_key->empty() || flags.dense_key->size() > 4 ||
        flags.dense_key->find_first_not_of("0123456789") != std::string::npos) {
        return usage("--dense-key is a number or none");
    }
    spec.dense_key = std::stol(*flags.dense_key);
    return {};
}

Result<SynthSpec> make_spec(const Flags& flags) {
    SynthSpec spec;
    if (flags.preset == "qwen3.5-122b") {
        spec = kvasir::synth::qwen35_122b();
        spec.mtp = !flags.layers;
    } else if (flags.preset != "tiny") {
        return usage("--preset is tiny or qwen3.5-122b");
    }
    if (flags.mtp && flags.no_mtp) return usage("give --mtp or --no-mtp, not both");
    if (flags.mtp || flags.no_mtp) spec.mtp = flags.mtp;
    if (flags.layers) spec.layers = *flags.layers;
    if (flags.arch) spec.arch = *flags.arch;
    if (flags.embd) spec.embd = *flags.embd;
    if (flags.ff) spec.ff = *flags.ff;
    if (flags.experts) spec.experts = *flags.experts;
    if (flags.used) spec.used = *flags.used;
    if (flags.vocab) spec.vocab = *flags.vocab;
    if (flags.shared) spec.shared = *flags.shared;
    spec.splits = flags.splits;
    spec.alignment = flags.alignment;
    spec.seed = flags.seed;
    spec.fused_swap = flags.fused_swap;
    spec.bias = flags.bias;
    spec.scale = flags.scale;
    spec.sparse = flags.sparse;
    spec.sync = !flags.no_sync;
    if (auto ok = apply_types(flags, spec); !ok) return tl::unexpected(ok.error());
    if (auto ok = apply_masks(flags, spec); !ok) return tl::unexpected(ok.error());
    if (auto ok = apply_order(flags, spec); !ok) return tl::unexpected(ok.error());
    return spec;
}

int report_error(const kvasir::Error& error) {
    std::fprintf(stderr, "kvasir-synth: %s\n", error.detail.c_str());
    return kvasir::errc_info(error.code).exit_code;
}

}  // namespace

int main(int argc, char** argv) {
    CLI::App app(
        "Makes GGUF model files for tests and benchmarks: random weights, real structure.");
    Flags flags;
    add_flags(app, flags);
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
        return app.exit(error) == 0 ? 0 : kvasir::errc_info(Errc::kUsage).exit_code;
    }
    const auto spec = make_spec(flags);
    if (!spec) return report_error(spec.error());
    const auto start = std::chrono::steady_clock::now();
    const auto report = write_synth(*spec, flags.output);
    if (!report) return report_error(report.error());
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    for (const std::string& path : report->paths) std::printf("%s\n", path.c_str());
    std::fprintf(stderr, "%s: %llu tensors, %.3f GB (%.3f GB on disk), %.2f s\n",
                 spec->arch.c_str(), static_cast<unsigned long long>(report->tensors),
                 static_cast<double>(report->bytes) / 1e9,
                 static_cast<double>(report->bytes_on_disk) / 1e9, seconds);
    return 0;
}
