// Fetching slices: every byte checked, nothing half stored, nothing fetched twice.
#include "worker/fetch.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <filesystem>

#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "worker/fetch_testing.hpp"
#include "worker/slice_budget.hpp"

namespace kvasir::worker {
namespace {

using namespace testing;

// Where the bytes of a slab are at the origin.
std::pair<uint32_t, uint64_t> place(const moe::SlicePlan& plan, size_t slab) {
    const uint64_t to = plan.slabs[slab].to;
    for (const moe::SliceRange& range : plan.ranges) {
        if (range.to <= to && to < range.to + range.bytes)
            return {range.shard, range.from + (to - range.to)};
    }
    KVASIR_CHECK(false);
}

class FetchTest : public ::testing::Test {
protected:
    FetchTest() : toy_(folder_, shape()) { std::filesystem::create_directory(folder_ / "cache"); }
    static ToyShape shape() {
        ToyShape shape;
        shape.layers = 3;
        shape.experts = 6;
        shape.splits = 2;
        return shape;
    }
    std::string path(const std::string& name = "s.gguf") const {
        return folder_ / ("cache/" + name);
    }
    Result<FetchReport> fetch(FakeOrigin& origin, FetchOptions options = {}) {
        return fetch_slice(origin, plan_, toy_.target(path()), options);
    }
    std::vector<std::string> files() const {
        std::vector<std::string> names;
        for (const auto& entry : std::filesystem::directory_iterator(folder_ / "cache"))
            names.push_back(entry.path().filename().string());
        std::ranges::sort(names);
        return names;
    }
    void expect_right() const { EXPECT_EQ(read_file(path()), right_); }

