// Computes one corpus through every kernel set that this processor runs, and prints a SHA-256 per
// set and numeric class. The corpus is the same on every processor, and so must the digests be.
//
//   kernels_digest                         prints SET CLASS DIGEST lines
//   kernels_digest --golden FILE [SET...]  compares with FILE, part by part; every SET must be here
//   kernels_digest --write                 prints what belongs into FILE
//
// tests/wasm/kernels_test.mjs makes the same corpus in JavaScript: change both. Exit codes: 1 other
// bits or a set is missing, 2 usage, 3 FILE is not what it should be.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "engine/kernels/blocks_testing.hpp"
#include "engine/kernels/gelu.hpp"
#include "engine/kernels/kernels.hpp"
#include "sha256_testing.hpp"

namespace kvasir::engine::kernels {
namespace {

using testing::Sha256;

// A counter through the finaliser of MurmurHash3 (Appleby): 32-bit integers only.
class Generator {
public:
    uint32_t next() {
        uint32_t x = counter_ += 0x9e3779b9;
        x = (x ^ x >> 16) * 0x85ebca6b;
        x = (x ^ x >> 13) * 0xc2b2ae35;
        return x ^ x >> 16;
    }

private:
    uint32_t counter_ = 0;
};

enum class Kind { kRandom, kZero, kSubnormal, kHuge, kExtreme };
constexpr Kind kKinds[] = {Kind::kRandom, Kind::kZero, Kind::kSubnormal, Kind::kHuge,
                           Kind::kExtreme};

struct Shape {
    uint32_t width, weight_rows, rows;
};
constexpr Shape kShapes[] = {{256, 7, 1},  {512, 5, 2},   {1024, 3, 3}, {3072, 4, 5}, {8192, 1, 4},
                             {2048, 3, 7}, {256, 3, 65},  {256, 2, 9},  {32, 3, 2},   {96, 2, 17},
                             {2880, 5, 3}, {1056, 33, 1}, {512, 8, 8},  {256, 16, 13}};

constexpr const char* kNames[] = {"q4_0", "q8_0",   "q2_K",   "q3_K",  "q4_K", "q5_K",
                                  "q6_K", "iq4_nl", "iq4_xs", "mxfp4", "q5_0"};
static_assert(std::size(kNames) == kWeightTypeCount);

uint16_t make_scale(Kind kind, Generator& random) {
    const uint32_t any = random.next() >> 16;
    switch (kind) {
        case Kind::kZero:
            return static_cast<uint16_t>(any & 0x8000);
        case Kind::kSubnormal:
            return static_cast<uint16_t>(any & 0x83ff);
        case Kind::kHuge:
            return static_cast<uint16_t>((any & 0x83ff) | 0x7800);
        default:
            return static_cast<uint16_t>((any & 0x83ff) | 0x2400 | (any & 0x0c00) >> 1);
    }
}

// The exponent of an MXFP4 block.
uint8_t make_exponent(Kind kind, Generator& random) {
    const uint32_t any = random.next() >> 16;
    switch (kind) {
        case Kind::kZero:
            return 0;
        case Kind::kSubnormal:
            return static_cast<uint8_t>(any % 4);
        case Kind::kHuge:
            return static_cast<uint8_t>(240 + any % 10);
        default:
            return static_cast<uint8_t>(110 + any % 30);
    }
}

std::vector<uint8_t> make_weights(WeightType type, const Shape& shape, Kind kind,
                                  Generator& random) {
    std::vector<uint8_t> weights(row_bytes(type, shape.width) * shape.weight_rows);
    for (uint8_t& byte : weights) {
        const uint32_t any = random.next() >> 16;
        // kExtreme: all fields full, or all empty (the largest negative of signed ones).
        byte = static_cast<uint8_t>(kind == Kind::kExtreme ? (any % 4 ? 0xff : 0) : any);
        if (kind == Kind::kExtreme && type == WeightType::kQ8_0) byte ^= 0x7f;
    }
    for (size_t b = 0; b < weights.size(); b += block_bytes(type)) {
        for (uint32_t at : scales_at(type)) {
            const uint16_t scale = make_scale(kind, random);
            weights[b + at] = static_cast<uint8_t>(scale);
            weights[b + at + 1] = static_cast<uint8_t>(scale >> 8);
        }
        if (type == WeightType::kMxfp4) weights[b] = make_exponent(kind, random);
    }
    return weights;
}

// Four sixteen-bit numbers added, in -4 .. 4 times a power of two: exact in every kind.
std::vector<float> make_values(size_t count, Kind kind, Generator& random) {
    std::vector<float> x(count);
    for (size_t i = 0; i < count; ++i) {
        int32_t sum = -131070;
        for (int k = 0; k < 4; ++k) sum += static_cast<int32_t>(random.next() >> 16);
        if (kind == Kind::kZero && (i < count / 2 || random.next() % 3)) sum = 0;
        const int exponent = kind == Kind::kSubnormal ? -146 : kind == Kind::kHuge ? 50 : -15;
        x[i] = static_cast<float>(std::ldexp(sum, exponent));
        if (kind == Kind::kExtreme) x[i] = sum < 0 ? -3.0f : 3.0f;
    }
    return x;
}

// Results, of which all that are not numbers count as one.
void add_floats(Sha256& sha, const std::vector<float>& values) {
    for (float value : values) {
        const uint32_t bits = value != value ? 0x7fc00000 : bits_of(value);
        const uint8_t bytes[4] = {static_cast<uint8_t>(bits), static_cast<uint8_t>(bits >> 8),
                                  static_cast<uint8_t>(bits >> 16),
                                  static_cast<uint8_t>(bits >> 24)};
        sha.add(bytes, sizeof(bytes));
    }
}

// The digest of each part of the corpus, in the order of the golden file.
struct Digests {
    std::vector<std::pair<std::string, std::string>> parts;

