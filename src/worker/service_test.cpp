// Hostile and broken messages to a worker: each costs its sender an error or the connection, and
// nothing else.
#include "worker/service.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "engine/engine_testing.hpp"

namespace kvasir::worker {
namespace {

namespace toy = engine::testing;
using wire::FrameType;

constexpr LayerKey kLayer0{0, 0};
constexpr LayerKey kLayer1{1, 0};

struct ToyFile {
    toy::Folder folder;
    std::string path = toy::write_toy(folder, "toy.gguf", toy::toy_spec());
};
const ToyFile& toy_file() {
    static const ToyFile file;
    return file;
}

// Layer 0: experts 2, 3, 6; layer 1: nothing.
class Service : public ::testing::Test {
protected:
    Service() {
        HoldingOptions options;
        options.model_path = toy_file().path;
        options.experts = "0:2-3,0:6";
        options.cache_dir = toy_file().folder / "cache";
        auto opened = Holding::open(options);
        KVASIR_CHECK(opened.has_value());
        holding_ = std::move(*opened);
        service_ = std::make_unique<ExpertService>(*holding_, toy::cpu(), toy::make_engine());
        EXPECT_EQ(status(service_->handle(program(1, kLayer0))), 0);
        rows_ = toy::random_floats(size_t{4} * 256, 1);
        good_ = compute(1, 0, 4, {{0, 0}, {3, 2}, {1, 1}}, toy::as_bytes(rows_));
        want_ = bytes(service_->handle(good_));
        // The rows of experts 2, 6 and 3, as an engine of its own says.
        toy::Toy model(toy_file().path);
        auto engine = toy::make_engine();
        const auto bank = model.prepare(*engine, kLayer0);
        const std::vector<engine::PairIn> pairs = {{0, 2}, {3, 6}, {1, 3}};
        auto rows = engine->compute(*bank, 0, 4, toy::as_bytes(rows_), pairs);
        KVASIR_CHECK(rows.has_value());
        const auto right = toy::as_bytes(*rows);
        EXPECT_TRUE(std::equal(right.begin(), right.end(), want_.begin(), want_.end()));
    }

    static std::vector<uint8_t> program(uint32_t id, LayerKey layer,
                                        const moe::Program& code = toy::swiglu()) {
        return wire::encode_program({id, layer, moe::encode(code)}, 5);
    }
    static std::vector<uint8_t> compute(uint32_t id, uint32_t type, uint32_t row_count,
                                        std::vector<wire::Pair> pairs,
                                        std::span<const uint8_t> rows, uint32_t request = 9) {
        ByteWriter out;
        wire::begin_compute(out, request, id, type, row_count, pairs, rows.size());
        out.bytes(rows);
        return out.take();
    }
    // What an acknowledgement says: what computes the bank, or why nothing does.
    static std::string detail(const Answer& answer) {
        auto frame = wire::decode_frame(answer.head);
        if (!frame || frame->header.type != FrameType::kProgramAck) return "not a PROGRAM_ACK";
        return wire::decode_program_ack(frame->payload)->detail;
    }
    static int status(const Answer& answer) {
        auto frame = wire::decode_frame(answer.head);
        if (!frame || frame->header.type != FrameType::kProgramAck) return -1;
        return wire::decode_program_ack(frame->payload)->status;
    }
    static std::vector<uint8_t> bytes(const Answer& answer) {
        return {answer.body.begin(), answer.body.end()};
    }

    // An answer is a whole frame of a type that a worker sends; only RESULT has a body, of the size
    // it says.
    static void expect_well_formed(const Answer& answer) {
        if (answer.head.empty()) {
            EXPECT_TRUE(answer.body.empty());
            return;
        }
        std::vector<uint8_t> whole = answer.head;
        whole.insert(whole.end(), answer.body.begin(), answer.body.end());
        auto frame = wire::decode_frame(whole);
        ASSERT_TRUE(frame) << frame.error().detail;
        if (frame->header.type == FrameType::kResult) {
            EXPECT_TRUE(wire::decode_result(frame->payload));
        } else {
            EXPECT_TRUE(answer.body.empty());
        }
    }
    Errc error_of(const Answer& answer) {
        auto frame = wire::decode_frame(answer.head);
        if (!frame || frame->header.type != FrameType::kError) return Errc::kCount_;
        EXPECT_TRUE(answer.body.empty());
        return wire::decode_error(frame->payload)->code;
    }
    void expect_still_right(const std::string& what) {
        EXPECT_EQ(bytes(service_->handle(good_)), want_) << "after " << what;
    }

