// RawGguf: writes any GGUF bytes, valid or not, for tests and the fuzz corpus.
//
// Used by *_test.cpp only. Every header field can be overridden, so that a table of single-field
// edits can name each one; nothing is checked. Thread: values. Owns: what was added.
#pragma once

#include <unistd.h>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "base/bytes.hpp"
#include "moe/gguf.hpp"

namespace kvasir::moe {

struct RawTensor {
    std::string name;
    std::vector<uint64_t> ne;
    uint32_t type = 0;                    // F32
    std::optional<uint32_t> n_dims = {};  // instead of ne.size()
    std::optional<uint64_t> offset = {};  // instead of the next free one
};

class RawGguf {
public:
    uint32_t version = 3;
    uint64_t alignment = 32;
    std::optional<uint64_t> tensor_count;
    std::optional<uint64_t> key_count;
    std::vector<RawTensor> tensors;

    // `value` holds the value's bytes after the type number.
    RawGguf& add_key(const std::string& key, uint32_t type, const ByteWriter& value) {
        ByteWriter record;
        put_text(record, key);
        record.u32(type);
        record.bytes(value.data());
        keys_.push_back(record.data());
        return *this;
    }
    RawGguf& add(const std::string& key, const std::string& text) {
        ByteWriter value;
        put_text(value, text);
        return add_key(key, 8, value);
    }
    RawGguf& add(const std::string& key, uint32_t number) {
        ByteWriter value;
        value.u32(number);
        return add_key(key, 4, value);
    }
    RawGguf& add(const std::string& key, const std::vector<uint32_t>& numbers) {
        ByteWriter value;
        value.u32(4);
        value.u64(numbers.size());
        for (const uint32_t number : numbers) value.u32(number);
        return add_key(key, 9, value);
    }
    RawGguf& add_tensor(std::string name, std::vector<uint64_t> ne, uint32_t type = 0) {
        tensors.push_back({std::move(name), std::move(ne), type, {}, {}});
        return *this;
    }

    std::vector<uint8_t> header() const {
        ByteWriter out;
        out.text("GGUF");
        out.u32(version);
        out.u64(tensor_count.value_or(tensors.size()));
        out.u64(key_count.value_or(keys_.size()));
        for (const auto& key : keys_) out.bytes(key);
        uint64_t next = 0;
        for (const RawTensor& tensor : tensors) {
            put_text(out, tensor.name);
            out.u32(tensor.n_dims.value_or(static_cast<uint32_t>(tensor.ne.size())));
            for (const uint64_t size : tensor.ne) out.u64(size);
            out.u32(tensor.type);
            out.u64(tensor.offset.value_or(next));
            next += padded(bytes_of(tensor));
        }
        return out.take();
    }
    // Header, padding, and data: byte i of the data is a function of i and `seed`.
    std::vector<uint8_t> file(uint8_t seed = 0) const {
        auto out = header();
        uint64_t data = 0;
        for (const RawTensor& tensor : tensors) data += padded(bytes_of(tensor));
        const uint64_t begin = padded(out.size());
        out.resize(begin + data);
        for (uint64_t i = 0; i < data; ++i) {
            out[begin + i] = static_cast<uint8_t>((i * 2654435761u >> 7) + seed);
        }
        return out;
    }

