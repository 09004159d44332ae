#include "engine/weights.hpp"

#include <map>
#include <utility>
#include <vector>

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

namespace kvasir::engine {

struct BankWeights::Owned {
    ggml_context_ptr context;
    std::vector<ggml_backend_buffer_ptr> buffers;
};

BankWeights::BankWeights() = default;
BankWeights::BankWeights(BankWeights&&) noexcept = default;
BankWeights& BankWeights::operator=(BankWeights&&) noexcept = default;
BankWeights::~BankWeights() = default;

namespace {

ggml_tensor* new_tensor(ggml_context* context, const moe::ExpertBank& bank,
                        const moe::SlabTensor& slab) {
    const auto type = static_cast<ggml_type>(slab.type);
    const auto experts = static_cast<int64_t>(bank.experts);
    ggml_tensor* tensor = nullptr;
    switch (slab.part) {
        case moe::SlabPart::kWeight:
            tensor = ggml_new_tensor_3d(context, type, static_cast<int64_t>(slab.n_in),
                                        static_cast<int64_t>(slab.n_out), experts);
            break;
        case moe::SlabPart::kBias:
            tensor = ggml_new_tensor_2d(context, type, static_cast<int64_t>(slab.n_out), experts);
            break;
        case moe::SlabPart::kScale:
            tensor = ggml_new_tensor_1d(context, type, experts);
            break;
    }
    ggml_set_name(tensor, slab.name.c_str());
    return tensor;
}

}  // namespace

Result<BankWeights> BankWeights::map(const moe::ExpertBank& bank, const moe::Mapping& mapping,
                                     ggml_backend_device* device) {
    BankWeights weights;
    weights.owned_ = std::make_unique<Owned>();
    const ggml_init_params params = {ggml_tensor_overhead() * (bank.tensors.size() + 1), nullptr,
                                     true};
    weights.owned_->context.reset(ggml_init(params));
    if (!weights.owned_->context)
        return fail(Errc::kEnvironment, "out of memory for expert tensors");
    for (const moe::SlabTensor& slab : bank.tensors) {
        ggml_tensor* tensor = new_tensor(weights.owned_->context.get(), bank, slab);
        weights.tensors_[index(slab.role, slab.part)] = tensor;
    }
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(device, &props);
    if (!props.caps.buffer_from_host_ptr) {
        ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(device);
        ggml_backend_buffer_ptr buffer(
            ggml_backend_alloc_ctx_tensors_from_buft(weights.owned_->context.get(), type));
        if (!buffer) {
            return fail(Errc::kEnvironment, std::string("device ") + ggml_backend_dev_name(device) +
                                                " has no memory for layer " + to_string(bank.key));
        }
        for (const moe::SlabTensor& slab : bank.tensors) {
            const auto bytes = mapping.tensor(bank, slab);
            ggml_backend_tensor_set(weights.get(slab.role, slab.part), bytes.data(), 0,
                                    bytes.size());
        }
        weights.owned_->buffers.push_back(std::move(buffer));
        return weights;
    }
    std::map<uint32_t, ggml_backend_buffer_t> by_shard;
    for (const moe::SlabTensor& slab : bank.tensors) {
        ggml_backend_buffer_t& buffer = by_shard[slab.shard];
        if (buffer == nullptr) {
            const auto shard = mapping.shard(slab.shard);
            buffer = ggml_backend_dev_buffer_from_host_ptr(
                device, const_cast<uint8_t*>(shard.data()), shard.size(), shard.size());
            if (buffer == nullptr) {
                return fail(Errc::kEnvironment, std::string("device ") +
                                                    ggml_backend_dev_name(device) +
                                                    " cannot map the weights");
            }
            weights.owned_->buffers.emplace_back(buffer);
            ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        }
        const auto bytes = mapping.tensor(bank, slab);
        ggml_backend_tensor_alloc(buffer, weights.get(slab.role, slab.part),
                                  const_cast<uint8_t*>(bytes.data()));
    }
    return weights;
}

}  // namespace kvasir::engine