    ScratchFolder folder_;
    ToyModel toy_;
    std::vector<Segment> segments_ = segments("0:1-3,1:0,2:2-5", toy_);
    moe::SlicePlan plan_ = toy_.plan(segments_);
    std::vector<uint8_t> right_ = toy_.slice(folder_, segments_);
};

TEST_F(FetchTest, GivesTheSliceThatTheModelWouldBeCutTo) {
    FakeOrigin origin(toy_.shards);
    auto report = fetch(origin);
    ASSERT_TRUE(report) << report.error().detail;
    expect_right();
    EXPECT_EQ(files(), std::vector<std::string>{"s.gguf"});
    EXPECT_EQ(report->bytes_fetched, plan_.bytes_slabs);
    EXPECT_EQ(report->bytes_pulled, plan_.bytes_slabs);
    // Adjacent experts are one range for each of gate, up and down.
    EXPECT_EQ(origin.asked.size(), 9u);
    auto model = moe::open_model(path());
    ASSERT_TRUE(model);
    EXPECT_TRUE(moe::verify_slice(*model));
}

TEST_F(FetchTest, AWholeSliceIsUsedWithoutTheOrigin) {
    write_file(path(), right_);
    FakeOrigin origin(toy_.shards);
    origin.bytes_until_failure = 0;
    uint64_t told = 0;
    FetchOptions options;
    options.on_slab = [&](const moe::SliceSlab& slab) { told += slab.bytes; };
    auto report = fetch(origin, options);
    ASSERT_TRUE(report) << report.error().detail;
    EXPECT_EQ(report->bytes_found, plan_.bytes_slabs);
    EXPECT_EQ(told, plan_.bytes_slabs);
    EXPECT_TRUE(origin.asked.empty());
}

// W7: flip one bit, shorten, extend, swap two slabs of equal size: refetched, as little as needed.
TEST_F(FetchTest, ADamagedSliceIsMendedAndNeverKept) {
    const moe::SliceSlab& first = plan_.slabs[0];
    const moe::SliceSlab& second = plan_.slabs[1];
    ASSERT_EQ(first.bytes, second.bytes);
    struct Damage {
        const char* name;
        std::function<void(std::vector<uint8_t>&)> apply;
        size_t slabs;  // that must come again, at most
    };
    const std::vector<Damage> damages = {
        {"bit in a slab", [&](auto& file) { file[second.to + 7] ^= 16; }, 1},
        {"bit in the header", [&](auto& file) { file[40] ^= 1; }, 0},
        {"shortened", [&](auto& file) { file.erase(file.end() - 100, file.end()); }, 1},
        {"cut in the header", [&](auto& file) { file.erase(file.begin() + 100, file.end()); },
         plan_.slabs.size()},
        {"empty", [&](auto& file) { file.clear(); }, plan_.slabs.size()},
        {"extended", [&](auto& file) { file.insert(file.end(), 5000, uint8_t{9}); }, 0},
        {"swapped",
         [&](auto& file) {
             std::swap_ranges(file.begin() + static_cast<long>(first.to),
                              file.begin() + static_cast<long>(first.to + first.bytes),
                              file.begin() + static_cast<long>(second.to));
         },
         2},
        {"zeros", [&](auto& file) { std::fill(file.begin(), file.end(), 0); }, plan_.slabs.size()},
    };
    for (const Damage& damage : damages) {
        SCOPED_TRACE(damage.name);
        auto file = right_;
        damage.apply(file);
        write_file(path(), file);
        FakeOrigin origin(toy_.shards);
        auto report = fetch(origin);
        ASSERT_TRUE(report) << report.error().detail;
        expect_right();
        uint64_t most = 0;
        for (const auto& job : origin.asked) most += job.bytes;
        EXPECT_LE(most, damage.slabs * first.bytes * 2);
        EXPECT_EQ(report->bytes_found + report->bytes_fetched, plan_.bytes_slabs);
        // The origin cannot help: then no file is there under the final name.
        write_file(path(), file);
        FakeOrigin dead(toy_.shards);
        dead.bytes_until_failure = 0;
        auto failed = fetch(dead);
        EXPECT_EQ(failed.has_value(), damage.slabs == 0);
        if (!failed) {
            EXPECT_EQ(files(), std::vector<std::string>{"s.gguf.part"});
        }
        std::filesystem::remove(path());
        std::filesystem::remove(path("s.gguf.part"));
    }
}

TEST_F(FetchTest, GoesOnAfterABrokenConnectionAtAnyByte) {
    for (uint64_t cut = 0; cut < plan_.bytes_slabs; cut += plan_.bytes_slabs / 37 + 1) {
        std::filesystem::remove(path());
        FakeOrigin origin(toy_.shards);
        origin.bytes_until_failure = cut;
        auto failed = fetch(origin);
        ASSERT_FALSE(failed);
        EXPECT_EQ(files(), std::vector<std::string>{"s.gguf.part"});
        const uint64_t first = origin.counters().bytes_pulled;
        origin.bytes_until_failure = UINT64_MAX;
        auto report = fetch(origin);
        ASSERT_TRUE(report) << report.error().detail;
        expect_right();
        // Slabs under way are lost at most: one for each range.
        EXPECT_LE(first + report->bytes_pulled, plan_.bytes_slabs + 9 * plan_.slabs[0].bytes * 2);
    }
}

// W7: kill -9 after every step of the writing. What is under the final name is whole or absent; the
// next run ends well and fetches no whole slab again.
TEST_F(FetchTest, SurvivesKillAfterEveryStep) {
    const size_t steps = 4 + plan_.slabs.size();
    for (size_t kill_at = 1; kill_at <= steps; ++kill_at) {
        std::filesystem::remove(path());
        const pid_t child = ::fork();
        if (child == 0) {
            FakeOrigin origin(toy_.shards);
            size_t step = 0;
            FetchOptions options;
            options.on_step = [&](FetchStep) {
                if (++step == kill_at) ::raise(SIGKILL);
            };
            (void)fetch(origin, options);
            ::_exit(9);
        }
        int status = 0;
        ASSERT_EQ(::waitpid(child, &status, 0), child);
        ASSERT_TRUE(WIFSIGNALED(status)) << "step " << kill_at << " of " << steps;
        if (std::filesystem::exists(path())) expect_right();
        FakeOrigin origin(toy_.shards);
        auto report = fetch(origin);
        ASSERT_TRUE(report) << report.error().detail;
        expect_right();
        const size_t written = kill_at <= 2 ? 0 : std::min(kill_at - 2, plan_.slabs.size());
        EXPECT_GE(report->bytes_found, written * plan_.slabs[0].bytes);
        EXPECT_EQ(files(), std::vector<std::string>{"s.gguf"});
    }
}

TEST_F(FetchTest, AWrongSlabIsFetchedAgain) {
    FakeOrigin origin(toy_.shards);
    int times = 0;
    origin.change = [&](uint32_t shard, uint64_t offset, uint8_t byte) {
        const auto [at_shard, at] = place(plan_, 4);
        if (shard == at_shard && offset == at + 3 && times++ == 0) return uint8_t(byte ^ 1);
        return byte;
    };
    auto report = fetch(origin);
    ASSERT_TRUE(report) << report.error().detail;
    expect_right();
    EXPECT_EQ(report->slabs_wrong, 1u);
    EXPECT_EQ(report->bytes_pulled, plan_.bytes_slabs + plan_.slabs[4].bytes);
}

// H3: another version of the file, of the same length: not one byte of it in a slice, and the
// download ends when it is clear, not after all of it.
TEST_F(FetchTest, AFileThatChangedIsNotFetchedToItsEnd) {
    for (const uint64_t from : {uint64_t{0}, plan_.bytes_slabs / 2}) {
        std::filesystem::remove(path("s.gguf.part"));
        FakeOrigin origin(toy_.shards);
        origin.change = [&](uint32_t, uint64_t, uint8_t byte) {
            return origin.counters().bytes_pulled >= from ? uint8_t(byte ^ 0x55) : byte;
        };
        auto report = fetch(origin);
        ASSERT_FALSE(report);
        EXPECT_EQ(report.error().code, Errc::kMismatch);
        EXPECT_EQ(files(), std::vector<std::string>{"s.gguf.part"});
        EXPECT_LE(origin.counters().bytes_pulled, from + 13 * 2 * plan_.slabs[0].bytes);
        origin.change = nullptr;
        ASSERT_TRUE(fetch(origin));
        expect_right();
        std::filesystem::remove(path());
    }
}

TEST_F(FetchTest, ASlabThatIsAlwaysWrongEndsWithItsName) {
    FakeOrigin origin(toy_.shards);
    const auto [at_shard, at] = place(plan_, 2);
    origin.change = [&, at_shard = at_shard, at = at](uint32_t shard, uint64_t offset,
                                                      uint8_t byte) {
        return shard == at_shard && offset == at ? uint8_t(byte ^ 1) : byte;
    };
    auto report = fetch(origin);
    ASSERT_FALSE(report);
    EXPECT_EQ(report.error().code, Errc::kMismatch);
    EXPECT_NE(report.error().detail.find("layer 0, expert 3"), std::string::npos)
        << report.error().detail;
    EXPECT_LE(origin.counters().bytes_pulled,
              plan_.bytes_slabs + kRefetchRounds * plan_.slabs[2].bytes);
}

TEST_F(FetchTest, CopiesWhatOtherSlicesHaveAndChecksIt) {
    FakeOrigin origin(toy_.shards);
    const auto other = segments("0:0-5,2:0-3", toy_);
    write_file(path("other.gguf"), toy_.slice(folder_, other));
    auto cache = SliceCache::open(folder_ / "cache", UINT64_MAX);
    ASSERT_TRUE(cache);
    const std::string donor = cache->slice_path(toy_.manifest.model_id, other);
    std::filesystem::rename(path("other.gguf"), donor);
    FetchTarget target = toy_.target(path());
    target.donors = cache->donors(toy_.manifest.model_id, path());
    ASSERT_EQ(target.donors.paths.size(), 1u);
    auto report = fetch_slice(origin, plan_, target, {});
    ASSERT_TRUE(report) << report.error().detail;
    expect_right();
    const uint64_t expert = plan_.bytes_slabs / 8;
    EXPECT_EQ(report->bytes_copied, 5 * expert);  // 0:1-3 and 2:2-3
    EXPECT_EQ(report->bytes_fetched, 3 * expert);
    // A donor whose bytes rotted, or that was cut off meanwhile, costs a download and no more.
    auto bytes = read_file(donor);
    for (size_t i = 4000; i < bytes.size(); i += 1000) bytes[i] ^= 1;
    bytes.erase(bytes.begin() + static_cast<long>(bytes.size() / 2), bytes.end());
    write_file(donor, bytes);
    std::filesystem::remove(path());
    report = fetch_slice(origin, plan_, target, {});
    ASSERT_TRUE(report) << report.error().detail;
    expect_right();
}

TEST_F(FetchTest, TwoProcessesDoNotWriteOneSlice) {
    FakeOrigin origin(toy_.shards);
    FetchOptions options;
    Errc inner = Errc::kCount_;
    options.on_step = [&](FetchStep step) {
        if (step != FetchStep::kHeaderWritten) return;
        FakeOrigin second(toy_.shards);
        const auto refused = fetch(second);
        if (!refused) inner = refused.error().code;
    };
    ASSERT_TRUE(fetch(origin, options));
    EXPECT_EQ(inner, Errc::kBusy);
    expect_right();
}

TEST_F(FetchTest, StopsSoonWhenCancelled) {
    FakeOrigin origin(toy_.shards);
    std::atomic<bool> cancelled{false};
    FetchOptions options;
    options.cancelled = &cancelled;
    options.on_slab = [&](const moe::SliceSlab&) { cancelled.store(true); };
    const auto report = fetch(origin, options);
    ASSERT_FALSE(report);
    EXPECT_EQ(report.error().code, Errc::kClosed);
    EXPECT_LT(origin.counters().bytes_pulled, plan_.bytes_slabs);
}

// W7: no room, at many byte counts around what is needed: a state with a name, nothing stored under
// the final name, and the next try with room ends well.
TEST_F(FetchTest, AFullDiskIsAnErrorThatSaysSo) {
    for (uint64_t room = 0; room < plan_.file_bytes; room += plan_.file_bytes / 16 + 1) {
        const pid_t child = ::fork();
        if (child == 0) {
            const rlimit limit = {room, room};
            if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) ::_exit(8);
            FakeOrigin origin(toy_.shards);
            const auto report = fetch(origin);
            const bool is_right = !report && report.error().code == Errc::kNoSpace &&
                                  !std::filesystem::exists(path());
            ::_exit(is_right ? 0 : 9);
        }
        int status = 0;
        ASSERT_EQ(::waitpid(child, &status, 0), child);
        EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0)
            << "room " << room << ", exit " << WEXITSTATUS(status);
    }
    FakeOrigin origin(toy_.shards);
    ASSERT_TRUE(fetch(origin));
    expect_right();
}