    void add(const std::string& name, Sha256& sha) { parts.emplace_back(name, sha.finish()); }
    // Over the parts that all classes share and those of one class.
    std::string of_class(const std::string& name) const {
        Sha256 sha;
        for (const auto& [part, digest] : parts) {
            const size_t colon = part.find(':');
            if (colon != std::string::npos && part.substr(colon + 1) != name) continue;
            const std::string line = part + " " + digest + "\n";
            sha.add(line.data(), line.size());
        }
        return sha.finish();
    }
};

// Activation rows, quantised and in the order that a set reads them.
struct QuantisedRows {
    std::vector<int8_t> q;
    std::vector<float> d;
    std::vector<int16_t> sums, pairs;
    std::vector<Row> rows;

    QuantisedRows(const Kernels& kernels, WeightType type, const Shape& s,
                  const std::vector<float>& x)
        : q(x.size()),
          d(x.size() / block_width(type)),
          sums(row_kind(type) == RowKind::kQ8_K ? x.size() / 16 : 0),
          pairs(sums.size() / 2) {
        const bool super = row_kind(type) == RowKind::kQ8_K;
        for (size_t r = 0; r < s.rows; ++r) {
            const size_t at = r * s.width, block = at / block_width(type);
            const size_t sum = super ? at / 16 : 0;
            rows.push_back({&q[at], &d[block], sums.data() + sum, pairs.data() + sum / 2});
            if (super) {
                kernels.elementwise.quantise_q8_k(s.width, &x[at], &q[at], &d[block],
                                                  sums.data() + sum, pairs.data() + sum / 2);
            } else {
                kernels.elementwise.quantise_q8_0(s.width, &x[at], &q[at], &d[block]);
            }
        }
    }
    void arrange(const Kernels& kernels, WeightType type) {
        kernels.arrange(type, static_cast<uint32_t>(q.size()), q.data());
    }
};

void add_products(const Kernels& kernels, Generator& random, Digests& digests) {
    Sha256 quantised[2];  // kQ8_0, kQ8_K
    for (uint32_t t = 0; t < kWeightTypeCount; ++t) {
        const WeightType type = kWeightTypes[t];
        Sha256 products;
        for (const Shape& s : kShapes) {
            if (s.width % block_width(type) != 0) continue;
            for (Kind kind : kKinds) {
                const auto weights = make_weights(type, s, kind, random);
                const auto x = make_values(size_t{s.width} * s.rows, kind, random);
                QuantisedRows rows(kernels, type, s, x);
                Sha256& sha = quantised[row_kind(type) == RowKind::kQ8_K];
                sha.add(rows.q.data(), rows.q.size());
                add_floats(sha, rows.d);
                sha.add(rows.sums.data(), rows.sums.size() * sizeof(int16_t));
                sha.add(rows.pairs.data(), rows.pairs.size() * sizeof(int16_t));
                rows.arrange(kernels, type);
                std::vector<float> out(size_t{s.weight_rows} * s.rows);
                const bool panel = takes_panel(type, s.weight_rows, s.rows);
                (panel ? kernels.dot_panel : kernels.dot[t])(
                    s.width, weights.data(), row_bytes(type, s.width), s.weight_rows,
                    rows.rows.data(), s.rows, out.data(), s.weight_rows);
                add_floats(products, out);
            }
        }
        digests.add(kNames[t], products);
    }
    digests.add("rows_q8_0", quantised[0]);
    digests.add("rows_q8_K", quantised[1]);
}

void add_activations(const Kernels& kernels, Generator& random, Digests& digests) {
    std::vector<float> x;
    for (uint32_t i = 0; i < 0x10000; ++i) x.push_back(float_of((i << 16) + i % 97));
    for (float edge : {0.0f, -0.0f, 87.0f, 88.25f, 88.75f, -87.5f, -103.875f, -104.125f, 126.5f,
                       133.0f, 134.0f, -133.0f, -134.0f, 9.75f, 10.0f, -10.0f}) {
        x.push_back(edge);
    }
    const auto usual = make_values(4096, Kind::kRandom, random);
    x.insert(x.end(), usual.begin(), usual.end());
    const auto g = make_values(x.size(), Kind::kRandom, random);
    const auto count = static_cast<uint32_t>(x.size());
    std::vector<float> y(x.size());
    const auto add = [&](const char* name) {
        Sha256 sha;
        add_floats(sha, y);
        digests.add(name, sha);
    };
    const Elementwise& e = kernels.elementwise;
    e.silu_v3(count, x.data(), nullptr, y.data()), add("silu:x86-v3");
    e.silu_v4(count, x.data(), nullptr, y.data()), add("silu:x86-v4");
    e.swiglu_v3(count, x.data(), g.data(), y.data()), add("swiglu:x86-v3");
    e.swiglu_v4(count, x.data(), g.data(), y.data()), add("swiglu:x86-v4");
    e.swiglu_oai(count, x.data(), g.data(), 1.702f, 7.0f, y.data()), add("swiglu_oai");
    gelu(count, x.data(), nullptr, y.data()), add("gelu");
    gelu(count, x.data(), g.data(), y.data()), add("geglu");
}

Digests compute(const Kernels& kernels) {
    Digests digests;
    Generator random;
    add_products(kernels, random, digests);
    add_activations(kernels, random, digests);
    const std::string v3 = digests.of_class("x86-v3"), v4 = digests.of_class("x86-v4");
    digests.parts.emplace_back("x86-v3", v3);
    digests.parts.emplace_back("x86-v4", v4);
    return digests;
}

int write() {
    const Digests digests = compute(*available_kernels().begin[0]);
    for (const auto& [part, digest] : digests.parts) {
        std::printf("%s %s\n", part.c_str(), digest.c_str());
    }
    return 0;
}

int check(const std::map<std::string, std::string>* golden, std::vector<std::string> wanted) {
    int status = 0;
    const KernelSets sets = available_kernels();
    for (uint32_t k = 0; k < sets.count; ++k) {
        const std::string set = sets.begin[k]->name;
        std::erase(wanted, set);
        const Digests digests = compute(*sets.begin[k]);
        for (const auto& [part, digest] : digests.parts) {
            if (part.starts_with("x86-")) {
                std::printf("%s %s %s\n", set.c_str(), part.c_str(), digest.c_str());
            }
            if (golden == nullptr) continue;
            const auto found = golden->find(part);
            if (found != golden->end() && found->second == digest) continue;
            std::printf("%s: %s differs from the golden digest\n", set.c_str(), part.c_str());
            status = 1;
        }
    }
    for (const std::string& set : wanted) {
        std::printf("%s: not among the sets of this processor\n", set.c_str());
        status = 1;
    }
    return status;
}

int run(const std::vector<std::string>& arguments) {
    if (arguments.empty()) return check(nullptr, {});
    if (arguments.size() == 1 && arguments[0] == "--write") return write();
    if (arguments.size() < 2 || arguments[0] != "--golden") {
        std::fprintf(stderr, "kernels_digest: [--golden FILE [SET...] | --write]\n");
        return 2;
    }
    std::ifstream file(arguments[1]);
    std::map<std::string, std::string> golden;
    std::string part, digest;
    while (file >> part >> digest) golden[part] = digest;
    if (golden.empty()) {
        std::fprintf(stderr, "%s: no digests there: give tests/golden/kernels.txt\n",
                     arguments[1].c_str());
        return 3;
    }
    return check(&golden, {arguments.begin() + 2, arguments.end()});
}

}  // namespace
}  // namespace kvasir::engine::kernels

int main(int count, char** arguments) {
    return kvasir::engine::kernels::run({arguments + 1, arguments + count});
}
