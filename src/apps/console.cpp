#include "apps/console.hpp"

#include <fmt/core.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <utility>

#include "base/log.hpp"

namespace kvasir::apps {
namespace {

void write_line(LogLevel level, std::string_view component, std::string_view line) {
    static constexpr std::array<const char*, 4> kNames = {"debug", "info", "warn", "error"};
    const auto now = std::chrono::system_clock::now();
    const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
    const auto millis =
        std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count() %
        1000;
    std::tm parts{};
    localtime_r(&seconds, &parts);
    // One write per line, so that lines of several threads and processes do not mix.
    const std::string text =
        fmt::format("{:02}:{:02}:{:02}.{:03} {:5} {}: {}\n", parts.tm_hour, parts.tm_min,
                    parts.tm_sec, millis, kNames[static_cast<size_t>(level)], component, line);
    tell_text(text);
}

}  // namespace

void tell_text(std::string_view text) {
    std::fwrite(text.data(), 1, text.size(), stderr);
    std::fflush(stderr);
}

int report_error(const Error& error) {
    std::fflush(stdout);
    tell("kvasir: {}\n", error.detail);
    return errc_info(error.code).exit_code;
}

Status install_log(std::string_view level) {
    if (level.empty()) {
        const char* from_environment = std::getenv("KVASIR_LOG");
        level =
            from_environment != nullptr && *from_environment != '\0' ? from_environment : "warn";
    }
    if (level == "off") {
        set_log_sink(nullptr, LogLevel::kError);
        return {};
    }
    static constexpr std::array<std::pair<std::string_view, LogLevel>, 4> kLevels = {
        {{"debug", LogLevel::kDebug},
         {"info", LogLevel::kInfo},
         {"warn", LogLevel::kWarn},
         {"error", LogLevel::kError}}};
    for (const auto& [name, value] : kLevels) {
        if (level != name) continue;
        set_log_sink(write_line, value);
        return {};
    }
    return fail(Errc::kUsage, fmt::format("'{}' is not a log level (--log-level, KVASIR_LOG); use "
                                          "debug, info, warn, error or off",
                                          printable(level)));
}

std::string terminal_text(std::string_view text) {
    std::string out;
    out.reserve(text.size());
    for (const char c : text) {
        const auto byte = static_cast<unsigned char>(c);
        if ((byte < 0x20 && c != '\n' && c != '\t') || byte == 0x7f) continue;
        out.push_back(c);
    }
    return out;
}

}  // namespace kvasir::apps