TEST_F(FetchTest, AFullFileSystemIsAnErrorThatSaysSo) {
    const std::string mount = folder_ / "small";
    std::filesystem::create_directory(mount);
    if (::mount("tmpfs", mount.c_str(), "tmpfs", 0, "size=1m") != 0)
        GTEST_SKIP() << "no permission to mount a file system";
    struct Unmount {
        std::string at;
        ~Unmount() { ::umount2(at.c_str(), MNT_DETACH); }
    } unmount{mount};
    const std::string at = mount + "/s.gguf";
    const std::string ballast = mount + "/ballast";
    for (const uint64_t left : {0, 4096, 65536, 262144}) {
        write_file(ballast, std::vector<uint8_t>((1 << 20) - left, 1));
        FakeOrigin origin(toy_.shards);
        const auto report = fetch_slice(origin, plan_, toy_.target(at), {});
        ASSERT_FALSE(report);
        EXPECT_EQ(report.error().code, Errc::kNoSpace) << report.error().detail;
        EXPECT_NE(report.error().detail.find("full"), std::string::npos);
        EXPECT_FALSE(std::filesystem::exists(at));
        EXPECT_EQ(origin.counters().bytes_pulled, 0u) << "room is made before bytes are asked for";
    }
    std::filesystem::remove(ballast);
    FakeOrigin origin(toy_.shards);
    const auto report = fetch_slice(origin, plan_, toy_.target(at), {});
    ASSERT_TRUE(report) << report.error().detail;
    EXPECT_EQ(read_file(at), right_);
}

