#include "synth/writer.hpp"

#include <ggml.h>
#include <gguf.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <set>

#include "base/log.hpp"
#include "synth/output_file.hpp"
#include "synth/random.hpp"

namespace kvasir::synth {
namespace {

constexpr size_t kChunkBytes = 1 << 20;

struct GgufFree {
    void operator()(gguf_context* context) const { gguf_free(context); }
};
struct GgmlFree {
    void operator()(ggml_context* context) const { ggml_free(context); }
};

// One file of the set: which tensors, where, and the finished header.
struct Shard {
    std::string path;
    std::vector<const TensorPlan*> tensors;
    std::vector<uint64_t> offsets;  // absolute
    std::vector<uint8_t> header;    // up to the first tensor
    uint64_t bytes = 0;
};

uint64_t padded(uint64_t bytes, uint64_t alignment) {
    return (bytes + alignment - 1) / alignment * alignment;
}

Status check_tensor(const TensorPlan& tensor) {
    const auto refuse = [&](const std::string& what) -> Status {
        return fail(Errc::kUsage, "tensor '" + printable(tensor.name, 80) + "': " + what);
    };
    if (tensor.name.empty() || tensor.name.size() >= GGML_MAX_NAME)
        return refuse("bad name length");
    if (tensor.type >= GGML_TYPE_COUNT ||
        ggml_type_size(static_cast<ggml_type>(tensor.type)) == 0) {
        return refuse("no ggml type " + std::to_string(tensor.type));
    }
    if (tensor.dims < 1 || tensor.dims > 4) return refuse("1 to 4 dimensions");
    uint64_t elements = 1;
    for (uint64_t n : tensor.ne) {
        if (n == 0 || n > (uint64_t{1} << 40) / elements) return refuse("dimensions out of range");
        elements *= n;
    }
    if (tensor.ne[0] % static_cast<uint64_t>(ggml_blck_size(static_cast<ggml_type>(tensor.type))) !=
        0) {
        return refuse("rows are not whole blocks of its type");
    }
    uint64_t rows = 0;
    for (const RowSource& source : tensor.sources) rows += source.rows;
    if (rows != tensor.ne[1]) return refuse("row sources do not add up to ne[1]");
    return {};
}

Status check_plan(const Plan& plan) {
    if (plan.splits < 1 || plan.splits > plan.tensors.size()) {
        return fail(Errc::kUsage, "splits must be 1 to the number of tensors");
    }
    if (plan.alignment == 0 || (plan.alignment & (plan.alignment - 1)) != 0) {
        return fail(Errc::kUsage, "alignment is not a power of two");
    }
    std::vector<std::set<std::string_view>> names(plan.splits);
    for (size_t i = 0; i < plan.tensors.size(); ++i) {
        if (auto ok = check_tensor(plan.tensors[i]); !ok) return ok;
        // ggml refuses a name twice in one file; over several files a test may want just that.
        if (!names[i % plan.splits].insert(plan.tensors[i].name).second) {
            return fail(Errc::kUsage,
                        "tensor '" + printable(plan.tensors[i].name, 80) + "' is there twice");
        }
    }
    std::set<std::string_view> keys;
    for (const MetaEntry& entry : plan.meta) {
        if (entry.key.empty() || !keys.insert(entry.key).second) {
            return fail(Errc::kUsage,
                        "key '" + printable(entry.key, 80) + "' is empty or there twice");
        }
    }
    return {};
}

void set_meta(gguf_context* gguf, const MetaEntry& entry) {
    const char* key = entry.key.c_str();
    struct Setter {
        gguf_context* gguf;
        const char* key;
        void operator()(uint32_t value) const { gguf_set_val_u32(gguf, key, value); }
        void operator()(float value) const { gguf_set_val_f32(gguf, key, value); }
        void operator()(bool value) const { gguf_set_val_bool(gguf, key, value); }
        void operator()(const std::string& value) const {
            gguf_set_val_str(gguf, key, value.c_str());
        }
        void operator()(const std::vector<int32_t>& value) const {
            gguf_set_arr_data(gguf, key, GGUF_TYPE_INT32, value.data(), value.size());
        }
        void operator()(const std::vector<std::string>& value) const {
            std::vector<const char*> texts;
            texts.reserve(value.size());
            for (const std::string& text : value) texts.push_back(text.c_str());
            gguf_set_arr_str(gguf, key, texts.data(), texts.size());
        }
    };
    std::visit(Setter{gguf, key}, entry.value);
}

using GgufContext = std::unique_ptr<gguf_context, GgufFree>;

// An empty context that lays tensors out at `alignment`. ggml takes the alignment from the key only
// when it reads a file, so the key is written to memory and read back. Null without memory.
GgufContext make_context(uint32_t alignment) {
    GgufContext gguf(gguf_init_empty());
    if (!gguf || alignment == GGUF_DEFAULT_ALIGNMENT) return gguf;
    gguf_set_val_u32(gguf.get(), "general.alignment", alignment);
    std::vector<uint8_t> bytes(gguf_get_meta_size(gguf.get()));
    gguf_get_meta_data(gguf.get(), bytes.data());
    return GgufContext(gguf_init_from_buffer(bytes.data(), bytes.size(), {true, nullptr}));
}

// Fills in offsets, header and size of one shard.
Status lay_out(const Plan& plan, uint32_t number, Shard& shard) {
    const GgufContext gguf = make_context(plan.alignment);
    const size_t memory = ggml_tensor_overhead() * (shard.tensors.size() + 1);
    const std::unique_ptr<ggml_context, GgmlFree> ggml(ggml_init({memory, nullptr, true}));
    if (!gguf || !ggml)
        return fail(Errc::kEnvironment, "out of memory for the header of " + shard.path);
    if (number == 0) {
        for (const MetaEntry& entry : plan.meta) set_meta(gguf.get(), entry);
    }
    if (plan.splits > 1) {
        gguf_set_val_u16(gguf.get(), "split.no", static_cast<uint16_t>(number));
        gguf_set_val_u16(gguf.get(), "split.count", static_cast<uint16_t>(plan.splits));
        gguf_set_val_i32(gguf.get(), "split.tensors.count",
                         static_cast<int32_t>(plan.tensors.size()));
    }
    std::vector<uint64_t> sizes;
    for (const TensorPlan* tensor : shard.tensors) {
        std::array<int64_t, 4> ne = {};
        std::copy(tensor->ne.begin(), tensor->ne.end(), ne.begin());
        ggml_tensor* shaped = ggml_new_tensor(ggml.get(), static_cast<ggml_type>(tensor->type),
                                              static_cast<int>(tensor->dims), ne.data());
        ggml_set_name(shaped, tensor->name.c_str());
        gguf_add_tensor(gguf.get(), shaped);
        sizes.push_back(ggml_nbytes(shaped));
    }
    shard.header.resize(gguf_get_meta_size(gguf.get()));
    gguf_get_meta_data(gguf.get(), shard.header.data());
    shard.bytes = shard.header.size();
    for (size_t i = 0; i < sizes.size(); ++i) {
        shard.offsets.push_back(shard.header.size() +
                                gguf_get_tensor_offset(gguf.get(), static_cast<int64_t>(i)));
        shard.bytes = shard.offsets.back() + padded(sizes[i], plan.alignment);
    }
    return {};
}

Status write_tensor(const Plan& plan, const TensorPlan& tensor, OutputFile& file) {
    RowMaker maker(tensor, plan.direct_blocks);
    const uint64_t rows_chunk = std::max<uint64_t>(1, kChunkBytes / maker.row_bytes());
    std::vector<uint8_t> chunk;
    for (uint64_t matrix = 0; matrix < tensor.ne[2] * tensor.ne[3]; ++matrix) {
        for (const RowSource& source : tensor.sources) {
            Random random(plan.seed, source.stream, matrix);
            for (uint64_t row = 0; row < source.rows; row += rows_chunk) {
                const uint64_t rows = std::min(rows_chunk, source.rows - row);
                chunk.resize(static_cast<size_t>(rows * maker.row_bytes()));
                maker.make(random, chunk);
                if (auto ok = file.write(chunk); !ok) return ok;
            }
        }
    }
    return {};
}

Result<OutputFile> write_shard(const Plan& plan, const Shard& shard) {
    auto file = OutputFile::create(shard.path);
    if (!file) return file;
    if (auto ok = file->write(shard.header); !ok) return tl::unexpected(ok.error());
    if (plan.sparse) {
        if (auto ok = file->leave_hole_to(shard.bytes); !ok) return tl::unexpected(ok.error());
    } else {
        for (size_t i = 0; i < shard.tensors.size(); ++i) {
            if (auto ok = file->pad_to(shard.offsets[i], plan.pad_byte); !ok) {
                return tl::unexpected(ok.error());
            }
            if (auto ok = write_tensor(plan, *shard.tensors[i], *file); !ok) {
                return tl::unexpected(ok.error());
            }
        }
        if (auto ok = file->pad_to(shard.bytes, plan.pad_byte); !ok)
            return tl::unexpected(ok.error());
    }
    if (auto ok = file->finish(plan.sync); !ok) return tl::unexpected(ok.error());
    return file;
}

// Better one sentence now than an error after minutes of writing.
Status check_space(const std::string& path, uint64_t bytes) {
    const size_t slash = path.rfind('/');
    const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
    struct statvfs info = {};
    if (::statvfs(folder.c_str(), &info) != 0) return {};  // creating the file will say why
    const uint64_t free_bytes = uint64_t{info.f_bavail} * info.f_frsize;
    if (free_bytes >= bytes) return {};
    return fail(Errc::kEnvironment, "not enough space for " + printable(path) + ": needs " +
                                        std::to_string(bytes) + " bytes, " +
                                        std::to_string(free_bytes) +
                                        " are free; use --layers, --sparse or another disk");
}

}  // namespace

std::vector<std::string> split_paths(const std::string& path, uint32_t splits) {
    if (splits <= 1) return {path};
    constexpr std::string_view kSuffix = ".gguf";
    std::string stem = path;
    if (stem.size() > kSuffix.size() && stem.ends_with(kSuffix))
        stem.resize(stem.size() - kSuffix.size());
    std::vector<std::string> paths;
    for (uint32_t i = 1; i <= splits; ++i) {
        char tail[40];
        std::snprintf(tail, sizeof tail, "-%05u-of-%05u.gguf", i, splits);
        paths.push_back(stem + tail);
    }
    return paths;
}

Result<SynthReport> write_plan(const Plan& plan, const std::string& path) {
    if (auto ok = check_plan(plan); !ok) return tl::unexpected(ok.error());
    std::vector<Shard> shards(plan.splits);
    const std::vector<std::string> paths = split_paths(path, plan.splits);
    for (size_t i = 0; i < plan.tensors.size(); ++i) {
        shards[i % plan.splits].tensors.push_back(&plan.tensors[i]);
    }
    uint64_t bytes = 0;
    uint64_t bytes_written = 0;
    for (uint32_t i = 0; i < plan.splits; ++i) {
        shards[i].path = paths[i];
        if (auto ok = lay_out(plan, i, shards[i]); !ok) return tl::unexpected(ok.error());
        bytes += shards[i].bytes;
        bytes_written += plan.sparse ? shards[i].header.size() : shards[i].bytes;
    }
    if (auto ok = check_space(path, bytes_written); !ok) return tl::unexpected(ok.error());

    const moe::FileSizeSignalGuard guard;  // a file too large is an error, not the end
    std::vector<OutputFile> files;
    files.reserve(shards.size());
    for (const Shard& shard : shards) {
        auto file = write_shard(plan, shard);
        if (!file) return tl::unexpected(file.error());
        files.push_back(std::move(*file));
    }
    for (size_t i = 0; i < files.size(); ++i) {
        auto ok = files[i].commit();
        if (ok) continue;
        for (size_t done = 0; done < i; ++done) ::unlink(paths[done].c_str());
        return tl::unexpected(ok.error());
    }
    SynthReport report{
        .paths = paths, .tensors = plan.tensors.size(), .bytes = bytes, .bytes_on_disk = 0};
    for (const std::string& name : paths) {
        struct stat info = {};
        if (::stat(name.c_str(), &info) == 0) {
            report.bytes_on_disk += static_cast<uint64_t>(info.st_blocks) * 512;
        }
    }
    return report;
}

Result<SynthReport> write_synth(const SynthSpec& spec, const std::string& path) {
    auto plan = make_plan(spec);
    if (!plan) return tl::unexpected(plan.error());
    return write_plan(*plan, path);
}

}  // namespace kvasir::synth
