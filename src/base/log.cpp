#include "base/log.hpp"

#include <atomic>

namespace kvasir {
namespace {
std::atomic<LogSink> g_sink{nullptr};
std::atomic<int> g_lowest{static_cast<int>(LogLevel::kInfo)};
constexpr size_t kLineBytesMax = 1024;
}  // namespace

void set_log_sink(LogSink sink, LogLevel lowest) {
    g_lowest.store(static_cast<int>(lowest));
    g_sink.store(sink);
}

bool log_enabled(LogLevel level) {
    return g_sink.load() != nullptr && static_cast<int>(level) >= g_lowest.load();
}

void log(LogLevel level, std::string_view component, std::string_view line) {
    if (!log_enabled(level)) return;
    if (LogSink sink = g_sink.load()) sink(level, component, line.substr(0, kLineBytesMax));
}

std::string printable(std::string_view text, size_t bytes_max) {
    std::string out;
    const bool cut = text.size() > bytes_max;
    for (char c : text.substr(0, bytes_max)) {
        out.push_back(c >= 0x20 && c < 0x7f ? c : '?');
    }
    if (cut) out += "...";
    return out;
}

}  // namespace kvasir