    std::unique_ptr<Holding> holding_;
    std::unique_ptr<ExpertService> service_;
    std::vector<float> rows_;
    std::vector<uint8_t> good_, want_;
};

TEST_F(Service, BadRequestsAreRefusedOneByOne) {
    const auto rows = toy::as_bytes(rows_);
    constexpr uint32_t kMax = 0xffffffff;
    const uint32_t cap = service_->pairs_max();
    const std::vector<float> many(size_t{cap + 1} * 256);
    struct Case {
        const char* what;
        std::vector<uint8_t> message;
        Errc code;
    };
    const Case cases[] = {
        {"program 0", compute(0, 0, 4, {{0, 0}}, rows), Errc::kNotHeld},
        {"program 2", compute(2, 0, 4, {{0, 0}}, rows), Errc::kNotHeld},
        {"program max", compute(kMax, 0, 4, {{0, 0}}, rows), Errc::kNotHeld},
        {"local = held", compute(1, 0, 4, {{0, 3}}, rows), Errc::kNotHeld},
        {"local of the model, not held", compute(1, 0, 4, {{0, 7}}, rows), Errc::kNotHeld},
        {"local = 2^15 - 1", compute(1, 0, 4, {{0, 0x7fff}}, rows), Errc::kNotHeld},
        {"local = -1", compute(1, 0, 4, {{0, 0xffff}}, rows), Errc::kNotHeld},
        {"row = count", compute(1, 0, 4, {{4, 0}}, rows), Errc::kProtocol},
        {"row = -1", compute(1, 0, 4, {{0xffff, 0}}, rows), Errc::kProtocol},
        {"type 1", compute(1, 1, 4, {{0, 0}}, rows), Errc::kProtocol},
        {"type 4 (retired)", compute(1, 4, 4, {{0, 0}}, rows), Errc::kProtocol},
        {"type 255", compute(1, 255, 4, {{0, 0}}, rows), Errc::kProtocol},
        {"type 2^31", compute(1, 1u << 31, 4, {{0, 0}}, rows), Errc::kProtocol},
        {"f32 bytes as Q8_K", compute(1, 15, 4, {{0, 0}}, rows), Errc::kProtocol},
        {"a byte short", compute(1, 0, 4, {{0, 0}}, rows.first(rows.size() - 1)), Errc::kProtocol},
        {"a value short: width 255", compute(1, 0, 4, {{0, 0}}, rows.first(4 * 255 * 4)),
         Errc::kProtocol},
        {"row count - 1", compute(1, 0, 3, {{0, 0}}, rows), Errc::kProtocol},
        {"row count + 1", compute(1, 0, 5, {{0, 0}}, rows), Errc::kProtocol},
        {"no bytes of rows", compute(1, 0, 4, {{0, 0}}, {}), Errc::kProtocol},
        {"one row more than the cap", compute(1, 0, cap + 1, {{0, 0}}, toy::as_bytes(many)),
         Errc::kLimit},
        {"one pair more than the cap", compute(1, 0, 4, std::vector<wire::Pair>(cap + 1), rows),
         Errc::kLimit},
    };
    for (const Case& c : cases) {
        const Answer answer = service_->handle(c.message);
        expect_well_formed(answer);
        EXPECT_EQ(error_of(answer), c.code) << c.what;
        expect_still_right(c.what);
    }
    const Answer full = service_->handle(compute(1, 0, 4, std::vector<wire::Pair>(cap), rows));
    EXPECT_EQ(full.body.size(), size_t{cap} * 256 * 4);
    const Answer rows_full = service_->handle(
        compute(1, 0, cap, {{cap - 1, 0}}, toy::as_bytes(many).first(size_t{cap} * 1024)));
    EXPECT_EQ(rows_full.body.size(), size_t{1024});
}

TEST_F(Service, AnErrorNamesWhoSpeaks) {
    const auto error = wire::encode_error({Errc::kBusy, "too many nodes"}, 0);
    const Answer relay = service_->handle(error, Speaker::kRelay);
    EXPECT_TRUE(relay.close);
    EXPECT_EQ(relay.reason.code, Errc::kBusy);
    EXPECT_EQ(relay.reason.detail, "the relay says: too many nodes");
    const Answer backbone = service_->handle(error);
    EXPECT_EQ(backbone.reason.detail, "the backbone says: too many nodes");
    expect_still_right("errors");
}

TEST_F(Service, ProgramsForWhatIsNotHeldOrCannotBeRunAreAnsweredNo) {
    EXPECT_EQ(status(service_->handle(program(2, kLayer1))), errc_info(Errc::kNotHeld).wire_code);
    EXPECT_EQ(status(service_->handle(program(2, {0, 1}))), errc_info(Errc::kNotHeld).wire_code);
    EXPECT_EQ(status(service_->handle(program(2, {0xffffffff, 0xffffffff}))),
              errc_info(Errc::kNotHeld).wire_code);
    moe::Program input_bias = toy::swiglu();
    input_bias.ops.push_back(
        toy::step(moe::OpKind::kMul, 4, 0));  // by the input: one row for all pairs
    EXPECT_GT(status(service_->handle(program(2, kLayer0, input_bias))), 0);
    moe::Program heavy{{toy::product(moe::SlabRole::kGate, 0)}};
    while (heavy.ops.size() < moe::kProgramOpsMax)
        heavy.ops.push_back(toy::step(moe::OpKind::kSqr, 1));
    const int code = status(service_->handle(program(2, kLayer0, heavy)));
    EXPECT_TRUE(code == 0 || code == errc_info(Errc::kLimit).wire_code);
    EXPECT_EQ(status(service_->handle(wire::encode_program({2, kLayer0, {1, 2, 3}}, 1))),
              errc_info(Errc::kProtocol).wire_code);
    expect_still_right("programs");
    service_->reset();
    EXPECT_EQ(error_of(service_->handle(good_)), Errc::kNotHeld);
}

// The bank is computed in the class that PROGRAM names, whatever this process's own ggml is of.
TEST_F(Service, ProgramsNameWhoseBitsTheyWant) {
    const auto named = [&](uint32_t numeric) {
        wire::ProgramMessage message{2, kLayer0, moe::encode(toy::swiglu())};
        message.numeric = numeric;
        return detail(service_->handle(wire::encode_program(message, 5)));
    };
    EXPECT_THAT(named(1), ::testing::EndsWith(" as x86-v3"));
    EXPECT_THAT(named(2), ::testing::EndsWith(" as x86-v4"));
    for (const uint32_t other : {0u, 3u, 0xffffffffu}) {
        EXPECT_EQ(named(other), "ggml: another kind of backbone") << other;
    }
    expect_still_right("classes");
}

// Every prefix, every single byte at several values, of both kinds of request.
TEST_F(Service, CutAndChangedMessages) {
    const auto small = compute(1, 0, 1, {{0, 1}}, toy::as_bytes(rows_).first(1024));
    for (const auto& message : {program(3, kLayer0), small, wire::encode_ping(3)}) {
        for (size_t size = 0; size < std::min<size_t>(message.size(), 200); ++size) {
            const std::vector<uint8_t> cut(message.begin(),
                                           message.begin() + static_cast<long>(size));
            const Answer answer = service_->handle(cut);
            expect_well_formed(answer);
            EXPECT_TRUE(answer.close) << size;
        }
        for (size_t at = 0; at < std::min<size_t>(message.size(), 100); ++at) {
            for (const int change : {1, 0x80, 0xff}) {
                auto bad = message;
                bad[at] = static_cast<uint8_t>(bad[at] ^ change);
                expect_well_formed(service_->handle(bad));
            }
        }
        auto longer = message;
        longer.push_back(0);
        EXPECT_TRUE(service_->handle(longer).close);
    }
    service_->reset();
    EXPECT_EQ(status(service_->handle(program(1, kLayer0))), 0);
    expect_still_right("everything");
}

// A request that is replayed, whatever came between, gives the same bytes: nothing of other
// requests shows.
TEST_F(Service, TenThousandRandomMessagesAndTheAnswerIsTheSame) {
    std::mt19937_64 random(11);
    uint64_t results = 0;
    for (int seed = 0; seed < 10000; ++seed) {
        const uint32_t row_count = static_cast<uint32_t>(random() % 5);
        std::vector<wire::Pair> pairs(random() % 4);
        for (auto& pair : pairs)
            pair = {static_cast<uint32_t>(random() % 5), static_cast<uint32_t>(random() % 4)};
        auto message =
            compute(1, random() % 8 ? 0 : static_cast<uint32_t>(random() % 45), row_count, pairs,
                    toy::as_bytes(rows_).first(row_count * 1024), static_cast<uint32_t>(random()));
        if (random() % 4 == 0) message[random() % message.size()] = static_cast<uint8_t>(random());
        if (random() % 8 == 0) message.resize(random() % message.size());
        const Answer answer = service_->handle(message);
        expect_well_formed(answer);
        results += answer.body.empty() ? 0 : 1;
        if (seed % 500 == 0) expect_still_right(std::to_string(seed));
    }
    EXPECT_GT(results, 500u);
    expect_still_right("all");
}

TEST_F(Service, FramesThatAreNotForAWorkerEndTheConnection) {
    for (const auto& message :
         {wire::encode_hello({}), wire::encode_welcome({}), wire::encode_program_ack({}, 1),
          wire::encode_simple(FrameType::kDrain)}) {
        const Answer answer = service_->handle(message);
        EXPECT_EQ(error_of(answer), Errc::kProtocol);
        EXPECT_TRUE(answer.close);
    }
    EXPECT_TRUE(service_->handle(wire::encode_simple(FrameType::kGoodbye)).close);
    const Answer told = service_->handle(wire::encode_error({Errc::kMismatch, "other bits"}, 0));
    EXPECT_TRUE(told.close);
    EXPECT_EQ(told.reason.code, Errc::kMismatch);
    EXPECT_FALSE(service_->handle(wire::encode_error({Errc::kBusy, "later"}, 4)).close);
    const Answer pong = service_->handle(wire::encode_ping(77));
    EXPECT_EQ(pong.head, wire::encode_pong(77));
    EXPECT_TRUE(service_->handle(wire::encode_pong(77)).head.empty());
}

TEST_F(Service, ProgramsAreBounded) {
    for (uint32_t id = 0; id < 5000; ++id) {
        const int code = status(service_->handle(program(id, kLayer0)));
        if (code != 0) {
            EXPECT_EQ(code, errc_info(Errc::kLimit).wire_code);
            EXPECT_GT(id, 100u);
            return;
        }
    }
    FAIL() << "5000 programs were taken";
}

}  // namespace
}  // namespace kvasir::worker
