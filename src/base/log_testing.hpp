// LogCapture: the lines that are logged while a test runs.
//
// Used by *_test.cpp only; one at a time. Thread: any. Owns: the log's sink, which is gone
// afterwards.
#pragma once

#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "base/log.hpp"

namespace kvasir::testing {

class LogCapture {
public:
    LogCapture() {
        {
            const std::lock_guard lock(mu());
            lines().clear();
        }
        set_log_sink(
            [](LogLevel, std::string_view, std::string_view line) {
                const std::lock_guard lock(mu());
                lines().emplace_back(line);
            },
            LogLevel::kInfo);
    }
    ~LogCapture() { set_log_sink(nullptr, LogLevel::kInfo); }
    LogCapture(const LogCapture&) = delete;
    LogCapture& operator=(const LogCapture&) = delete;
    // Those that contain `text`.
    std::vector<std::string> with(std::string_view text) const {
        const std::lock_guard lock(mu());
        std::vector<std::string> found;
        for (const std::string& line : lines()) {
            if (line.find(text) != std::string::npos) found.push_back(line);
        }
        return found;
    }

private:
    // The sink is a plain function: what it writes to belongs to the process.
    static std::mutex& mu() {
        static std::mutex mutex;
        return mutex;
    }
    static std::vector<std::string>& lines() {
        static std::vector<std::string> all;
        return all;
    }
};

}  // namespace kvasir::testing
