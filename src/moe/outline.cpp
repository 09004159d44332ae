#include "moe/outline.hpp"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <optional>
#include <set>
#include <string_view>

#include "base/bytes.hpp"
#include "base/check.hpp"
#include "base/log.hpp"
#include "moe/classify.hpp"
#include "moe/cut.hpp"
#include "moe/layout.hpp"
#include "moe/slice_metadata.hpp"
#include "moe/splits.hpp"

namespace kvasir::moe {
namespace {

constexpr std::string_view kMagic{"kvasir-outline-1\0", 17};
constexpr size_t kModelTextMax = 1024;  // name, architecture
constexpr size_t kFileNameMax = 255;
constexpr uint32_t kBankTensorsMax = 12;  // four roles, three parts
// Of all shards together: whatever is added up from parts of them stays below 2^63.
constexpr auto kModelBytesMax = static_cast<uint64_t>(std::numeric_limits<int64_t>::max() / 2);

void put_text(ByteWriter& out, std::string_view text) {
    KVASIR_CHECK(text.size() <= UINT16_MAX);
    out.u16(static_cast<uint16_t>(text.size()));
    out.text(text);
}

// The stacked tensor that the slabs of `slab` lie in; nullopt when its size is none of 63 bits, not
// a whole number of blocks, or 0.
std::optional<GgufTensor> stacked(const SlabTensor& slab, uint32_t experts) {
    GgufTensor tensor;
    tensor.name = slab.name;
    tensor.type = slab.type;
    tensor.offset = slab.offset;
    switch (slab.part) {
        case SlabPart::kWeight:
            tensor.dims = 3;
            tensor.ne = {slab.n_in, slab.n_out, experts, 1};
            break;
        case SlabPart::kBias:
            tensor.dims = 2;
            tensor.ne = {slab.n_out, experts, 1, 1};
            break;
        case SlabPart::kScale:
            tensor.dims = 1;
            tensor.ne = {experts, 1, 1, 1};
            break;
    }
    const auto info = type_info(slab.type);
    if (!info || tensor.ne[0] % info->block != 0) return std::nullopt;
    uint64_t elements = 1;
    for (const uint64_t size : tensor.ne) {
        if (size == 0 || size > kModelBytesMax / elements) return std::nullopt;
        elements *= size;
    }
    const uint64_t blocks = elements / info->block;
    if (blocks > kModelBytesMax / info->block_bytes) return std::nullopt;
    tensor.bytes = blocks * info->block_bytes;
    return tensor;
}

// What is left of a shard when only its expert tensors count.
GgufHeader bare_shard(std::string name, uint64_t file_bytes) {
    GgufHeader shard;
    shard.path = std::move(name);
    shard.file_bytes = file_bytes;
    return shard;
}

void count_expert_bytes(Model& model) {
    ClassTotal& total = model.totals[static_cast<size_t>(TensorClass::kExpert)];
    for (const GgufHeader& shard : model.shards) {
        for (const GgufTensor& tensor : shard.tensors) {
            total.tensors += 1;
            total.bytes += tensor.bytes;
        }
    }
}

bool is_file_name(std::string_view name) {
    if (name.empty() || name.size() > kFileNameMax || name == "." || name == "..") return false;
    return std::ranges::none_of(
        name, [](char c) { return c == '/' || c == '\\' || (c >= 0 && c < 32) || c == 127; });
}

// Reads an outline from bytes that nobody vouches for. The first thing that is wrong sticks; from
// then on all reads give zeros.
class Decoder {
public:
    explicit Decoder(std::span<const uint8_t> bytes) : in_(bytes) {}

