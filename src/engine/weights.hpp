// The weights of one bank as ggml tensors: mapped in place, or uploaded.
//
// Used by ExpertEngine. map() makes tensors over a memory-mapped slice or model (no copy on the CPU
// device; any other device gets its own copy).
//
// Thread: immutable after making. Owns: ggml context and buffers; the mapping must outlive it.
#pragma once

#include <array>
#include <memory>

#include "base/result.hpp"
#include "moe/mapping.hpp"
#include "moe/model.hpp"

struct ggml_tensor;
struct ggml_backend_device;

namespace kvasir::engine {

constexpr size_t kRoleCount = 4;
constexpr size_t kPartCount = 3;

class BankWeights {
public:
    using Tensors = std::array<ggml_tensor*, kRoleCount * kPartCount>;

    static Result<BankWeights> map(const moe::ExpertBank& bank, const moe::Mapping& mapping,
                                   ggml_backend_device* device);

    BankWeights(BankWeights&&) noexcept;
    BankWeights& operator=(BankWeights&&) noexcept;
    ~BankWeights();

    // Null when the bank has no such tensor.
    ggml_tensor* get(moe::SlabRole role, moe::SlabPart part) const {
        return tensors_[index(role, part)];
    }
    static size_t index(moe::SlabRole role, moe::SlabPart part) {
        return static_cast<size_t>(role) * kPartCount + static_cast<size_t>(part);
    }

private:
    friend struct WeightsForTests;  // over tensors of a test's own: engine_testing.hpp
    struct Owned;
    BankWeights();
    Tensors tensors_ = {};
    std::unique_ptr<Owned> owned_;
};

}  // namespace kvasir::engine