// ---- every layout ----

ToyShape some_toy() {
    ToyShape shape;
    shape.layers = *rc::gen::inRange<uint32_t>(1, 4);
    shape.dense = *rc::gen::inRange<uint32_t>(0, 2);
    shape.experts = *rc::gen::inRange<uint32_t>(1, 9);
    shape.fused = *rc::gen::arbitrary<bool>();
    shape.bias = *rc::gen::arbitrary<bool>();
    shape.scale = *rc::gen::arbitrary<bool>();
    shape.splits = *rc::gen::inRange<uint32_t>(1, 4);
    shape.embd = shape.ff = 64;
    shape.type = shape.type_down = moe::testing::kQ8_0;
    return shape;
}

RC_GTEST_PROP(Fetch, AnyLayoutAnyExpertsAnyPieces, ()) {
    ScratchFolder folder;
    const auto shape = some_toy();
    const ToyModel toy(folder, shape);
    std::vector<Segment> chosen;
    for (const moe::ExpertBank& bank : toy.outline.model.banks) {
        const auto begin = *rc::gen::inRange<uint32_t>(0, bank.experts);
        const auto end = *rc::gen::inRange<uint32_t>(begin, bank.experts + 1);
        if (end > begin) chosen.push_back({bank.key, begin, end});
    }
    if (chosen.empty()) chosen = moe::all_segments(toy.outline.model);
    FakeOrigin origin(toy.shards);
    origin.piece_bytes = *rc::gen::inRange<size_t>(50, 100000);
    const auto plan = toy.plan(chosen);
    const auto report = fetch_slice(origin, plan, toy.target(folder / "f.gguf"), {});
    RC_ASSERT(report.has_value());
    RC_ASSERT(read_file(folder / "f.gguf") == toy.slice(folder, chosen));
    RC_ASSERT(report->bytes_pulled == plan.bytes_slabs);
}

