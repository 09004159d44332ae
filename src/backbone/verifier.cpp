#include "backbone/verifier.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/log.hpp"

namespace kvasir::backbone {
namespace {

using namespace std::chrono_literals;

constexpr auto kLongWait = 60s;
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
    notify(mailbox_.fd());
    thread_.join();
}

void Verifier::add(std::shared_ptr<WorkerSession> session) {
    {
        const std::lock_guard lock(mu_);
        for (const HeldBank& bank : session->banks()) {
            if (replica_.learned(bank.layer)) tasks_.emplace_back(session, bank.layer);
        }
        sessions_.emplace(session->tag(), std::move(session));
    }
    notify(mailbox_.fd());
}

void Verifier::remove(uint64_t tag) {
    {
        const std::lock_guard lock(mu_);
        sessions_.erase(tag);
    }
    notify(mailbox_.fd());
}

void Verifier::on_program(LayerKey layer) {
    {
        const std::lock_guard lock(mu_);
        for (const auto& [tag, session] : sessions_) {
            if (session->bank(layer) != nullptr) tasks_.emplace_back(session, layer);
        }
    }
    notify(mailbox_.fd());
}

// ---- the thread ----

void Verifier::run() {
    for (;;) {
        (void)mailbox_.wait(next_deadline());
        take_replies();
        {
            const std::lock_guard lock(mu_);
            if (stopping_) return;
        }
        take_tasks();
        expire();
        start_checks();
    }
}

net::Deadline Verifier::next_deadline() const {
    auto deadline = net::Clock::now() + kLongWait;
    for (const auto& [tag, candidate] : candidates_) {
        if (candidate.check) deadline = std::min(deadline, candidate.check->deadline);
    }
    return deadline;
}

void Verifier::take_tasks() {
    const std::lock_guard lock(mu_);
    for (auto& [session, layer] : tasks_) {
        Candidate& candidate = candidates_[session->tag()];
        candidate.session = session;
        // A worker that joins while a program is learned would be asked twice.
        if (std::ranges::find(candidate.todo, layer) == candidate.todo.end())
            candidate.todo.push_back(layer);
    }
    tasks_.clear();
}

void Verifier::start_checks() {
    bool worked = false;
    for (auto it = candidates_.begin(); it != candidates_.end();) {
        Candidate& candidate = it->second;
        while (!candidate.check && !candidate.todo.empty() && candidate.session->open()) {
            worked = true;
            if (Status ok = start(candidate); !ok) finish(candidate, ok);
        }
        const bool done = candidate.todo.empty() || !candidate.session->open();
        it = done ? candidates_.erase(it) : std::next(it);
        worked = worked || done;
    }
    if (worked && candidates_.empty()) {
        log(LogLevel::kInfo, "verify",
            "workers hold " + std::to_string(board_.experts_covered()) + " of " +
                std::to_string(board_.experts_active()) + " experts in use");
    }
}

void Verifier::take_replies() {
    std::vector<Reply> replies;
    mailbox_.take(replies);
    for (const Reply& reply : replies) {
        const auto found = std::ranges::find_if(candidates_, [&](const auto& entry) {
            return entry.second.check && entry.second.check->cookie == reply.cookie;
        });
        if (found == candidates_.end()) continue;  // of a check that was given up
        Candidate& candidate = found->second;
        if (Status ok = step(candidate, reply); !ok) finish(candidate, ok);
    }
}

void Verifier::expire() {
    const auto now = net::Clock::now();
    for (auto& [tag, candidate] : candidates_) {
        if (!candidate.check || now < candidate.check->deadline) continue;
        candidate.session->cancel(candidate.check->request_id);
        finish(candidate, fail(Errc::kTimeout, "no answer in time"));
    }
}

// ---- one bank of one worker ----

Status Verifier::send(Candidate& candidate, std::span<const std::span<const uint8_t>> pieces) {
    Check& check = *candidate.check;
    check.cookie = ++last_cookie_;
    check.deadline = net::Clock::now() + kAnswerTime;
    return candidate.session->request(check.request_id, pieces, 0, &mailbox_, check.cookie);
}

Status Verifier::start(Candidate& candidate) {
    const LayerKey layer = candidate.todo.front();
    const auto learned = replica_.learned(layer);
    if (!learned || candidate.session->bank(layer) == nullptr)
        return fail(Errc::kNotHeld, "nothing to verify");
    Check& check = candidate.check.emplace();
    check.learned = *learned;
    check.request_id = candidate.session->next_request_id();
    const auto message =
        wire::encode_program({learned->program_id, layer, moe::encode(learned->bank->program),
                              static_cast<uint32_t>(engine::numeric_class())},
                             check.request_id);
    const std::span<const uint8_t> piece(message);
    return send(candidate, {&piece, 1});
}

// An answer arrived: the next request, or the end. An error ends the check.
Status Verifier::step(Candidate& candidate, const Reply& reply) {
    if (reply.type == wire::FrameType::kError) return tl::unexpected(reply.error);
    if (candidate.check->rows == 0) return on_ack(candidate, reply);
    return on_answer(candidate, reply);
}

Status Verifier::on_ack(Candidate& candidate, const Reply& reply) {
    if (reply.type != wire::FrameType::kProgramAck)
        return fail(Errc::kProtocol, "answered PROGRAM with something else");
    auto ack = wire::decode_program_ack(reply.payload);
    if (!ack) return tl::unexpected(ack.error());
    if (ack->program != candidate.check->learned.program_id)
        return fail(Errc::kProtocol, "acknowledged another program");
    // Whatever its reason, the worker may hold other banks whose programs it can run.
    if (ack->status != 0)
        return fail(Errc::kUnsupported, "cannot run the program: " + printable(ack->detail));
    candidate.session->computes_with(printable(ack->detail));
    return send_challenge(candidate, 1);
}

Status Verifier::send_challenge(Candidate& candidate, uint32_t rows) {
    Check& check = *candidate.check;
    const engine::Bank& bank = *check.learned.bank;
    const HeldBank& held = *candidate.session->bank(candidate.todo.front());
    const uint32_t width = bank.shape.input();
    check.rows = rows;
    std::normal_distribution<float> normal;
    check.values.resize(size_t{rows} * width);
    for (float& value : check.values) value = normal(random_);
    std::vector<wire::Pair> pairs;
    check.pairs.clear();
    const auto add = [&](uint32_t row, uint32_t local) {
        pairs.push_back({row, local});
        check.pairs.push_back({row, held.globals[local]});
    };
    const auto any = [&] { return static_cast<uint32_t>(random_() % held.globals.size()); };
    // All rows of one expert, and one row of some others, as far as the worker takes so many.
    const uint32_t pairs_max = candidate.session->hello().pairs_max;
    const uint32_t crowded = any();
    for (uint32_t row = 0; row < rows; ++row) add(row, crowded);
    for (uint32_t i = 1; i < kChallengeExperts && pairs.size() < pairs_max; ++i)
        add(i % rows, any());
    const uint32_t row_type = bank.takes_q8k ? engine::kRowQ8K : engine::kRowF32;
    std::vector<uint8_t> bytes(engine::row_bytes(row_type, width) * rows);
    if (bank.takes_q8k) {
        Status ok = engine_->quantise(check.values.data(), rows, width, bytes.data());
        if (!ok) return ok;
    } else {
        std::memcpy(bytes.data(), check.values.data(), bytes.size());
    }
    check.request_id = candidate.session->next_request_id();
    ByteWriter head;
    wire::begin_compute(head, check.request_id, check.learned.program_id, row_type, rows, pairs,
                        bytes.size());
    const std::span<const uint8_t> pieces[] = {head.data(), bytes};
    return send(candidate, pieces);
}

// Rows of the second request: as many as reach the kernels for several rows, and the worker takes.
uint32_t Verifier::crowd(const Candidate& candidate) {
    const wire::Hello& hello = candidate.session->hello();
    return std::min({kChallengeRows, hello.rows_max, hello.pairs_max});
}

Status Verifier::on_answer(Candidate& candidate, const Reply& reply) {
    Check& check = *candidate.check;
    const engine::Bank& bank = *check.learned.bank;
    if (reply.type != wire::FrameType::kResult)
        return fail(Errc::kProtocol, "answered COMPUTE with something else");
    auto result = wire::decode_result(reply.payload);
    if (!result) return tl::unexpected(result.error());
    if (result->pair_count != check.pairs.size() || result->width != bank.shape.output()) {
        return fail(Errc::kBadAnswer, "the challenge's answer has the wrong size");
    }
    // f32 rows here although the worker got Q8_K: the equality of the two is part of the check.
    auto want = engine_->compute(bank, engine::kRowF32, check.rows,
                                 {reinterpret_cast<const uint8_t*>(check.values.data()),
                                  check.values.size() * sizeof(float)},
                                 check.pairs);
    if (!want) return tl::unexpected(want.error());
    if (std::memcmp(want->data(), result->rows.data(), result->rows.size()) != 0) {
        check.exact = false;
        std::vector<float> got(want->size());
        std::memcpy(got.data(), result->rows.data(), result->rows.size());
        if (error_of(got, *want) > kApproximateError) {
            return fail(Errc::kBadAnswer,
                        "the challenge's answer is wrong, not just rounded differently");
        }
    }
    if (!std::exchange(check.crowded, true)) return send_challenge(candidate, crowd(candidate));
    return passed(candidate);
}

Status Verifier::passed(Candidate& candidate) {
    WorkerSession& session = *candidate.session;
    const LayerKey layer = candidate.todo.front();
    const bool exact = candidate.check->exact;
    // Exact is a property of the machine: one bank that differs makes the worker approximate for
    // good.
    session.mark_exact(exact);
    if (!exact) {
        log(LogLevel::kWarn, "verify",
            session.label() + " computes other bits than this backbone (" +
                (exact_strict_ ? "not used: --exact strict" : "answers are approximate") + ")");
        if (exact_strict_)
            return fail(Errc::kMismatch, "another numeric class than this backbone's");
    } else {
        log(LogLevel::kDebug, "verify", session.label() + " is exact on layer " + to_string(layer));
    }
    finish(candidate, {});
    return {};
}

// The bank at the front is dealt with.
void Verifier::finish(Candidate& candidate, const Status& outcome) {
    const LayerKey layer = candidate.todo.front();
    candidate.todo.pop_front();
    candidate.check.reset();
    WorkerSession& session = *candidate.session;
    if (outcome) {
        if (session.exact() || !exact_strict_) board_.add(candidate.session, layer);
        return;
    }
    log(LogLevel::kWarn, "verify",
        session.label() + ", layer " + to_string(layer) + ": " + outcome.error().detail);
    const bool keeps_connection =
        outcome.error().code == Errc::kUnsupported || outcome.error().code == Errc::kBusy;
    if (!keeps_connection) session.close(outcome.error());
}

}  // namespace kvasir::backbone
