// What tests of fetching share: a toy model with its outline, and an origin in memory that can do
// what origins do.
//
// Used by *_test.cpp only. Thread: one. Owns: the folder. Limits: failures abort with KVASIR_CHECK.
#pragma once

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/check.hpp"
#include "moe/manifest.hpp"
#include "moe/outline.hpp"
#include "moe/segments.hpp"
#include "moe/slice.hpp"
#include "moe/slice_testing.hpp"
#include "moe/verify.hpp"
#include "net/client.hpp"
#include "worker/cache.hpp"
#include "worker/fetch.hpp"

namespace kvasir::worker::testing {

using moe::testing::read_file;
using moe::testing::ScratchFolder;
using moe::testing::ToyShape;
using moe::testing::write_file;

// A model on disk, as the market sees it, and its outline, as a node does.
struct ToyModel {
    explicit ToyModel(const ScratchFolder& folder, ToyShape shape = {},
                      const std::string& name = "toy.gguf") {
        auto opened = moe::open_model(moe::testing::write_toy(folder, shape, name));
        KVASIR_CHECK(opened.has_value());
        model = std::move(*opened);
        auto computed = moe::compute_manifest(model);
        KVASIR_CHECK(computed.has_value());
        manifest = std::move(*computed);
        auto made = moe::make_outline(model, manifest);
        KVASIR_CHECK(made.has_value());
        bytes = moe::encode_outline(*made);
        auto decoded = moe::decode_outline(bytes);
        KVASIR_CHECK(decoded.has_value());
        outline = std::move(*decoded);
        for (const auto& shard : model.shards) shards.push_back(read_file(shard.path));
    }
    moe::SlicePlan plan(const std::vector<Segment>& segments) const {
        auto made = moe::plan_slice(outline, segments);
        KVASIR_CHECK(made.has_value());
        return std::move(*made);
    }
    // What `kvasir slice` would cut from the model itself.
    std::vector<uint8_t> slice(const ScratchFolder& folder,
                               const std::vector<Segment>& segments) const {
        const std::string path = folder / "cut.gguf";
        KVASIR_CHECK(moe::write_slice(model, manifest, segments, path).has_value());
        return read_file(path);
    }
    FetchTarget target(const std::string& path) const {
        FetchTarget out;
        out.path = path;
        for (size_t i = 0; i < shards.size(); ++i)
            out.shards.push_back({"mem:" + std::to_string(i), shards[i].size()});
        return out;
    }

    moe::Model model;
    moe::Manifest manifest;
    std::vector<uint8_t> bytes;
    moe::Outline outline;
    std::vector<std::vector<uint8_t>> shards;
};

class FakeOrigin final : public net::HttpClient {
public:
    explicit FakeOrigin(const std::vector<std::vector<uint8_t>>& shards) : shards_(shards) {}

    Result<net::HttpReply> call(const net::HttpCall&) override {
        return fail(Errc::kIo, "not this one");
    }
    Status download(std::vector<net::RangeJob> jobs, const net::RangeOptions&,
                    const OnData& on_data, const OnDone& on_done) override {
        asked.insert(asked.end(), jobs.begin(), jobs.end());
        // The pieces of all jobs in turn, as parallel connections bring them.
        std::vector<uint64_t> at(jobs.size(), 0);
        for (bool is_more = true; is_more;) {
            is_more = false;
            for (size_t i = 0; i < jobs.size(); ++i) {
                if (at[i] == jobs[i].bytes) continue;
                if (Status ok = piece(jobs[i], at[i], on_data); !ok) return ok;
                if (at[i] < jobs[i].bytes) {
                    is_more = true;
                } else if (Status ok = on_done(jobs[i]); !ok) {
                    return ok;
                }
            }
        }
        return {};
    }
    const net::RangeCounters& counters() const override { return counters_; }
    void cancel() override {}

    size_t piece_bytes = 1000;
    uint64_t bytes_until_failure = UINT64_MAX;
    Error failure{Errc::kIo, "connection reset"};
    // Changes a byte that is about to be sent.
    std::function<uint8_t(uint32_t shard, uint64_t offset, uint8_t byte)> change;
    std::vector<net::RangeJob> asked;

private:
    Status piece(const net::RangeJob& job, uint64_t& at, const OnData& on_data) {
        const auto shard = static_cast<uint32_t>(std::stoul(job.url.substr(4)));
        KVASIR_CHECK(job.file_bytes == shards_[shard].size());
        const uint64_t size = std::min<uint64_t>(piece_bytes, job.bytes - at);
        if (size > bytes_until_failure) return tl::unexpected(failure);
        bytes_until_failure -= size;
        std::vector<uint8_t> data(size);
        for (uint64_t i = 0; i < size; ++i) {
            const uint64_t offset = job.offset + at + i;
            data[i] = shards_[shard].at(offset);
            if (change) data[i] = change(shard, offset, data[i]);
        }
        counters_.bytes_pulled += size;
        if (Status ok = on_data(job, job.offset + at, data); !ok) return ok;
        counters_.bytes_wanted += size;
        at += size;
        return {};
    }

    const std::vector<std::vector<uint8_t>>& shards_;
    net::RangeCounters counters_;
};

inline std::vector<Segment> segments(const std::string& text, const ToyModel& toy) {
    auto parsed = moe::parse_segments(text, toy.model);
    KVASIR_CHECK(parsed.has_value());
    return *parsed;
}

}  // namespace kvasir::worker::testing
