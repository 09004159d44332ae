#include "relay/auditor_testing.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <random>

namespace kvasir::relay {
namespace {

using testing::Auditor;

RC_GTEST_PROP(Auditor, NoFrameIsLostDoubledOrMisdirected, ()) {
    const auto data = *rc::gen::container<std::vector<uint8_t>>(rc::gen::arbitrary<uint8_t>());
    Auditor().run(data);
}

// Long sequences, and proof that they reach what they are meant to.
TEST(Auditor, LongSequences) {
    uint64_t delivered = 0, told = 0, held = 0, replaced = 0, busy = 0, closed = 0, stalled = 0;
    uint64_t no_handle = 0, memory = 0;
    for (uint32_t seed = 0; seed < 150; ++seed) {
        std::mt19937 random(seed);
        std::vector<uint8_t> data(9000);
        for (auto& byte : data) byte = static_cast<uint8_t>(random());
        // Fewer ends than the bytes alone would give, so that queues fill.
        for (size_t i = 0; i < data.size(); i += 3) {
            if (data[i] % 16 < 3 && random() % 8 != 0) data[i] = 11;
        }
        SwitchboardOptions options = Auditor::options();
        if (seed % 2 == 0) options.queue_total_max = 100000;
        Auditor auditor(options);
        auditor.run(data);
        delivered += auditor.delivered();
        told += auditor.told();
        held += auditor.counters().held;
        replaced += auditor.counters().replaced;
        busy += auditor.counters().told_busy;
        closed += auditor.counters().told_closed;
        stalled += auditor.counters().cut_stalled;
        memory += auditor.counters().cut_memory;
        no_handle += auditor.counters().introductions_failed;
    }
    RecordProperty("delivered", std::to_string(delivered));
    EXPECT_GT(delivered, 5000u);
    EXPECT_GT(told, 1000u);
    EXPECT_GT(held, 1000u);
    EXPECT_GT(replaced, 100u);
    EXPECT_GT(busy, 1000u);
    EXPECT_GT(closed, 100u);
    EXPECT_GT(stalled, 2u);
    EXPECT_GT(no_handle, 10u);
    EXPECT_GT(memory, 10u);
}

}  // namespace
}  // namespace kvasir::relay
