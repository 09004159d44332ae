// Counters of all lanes of a backbone.
//
// Used by lanes (add) and report() (read). Thread: any, guarded inside. Limits: samples are a
// bounded reservoir.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <vector>

#include "backbone/report.hpp"

namespace kvasir::backbone {

class Stats {
public:
    // A layer with `remote` pairs from workers took `total`; the slowest worker computed for
    // `compute`.
    void add_layer(uint64_t remote, uint64_t local, uint64_t retried,
                   std::chrono::nanoseconds total, std::chrono::nanoseconds compute, bool exact);
    void add_local(uint64_t pairs);
    void add_time(std::chrono::nanoseconds in_backend);
    void fill(Report& report) const;
    void reset();

private:
    mutable std::mutex mu_;
    // Guarded by mu_.
    uint64_t layers_ = 0, remote_ = 0, local_ = 0, retried_ = 0;
    double stall_ms_ = 0;
    std::chrono::nanoseconds in_backend_{0};
    bool exact_ = true;
    std::vector<float> overhead_us_;  // the newest, as a ring
    size_t next_ = 0;
};

}  // namespace kvasir::backbone
