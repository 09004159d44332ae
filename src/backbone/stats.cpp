#include "backbone/stats.hpp"

#include <algorithm>

namespace kvasir::backbone {
namespace {

constexpr size_t kSamplesMax = size_t{1} << 17;

double quantile(std::vector<float>& values, double q) {
    if (values.empty()) return 0;
    const auto rank = static_cast<ptrdiff_t>(q * static_cast<double>(values.size() - 1));
    std::nth_element(values.begin(), values.begin() + rank, values.end());
    return values[static_cast<size_t>(rank)];
}

}  // namespace

void Stats::add_layer(uint64_t remote, uint64_t local, uint64_t retried,
                      std::chrono::nanoseconds total, std::chrono::nanoseconds compute,
                      bool exact) {
    const std::lock_guard lock(mu_);
    ++layers_;
    remote_ += remote;
    local_ += local;
    retried_ += retried;
    exact_ = exact_ && exact;
    stall_ms_ = std::max(stall_ms_, static_cast<double>(total.count()) / 1e6);
    const float us = static_cast<float>((total - compute).count()) / 1000.0f;
    if (overhead_us_.size() < kSamplesMax) {
        overhead_us_.push_back(us);
    } else {
        overhead_us_[next_++ % kSamplesMax] = us;
    }
}

void Stats::add_local(uint64_t pairs) {
    const std::lock_guard lock(mu_);
    local_ += pairs;
}

void Stats::add_time(std::chrono::nanoseconds in_backend) {
    const std::lock_guard lock(mu_);
    in_backend_ += in_backend;
}

void Stats::fill(Report& report) const {
    const std::lock_guard lock(mu_);
    report.layers = layers_;
    report.pairs_remote = remote_;
    report.pairs_local = local_;
    report.retries = retried_;
    report.stall_ms_max = stall_ms_;
    report.backend_ms = static_cast<double>(in_backend_.count()) / 1e6;
    report.exact = exact_;
    std::vector<float> samples = overhead_us_;
    report.overhead_us_p50 = quantile(samples, 0.5);
    report.overhead_us_p99 = quantile(samples, 0.99);
}

void Stats::reset() {
    const std::lock_guard lock(mu_);
    layers_ = remote_ = local_ = retried_ = 0;
    stall_ms_ = 0;
    in_backend_ = std::chrono::nanoseconds(0);
    exact_ = true;
    overhead_us_.clear();
    next_ = 0;
}

}  // namespace kvasir::backbone