    Result<Outline> run() {
        for (auto step : {&Decoder::read_head, &Decoder::read_shards, &Decoder::read_kept_keys,
                          &Decoder::read_facts, &Decoder::read_banks, &Decoder::check_end,
                          &Decoder::check_kept_keys, &Decoder::check_overlap, &Decoder::lay_out}) {
            (this->*step)();
            if (error_) return tl::unexpected<Error>(std::move(*error_));
        }
        count_expert_bytes(out_.model);
        return std::move(out_);
    }

private:
    bool ok() const { return !error_; }
    void refuse(const std::string& field, const std::string& what, Errc code = Errc::kBadInput) {
        if (!error_) error_ = Error{code, "outline: " + field + ": " + what};
    }
    template <class T>
    T take(const std::string& field, T value) {
        if (in_.failed()) refuse(field, "the bytes end before it");
        return value;
    }
    uint8_t u8(const std::string& field) { return take(field, in_.u8()); }
    uint32_t u32(const std::string& field) { return take(field, in_.u32()); }
    uint64_t u64(const std::string& field) { return take(field, in_.u64()); }
    std::string text(const std::string& field, size_t bytes_max) {
        const uint16_t size = take(field, in_.u16());
        if (size > bytes_max) {
            refuse(
                field,
                std::to_string(size) + " bytes, above the supported " + std::to_string(bytes_max),
                Errc::kLimit);
            return {};
        }
        return std::string(take(field, in_.text(size)));
    }
    Sha256 digest(const std::string& field) {
        Sha256 value = {};
        std::ranges::copy(take(field, in_.bytes(value.size())), value.begin());
        return value;
    }
    // A count whose items have at least `bytes_each` bytes.
    uint32_t count(const std::string& field, uint64_t bytes_each, uint64_t count_max) {
        const uint32_t value = u32(field);
        if (value > count_max) {
            refuse(field,
                   std::to_string(value) + ", above the supported " + std::to_string(count_max),
                   Errc::kLimit);
        } else if (value > in_.remaining() / bytes_each) {
            refuse(field, std::to_string(value) + " cannot fit in the " +
                              std::to_string(in_.remaining()) + " bytes that remain");
        }
        return ok() ? value : 0;
    }

    void read_head() {
        if (in_.remaining() > kOutlineBytesMax) {
            return refuse("size", std::to_string(in_.remaining()) + " bytes", Errc::kLimit);
        }
        if (in_.text(kMagic.size()) != kMagic) {
            return refuse("magic", "these bytes are no outline of this version");
        }
        out_.manifest.model_id = digest("model_id");
        if (ok() && !out_.manifest.has_model_id()) refuse("model_id", "must not be zero");
        out_.model.name = text("name", kModelTextMax);
    }

    void read_shards() {
        const uint32_t shards = count("shards", 2 + 8, kSplitPartsMax);
        if (ok() && shards == 0) refuse("shards", "a model has at least one file");
        std::set<std::string> names;
        uint64_t total = 0;
        for (uint32_t i = 0; i < shards && ok(); ++i) {
            const std::string field = "shards[" + std::to_string(i) + "]";
            std::string name = text(field + ".name", kFileNameMax);
            const uint64_t bytes = u64(field + ".bytes");
            if (!ok()) return;
            if (!is_file_name(name)) return refuse(field + ".name", "is not a plain file name");
            if (!names.insert(name).second) return refuse(field + ".name", "is there twice");
            if (bytes > kModelBytesMax - total)
                return refuse(field + ".bytes", "no file is as big");
            total += bytes;
            out_.model.shards.push_back(bare_shard(std::move(name), bytes));
        }
    }

    void read_kept_keys() {
        const uint32_t keys = count("kept keys", 4, kGgufKeysMax);
        for (uint32_t i = 0; i < keys && ok(); ++i) {
            const std::string field = "kept keys[" + std::to_string(i) + "]";
            const uint32_t bytes = u32(field);
            if (bytes > kKeptKeyBytesMax) {
                return refuse(field, std::to_string(bytes) + " bytes", Errc::kLimit);
            }
            const auto record = take(field, in_.bytes(bytes));
            out_.kept_keys.emplace_back(record.begin(), record.end());
        }
    }

