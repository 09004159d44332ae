#include "disk_testing.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string_view>

namespace kvasir::e2e {

namespace fs = std::filesystem;

ProgramOptions bad_disk(const std::string& under, const std::string& what, const std::string& like,
                        const std::string& during) {
    ProgramOptions options;
    options.environment = {std::string("LD_PRELOAD=") + KVASIR_BAD_DISK,
                           "KVASIR_BAD_DISK_UNDER=" + fs::weakly_canonical(under).string(),
                           "KVASIR_BAD_DISK_LIKE=" + like, "KVASIR_BAD_DISK=" + what};
    if (!during.empty()) options.environment.push_back("KVASIR_BAD_DISK_WHILE=" + during);
    return options;
}

void put(const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
}

std::string content(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<std::string> names_in(const std::string& folder, const std::string& end) {
    std::vector<std::string> names;
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(folder, ignored)) {
        const std::string name = entry.path().filename().string();
        if (name.ends_with(end)) names.push_back(name);
    }
    return names;
}

size_t lose_unsynced(const std::string& path, LostPages which) {
    constexpr size_t kPageBytes = 4096;
    const std::string now = content(path);
    std::string left = content(path + ".synced");
    size_t lost = 0;
    for (size_t at = 0; at < now.size(); at += kPageBytes) {
        const std::string_view written = std::string_view(now).substr(at, kPageBytes);
        if (std::string_view(left).substr(std::min(at, left.size()), kPageBytes) == written)
            continue;
        const bool is_odd = at / kPageBytes % 2 == 1;
        if (which == LostPages::kAll || (which == LostPages::kOdd) == is_odd) {
            ++lost;
            continue;
        }
        left.resize(std::max(left.size(), at + written.size()));
        left.replace(at, written.size(), written);
    }
    put(path, left);
    return lost;
}

}  // namespace kvasir::e2e
