#include "backbone/verifier.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/log.hpp"

namespace kvasir::backbone {
namespace {

using namespace std::chrono_literals;

constexpr auto kAnswerTime = 10s;          // a phone may have to page its experts in
constexpr uint32_t kChallengeExperts = 4;  // random ones of the worker's own
constexpr uint32_t kChallengeRows = 9;     // ggml's panel kernels begin at 8 rows of one expert
constexpr double kApproximateError =
    0.05;  // normalised squared error above which an answer is simply wrong

// NMSE of `got` against `want`; infinite when something is not a number.
double error_of(std::span<const float> got, std::span<const float> want) {
    double difference = 0, size = 0;
    for (size_t i = 0; i < want.size(); ++i) {
        difference += (double{got[i]} - want[i]) * (double{got[i]} - want[i]);
        size += double{want[i]} * want[i];
    }
    if (!std::isfinite(difference)) return INFINITY;
    return size > 0 ? difference / size : difference;
}

}  // namespace

Verifier::Verifier(Replica& replica, RosterBoard& board,
                   std::unique_ptr<engine::ExpertEngine> engine, bool exact_strict)
    : replica_(replica),
      board_(board),
      engine_(std::move(engine)),
      exact_strict_(exact_strict),
      random_(std::random_device{}()) {
    thread_ = std::thread([this] { run(); });
}

Verifier::~Verifier() {
    {
        const std::lock_guard lock(mu_);
        stopping_ = true;
    }
    wake_.notify_all();
    thread_.join();
}

void Verifier::add(std::shared_ptr<WorkerSession> session) {
    const std::lock_guard lock(mu_);
    for (const HeldBank& bank : session->banks()) {
        if (replica_.learned(bank.layer)) tasks_.push_back({session, bank.layer});
    }
    sessions_.emplace(session->tag(), std::move(session));
    wake_.notify_all();
}

void Verifier::remove(uint64_t tag) {
    const std::lock_guard lock(mu_);
    sessions_.erase(tag);
}

void Verifier::on_program(LayerKey layer) {
    const std::lock_guard lock(mu_);
    for (const auto& [tag, session] : sessions_) {
        if (session->bank(layer) != nullptr) tasks_.push_back({session, layer});
    }
    wake_.notify_all();
}

void Verifier::run() {
    for (;;) {
        Task task;
        {
            std::unique_lock lock(mu_);
            wake_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
            if (stopping_) return;
            task = std::move(tasks_.front());
            tasks_.pop_front();
        }
        if (!task.session->open()) continue;
        if (Status ok = verify(*task.session, task.layer); !ok) {
            log(LogLevel::kWarn, "verify",
                task.session->label() + ", layer " + to_string(task.layer) + ": " +
                    ok.error().detail);
            const bool keeps_connection =
                ok.error().code == Errc::kUnsupported || ok.error().code == Errc::kBusy;
            if (!keeps_connection) task.session->close(ok.error());
            continue;
        }
        if (task.session->exact() || !exact_strict_) board_.add(task.session, task.layer);
        const std::lock_guard lock(mu_);
        if (tasks_.empty()) {
            log(LogLevel::kInfo, "verify",
                "workers hold " + std::to_string(board_.experts_covered()) + " of " +
                    std::to_string(board_.experts_active()) + " experts in use");
        }
    }
}

Result<Reply> Verifier::ask(WorkerSession& session, uint32_t request_id,
                            std::span<const std::span<const uint8_t>> pieces) {
    const uint64_t cookie = ++last_cookie_;
    if (Status ok = session.request(request_id, pieces, &mailbox_, cookie); !ok)
        return tl::unexpected(ok.error());
    const auto deadline = net::Clock::now() + kAnswerTime;
    std::vector<Reply> replies;
    while (mailbox_.wait(std::min(deadline, net::Clock::now() + 100ms)) ||
           net::Clock::now() < deadline) {
        mailbox_.take(replies);
        for (Reply& reply : replies) {
            if (reply.cookie != cookie) continue;  // of an earlier request that was given up
            if (reply.type == wire::FrameType::kError) return tl::unexpected(reply.error);
            return std::move(reply);
        }
        const std::lock_guard lock(mu_);
        if (stopping_) break;
    }
    session.cancel(request_id);
    return fail(Errc::kTimeout, "no answer in time");
}

Status Verifier::verify(WorkerSession& session, LayerKey layer) {
    const auto learned = replica_.learned(layer);
    const HeldBank* held = session.bank(layer);
    if (!learned || held == nullptr) return fail(Errc::kNotHeld, "nothing to verify");
    const uint32_t request_id = session.next_request_id();
    const auto message = wire::encode_program(
        {learned->program_id, layer, moe::encode(learned->bank->program)}, request_id);
    const std::span<const uint8_t> piece(message);
    auto reply = ask(session, request_id, {&piece, 1});
    if (!reply) return tl::unexpected(reply.error());
    if (reply->type != wire::FrameType::kProgramAck)
        return fail(Errc::kProtocol, "answered PROGRAM with something else");
    auto ack = wire::decode_program_ack(reply->payload);
    if (!ack) return tl::unexpected(ack.error());
    if (ack->program != learned->program_id)
        return fail(Errc::kProtocol, "acknowledged another program");
    if (ack->status != 0)
        return fail(errc_from_wire(ack->status),
                    "cannot run the program: " + printable(ack->detail));
    bool exact = true;
    for (uint32_t rows : {uint32_t{1}, kChallengeRows}) {
        if (Status ok = challenge(session, *learned, *held, rows, exact); !ok) return ok;
    }
    // Exact is a property of the machine: one bank that differs makes the worker approximate for
    // good.
    const bool first = !session.exact() && !board_.snapshot()->layers.contains(layer);
    session.mark_exact(exact);
    if (!exact) {
        log(LogLevel::kWarn, "verify",
            session.label() + " computes other bits than this backbone (" +
                (exact_strict_ ? "not used: --exact strict" : "answers are approximate") + ")");
        if (exact_strict_)
            return fail(Errc::kMismatch, "another numeric class than this backbone's");
    } else if (first) {
        log(LogLevel::kDebug, "verify", session.label() + " is exact on layer " + to_string(layer));
    }
    return {};
}

Status Verifier::challenge(WorkerSession& session, const LearnedBank& learned, const HeldBank& held,
                           uint32_t rows, bool& exact) {
    const engine::Bank& bank = *learned.bank;
    const uint32_t width = bank.shape.input();
    std::normal_distribution<float> normal;
    std::vector<float> values(size_t{rows} * width);
    for (float& value : values) value = normal(random_);
    std::vector<wire::Pair> pairs;
    std::vector<engine::PairIn> own;
    const auto add = [&](uint32_t row, uint32_t local) {
        pairs.push_back({row, local});
        own.push_back({row, held.globals[local]});
    };
    const auto any = [&] { return static_cast<uint32_t>(random_() % held.globals.size()); };
    // All rows of one expert, and one row of some others.
    const uint32_t crowded = any();
    for (uint32_t row = 0; row < rows; ++row) add(row, crowded);
    for (uint32_t i = 1; i < kChallengeExperts; ++i) add(i % rows, any());
    const uint32_t row_type = bank.takes_q8k ? engine::kRowQ8K : engine::kRowF32;
    std::vector<uint8_t> bytes(engine::row_bytes(row_type, width) * rows);
    if (bank.takes_q8k) {
        if (Status ok = engine_->quantise(values.data(), rows, width, bytes.data()); !ok) return ok;
    } else {
        std::memcpy(bytes.data(), values.data(), bytes.size());
    }
    const uint32_t request_id = session.next_request_id();
    ByteWriter head;
    wire::begin_compute(head, request_id, learned.program_id, row_type, rows, pairs, bytes.size());
    const std::span<const uint8_t> pieces[] = {head.data(), bytes};
    auto reply = ask(session, request_id, pieces);
    if (!reply) return tl::unexpected(reply.error());
    if (reply->type != wire::FrameType::kResult)
        return fail(Errc::kProtocol, "answered COMPUTE with something else");
    auto result = wire::decode_result(reply->payload);
    if (!result) return tl::unexpected(result.error());
    if (result->pair_count != pairs.size() || result->width != bank.shape.output()) {
        return fail(Errc::kBadAnswer, "the challenge's answer has the wrong size");
    }
    // f32 rows here although the worker got Q8_K: the equality of the two is part of the check.
    auto want = engine_->compute(
        bank, engine::kRowF32, rows,
        {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(float)}, own);
    if (!want) return tl::unexpected(want.error());
    if (std::memcmp(want->data(), result->rows.data(), result->rows.size()) == 0) return {};
    exact = false;
    std::vector<float> got(want->size());
    std::memcpy(got.data(), result->rows.data(), result->rows.size());
    if (error_of(got, *want) > kApproximateError) {
        return fail(Errc::kBadAnswer,
                    "the challenge's answer is wrong, not just rounded differently");
    }
    return {};
}

}  // namespace kvasir::backbone