    void read_facts() {
        out_.model.arch = text("arch", kModelTextMax);
        out_.model.experts_used = u32("experts_used");
        out_.model.n_embd = u64("n_embd");
    }

    void read_banks() {
        constexpr uint64_t kBankBytesMin = 4 + 4 + 4 + 1 + 4;
        const uint32_t banks = count("banks", kBankBytesMin, 2 * uint64_t{kLayersMax});
        for (uint32_t b = 0; b < banks && ok(); ++b) {
            read_bank("banks[" + std::to_string(b) + "]");
        }
    }

    void read_bank(const std::string& field) {
        constexpr uint64_t kTensorBytesMin = 2 + 1 + 1 + 4 + 8 + 8 + 4 + 8 + 8;
        ExpertBank bank;
        bank.key.layer = u32(field + ".layer");
        bank.key.bank = u32(field + ".bank");
        bank.experts = u32(field + ".experts");
        const uint8_t is_mtp = u8(field + ".is_mtp");
        const uint32_t tensors = count(field + ".tensors", kTensorBytesMin, kBankTensorsMax);
        if (!ok()) return;
        if (bank.key.layer >= kLayersMax) return refuse(field + ".layer", "no model is as deep");
        if (bank.key.bank > 1) return refuse(field + ".bank", "there is no such bank");
        if (!claimed_.empty() && bank.key <= claimed_.back().key) {
            return refuse(field + ".layer", "banks are not in order");
        }
        if (bank.experts == 0 || bank.experts > kBankExpertsMax) {
            return refuse(field + ".experts", std::to_string(bank.experts) + " experts");
        }
        if (is_mtp > 1) return refuse(field + ".is_mtp", "must be 0 or 1");
        bank.is_mtp = is_mtp == 1;
        if (tensors == 0) return refuse(field + ".tensors", "a bank has tensors");
        BankDigests digests;
        digests.key = bank.key;
        digests.experts = bank.experts;
        for (uint32_t t = 0; t < tensors && ok(); ++t) {
            const std::string where = field + ".tensors[" + std::to_string(t) + "]";
            read_tensor(where, bank);
            read_digests(where + ".sha256", bank.experts, digests.slabs.emplace_back());
        }
        claimed_.push_back(std::move(bank));
        out_.manifest.banks.push_back(std::move(digests));
    }

    void read_tensor(const std::string& field, ExpertBank& bank) {
        SlabTensor slab;
        slab.name = text(field + ".name", kGgufNameBytesMax);
        const uint8_t role = u8(field + ".role");
        const uint8_t part = u8(field + ".part");
        slab.role = static_cast<SlabRole>(role);
        slab.part = static_cast<SlabPart>(part);
        slab.type = u32(field + ".type");
        slab.n_in = u64(field + ".n_in");
        slab.n_out = u64(field + ".n_out");
        slab.shard = u32(field + ".shard");
        slab.offset = u64(field + ".offset");
        slab.slab_bytes = u64(field + ".slab_bytes");
        if (!ok()) return;
        const auto name = parse_expert_name(slab.name);
        if (!name || name->key != bank.key || name->role != slab.role || name->part != slab.part) {
            return refuse(field + ".name", "'" + printable(slab.name) +
                                               "' is not the tensor of that layer, role and part");
        }
        if (slab.shard >= out_.model.shards.size()) {
            return refuse(field + ".shard", "there is no shard " + std::to_string(slab.shard));
        }
        GgufHeader& shard = out_.model.shards[slab.shard];
        auto tensor = stacked(slab, bank.experts);
        if (!tensor) {
            return refuse(field + ".n_in", "type and sizes do not make a tensor of whole blocks");
        }
        if (tensor->bytes > shard.file_bytes || tensor->offset > shard.file_bytes - tensor->bytes) {
            return refuse(field + ".offset", "its data ends outside " + printable(shard.path));
        }
        shard.tensors.push_back(std::move(*tensor));
        bank.tensors.push_back(std::move(slab));
    }

