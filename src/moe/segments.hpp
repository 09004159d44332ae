// Segment sets: the text form "0-3:0-15,7:200-255" and set arithmetic over experts.
//
// Used by the command line (slice, worker), the planner of `run`, and the join report. Grammar:
// item (',' item)*, item = layers ':' experts, layers = N | N-M, experts = N | N-M | '*';
// a 'c' after a layer number means bank 1 ("12c:0-7"). Ranges are inclusive in text, half-open in
// memory. Thread: values.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "moe/model.hpp"

namespace kvasir::moe {

// Sorted by (layer, begin), merged, disjoint. Checked against the model: layers without experts
// inside a range are skipped, a layer named alone must have experts, expert numbers must exist.
// Errors: kUsage, naming the item.
Result<std::vector<Segment>> parse_segments(std::string_view text, const Model& model);
std::string to_string(const std::vector<Segment>& segments);
std::vector<Segment> normalise(std::vector<Segment> segments);
std::vector<Segment> all_segments(const Model& model);
// Splits all experts of the model into `parts` disjoint sets of nearly equal bytes; part i of every
// bank is a contiguous range.
std::vector<std::vector<Segment>> split_evenly(const Model& model, uint32_t parts);

}  // namespace kvasir::moe
