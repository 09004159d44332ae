// `kvasir inspect`: flags only; the analysis is moe/inspect.
#include <algorithm>
#include <cstdio>
#include <memory>

#include <CLI/CLI.hpp>

#include "apps/commands.hpp"
#include "apps/console.hpp"
#include "engine/kernels/weights.hpp"
#include "moe/inspect.hpp"

namespace kvasir::apps {
namespace {

bool has_kernels(const moe::ExpertBank& bank) {
    return std::all_of(bank.tensors.begin(), bank.tensors.end(), [](const auto& tensor) {
        if (tensor.part != moe::SlabPart::kWeight) return true;
        return engine::kernels::covers(static_cast<engine::kernels::WeightType>(tensor.type),
                                       tensor.n_in);
    });
}

}  // namespace

void add_inspect(CLI::App& app, int& exit_code) {
    CLI::App* command = app.add_subcommand(
        "inspect", "Show a model at tensor level: its experts, their bytes, the dense rest");
    auto options = std::make_shared<moe::InspectOptions>();
    options->has_kernels = has_kernels;
    command->add_option("model", options->path, "GGUF file; of a split model, any part")
        ->required();
    command->add_flag("--json", options->json, "JSON for programs");
    command->add_flag("--per-layer", options->per_layer, "list every layer in the table");
    command->callback([options, &exit_code] {
        const auto text = moe::run_inspect(*options);
        if (!text) {
            exit_code = report_error(text.error());
            return;
        }
        const bool is_written =
            std::fwrite(text->data(), 1, text->size(), stdout) == text->size() &&
            std::fflush(stdout) == 0;
        if (!is_written) {
            exit_code = report_error({Errc::kIo, "standard output: cannot write the report"});
        }
    });
}

}  // namespace kvasir::apps