// ---- the budget ----

RC_GTEST_PROP(SliceBudget, FilesFitToTheByte, ()) {
    ScratchFolder folder;
    const ToyModel toy(folder, some_toy());
    const auto budget = *rc::gen::inRange<uint64_t>(1, 400000);
    const auto ask = lease_budget(toy.outline, budget);
    if (!ask) {
        RC_ASSERT(ask.error().code == Errc::kUsage);
        return;
    }
    // A market that uses up what was asked for, in any order.
    std::vector<NodeLease> leases;
    uint64_t left = *ask;
    for (const moe::ExpertBank& bank : toy.outline.model.banks) {
        const uint64_t most = left / bank.expert_bytes();
        const auto count = std::min<uint64_t>(most, bank.experts);
        if (count == 0) continue;
        const uint64_t bytes = count * bank.expert_bytes();
        left -= bytes;
        leases.push_back({leases.size() + 1,
                          {bank.key, 0, static_cast<uint32_t>(count)},
                          bytes,
                          std::chrono::seconds(60)});
    }
    const size_t before = leases.size();
    const auto fitting = fit_leases(toy.outline, leases, budget);
    RC_ASSERT(fitting.has_value());
    RC_ASSERT(fitting->dropped.empty());  // what was asked for fits
    RC_ASSERT(fitting->kept.size() == before);
    // A market that gives more than was asked for: what is kept fits, what is not is named.
    const auto tight = fit_leases(toy.outline, leases, budget / 2);
    RC_ASSERT(tight.has_value());
    RC_ASSERT(tight->kept.size() + tight->dropped.size() == before);
    if (tight->kept.empty()) return;
    std::vector<Segment> kept;
    for (const NodeLease& lease : tight->kept) kept.push_back(lease.segment);
    RC_ASSERT(toy.plan(moe::normalise(kept)).file_bytes <= budget / 2);
}

}  // namespace
}  // namespace kvasir::worker
