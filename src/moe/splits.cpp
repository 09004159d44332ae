#include "moe/splits.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <optional>
#include <set>

#include "base/log.hpp"
#include "moe/file.hpp"

namespace kvasir::moe {
namespace {

namespace fs = std::filesystem;

std::string shown(const std::string& path) {
    return printable(path, 400);
}

uint64_t part_count(const GgufHeader& header) {
    return header.get_u64("split.count").value_or(0);
}

// End of the last tensor: where a file may end.
uint64_t data_end(const GgufHeader& header) {
    uint64_t end = header.data_offset;
    for (const GgufTensor& tensor : header.tensors)
        end = std::max(end, tensor.offset + tensor.bytes);
    return end;
}

bool has_magic_at(const std::string& path, uint64_t offset) {
    const auto fd = open_for_reading(path);
    if (!fd) return false;
    std::array<char, 4> magic = {};
    const ssize_t got = pread(fd->get(), magic.data(), magic.size(), static_cast<off_t>(offset));
    return got == 4 && std::string_view(magic.data(), 4) == "GGUF";
}

// A second GGUF behind the first one's data: someone used `cat part1 part2`.
Status check_not_joined(const GgufHeader& header) {
    const uint64_t end = data_end(header);
    const uint64_t mask = header.alignment - 1;
    for (const uint64_t offset : {end, (end + mask) & ~mask}) {
        if (offset < header.file_bytes && has_magic_at(header.path, offset)) {
            return fail(Errc::kBadInput,
                        shown(header.path) + ": another GGUF file begins at byte " +
                            std::to_string(offset) +
                            ": parts were joined by plain concatenation; "
                            "keep the parts separate or use llama-gguf-split --merge");
        }
    }
    return {};
}

// The prefix and "-of-0000N.gguf" tail of a part's usual name.
struct PartName {
    std::string prefix;
    std::string tail;
};
std::optional<PartName> parse_part_name(const std::string& name) {
    constexpr size_t kTailBytes = std::string_view("-00001-of-00002.gguf").size();
    if (name.size() < kTailBytes) return std::nullopt;
    const std::string tail = name.substr(name.size() - kTailBytes);
    const auto digits = [&](size_t begin) {
        return std::all_of(tail.begin() + begin, tail.begin() + begin + 5,
                           [](char c) { return c >= '0' && c <= '9'; });
    };
    if (tail[0] != '-' || tail.substr(6, 4) != "-of-" || !digits(1) || !digits(10) ||
        tail.substr(15) != ".gguf") {
        return std::nullopt;
    }
    return PartName{name.substr(0, name.size() - kTailBytes), tail.substr(6)};
}

// Finds the parts of one set and keeps what is known about them.
class PartFinder {
public:
    explicit PartFinder(GgufHeader named)
        : count_(part_count(named)),
          tensors_(named.get_u64("split.tensors.count")),
          named_(named.path) {
        remember(named.path);
        add(std::move(named));
    }

    // Siblings with llama.cpp's names; one that cannot be read is an error of its own.
    Status add_named_siblings() {
        const auto mine = parse_part_name(fs::path(named_).filename().string());
        if (!mine) return {};
        auto files = list_folder();
        if (!files) return tl::unexpected<Error>(std::move(files.error()));
        for (const std::string& file : *files) {
            const auto other = parse_part_name(fs::path(file).filename().string());
            if (!other || other->prefix != mine->prefix || other->tail != mine->tail) continue;
            if (!remember(file)) continue;
            auto header = read_gguf_header(file);
            if (!header) return tl::unexpected<Error>(std::move(header.error()));
            add(std::move(*header));
        }
        return {};
    }

    // Any .gguf file of the folder whose split keys fit; files that cannot be read are not parts.
    Status add_renamed_siblings() {
        auto files = list_folder();
        if (!files) return tl::unexpected<Error>(std::move(files.error()));
        for (const std::string& file : *files) {
            if (!file.ends_with(".gguf") || !remember(file)) continue;
            if (auto header = read_gguf_header(file)) add(std::move(*header));
        }
        return {};
    }

    bool complete() const {
        return parts_.size() == count_ && std::ranges::all_of(parts_, [](const auto& part) {
                   return part.second.size() == 1;
               });
    }

    std::vector<GgufHeader> take() {
        std::vector<GgufHeader> out;
        for (auto& [number, headers] : parts_) out.push_back(std::move(headers.front()));
        return out;
    }