    void read_digests(const std::string& field, uint32_t experts, std::vector<Sha256>& digests) {
        if (!ok()) return;
        if (experts > in_.remaining() / sizeof(Sha256)) {
            return refuse(field, "the bytes end before it");
        }
        digests.resize(experts);
        for (Sha256& value : digests) {
            std::ranges::copy(in_.bytes(value.size()), value.begin());
        }
    }

    void check_end() {
        if (in_.remaining() != 0) {
            refuse("end", std::to_string(in_.remaining()) + " bytes left over");
        }
    }

    // The records are what a GGUF reader accepts, each under a name that slices keep, in order.
    void check_kept_keys() {
        ByteWriter file;
        file.text("GGUF");
        file.u32(3);
        file.u64(0);
        file.u64(out_.kept_keys.size());
        uint64_t offset = file.size();
        for (const auto& record : out_.kept_keys) file.bytes(record);
        const auto header = parse_gguf_header(file.data(), file.size(), "outline: kept keys");
        if (!header) {
            error_ = header.error();
            return;
        }
        size_t index = 0;
        for (const auto& [key, value] : header->keys) {
            const std::string field = "kept keys[" + std::to_string(index) + "]";
            const uint64_t bytes = out_.kept_keys[index++].size();
            if (value.offset != offset || value.bytes != bytes) {
                return refuse(field, "is not one record, or not in order");
            }
            if (!is_kept_key(key, bytes)) {
                return refuse(field, "'" + printable(key) + "' is no key of a slice");
            }
            offset += bytes;
        }
        if (header->get_text("general.architecture") != out_.model.arch ||
            out_.model.arch.empty()) {
            refuse("arch", "is not what the key 'general.architecture' says");
        }
    }

    void check_overlap() {
        for (const GgufHeader& shard : out_.model.shards) {
            std::vector<const GgufTensor*> order;
            for (const GgufTensor& tensor : shard.tensors) order.push_back(&tensor);
            std::ranges::sort(order, {}, &GgufTensor::offset);
            for (size_t i = 1; i < order.size(); ++i) {
                if (order[i]->offset >= order[i - 1]->offset + order[i - 1]->bytes) continue;
                return refuse(printable(order[i]->name),
                              "its data overlaps that of " + printable(order[i - 1]->name));
            }
        }
    }

    // The rules that a model read from files obeys decide; what they derive must be what is
    // claimed.
    void lay_out() {
        auto banks = lay_out_banks(out_.model.shards);
        if (!banks) {
            error_ = Error{banks.error().code, "outline: " + banks.error().detail};
            return;
        }
        if (banks->size() != claimed_.size()) return refuse("banks", "two of the same layer");
        for (size_t b = 0; b < banks->size(); ++b) {
            ExpertBank& bank = (*banks)[b];
            const ExpertBank& claimed = claimed_[b];
            const std::string field = "banks[" + std::to_string(b) + "]";
            const bool same = bank.key == claimed.key && bank.experts == claimed.experts &&
                              std::ranges::equal(bank.tensors, claimed.tensors, same_slabs);
            if (!same) {
                return refuse(field + ".tensors", "not in order, or sizes that disagree");
            }
            bank.is_mtp = claimed.is_mtp;
            out_.manifest.banks[b].global_ids = bank.global_ids;
        }
        out_.model.banks = std::move(*banks);
    }

    static bool same_slabs(const SlabTensor& a, const SlabTensor& b) {
        return a.name == b.name && a.role == b.role && a.part == b.part && a.type == b.type &&
               a.n_in == b.n_in && a.n_out == b.n_out && a.shard == b.shard &&
               a.offset == b.offset && a.slab_bytes == b.slab_bytes;
    }

