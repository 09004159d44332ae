// `kvasir verify`: flags and the report; the checks are moe/verify.
#include <cstdio>
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
#include "moe/verify.hpp"

namespace kvasir::apps {
namespace {

struct VerifyFlags {
    std::string slice;
    std::string model;
    std::string cache_dir;
    bool json = false;
};

struct Outcome {
    moe::VerifyReport report;
    std::string segments;
    std::string model_id;
    bool compared_bytes = false;
    bool compared_id = false;
};

Status compare_with_model(const VerifyFlags& flags, const moe::Model& slice, Outcome& outcome) {
    const auto model = moe::open_model(flags.model);
    if (!model) return tl::unexpected(model.error());
    ProgressLine line("comparing with " + flags.model);
    const auto report = moe::verify_slice_against(
        slice, *model, [&line](uint64_t done, uint64_t all) { line.show(done, all); });
    if (!report) return tl::unexpected(report.error());
    outcome.compared_bytes = true;
    // The bytes have been compared; the id is only checked where it costs nothing more.
    const auto manifest = moe::cached_manifest(*model, flags.cache_dir);
    if (slice.slice_model_id.empty() || !manifest) return {};
    if (to_hex(manifest->model_id) != slice.slice_model_id) {
        return fail(Errc::kMismatch, flags.slice + ": key 'kvasir.model_id' is not the id of " +
                                         flags.model +
                                         ", though these experts are equal; cut it "
                                         "again from the model it is to serve");
    }
    outcome.compared_id = true;
    return {};
}

Result<Outcome> run(const VerifyFlags& flags) {
    const auto slice = moe::open_model(flags.slice);
    if (!slice) return tl::unexpected(slice.error());
    Outcome outcome;
    {
        ProgressLine line("hashing " + flags.slice);
        const auto report = moe::verify_slice(
            *slice, {.threads = 0,
                     .progress = [&line](uint64_t done, uint64_t all) { line.show(done, all); }});
        if (!report) return tl::unexpected(report.error());
        outcome.report = *report;
    }
    outcome.segments = moe::to_string(moe::all_segments(*slice));
    outcome.model_id = slice->slice_model_id;
    if (flags.model.empty()) return outcome;
    auto status = compare_with_model(flags, *slice, outcome);
    if (!status) return tl::unexpected(std::move(status.error()));
    return outcome;
}

void print_json(const VerifyFlags& flags, const Result<Outcome>& outcome) {
    nlohmann::ordered_json out;
    out["slice"] = flags.slice;
    out["ok"] = outcome.has_value();
    if (outcome) {
        out["segments"] = outcome->segments;
        out["slabs"] = outcome->report.slabs;
        out["bytes"] = outcome->report.bytes;
        out["model_id"] = outcome->model_id.empty() ? nlohmann::ordered_json()
                                                    : nlohmann::ordered_json(outcome->model_id);
        out["compared_with_model"] = outcome->compared_bytes;
        out["compared_model_id"] = outcome->compared_id;
    } else {
        out["error"] = errc_info(outcome.error().code).name;
        out["detail"] = outcome.error().detail;
    }
    using Json = nlohmann::ordered_json;
    fmt::print("{}\n", out.dump(2, ' ', false, Json::error_handler_t::replace));
}

void print_text(const VerifyFlags& flags, const Outcome& outcome) {
    fmt::print("{}: good: {} slabs ({}), {:.1f} MB match their digests\n",
               terminal_text(flags.slice), outcome.report.slabs, outcome.segments,
               static_cast<double>(outcome.report.bytes) / 1e6);
    if (outcome.compared_bytes) {
        fmt::print("equal to {}, byte for byte{}\n", terminal_text(flags.model),
                   outcome.compared_id ? "; model id too" : "");
    }
}

}  // namespace

void add_verify(CLI::App& app, int& exit_code) {
    CLI::App* command = app.add_subcommand(
        "verify", "Check a slice against its own digests, and byte for byte against the model");
    auto flags = std::make_shared<VerifyFlags>();
    command->add_option("slice", flags->slice, "a file made by kvasir slice")->required();
    command->add_option("--model", flags->model, "the model to compare with");
    command->add_option("--cache-dir", flags->cache_dir,
                        "where manifests are kept (default: $XDG_CACHE_HOME/kvasir)");
    command->add_flag("--json", flags->json, "JSON for programs");
    command->callback([flags, &exit_code] {
        const auto outcome = run(*flags);
        if (flags->json) print_json(*flags, outcome);
        if (!outcome) {
            exit_code = report_error(outcome.error());
            return;
        }
        if (!flags->json) print_text(*flags, *outcome);
    });
}

}  // namespace kvasir::apps
