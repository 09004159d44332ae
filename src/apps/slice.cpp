// `kvasir slice`: flags and the report; the cutting is moe/slice.
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include <fmt/core.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "apps/commands.hpp"
#include "apps/console.hpp"
#include "apps/progress.hpp"
#include "moe/manifest.hpp"
#include "moe/segments.hpp"
#include "moe/slice.hpp"
#include "moe/verify.hpp"

namespace kvasir::apps {
namespace {

struct SliceFlags {
    std::string model;
    std::string experts;
    std::string output;
    std::string cache_dir;
    bool force = false;
    bool no_model_id = false;
    bool json = false;
};

// The digests to put into the slice: none if nobody wants the whole model read.
Result<std::optional<moe::Manifest>> get_manifest(const moe::Model& model,
                                                  const SliceFlags& flags) {
    if (model.is_slice) {
        auto own = moe::slice_manifest(model);
        if (!own) return tl::unexpected(std::move(own.error()));
        return std::optional(std::move(*own));
    }
    if (flags.no_model_id) return moe::cached_manifest(model, flags.cache_dir);
    ProgressLine line("hashing " + model.shards.front().path);
    auto manifest = moe::load_or_compute_manifest(
        model, flags.cache_dir, [&line](uint64_t done, uint64_t all) { line.show(done, all); });
    if (!manifest) return tl::unexpected(std::move(manifest.error()));
    return std::optional(std::move(*manifest));
}

// Before minutes of hashing; write_slice() checks again when it renames.
Status check_output(const SliceFlags& flags) {
    std::error_code ignored;
    if (flags.force || !std::filesystem::exists(flags.output, ignored)) return {};
    return fail(Errc::kUsage,
                flags.output + ": exists; pass --force to replace it, or another name");
}

struct Outcome {
    moe::SliceReport report;
    std::string segments;
    std::string model_id;  // hex or empty
};

Result<Outcome> run(const SliceFlags& flags) {
    auto model = moe::open_model(flags.model);
    if (!model) return tl::unexpected(std::move(model.error()));
    auto segments = moe::parse_segments(flags.experts, *model);
    if (!segments) return tl::unexpected(std::move(segments.error()));
    if (auto status = check_output(flags); !status) {
        return tl::unexpected(std::move(status.error()));
    }
    auto manifest = get_manifest(*model, flags);
    if (!manifest) return tl::unexpected(std::move(manifest.error()));
    const bool has_manifest = manifest->has_value();
    ProgressLine line("copying to " + flags.output);
    const moe::SliceOptions options{
        .replace = flags.force,
        .observer = [&line](moe::SliceStep, uint64_t done, uint64_t all) { line.show(done, all); }};
    auto report = has_manifest
                      ? moe::write_slice(*model, **manifest, *segments, flags.output, options)
                      : moe::write_slice(*model, *segments, flags.output, options);
    if (!report) return tl::unexpected(std::move(report.error()));
    const bool has_id = has_manifest && (*manifest)->has_model_id();
    return Outcome{*report, moe::to_string(*segments),
                   has_id ? to_hex((*manifest)->model_id) : std::string()};
}

void print(const SliceFlags& flags, const Outcome& outcome) {
    if (flags.json) {
        nlohmann::ordered_json out;
        out["slice"] = flags.output;
        out["segments"] = outcome.segments;
        out["experts"] = outcome.report.experts;
        out["bytes_file"] = outcome.report.bytes_file;
        out["bytes_slabs"] = outcome.report.bytes_slabs;
        out["ranges"] = outcome.report.ranges;
        out["model_id"] = outcome.model_id.empty() ? nlohmann::ordered_json()
                                                   : nlohmann::ordered_json(outcome.model_id);
        using Json = nlohmann::ordered_json;
        fmt::print("{}\n", out.dump(2, ' ', false, Json::error_handler_t::replace));
        return;
    }
    fmt::print("{}: {} experts ({}), {:.1f} MB in {} byte ranges\nmodel id {}\n",
               terminal_text(flags.output), outcome.report.experts, outcome.segments,
               static_cast<double>(outcome.report.bytes_slabs) / 1e6, outcome.report.ranges,
               outcome.model_id.empty() ? "not known (--no-model-id)" : outcome.model_id);
}

}  // namespace

void add_slice(CLI::App& app, int& exit_code) {
    CLI::App* command = app.add_subcommand(
        "slice", "Cut some experts of a model into a GGUF file of their own, byte for byte");
    auto flags = std::make_shared<SliceFlags>();
    command->add_option("model", flags->model, "GGUF file; of a split model, any part")->required();
    command
        ->add_option("--experts", flags->experts,
                     "which experts: LAYERS:EXPERTS,... like 0-3:0-15,7:200-255 or 5:*")
        ->required();
    command->add_option("-o,--output", flags->output, "the slice to write")->required();
    command->add_flag("-f,--force", flags->force, "replace an existing file");
    command->add_flag(
        "--no-model-id", flags->no_model_id,
        "do not read the whole model (once) to learn its id; hash only what is copied");
    command->add_option("--cache-dir", flags->cache_dir,
                        "where manifests are kept (default: $XDG_CACHE_HOME/kvasir)");
    command->add_flag("--json", flags->json, "JSON for programs");
    command->callback([flags, &exit_code] {
        const auto outcome = run(*flags);
        if (!outcome) {
            exit_code = report_error(outcome.error());
            return;
        }
        print(*flags, *outcome);
    });
}

}  // namespace kvasir::apps