    static uint64_t bytes_of(const RawTensor& tensor) {
        const auto info = type_info(tensor.type);
        uint64_t elements = 1;
        for (const uint64_t size : tensor.ne) elements *= size;
        return info ? elements / info->block * info->block_bytes : elements;
    }
    static void put_text(ByteWriter& out, const std::string& text) {
        out.u64(text.size());
        out.text(text);
    }

private:
    uint64_t padded(uint64_t bytes) const {
        const uint64_t step = alignment == 0 ? 1 : alignment;
        return (bytes + step - 1) / step * step;
    }
    std::vector<std::vector<uint8_t>> keys_;
};

// A folder of this test alone, removed at the end.
class TempFolder {
public:
    TempFolder() {
        std::string name = (std::filesystem::temp_directory_path() / "kvasir_moe_XXXXXX").string();
        path_ = mkdtemp(name.data());
    }
    ~TempFolder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    TempFolder(const TempFolder&) = delete;
    TempFolder& operator=(const TempFolder&) = delete;
    std::string file(const std::string& name) const { return path_ + "/" + name; }
    std::string write(const std::string& name, const std::vector<uint8_t>& bytes) const {
        std::ofstream out(file(name), std::ios::binary);
        out.write(reinterpret_cast<const char*>(bytes.data()),
                  static_cast<std::streamsize>(bytes.size()));
        return file(name);
    }

private:
    std::string path_;
};

// Peak growth of resident memory is not portable; current resident bytes of this process are.
inline uint64_t resident_bytes() {
    std::ifstream statm("/proc/self/statm");
    uint64_t total = 0;
    uint64_t resident = 0;
    statm >> total >> resident;
    return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

// A toy MoE with 4 blocks, hidden 64, width 96, 8 experts, 2 used; switches for each layout.
struct ToyMoe {
    std::string arch = "toy";
    std::vector<bool> is_moe = {true, true, true, true};
    std::vector<bool> is_fused = {false, false, false, false};
    bool bias = false;
    bool scale = false;
    bool shared = false;
    bool probs = false;
    uint32_t experts = 8;
    std::optional<uint32_t> leading_dense;
    uint32_t mtp = 0;  // extra MoE blocks with nextn tensors

    uint32_t blocks() const { return static_cast<uint32_t>(is_moe.size()) + mtp; }
    RawGguf keys() const {
        RawGguf out;
        out.add("general.architecture", arch).add("general.name", std::string("Toy"));
        out.add(arch + ".block_count", blocks()).add(arch + ".embedding_length", 64u);
        out.add(arch + ".expert_count", experts).add(arch + ".expert_used_count", 2u);
        if (leading_dense) out.add(arch + ".leading_dense_block_count", *leading_dense);
        if (mtp > 0) out.add(arch + ".nextn_predict_layers", mtp);
        return out;
    }
    std::vector<RawTensor> tensors() const {
        RawGguf out;
        out.add_tensor("token_embd.weight", {64, 32}).add_tensor("output.weight", {64, 32});
        for (uint32_t layer = 0; layer < blocks(); ++layer) {
            const std::string blk = "blk." + std::to_string(layer) + ".";
            out.add_tensor(blk + "attn_q.weight", {64, 64})
                .add_tensor(blk + "ffn_norm.weight", {64});
            if (layer >= is_moe.size()) out.add_tensor(blk + "nextn.eh_proj.weight", {128, 64});
            if (layer < is_moe.size() && !is_moe[layer]) {
                for (const char* name : {"ffn_gate", "ffn_up"}) {
                    out.add_tensor(blk + name + ".weight", {64, 96});
                }
                out.add_tensor(blk + "ffn_down.weight", {96, 64});
                continue;
            }
            add_experts(out, blk, layer < is_fused.size() && is_fused[layer]);
        }
        return out.tensors;
    }
    RawGguf make() const {
        RawGguf out = keys();
        out.tensors = tensors();
        return out;
    }

private:
    void add_experts(RawGguf& out, const std::string& blk, bool fused) const {
        out.add_tensor(blk + "ffn_gate_inp.weight", {64, experts});
        if (probs) out.add_tensor(blk + "exp_probs_b.bias", {experts});
        if (shared) out.add_tensor(blk + "ffn_up_shexp.weight", {64, 96});
        const auto add_matrix = [&](const std::string& role, uint64_t n_in, uint64_t n_out) {
            out.add_tensor(blk + "ffn_" + role + "_exps.weight", {n_in, n_out, experts});
            if (bias) out.add_tensor(blk + "ffn_" + role + "_exps.bias", {n_out, experts});
            if (scale) out.add_tensor(blk + "ffn_" + role + "_exps.scale", {experts});
        };
        if (fused) {
            add_matrix("gate_up", 64, 192);
        } else {
            add_matrix("gate", 64, 96);
            add_matrix("up", 64, 96);
        }
        add_matrix("down", 96, 64);
    }
};

}  // namespace kvasir::moe
