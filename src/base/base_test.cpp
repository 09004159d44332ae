#include <gtest/gtest.h>

#include "base/bytes.hpp"
#include "base/ids.hpp"
#include "base/log.hpp"
#include "base/log_budget.hpp"
#include "base/result.hpp"
#include "base/units.hpp"

namespace kvasir {
namespace {

TEST(Errc, TableIsTotalAndWireCodesAreUnique) {
    for (int i = 0; i < static_cast<int>(Errc::kCount_); ++i) {
        const auto code = static_cast<Errc>(i);
        EXPECT_FALSE(errc_info(code).name.empty()) << i;
        EXPECT_NE(errc_info(code).exit_code, 0) << i;
        EXPECT_GE(errc_info(code).http_status, 400) << i;
        EXPECT_EQ(errc_from_wire(errc_info(code).wire_code), code) << i;
    }
    EXPECT_EQ(errc_from_wire(0), Errc::kProtocol);
    EXPECT_EQ(errc_from_wire(65535), Errc::kProtocol);
}

TEST(Bytes, RoundTripIsLittleEndian) {
    ByteWriter out;
    out.u16(0x0102);
    out.u32(0x03040506);
    out.u64(0x0708090a0b0c0d0e);
    out.f32(1.0f);
    EXPECT_EQ(out.data()[0], 0x02);
    ByteReader in(out.data());
    EXPECT_EQ(in.u16(), 0x0102);
    EXPECT_EQ(in.u32(), 0x03040506u);
    EXPECT_EQ(in.u64(), 0x0708090a0b0c0d0eu);
    EXPECT_EQ(in.f32(), 1.0f);
    EXPECT_TRUE(in.finished());
}

TEST(Bytes, ReadingPastTheEndFailsAndStaysFailed) {
    const uint8_t data[3] = {1, 2, 3};
    ByteReader in(data);
    EXPECT_EQ(in.u32(), 0u);
    EXPECT_TRUE(in.failed());
    EXPECT_EQ(in.u8(), 0);
    EXPECT_FALSE(in.finished());
    ByteReader huge(data);
    EXPECT_TRUE(huge.bytes(~uint64_t{0}).empty());
    EXPECT_TRUE(huge.failed());
}

TEST(Printable, NeutralisesControlAndHighBytes) {
    EXPECT_EQ(printable("a\x1b[31m\nb\xff"), "a?[31m?b?");
    EXPECT_EQ(printable(std::string(300, 'x')).size(), 203u);
}

TEST(LogBudget, SoManyLinesASecondAndTheRestIsCounted) {
    LogBudget budget(2);
    const std::chrono::steady_clock::time_point start{std::chrono::hours(1)};
    EXPECT_TRUE(budget.take(start));
    EXPECT_TRUE(budget.take(start));
    EXPECT_EQ(budget.left_out(), "");
    for (int i = 0; i < 5; ++i) EXPECT_FALSE(budget.take(start + std::chrono::milliseconds(999)));
    EXPECT_TRUE(budget.take(start + std::chrono::seconds(1)));
    EXPECT_EQ(budget.left_out(), " (and 5 more like it before)");
    EXPECT_EQ(budget.left_out(), "");
}

TEST(Ids, LayerKeyText) {
    EXPECT_EQ(to_string(LayerKey{12, 0}), "12");
    EXPECT_EQ(to_string(LayerKey{12, 1}), "12c");
}

TEST(Units, BytesAreRoundedToAUnit) {
    EXPECT_EQ(format_bytes(0), "0 B");
    EXPECT_EQ(format_bytes(999), "999 B");
    EXPECT_EQ(format_bytes(1000), "1.0 kB");
    EXPECT_EQ(format_bytes(5308416), "5.3 MB");
    EXPECT_EQ(format_bytes(99949999), "99.9 MB");
    EXPECT_EQ(format_bytes(99960000), "100 MB");
    EXPECT_EQ(format_bytes(339738624), "340 MB");
    EXPECT_EQ(format_bytes(999499999), "999 MB");
    EXPECT_EQ(format_bytes(999500000), "1.0 GB");
    EXPECT_EQ(format_bytes(77.2e9), "77.2 GB");
    EXPECT_EQ(format_bytes(5e18), "5000 PB");
}

}  // namespace
}  // namespace kvasir
