#include "market/proof.hpp"

#include <algorithm>

#include "base/check.hpp"

namespace kvasir::market {

std::vector<Probe> make_probes(const Lease& lease, const moe::ExpertBank& bank, uint32_t count,
                               std::mt19937_64& random) {
    KVASIR_CHECK(bank.key == lease.segment.layer && lease.segment.end <= bank.experts);
    std::vector<Probe> out;
    std::uniform_int_distribution<uint32_t> experts(lease.segment.begin, lease.segment.end - 1);
    std::uniform_int_distribution<uint64_t> places(0, bank.expert_bytes() - 1);
    for (uint32_t i = 0; i < count; ++i) {
        Probe probe;
        probe.lease = lease.id;
        probe.expert = i == 0   ? lease.segment.begin
                       : i == 1 ? lease.segment.end - 1
                                : experts(random);
        uint64_t place = places(random);
        while (place >= bank.tensors[probe.tensor].slab_bytes) {
            place -= bank.tensors[probe.tensor++].slab_bytes;
        }
        const uint64_t slab_bytes = bank.tensors[probe.tensor].slab_bytes;
        probe.bytes = std::min(slab_bytes, kProbeBytesMax);
        probe.offset = std::min(place, slab_bytes - probe.bytes);
        out.push_back(probe);
    }
    return out;
}

uint64_t probe_offset(const Probe& probe, const moe::ExpertBank& bank) {
    const moe::SlabTensor& tensor = bank.tensors[probe.tensor];
    return tensor.offset + probe.expert * tensor.slab_bytes + probe.offset;
}

}  // namespace kvasir::market
