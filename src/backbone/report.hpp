// What a backbone counted: pairs, bytes, time added per layer. Plain values.
//
// Used by `kvasir run`, `kvasir bench` and the plugin's log. Thread: values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvasir::backbone {

struct WorkerReport {
    std::string id;
    std::string build;     // fingerprint in one line
    std::string computes;  // with what, of the bank asked last
    uint64_t experts_held = 0;
    uint64_t pairs = 0;  // answered and used
    uint64_t requests = 0;
    uint64_t failures = 0;      // timeouts, bad answers, disconnects with work in flight
    uint64_t bytes_in = 0;      // from the worker, on the wire
    uint64_t bytes_out = 0;     // to the worker
    double compute_us_p50 = 0;  // the worker's own clock, per request
    bool exact = false;         // same bits as this backbone's replica
    bool connected = false;
};

struct Report {
    uint64_t layers = 0;  // MoE layers computed with at least one remote pair
    uint64_t pairs_remote = 0;
    uint64_t pairs_local = 0;
    uint64_t retries = 0;  // pairs asked again elsewhere
    // Per layer: time in the backend minus the slowest worker's own compute time.
    double overhead_us_p50 = 0;
    double overhead_us_p99 = 0;
    double stall_ms_max = 0;  // longest single layer
    double backend_ms = 0;    // of all layers in the backend, whoever computed
    bool exact = true;        // no approximate answer was used
    std::vector<WorkerReport> workers;
};

}  // namespace kvasir::backbone
