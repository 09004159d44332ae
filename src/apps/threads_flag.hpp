// The check of --threads and --worker-threads: as many as a machine can make use of.
//
// Used by every subcommand that computes. Thread: pure. Limits: kThreadsAlways, or four times the
// machine's hardware threads where those are more: beyond that threads only wait for each other.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <string>
#include <thread>

#include <CLI/CLI.hpp>

namespace kvasir::apps {

constexpr uint64_t kThreadsAlways = 64;

inline uint64_t threads_max(uint64_t hardware) {
    return std::max(kThreadsAlways, 4 * hardware);
}

// Why `text` is not taken as a number of threads on a machine with `hardware` of them; empty: it
// is. What is no number at all is left to CLI11.
inline std::string refuse_threads(const std::string& text, uint64_t hardware) {
    int64_t count = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
    if (error == std::errc::invalid_argument || end != text.data() + text.size()) return {};
    if (error == std::errc::result_out_of_range) count = text[0] == '-' ? 0 : INT64_MAX;
    if (count < 1) return text + " threads cannot compute anything: give 1 or more";
    const uint64_t most = threads_max(hardware);
    if (static_cast<uint64_t>(count) <= most) return {};
    return text + " threads are more than the " + std::to_string(most) +
           " that are taken on this machine, which runs " + std::to_string(hardware) +
           " at once: more would only wait for each other";
}

inline CLI::Option* check_threads(CLI::Option* option) {
    const uint64_t hardware = std::max(1U, std::thread::hardware_concurrency());
    return option
        ->check(
            CLI::Validator([hardware](std::string& text) { return refuse_threads(text, hardware); },
                           "INT in [1 - " + std::to_string(threads_max(hardware)) + "]"))
        ->capture_default_str();
}

}  // namespace kvasir::apps