    Error explain() const {
        std::string missing;
        std::string doubled;
        size_t listed = 0;
        for (uint64_t number = 0; number < count_; ++number) {
            const auto found = parts_.find(number);
            if (found != parts_.end() && found->second.size() == 1) continue;
            if (++listed > 20) continue;
            if (found == parts_.end()) {
                missing += (missing.empty() ? "" : ", ") + std::to_string(number + 1);
                continue;
            }
            doubled += (doubled.empty() ? "" : "; ") + std::to_string(number + 1) + " (";
            for (size_t i = 0; i < found->second.size() && i < 4; ++i) {
                const fs::path file(found->second[i].path);
                doubled += (i == 0 ? "" : ", ") + printable(file.filename().string());
            }
            doubled += ")";
        }
        std::string text =
            shown(named_) + ": the model is split into " + std::to_string(count_) + " parts;";
        if (!missing.empty()) text += " missing: part " + missing + ";";
        if (!doubled.empty()) text += " doubled: part " + doubled + ";";
        if (listed > 20) text += " and " + std::to_string(listed - 20) + " more;";
        text += " put all parts of one model into one folder, each once";
        return {Errc::kBadInput, text};
    }

private:
    void add(GgufHeader header) {
        const auto number = header.get_u64("split.no");
        if (part_count(header) != count_ || !number || *number >= count_ ||
            header.get_u64("split.tensors.count") != tensors_) {
            return;
        }
        parts_[*number].push_back(std::move(header));
    }

    // False if the same file (also under another name) was seen already.
    bool remember(const std::string& path) {
        struct stat info = {};
        if (stat(path.c_str(), &info) != 0 || !S_ISREG(info.st_mode)) return false;
        return seen_.emplace(info.st_dev, info.st_ino).second;
    }

    Result<std::vector<std::string>> list_folder() const {
        const fs::path parent = fs::path(named_).parent_path();
        const fs::path folder = parent.empty() ? fs::path(".") : parent;
        std::vector<std::string> files;
        std::error_code error;
        for (fs::directory_iterator it(folder, error), end; !error && it != end;
             it.increment(error)) {
            files.push_back((parent / it->path().filename()).string());
            if (files.size() > kFolderFilesMax) {
                return fail(Errc::kLimit, shown(folder.string()) +
                                              ": holds too many files to look "
                                              "for the parts; put the model into its own folder");
            }
        }
        if (error) {
            return fail(Errc::kEnvironment,
                        shown(folder.string()) + ": cannot list: " + error.message());
        }
        return files;
    }

    const uint64_t count_;
    const std::optional<uint64_t> tensors_;
    const std::string named_;
    std::map<uint64_t, std::vector<GgufHeader>> parts_;
    std::set<std::pair<dev_t, ino_t>> seen_;
};

}  // namespace

Result<std::vector<GgufHeader>> collect_shards(const std::string& path) {
    auto named = read_gguf_header(path);
    if (!named) return tl::unexpected<Error>(std::move(named.error()));
    if (auto joined = check_not_joined(*named); !joined) {
        return tl::unexpected<Error>(std::move(joined.error()));
    }
    const uint64_t count = part_count(*named);
    std::vector<GgufHeader> whole;
    if (count <= 1) {
        whole.push_back(std::move(*named));
        return whole;
    }
    const auto number = named->get_u64("split.no");
    if (!number || *number >= count) {
        return fail(Errc::kBadInput, shown(path) + ": key 'split.no' must be below split.count = " +
                                         std::to_string(count));
    }
    if (count > kSplitPartsMax) {
        return fail(Errc::kLimit, shown(path) + ": key 'split.count' = " + std::to_string(count) +
                                      " is above the supported " + std::to_string(kSplitPartsMax));
    }
    PartFinder finder(std::move(*named));
    if (auto added = finder.add_named_siblings(); !added) {
        return tl::unexpected<Error>(std::move(added.error()));
    }
    if (!finder.complete()) {
        if (auto added = finder.add_renamed_siblings(); !added) {
            return tl::unexpected<Error>(std::move(added.error()));
        }
    }
    if (!finder.complete()) return tl::unexpected<Error>(finder.explain());
    auto shards = finder.take();
    for (const GgufHeader& shard : shards) {
        if (auto joined = check_not_joined(shard); !joined) {
            return tl::unexpected<Error>(std::move(joined.error()));
        }
    }
    return shards;
}

}  // namespace kvasir::moe
