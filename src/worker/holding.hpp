// Holding: the experts a worker has, mapped: a slice, or some segments of a whole model.
//
// Used by Worker. A slice is checked against its own digests before anything is computed with it; a
// whole model's digests come from its cached manifest. Thread: immutable after open(). Owns: model,
// mapping, digests. Limits: wire::kSegmentsMax ranges of experts.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "moe/manifest.hpp"
#include "moe/mapping.hpp"
#include "moe/model.hpp"
#include "wire/messages.hpp"

namespace kvasir::worker {

struct HoldingOptions {
    std::string slice_path;  // this, or
    std::string model_path;  // a whole model and
    std::string experts;     // the segments of it to hold ("0-3:0-15")
    std::string cache_dir;   // of manifests
    bool verify = true;      // hash the slice's slabs before use
};

class Holding {
public:
    // Errors: those of open_model, verify_slice, load_or_compute_manifest, parse_segments; kLimit
    // (more ranges of experts than a HELLO takes).
    static Result<std::unique_ptr<Holding>> open(const HoldingOptions& options);

    const moe::Model& model() const { return model_; }
    const moe::Mapping& mapping() const { return mapping_; }
    const Sha256& model_id() const { return model_id_; }
    const std::vector<wire::HeldSegment>& segments() const { return segments_; }
    uint64_t experts() const;
    uint64_t bytes() const;
    // The index within the file's bank of the worker's local expert (its position among the held
    // ones); sorted by global id. Null when nothing of the bank is held.
    const std::vector<uint32_t>* file_index(LayerKey layer) const;

private:
    Holding(moe::Model model, moe::Mapping mapping)
        : model_(std::move(model)), mapping_(std::move(mapping)) {}
    void index_segments(const moe::Manifest& manifest, const std::vector<Segment>& segments);

    moe::Model model_;
    moe::Mapping mapping_;
    Sha256 model_id_ = {};
    std::vector<wire::HeldSegment> segments_;
    struct Bank {
        LayerKey layer;
        std::vector<uint32_t> file_index;
    };
    std::vector<Bank> banks_;
};

}  // namespace kvasir::worker