    ByteReader in_;
    Outline out_;
    std::vector<ExpertBank> claimed_;
    std::optional<Error> error_;
};

}  // namespace

Result<Outline> make_outline(const Model& model, const Manifest& manifest) {
    const std::string where = printable(model.shards.front().path, 400);
    if (model.is_slice) {
        return fail(Errc::kUsage, where + ": is a slice; name the whole model");
    }
    if (!manifest.has_model_id()) {
        return fail(Errc::kUsage, where + ": the manifest given has no model id");
    }
    if (auto status = check_manifest(model, manifest); !status) {
        return tl::unexpected(std::move(status.error()));
    }
    if (model.arch.size() > kModelTextMax) {
        return fail(Errc::kLimit, where + ": the name of its architecture is too long");
    }
    auto keys = read_kept_keys(model);
    if (!keys) return tl::unexpected(std::move(keys.error()));
    Outline outline;
    outline.manifest = manifest;
    outline.kept_keys = std::move(*keys);
    outline.model.arch = model.arch;
    outline.model.name = model.name.substr(0, kModelTextMax);
    outline.model.experts_used = model.experts_used;
    outline.model.n_embd = model.n_embd;
    outline.model.banks = model.banks;
    for (const GgufHeader& shard : model.shards) {
        std::string name = std::filesystem::path(shard.path).filename();
        if (!is_file_name(name)) {
            return fail(Errc::kUsage, printable(shard.path, 400) +
                                          ": its name has control characters, backslashes or too "
                                          "many bytes to be asked for over a network; rename it");
        }
        outline.model.shards.push_back(bare_shard(std::move(name), shard.file_bytes));
    }
    for (const ExpertBank& bank : model.banks) {
        for (const SlabTensor& slab : bank.tensors) {
            auto tensor = stacked(slab, bank.experts);
            KVASIR_CHECK(tensor);  // open_model() has measured it
            outline.model.shards[slab.shard].tensors.push_back(std::move(*tensor));
        }
    }
    count_expert_bytes(outline.model);
    return outline;
}

std::vector<uint8_t> encode_outline(const Outline& outline) {
    const Model& model = outline.model;
    ByteWriter out;
    out.text(kMagic);
    out.bytes(outline.manifest.model_id);
    put_text(out, model.name);
    out.u32(static_cast<uint32_t>(model.shards.size()));
    for (const GgufHeader& shard : model.shards) {
        put_text(out, shard.path);
        out.u64(shard.file_bytes);
    }
    out.u32(static_cast<uint32_t>(outline.kept_keys.size()));
    for (const auto& record : outline.kept_keys) {
        out.u32(static_cast<uint32_t>(record.size()));
        out.bytes(record);
    }
    put_text(out, model.arch);
    out.u32(model.experts_used);
    out.u64(model.n_embd);
    out.u32(static_cast<uint32_t>(model.banks.size()));
    for (size_t b = 0; b < model.banks.size(); ++b) {
        const ExpertBank& bank = model.banks[b];
        out.u32(bank.key.layer);
        out.u32(bank.key.bank);
        out.u32(bank.experts);
        out.u8(bank.is_mtp ? 1 : 0);
        out.u32(static_cast<uint32_t>(bank.tensors.size()));
        for (size_t t = 0; t < bank.tensors.size(); ++t) {
            const SlabTensor& slab = bank.tensors[t];
            put_text(out, slab.name);
            out.u8(static_cast<uint8_t>(slab.role));
            out.u8(static_cast<uint8_t>(slab.part));
            out.u32(slab.type);
            out.u64(slab.n_in);
            out.u64(slab.n_out);
            out.u32(slab.shard);
            out.u64(slab.offset);
            out.u64(slab.slab_bytes);
            for (const Sha256& digest : outline.manifest.banks[b].slabs[t]) out.bytes(digest);
        }
    }
    return out.take();
}

Result<Outline> decode_outline(std::span<const uint8_t> bytes) {
    return Decoder(bytes).run();
}

}  // namespace kvasir::moe
