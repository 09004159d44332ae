#include "worker/holding.hpp"

#include <algorithm>
#include <utility>

#include "base/log.hpp"
#include "moe/segments.hpp"
#include "moe/verify.hpp"

namespace kvasir::worker {
namespace {

// A HELLO can name so many ranges and no more.
Status check_count(const std::vector<Segment>& segments, const std::string& path) {
    if (segments.size() <= wire::kSegmentsMax) return {};
    return fail(Errc::kLimit,
                printable(path) + ": the experts chosen are " + std::to_string(segments.size()) +
                    " separate ranges, a worker can offer " + std::to_string(wire::kSegmentsMax) +
                    "; choose neighbouring experts, or start two workers");
}

}  // namespace

Result<std::unique_ptr<Holding>> Holding::open(const HoldingOptions& options) {
    const bool is_slice = !options.slice_path.empty();
    const std::string& path = is_slice ? options.slice_path : options.model_path;
    auto model = moe::open_model(path);
    if (!model) return tl::unexpected(model.error());
    if (is_slice && !model->is_slice) {
        return fail(
            Errc::kUsage,
            options.slice_path + " is not a slice; for a whole model use --model and --experts");
    }
    if (!is_slice && model->is_slice) {
        return fail(Errc::kUsage,
                    options.model_path + " is a slice: give it with --slice, without --experts");
    }
    if (model->banks.empty())
        return fail(Errc::kBadInput, model->shards.front().path + " has no experts");
    auto mapping = moe::Mapping::make(*model);
    if (!mapping) return tl::unexpected(mapping.error());
    std::unique_ptr<Holding> holding(new Holding(std::move(*model), std::move(*mapping)));
    if (is_slice) {
        auto manifest = moe::slice_manifest(holding->model_);
        if (!manifest) return tl::unexpected(manifest.error());
        if (options.verify) {
            if (auto report = moe::verify_slice(holding->model_); !report)
                return tl::unexpected(report.error());
        }
        const auto all = moe::all_segments(holding->model_);
        if (Status ok = check_count(all, path); !ok) return tl::unexpected(ok.error());
        holding->index_segments(*manifest, all);
        return holding;
    }
    auto segments = moe::parse_segments(options.experts, holding->model_);
    if (!segments) return tl::unexpected(segments.error());
    if (Status ok = check_count(*segments, path); !ok) return tl::unexpected(ok.error());
    auto manifest = moe::load_or_compute_manifest(holding->model_, options.cache_dir);
    if (!manifest) return tl::unexpected(manifest.error());
    holding->index_segments(*manifest, *segments);
    return holding;
}

void Holding::index_segments(const moe::Manifest& manifest, const std::vector<Segment>& segments) {
    model_id_ = manifest.model_id;
    for (const Segment& segment : segments) {
        segments_.push_back({segment, manifest.segment_digest(segment)});
        if (banks_.empty() || banks_.back().layer != segment.layer)
            banks_.push_back({segment.layer, {}});
        const moe::ExpertBank* bank = model_.find_bank(segment.layer);
        for (uint32_t id = segment.begin; id < segment.end; ++id) {
            const auto found =
                std::lower_bound(bank->global_ids.begin(), bank->global_ids.end(), id);
            banks_.back().file_index.push_back(
                static_cast<uint32_t>(found - bank->global_ids.begin()));
        }
    }
}

uint64_t Holding::experts() const {
    uint64_t count = 0;
    for (const Bank& bank : banks_) count += bank.file_index.size();
    return count;
}

uint64_t Holding::bytes() const {
    uint64_t bytes = 0;
    for (const Bank& bank : banks_)
        bytes += bank.file_index.size() * model_.find_bank(bank.layer)->expert_bytes();
    return bytes;
}

const std::vector<uint32_t>* Holding::file_index(LayerKey layer) const {
    for (const Bank& bank : banks_) {
        if (bank.layer == layer) return &bank.file_index;
    }
    return nullptr;
}

}  // namespace kvasir::worker
