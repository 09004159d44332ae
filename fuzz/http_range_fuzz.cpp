// Fuzz target: the text that HTTP clients send and that we parse ourselves.
//
// Input: 8 bytes size of the body (little-endian), then text, given to parse_range(),
// parse_target() and parse_bearer(). Checked: a range lies within the body and is not empty; a path
// has no empty, "." or ".." part and no control character.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "net/http.hpp"
#include "net/http_text.hpp"

namespace {

using namespace kvasir;

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "http_range_fuzz: %s\n", what);
    std::abort();
}

void check_path(std::string_view path) {
    require(path.starts_with('/'), "a path without a slash");
    if (path == "/") return;
    require(!path.ends_with('/'), "a path that ends with a slash");
    for (const char c : path) {
        require(static_cast<unsigned char>(c) >= ' ' && c != 0x7f, "a control character");
    }
    const std::string closed = std::string(path) + "/";
    for (const char* part : {"//", "/./", "/../"}) {
        require(closed.find(part) == std::string::npos, "a path that is not normal");
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size < 8) return 0;
    uint64_t body_bytes = 0;
    for (int i = 0; i < 8; ++i) body_bytes |= static_cast<uint64_t>(data[i]) << (8 * i);
    const std::string_view text(reinterpret_cast<const char*>(data) + 8, size - 8);

    const auto range = net::parse_range(text, body_bytes);
    if (range && *range) {
        require((*range)->bytes != 0, "an empty range");
        require((*range)->offset < body_bytes, "a range that starts behind the end");
        require((*range)->bytes <= body_bytes - (*range)->offset, "a range beyond the end");
    }
    if (const auto target = net::parse_target(text)) check_path(target->path);
    const std::string_view token = net::parse_bearer(text);
    require(token.find_first_of(" \t,\"") == std::string_view::npos, "a token of several words");
    return 0;
}
