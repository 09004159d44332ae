#include "moe/segments.hpp"

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <span>

#include "base/check.hpp"
#include "base/log.hpp"

namespace kvasir::moe {
namespace {

struct Range {
    uint32_t first = 0;
    uint32_t last = 0;  // inclusive
};

std::optional<uint32_t> parse_number(std::string_view text) {
    uint32_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
    return value;
}

std::optional<Range> parse_range(std::string_view text) {
    const size_t dash = text.find('-');
    const auto first = parse_number(text.substr(0, dash));
    const auto last = dash == text.npos ? first : parse_number(text.substr(dash + 1));
    if (!first || !last || *first > *last) return std::nullopt;
    return Range{*first, *last};
}

// One item of the text, still without the model.
struct Item {
    std::string_view text;
    Range layers;
    uint32_t bank = 0;
    bool is_one_layer = false;
    bool is_all_experts = false;
    Range experts;
};

Result<Item> parse_item(std::string_view text) {
    const auto refuse = [&](const std::string& what) {
        return fail(Errc::kUsage, "experts '" + printable(text) + "': " + what);
    };
    Item item;
    item.text = text;
    const size_t colon = text.find(':');
    if (colon == text.npos) return refuse("expected LAYERS:EXPERTS, like 0-3:0-15 or 7:*");
    std::string_view layers = text.substr(0, colon);
    const std::string_view experts = text.substr(colon + 1);
    // "12c", "0-3c": the second bank of those layers ("0c-3c" says the same).
    const size_t dash = layers.find('-');
    const bool first_is_chunk = dash != layers.npos && dash > 0 && layers[dash - 1] == 'c';
    const bool last_is_chunk = layers.ends_with('c');
    if (first_is_chunk && !last_is_chunk)
        return refuse("write 'c' behind the last layer, like 0-3c");
    item.bank = last_is_chunk ? 1 : 0;
    std::string plain(layers.substr(0, layers.size() - (last_is_chunk ? 1 : 0)));
    if (first_is_chunk) plain.erase(dash - 1, 1);
    const auto layer_range = parse_range(plain);
    if (!layer_range)
        return refuse("'" + printable(layers) + "' is not a layer or a range of layers");
    item.layers = *layer_range;
    item.is_one_layer = plain.find('-') == plain.npos;
    item.is_all_experts = experts == "*";
    if (item.is_all_experts) return item;
    const auto expert_range = parse_range(experts);
    if (!expert_range) {
        return refuse("'" + printable(experts) + "' is not an expert, a range of experts or *");
    }
    item.experts = *expert_range;
    return item;
}

// Experts of a bank with ids in [first, last]; a slice's bank holds some, named by global ids.
std::span<const uint32_t> ids_between(const ExpertBank& bank, uint32_t first, uint32_t last) {
    const auto begin = std::ranges::lower_bound(bank.global_ids, first);
    const auto end = std::ranges::upper_bound(bank.global_ids, last);
    return {begin, end};
}

// The last layer that may be named: dense layers and those that a slice does not have may be part
// of a range, what lies behind the model's end is a mistake.
uint32_t last_layer(const Model& model) {
    const uint32_t last = model.banks.empty() ? 0 : model.banks.back().key.layer;
    return model.layers_total > last ? model.layers_total - 1 : last;
}

Status add_item(const Item& item, const Model& model, std::vector<Segment>& out) {
    if (const uint32_t last = last_layer(model); item.layers.last > last) {
        return fail(Errc::kUsage, "experts '" + printable(item.text) + "': there is no layer " +
                                      std::to_string(item.layers.last) +
                                      ", the model's layers are 0 to " + std::to_string(last));
    }
    bool any = false;
    for (const ExpertBank& bank : model.banks) {
        if (bank.key.layer < item.layers.first || bank.key.layer > item.layers.last ||
            bank.key.bank != item.bank) {
            continue;
        }
        any = true;
        const Range range = item.is_all_experts ? Range{0, UINT32_MAX} : item.experts;
        const auto ids = ids_between(bank, range.first, range.last);
        if (!item.is_all_experts && ids.size() != uint64_t{range.last} - range.first + 1) {
            return fail(Errc::kUsage,
                        "experts '" + printable(item.text) + "': layer " + to_string(bank.key) +
                            " has " + std::to_string(bank.experts) + " experts between " +
                            std::to_string(bank.global_ids.front()) + " and " +
                            std::to_string(bank.global_ids.back()) + ", not all of these");
        }
        for (const uint32_t id : ids) out.push_back({bank.key, id, id + 1});
    }
    if (any) return {};
    return fail(Errc::kUsage, "experts '" + printable(item.text) + "': " +
                                  (item.is_one_layer ? "that layer has" : "those layers have") +
                                  " no experts in this model (see kvasir inspect --per-layer)");
}

}  // namespace

Result<std::vector<Segment>> parse_segments(std::string_view text, const Model& model) {
    std::vector<Segment> out;
    while (true) {
        const size_t comma = text.find(',');
        const auto item = parse_item(text.substr(0, comma));
        if (!item) return tl::unexpected<Error>(item.error());
        if (auto added = add_item(*item, model, out); !added) {
            return tl::unexpected<Error>(std::move(added.error()));
        }
        if (comma == text.npos) break;
        text.remove_prefix(comma + 1);
    }
    return normalise(std::move(out));
}

std::string to_string(const std::vector<Segment>& segments) {
    // Layers with the same experts are written as one range, which is what a person would type.
    const std::vector<Segment> sorted = normalise(segments);
    std::map<LayerKey, std::string> experts_of;
    for (const Segment& segment : sorted) {
        std::string& text = experts_of[segment.layer];
        if (!text.empty()) text += '+';
        text += std::to_string(segment.begin);
        if (segment.count() > 1) text += '-' + std::to_string(segment.end - 1);
    }
    std::string out;
    const auto append = [&](uint32_t first, LayerKey last, std::string_view experts) {
        while (!experts.empty()) {
            const size_t plus = experts.find('+');
            if (!out.empty()) out += ',';
            if (first != last.layer) out += std::to_string(first) + '-';
            out += to_string(last) + ':' + std::string(experts.substr(0, plus));
            experts.remove_prefix(plus == experts.npos ? experts.size() : plus + 1);
        }
    };
    for (const uint32_t bank : {0u, 1u}) {
        std::optional<LayerKey> last;
        uint32_t first = 0;
        std::string_view experts;
        for (const auto& [key, text] : experts_of) {
            if (key.bank != bank) continue;
            if (last && text == experts && key.layer == last->layer + 1) {
                last = key;
                continue;
            }
            if (last) append(first, *last, experts);
            first = key.layer;
            last = key;
            experts = text;
        }
        if (last) append(first, *last, experts);
    }
    return out;
}

std::vector<Segment> normalise(std::vector<Segment> segments) {
    std::erase_if(segments, [](const Segment& segment) { return segment.begin >= segment.end; });
    std::ranges::sort(segments);
    std::vector<Segment> out;
    for (const Segment& segment : segments) {
        if (!out.empty() && out.back().layer == segment.layer && segment.begin <= out.back().end) {
            out.back().end = std::max(out.back().end, segment.end);
        } else {
            out.push_back(segment);
        }
    }
    return out;
}

std::vector<Segment> all_segments(const Model& model) {
    std::vector<Segment> out;
    for (const ExpertBank& bank : model.banks) {
        for (const uint32_t id : bank.global_ids) out.push_back({bank.key, id, id + 1});
    }
    return normalise(std::move(out));
}

std::vector<std::vector<Segment>> split_evenly(const Model& model, uint32_t parts) {
    KVASIR_CHECK(parts > 0);
    std::vector<std::vector<Segment>> out(parts);
    std::vector<uint64_t> bytes(parts);
    for (const ExpertBank& bank : model.banks) {
        // Everyone gets the whole quotient; the experts left over go to those with fewest bytes.
        std::vector<uint32_t> counts(parts, bank.experts / parts);
        std::vector<uint32_t> order(parts);
        for (uint32_t i = 0; i < parts; ++i) order[i] = i;
        std::ranges::stable_sort(order, {}, [&](uint32_t part) { return bytes[part]; });
        for (uint32_t i = 0; i < bank.experts % parts; ++i) counts[order[i]] += 1;
        uint32_t next = 0;
        for (uint32_t part = 0; part < parts; ++part) {
            bytes[part] += counts[part] * bank.expert_bytes();
            for (uint32_t i = 0; i < counts[part]; ++i) {
                const uint32_t id = bank.global_ids[next++];
                out[part].push_back({bank.key, id, id + 1});
            }
        }
    }
    for (auto& segments : out) segments = normalise(std::move(segments));
    return out;
}

}  // namespace kvasir::moe
