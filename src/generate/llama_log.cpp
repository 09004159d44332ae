#include "generate/llama_log.hpp"

#include <llama.h>

#include <mutex>
#include <string_view>

#include "base/log.hpp"

namespace kvasir::generate {
namespace {

constexpr size_t kLineBytesMax = 1024;

struct Capture {
    std::mutex mu;
    // Guarded by mu
    std::string partial;  // a line that has not ended yet
    bool partial_is_error = false;
    std::string error;
};

Capture& capture() {
    static Capture instance;
    return instance;
}

// "llama_model_load: error loading model: x" -> "error loading model: x"
std::string_view without_function_name(std::string_view line) {
    const size_t colon = line.find(": ");
    if (colon == std::string_view::npos) return line;
    for (const char c : line.substr(0, colon)) {
        const bool identifier = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                                (c >= '0' && c <= '9') || c == '_' || c == ':';
        if (!identifier) return line;
    }
    return line.substr(colon + 2);
}

// The reason comes first, then each caller says that it failed as well ("failed to load model"):
// keep the first line, unless a later one carries llama.cpp's own summary of the exception.
void keep_error(Capture& state, std::string_view line) {
    if (state.error.empty() || line.find("error loading model") != std::string_view::npos) {
        state.error = line;
    }
}

void finish_line(Capture& state) {
    if (state.partial.empty()) return;
    log(LogLevel::kDebug, "llama", state.partial);
    if (state.partial_is_error) keep_error(state, state.partial);
    state.partial.clear();
    state.partial_is_error = false;
}

void on_llama_log(ggml_log_level level, const char* text, void*) {
    Capture& state = capture();
    const std::lock_guard lock(state.mu);
    if (level != GGML_LOG_LEVEL_CONT) {
        finish_line(state);
        state.partial_is_error = level == GGML_LOG_LEVEL_ERROR;
    }
    for (const char c : std::string_view(text)) {
        if (c == '\n') {
            const bool is_error = state.partial_is_error;
            finish_line(state);
            state.partial_is_error = is_error;
        } else if (state.partial.size() < kLineBytesMax) {
            state.partial.push_back(c);
        }
    }
}

}  // namespace

void install_llama_log() {
    llama_log_set(on_llama_log, nullptr);
}

void clear_llama_error() {
    Capture& state = capture();
    const std::lock_guard lock(state.mu);
    state.error.clear();
}

std::string last_llama_error() {
    Capture& state = capture();
    const std::lock_guard lock(state.mu);
    return printable(without_function_name(state.error), 400);
}

}  // namespace kvasir::generate
