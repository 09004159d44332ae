#include "synth/random.hpp"

#include <ggml.h>

#include <cmath>
#include <cstring>

#include "base/check.hpp"

namespace kvasir::synth {
namespace {

constexpr size_t kTable = 65536;  // gaussian values, picked by 16 random bits
constexpr size_t kHeads = 4096;   // pooled block scales, picked by 12 random bits
constexpr size_t kQ4kBytes = 144, kQ4kHead = 16, kQ4kQuants = 128;
constexpr size_t kQ6kBytes = 210, kQ6kQuants = 192, kQ6kTail = 18;

uint64_t splitmix(uint64_t& state) {
    uint64_t z = (state += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

// A table of normal deviates: sums of twelve uniforms, recentred to mean 0 and deviation 1.
const std::vector<float>& gaussian_table() {
    static const std::vector<float> kValues = [] {
        Random random(0, "gaussian table", 0);
        std::vector<double> sums(kTable);
        double mean = 0;
        for (double& sum : sums) {
            uint64_t total = 0;
            for (int i = 0; i < 12; ++i) total += random.next() >> 48;
            sum = static_cast<double>(total) / 65536.0 - 6.0;
            mean += sum;
        }
        mean /= static_cast<double>(kTable);
        double square = 0;
        for (double& sum : sums) square += (sum - mean) * (sum - mean);
        const double deviation = std::sqrt(square / static_cast<double>(kTable));
        std::vector<float> values;
        values.reserve(kTable);
        for (double sum : sums) values.push_back(static_cast<float>((sum - mean) / deviation));
        return values;
    }();
    return kValues;
}

void put_half(uint8_t* out, float value) {
    const uint16_t half = ggml_fp32_to_fp16(value);
    out[0] = static_cast<uint8_t>(half);
    out[1] = static_cast<uint8_t>(half >> 8);
}

// Q4_K: weight = d * scale * (q - 7.5), by minimum = scale and dmin = 7.5 d; q uniform in 0..15
// (deviation 4.61), scales uniform in 32..63 (root mean square 48.4).
void make_q4k_head(Random& random, float scale, uint8_t* out) {
    const float d = scale / (4.61F * 48.4F);
    put_half(out, d);
    put_half(out + 2, 7.5F * d);
    uint8_t scales[8];
    for (uint8_t& value : scales) value = static_cast<uint8_t>(32 + (random.next() >> 59));
    uint8_t* packed = out + 4;
    for (int i = 0; i < 4; ++i) {
        const auto low = scales[i];
        const auto high = scales[i + 4];
        packed[i] = static_cast<uint8_t>(low | ((high >> 4) << 6));
        packed[i + 4] = packed[i];
        packed[i + 8] = static_cast<uint8_t>((high & 15) | ((high & 15) << 4));
    }
}

// Q6_K: weight = d * scale * (q - 32); q uniform in 0..63 (root mean square 18.5 about 32), scales
// of either sign with magnitude 64..127 (root mean square 97.3).
void make_q6k_tail(Random& random, float scale, uint8_t* out) {
    for (int i = 0; i < 16; ++i) {
        const uint64_t bits = random.next();
        const int magnitude = 64 + static_cast<int>(bits >> 58);
        out[i] = static_cast<uint8_t>((bits & 1) != 0 ? magnitude : -magnitude);
    }
    put_half(out + 16, scale / (18.5F * 97.3F));
}

void put_bits(Random& random, uint8_t* out, size_t count) {
    for (size_t i = 0; i < count; i += 8) {
        const uint64_t bits = random.next();
        std::memcpy(out + i, &bits, 8);
    }
}

}  // namespace

Random::Random(uint64_t seed, std::string_view stream, uint64_t index) {
    uint64_t hash = 0xcbf29ce484222325;  // FNV-1a of the name
    for (char c : stream) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
    uint64_t state = seed;
    uint64_t mixed = splitmix(state) ^ hash;
    state = splitmix(mixed) ^ index;
    for (uint64_t& word : state_) word = splitmix(state);
}

RowMaker::RowMaker(const TensorPlan& tensor, bool direct)
    : type_(tensor.type), row_(tensor.ne[0]), fill_(tensor.fill), scale_(tensor.scale) {
    const auto type = static_cast<ggml_type>(type_);
    KVASIR_CHECK(row_ % static_cast<uint64_t>(ggml_blck_size(type)) == 0);
    row_bytes_ = ggml_row_size(type, static_cast<int64_t>(row_));
    direct_ = direct && fill_ == Fill::kGaussian &&
              (type == GGML_TYPE_F16 || type == GGML_TYPE_Q4_K || type == GGML_TYPE_Q6_K);
    if (direct_) prepare_direct();
    if (ggml_quantize_requires_imatrix(type)) importance_.assign(row_, 1.0F);
}

void RowMaker::prepare_direct() {
    Random random(0, "block scales", type_);
    if (type_ == GGML_TYPE_F16) {
        halves_.reserve(kTable);
        for (float value : gaussian_table()) halves_.push_back(ggml_fp32_to_fp16(value * scale_));
        return;
    }
    const bool q4k = type_ == GGML_TYPE_Q4_K;
    const size_t bytes = q4k ? kQ4kHead : kQ6kTail;
    heads_.resize(kHeads * bytes);
    for (size_t i = 0; i < kHeads; ++i) {
        if (q4k) {
            make_q4k_head(random, scale_, &heads_[i * bytes]);
        } else {
            make_q6k_tail(random, scale_, &heads_[i * bytes]);
        }
    }
}

void RowMaker::make_direct(Random& random, std::span<uint8_t> out) const {
    if (type_ == GGML_TYPE_F16) {
        for (size_t row = 0; row < out.size(); row += row_bytes_) {
            for (size_t i = 0; i < row_; i += 4) {
                uint64_t bits = random.next();
                for (size_t j = i; j < std::min<size_t>(i + 4, row_); ++j, bits >>= 16) {
                    std::memcpy(&out[row + 2 * j], &halves_[bits & 0xffff], 2);
                }
            }
        }
        return;
    }
    if (type_ == GGML_TYPE_Q4_K) {
        for (size_t at = 0; at < out.size(); at += kQ4kBytes) {
            std::memcpy(&out[at], &heads_[(random.next() >> 52) * kQ4kHead], kQ4kHead);
            put_bits(random, &out[at + kQ4kHead], kQ4kQuants);
        }
        return;
    }
    for (size_t at = 0; at < out.size(); at += kQ6kBytes) {
        put_bits(random, &out[at], kQ6kQuants);
        std::memcpy(&out[at + kQ6kQuants], &heads_[(random.next() >> 52) * kQ6kTail], kQ6kTail);
    }
}

void RowMaker::make_values(Random& random, std::span<float> row) const {
    const auto& table = gaussian_table();
    for (size_t i = 0; i < row.size(); i += 4) {
        uint64_t bits = random.next();
        for (size_t j = i; j < std::min(i + 4, row.size()); ++j, bits >>= 16) {
            const float gaussian = table[bits & 0xffff];
            const float uniform = 0.5F + static_cast<float>(bits & 0xffff) / 65536.0F;
            switch (fill_) {
                case Fill::kGaussian:
                    row[j] = gaussian * scale_;
                    break;
                case Fill::kNorm:
                    row[j] = 1.0F + gaussian * scale_;
                    break;
                case Fill::kUniform:
                    row[j] = uniform;
                    break;
                case Fill::kDecay:
                    row[j] = -uniform * scale_;
                    break;
                case Fill::kStep:
                    row[j] = gaussian * scale_ - 2.0F;
                    break;
            }
        }
    }
}

void RowMaker::make(Random& random, std::span<uint8_t> out) {
    KVASIR_CHECK(out.size() % row_bytes_ == 0);
    if (direct_) return make_direct(random, out);
    const size_t rows = out.size() / row_bytes_;
    values_.resize(rows * row_);
    for (size_t row = 0; row < rows; ++row) {
        make_values(random, std::span<float>(values_).subspan(row * row_, row_));
    }
    ggml_quantize_chunk(static_cast<ggml_type>(type_), values_.data(), out.data(), 0,
                        static_cast<int64_t>(rows), static_cast<int64_t>(row_),
                        importance_.empty() ? nullptr : importance_.data());
}

}  // namespace kvasir::synth
