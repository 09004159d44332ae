#include "engine/tensor_check.hpp"

#include <algorithm>
#include <cstring>

#include "ggml-backend.h"
#include "ggml.h"

namespace kvasir::engine {
namespace {

constexpr size_t kSampleBytes = 512;

}  // namespace

bool same_tensors(const moe::ExpertBank& bank, const moe::Mapping& mapping,
                  const BankWeights::Tensors& tensors) {
    for (size_t i = 0; i < tensors.size(); ++i) {
        const ggml_tensor* tensor = tensors[i];
        if (tensor == nullptr) continue;
        const auto role = static_cast<moe::SlabRole>(i / kPartCount);
        const auto part = static_cast<moe::SlabPart>(i % kPartCount);
        const moe::SlabTensor* slab = bank.find(role, part);
        if (slab == nullptr || static_cast<uint32_t>(tensor->type) != slab->type ||
            tensor->data == nullptr)
            return false;
        const auto bytes = mapping.tensor(bank, *slab);
        if (ggml_nbytes(tensor) != bytes.size() || !ggml_is_contiguous(tensor)) return false;
        if (part == moe::SlabPart::kWeight && static_cast<uint64_t>(tensor->ne[0]) != slab->n_in)
            return false;
        const auto* data = static_cast<const uint8_t*>(tensor->data);
        if (data == bytes.data()) continue;
        const size_t length = std::min<size_t>(kSampleBytes, slab->slab_bytes);
        const size_t places = slab->slab_bytes - length + 1;
        for (uint32_t expert = 0; expert < bank.experts; ++expert) {
            const size_t offset = expert * slab->slab_bytes + expert * size_t{7919} % places;
            if (std::memcmp(data + offset, bytes.data() + offset, length) != 0) return false;
        }
    }
    return true;
}

}  // namespace kvasir::engine
