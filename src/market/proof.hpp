// Which bytes a node must show before its lease counts: random places of the slabs it has leased.
//
// Used by the coordinator: it reads the same bytes from its own file and compares SHA-256(nonce ‖
// bytes). This catches a node that did not download, downloaded another model, or has bad storage;
// not one that fetches just the bytes it is asked for (a backbone's numeric challenge and its
// audits do).
// Thread: pure. Limits: kProbeBytesMax bytes a probe.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "market/leases.hpp"
#include "moe/model.hpp"

namespace kvasir::market {

constexpr uint64_t kProbeBytesMax = 4096;

struct Probe {
    uint64_t lease = 0;
    uint32_t expert = 0;  // global id
    uint32_t tensor = 0;  // index into ExpertBank::tensors
    uint64_t offset = 0;  // in the slab
    uint64_t bytes = 0;
};

// `count` probes, the first and the last expert of the segment among them, places uniform over the
// experts' bytes. Precondition (KVASIR_CHECK): the bank is the lease's.
std::vector<Probe> make_probes(const Lease& lease, const moe::ExpertBank& bank, uint32_t count,
                               std::mt19937_64& random);

// Where the probe's bytes are in the shard `bank.tensors[probe.tensor].shard`.
uint64_t probe_offset(const Probe& probe, const moe::ExpertBank& bank);

}  // namespace kvasir::market
