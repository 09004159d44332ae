#include "base/ids.hpp"

namespace kvasir {

std::string to_hex(const Sha256& digest) {
    static constexpr char kDigits[] = "0123456789abcdef";
    std::string text;
    text.reserve(digest.size() * 2);
    for (uint8_t byte : digest) {
        text.push_back(kDigits[byte >> 4]);
        text.push_back(kDigits[byte & 15]);
    }
    return text;
}

std::string to_string(LayerKey layer) {
    return std::to_string(layer.layer) + (layer.bank == 0 ? "" : "c");
}

}  // namespace kvasir
