#include "moe/inspect.hpp"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <map>
#include <set>
#include <string_view>

#include <nlohmann/json.hpp>

#include "base/log.hpp"
#include "base/units.hpp"

namespace kvasir::moe {
namespace {

constexpr uint64_t kMegabyte = 1'000'000;

[[gnu::format(printf, 1, 2)]] std::string print(const char* format, ...) {
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    const int length = vsnprintf(line, sizeof(line), format, arguments);
    va_end(arguments);
    return {line, static_cast<size_t>(std::clamp(length, 0, static_cast<int>(sizeof(line)) - 1))};
}

std::string types_of(const ExpertBank& bank) {
    std::string out;
    for (const SlabTensor& tensor : bank.tensors) {
        if (tensor.part != SlabPart::kWeight) continue;
        const auto info = type_info(tensor.type);
        out += (out.empty() ? "" : " ") + std::string(info ? info->name : "?");
    }
    return out;
}

// Checks the slabs against the tensor tables again, apart from the code that laid them out.
SlabReport check_slabs(const Model& model) {
    std::map<std::string_view, const GgufTensor*> tensors;
    for (const GgufHeader& shard : model.shards) {
        for (const GgufTensor& tensor : shard.tensors) tensors.emplace(tensor.name, &tensor);
    }
    SlabReport report;
    for (const ExpertBank& bank : model.banks) {
        for (const SlabTensor& slab : bank.tensors) {
            report.tensors += 1;
            report.slabs += bank.experts;
            const auto found = tensors.find(slab.name);
            const auto info = type_info(slab.type);
            const uint64_t bytes = slab.slab_bytes * bank.experts;
            if (found == tensors.end() || found->second->bytes != bytes ||
                found->second->offset != slab.offset) {
                report.not_contiguous += bank.experts;
            }
            if (!info || slab.slab_bytes % info->block_bytes != 0) {
                report.not_block_aligned += bank.experts;
            }
            if (slab.offset + bytes > model.shards[slab.shard].file_bytes) {
                report.outside_file += bank.experts;
            }
        }
    }
    return report;
}

BudgetReport fill_budget(const std::vector<LayerReport>& banks, uint64_t budget) {
    BudgetReport report;
    report.budget_bytes = budget;
    std::map<uint64_t, uint64_t> experts_by_bytes;
    std::map<uint32_t, uint64_t> bytes_of_layer;
    for (const LayerReport& bank : banks) {
        experts_by_bytes[bank.expert_bytes] += bank.experts;
        bytes_of_layer[bank.key.layer] += bank.bytes;
    }
    for (const auto& [bytes, count] : experts_by_bytes) {
        const uint64_t fits =
            std::min(count, (budget - report.experts_bytes) / std::max(bytes, uint64_t{1}));
        report.experts += fits;
        report.experts_bytes += fits * bytes;
    }
    std::multiset<uint64_t> layers;
    for (const auto& [layer, bytes] : bytes_of_layer) layers.insert(bytes);
    for (const uint64_t bytes : layers) {
        if (bytes > budget - report.layers_bytes) break;
        report.layers += 1;
        report.layers_bytes += bytes;
    }
    return report;
}

const char* class_label(TensorClass tensor_class) {
    switch (tensor_class) {
        case TensorClass::kExpert:
            return "experts";
        case TensorClass::kAttention:
            return "attention";
        case TensorClass::kRecurrent:
            return "recurrent";
        case TensorClass::kNorm:
            return "norms";
        case TensorClass::kRouter:
            return "router";
        case TensorClass::kSharedExpert:
            return "shared expert";
        case TensorClass::kDenseFfn:
            return "dense FFN";
        case TensorClass::kEmbedding:
            return "embeddings";
        case TensorClass::kOutput:
            return "output";
        case TensorClass::kOther:
            return "other";
        case TensorClass::kCount_:
            break;
    }
    return "?";
}

double share(uint64_t part, uint64_t whole) {
    return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

// "86 %", but "0.4 %" where whole numbers would say nothing.
std::string percent_text(double fraction) {
    const double percent = fraction * 100;
    return print(percent >= 9.95 || percent == 0 ? "%.0f %%"
                 : percent >= 0.1                ? "%.1f %%"
                                                 : "%.3f %%",
                 percent);
}

// Which weight types are left to ggml, on whichever machine.
std::string kernels_text(const InspectReport& report) {
    uint64_t without = 0;
    std::set<std::string> types;
    for (const LayerReport& layer : report.per_layer) {
        if (layer.has_kernels.value_or(true)) continue;
        ++without;
        types.insert(layer.types);
    }
    if (report.per_layer.empty() || !report.per_layer.front().has_kernels) return {};
    // The activations between the products are the program's, which llama.cpp's graph shows later.
    if (without == 0)
        return "kernels     for all weights; the activation is checked when a worker joins\n";
    std::string out = "kernels     none for " + count_text(without) + " layers:";
    for (const std::string& type : types) out += " (" + type + ")";
    return out + "; ggml computes those\n";
}

std::string head_text(const InspectReport& report) {
    std::string out = "model       " + printable(report.path, 400);
    if (report.files > 1) out += " and " + count_text(report.files - 1) + " more files";
    out += "\n";
    if (!report.name.empty()) out += "name        " + printable(report.name) + "\n";
    out += "arch        " + printable(report.arch) + ", hidden width " +
           std::to_string(report.n_embd) + "\n";
    if (!report.slice_model_id.empty()) {
        out += "slice of    " + report.slice_model_id + "\n";
    }
    if (report.layers == 0) {
        return out + "experts     none: not a Mixture-of-Experts model\nbytes       " +
               format_bytes(static_cast<double>(report.bytes_total)) + "\n";
    }
    out += "layers      " + count_text(report.layers) + " layers with experts, of " +
           count_text(report.layers_total);
    if (report.mtp_layers > 0) out += " (" + count_text(report.mtp_layers) + " MTP)";
    out += "\nexperts     " + count_text(report.experts_per_layer) + " experts per layer, " +
           count_text(report.experts_used) + " used; " + count_text(report.experts_total) +
           " experts in all\none expert  " + format_bytes(report.expert_bytes_mean);
    if (report.expert_bytes_min != report.expert_bytes_max) {
        out += " mean (" + format_bytes(static_cast<double>(report.expert_bytes_min)) + " .. " +
               format_bytes(static_cast<double>(report.expert_bytes_max)) + ")";
    }
    return out + "\nshare       " + percent_text(report.share_experts) +
           " of the bytes are experts: " + format_bytes(static_cast<double>(report.bytes_experts)) +
           " of " + format_bytes(static_cast<double>(report.bytes_total)) + "\n" +
           kernels_text(report);
}

std::string classes_text(const InspectReport& report) {
    std::string out = "\nwhere the bytes are    tensors       bytes     share\n";
    for (size_t i = 0; i < report.classes.size(); ++i) {
        const ClassTotal& total = report.classes[i];
        if (total.tensors == 0) continue;
        out += print("  %-18s %9s %11s %9s\n", class_label(static_cast<TensorClass>(i)),
                     count_text(total.tensors).c_str(),
                     format_bytes(static_cast<double>(total.bytes)).c_str(),
                     percent_text(share(total.bytes, report.bytes_total)).c_str());
    }
    return out;
}

std::string budgets_text(const InspectReport& report) {
    std::string out = "\na node with            experts   or whole layers\n";
    for (const BudgetReport& budget : report.budgets) {
        out += print("  %-18s %9s %17s\n",
                     (count_text(budget.budget_bytes / kMegabyte) + " MB").c_str(),
                     count_text(budget.experts).c_str(), count_text(budget.layers).c_str());
    }
    return out;
}

std::string slabs_text(const SlabReport& slabs) {
    std::string out = "\nslabs       " + count_text(slabs.slabs) + " in " +
                      count_text(slabs.tensors) + " tensors: ";
    if (slabs.ok()) return out + "contiguous, block-aligned, inside the file\n";
    return out + count_text(slabs.not_contiguous) + " not contiguous, " +
           count_text(slabs.not_block_aligned) + " not block-aligned, " +
           count_text(slabs.outside_file) + " outside the file\n";
}

// Neighbouring layers that are alike share a line, unless every layer was asked for.
std::string layers_text(const InspectReport& report, bool per_layer) {
    const auto alike = [](const LayerReport& a, const LayerReport& b) {
        return a.key.bank == b.key.bank && a.experts == b.experts && a.is_mtp == b.is_mtp &&
               a.layout == b.layout && a.types == b.types && a.expert_bytes == b.expert_bytes;
    };
    std::string out = "\nlayer       experts  one expert       layer  layout and types\n";
    for (const uint32_t bank : {0u, 1u}) {
        std::vector<const LayerReport*> layers;
        for (const LayerReport& layer : report.per_layer) {
            if (layer.key.bank == bank) layers.push_back(&layer);
        }
        for (size_t first = 0, next = 0; first < layers.size(); first = next) {
            next = first + 1;
            while (!per_layer && next < layers.size() && alike(*layers[first], *layers[next]) &&
                   layers[next]->key.layer == layers[next - 1]->key.layer + 1) {
                ++next;
            }
            const LayerReport& layer = *layers[first];
            std::string label = next - first > 1 ? std::to_string(layer.key.layer) + "-" : "";
            label += to_string(layers[next - 1]->key) + (layer.is_mtp ? " MTP" : "");
            out += print("%-12s %6s %11s %11s  ", label.c_str(), count_text(layer.experts).c_str(),
                         format_bytes(static_cast<double>(layer.expert_bytes)).c_str(),
                         format_bytes(static_cast<double>(layer.bytes)).c_str());
            out += layer.layout + ": " + layer.types + "\n";
        }
    }
    return out;
}

}  // namespace

InspectReport make_report(const Model& model, const HasKernels& has_kernels) {
    InspectReport report;
    report.path = model.shards.front().path;
    report.name = model.name;
    report.arch = model.arch;
    report.slice_model_id = model.slice_model_id;
    report.files = model.shards.size();
    report.n_embd = model.n_embd;
    report.layers_total = model.layers_total;
    report.mtp_layers = model.mtp_layers;
    report.experts_used = model.experts_used;
    report.experts_total = model.experts_total();
    report.bytes_total = model.bytes_total();
    report.bytes_experts = model.bytes_experts();
    report.share_experts = share(report.bytes_experts, report.bytes_total);
    report.classes = model.totals;
    report.warnings = model.warnings;
    report.slabs = check_slabs(model);
    std::set<uint32_t> layers;
    for (const ExpertBank& bank : model.banks) {
        LayerReport layer;
        layer.key = bank.key;
        layer.experts = bank.experts;
        layer.is_mtp = bank.is_mtp;
        layer.layout = bank.layout_name();
        layer.types = types_of(bank);
        layer.expert_bytes = bank.expert_bytes();
        layer.bytes = layer.expert_bytes * bank.experts;
        if (has_kernels) layer.has_kernels = has_kernels(bank);
        const bool is_first = report.per_layer.empty();
        report.expert_bytes_min =
            is_first ? layer.expert_bytes : std::min(report.expert_bytes_min, layer.expert_bytes);
        report.expert_bytes_max = std::max(report.expert_bytes_max, layer.expert_bytes);
        if (bank.key.bank == 0) {
            report.experts_per_layer = std::max(report.experts_per_layer, bank.experts);
        }
        layers.insert(bank.key.layer);
        report.per_layer.push_back(std::move(layer));
    }
    report.layers = static_cast<uint32_t>(layers.size());
    if (report.experts_total > 0) {
        report.expert_bytes_mean =
            static_cast<double>(report.bytes_experts) / static_cast<double>(report.experts_total);
        for (const uint64_t megabytes : kBudgetsMb) {
            report.budgets.push_back(fill_budget(report.per_layer, megabytes * kMegabyte));
        }
    }
    return report;
}

std::string count_text(uint64_t count) {
    std::string out = std::to_string(count);
    for (size_t at = out.size(); at > 3;) {
        at -= 3;
        out.insert(at, ",");
    }
    return out;
}

std::string inspect_text(const InspectReport& report, bool per_layer) {
    std::string out = head_text(report);
    out += classes_text(report);
    if (report.layers > 0) {
        out += budgets_text(report);
        out += layers_text(report, per_layer);
        out += slabs_text(report.slabs);
    }
    for (const std::string& warning : report.warnings)
        out += "warning     " + printable(warning) + "\n";
    return out;
}

std::string inspect_json(const InspectReport& report) {
    using nlohmann::ordered_json;
    ordered_json classes = ordered_json::object();
    for (size_t i = 0; i < report.classes.size(); ++i) {
        classes[std::string(to_string(static_cast<TensorClass>(i)))] = {
            {"tensors", report.classes[i].tensors}, {"bytes", report.classes[i].bytes}};
    }
    ordered_json layers = ordered_json::array();
    for (const LayerReport& layer : report.per_layer) {
        layers.push_back({{"layer", layer.key.layer},
                          {"bank", layer.key.bank},
                          {"experts", layer.experts},
                          {"mtp", layer.is_mtp},
                          {"layout", layer.layout},
                          {"types", layer.types},
                          {"expert_bytes", layer.expert_bytes},
                          {"bytes", layer.bytes}});
        if (layer.has_kernels) layers.back()["kernels"] = *layer.has_kernels;
    }
    ordered_json budgets = ordered_json::array();
    for (const BudgetReport& budget : report.budgets) {
        budgets.push_back({{"budget_bytes", budget.budget_bytes},
                           {"experts", budget.experts},
                           {"experts_bytes", budget.experts_bytes},
                           {"layers", budget.layers},
                           {"layers_bytes", budget.layers_bytes}});
    }
    ordered_json warnings = ordered_json::array();
    for (const std::string& warning : report.warnings) warnings.push_back(printable(warning));
    const ordered_json out = {
        {"path", printable(report.path, 400)},
        {"name", printable(report.name)},
        {"arch", printable(report.arch)},
        {"files", report.files},
        {"is_slice", !report.slice_model_id.empty()},
        {"slice_model_id", report.slice_model_id},
        {"n_embd", report.n_embd},
        {"layers", report.layers},
        {"layers_total", report.layers_total},
        {"layers_mtp", report.mtp_layers},
        {"experts_per_layer", report.experts_per_layer},
        {"experts_used", report.experts_used},
        {"experts_total", report.experts_total},
        {"bytes_total", report.bytes_total},
        {"bytes_experts", report.bytes_experts},
        {"share_experts", report.share_experts},
        {"expert_bytes_min", report.expert_bytes_min},
        {"expert_bytes_mean", report.expert_bytes_mean},
        {"expert_bytes_max", report.expert_bytes_max},
        {"classes", classes},
        {"budgets", budgets},
        {"slabs",
         {{"tensors", report.slabs.tensors},
          {"count", report.slabs.slabs},
          {"not_contiguous", report.slabs.not_contiguous},
          {"not_block_aligned", report.slabs.not_block_aligned},
          {"outside_file", report.slabs.outside_file},
          {"ok", report.slabs.ok()}}},
        {"warnings", warnings},
        {"per_layer", layers},
    };
    return out.dump(2) + "\n";
}

Result<std::string> run_inspect(const InspectOptions& options) {
    auto model = open_model(options.path);
    if (!model) return tl::unexpected<Error>(std::move(model.error()));
    const InspectReport report = make_report(*model, options.has_kernels);
    return options.json ? inspect_json(report) : inspect_text(report, options.per_layer);
}

}  // namespace kvasir::moe
