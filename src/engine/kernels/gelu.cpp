#include "engine/kernels/gelu.hpp"

#include <array>
#include <memory>

#include "engine/kernels/gelu_values.hpp"

namespace kvasir::engine::kernels {
namespace {

using Table = std::array<uint16_t, kHalves>;

std::unique_ptr<const Table> make_table() {
    auto table = std::make_unique<Table>();
    fill_gelu_table(table->data());
    return table;
}

}  // namespace

void gelu(uint32_t count, const float* x, const float* g, float* y) {
    static const std::unique_ptr<const Table> table = make_table();
    gelu_from(table->data(), count, x, g, y);
}

}  // namespace kvasir::engine::kernels
