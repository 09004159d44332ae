#include "backbone/lane.hpp"

#include <poll.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/check.hpp"
#include "base/log.hpp"
#include "engine/runtime.hpp"

namespace kvasir::backbone {
namespace {

constexpr uint32_t kNoSlot = ~uint32_t{0};
constexpr const char* kNotNumbers = "answered with values that are not numbers";

// Copies floats and tells whether all of them are finite.
bool copy_finite(float* out, const uint8_t* in, size_t count) {
    std::memcpy(out, in, count * sizeof(float));
    constexpr uint32_t kExponent = 0x7f800000;
    uint32_t bad = 0;
    for (size_t i = 0; i < count; ++i) {
        uint32_t bits;
        std::memcpy(&bits, out + i, sizeof(bits));
        bad |= static_cast<uint32_t>((bits & kExponent) == kExponent);
    }
    return bad == 0;
}

}  // namespace

SwarmLane::SwarmLane(Replica& replica, RosterBoard& board, Stats& stats,
                     std::unique_ptr<engine::ExpertEngine> engine,
                     std::vector<RelayHere> relays_here)
    : replica_(replica),
      board_(board),
      stats_(stats),
      engine_(std::move(engine)),
      relays_here_(std::move(relays_here)) {
    on_reply_ = [this](uint64_t cookie, wire::FrameType type, std::span<const uint8_t> payload,
                       const Error& error) { on_reply(cookie, type, payload, error); };
}

SwarmLane::~SwarmLane() {
    finish();
    if (!roster_) return;
    for (const auto& worker : roster_->workers) worker->link()->give_back(this);
}

void SwarmLane::set_threads(uint32_t threads) {
    auto device = engine::find_device("");
    if (!device) return;
    if (auto engine = engine::ExpertEngine::make(*device, threads, engine_->with()))
        engine_ = std::move(*engine);
}

Result<bool> SwarmLane::compute(const LayerBatch& batch) {
    const auto start = net::Clock::now();
    batch_ = &batch;
    ++epoch_;
    if (batch.pairs.empty()) return true;
    if (!prepare(batch)) return false;
    group_pairs();
    assign(to_assign_);
    // Without the kernels the caller's own graph is the shorter way.
    if (to_send_.empty() && !uses_kernels()) return false;
    const bool any_remote = !to_send_.empty();
    Status ok = run_assigned();
    if (ok) ok = collect();
    finish();
    if (!ok) return tl::unexpected(ok.error());
    if (!any_remote) {
        note_local(local_pairs_);
        return true;
    }
    auto slowest = local_compute_;
    for (const auto& [worker, time] : worker_compute_) slowest = std::max(slowest, time);
    stats_.add_layer(remote_pairs_, local_pairs_, retried_pairs_, net::Clock::now() - start,
                     slowest, exact_);
    return true;
}

bool SwarmLane::uses_kernels() const {
    return engine_->with() == engine::ComputeWith::kKernels && learned_->bank->plan != nullptr;
}

// Takes the newest roster and decides whether this batch is for the swarm at all.
bool SwarmLane::prepare(const LayerBatch& batch) {
    if (const uint64_t version = board_.version(); version != roster_version_) {
        roster_ = board_.snapshot();
        roster_version_ = version;
    }
    const auto layer = roster_->layers.find(batch.layer);
    layer_ = layer == roster_->layers.end() ? nullptr : &layer->second;
    learned_ = replica_.learned(batch.layer);
    if (layer_ == nullptr && (!learned_ || !uses_kernels())) return false;
    if (!learned_ || learned_->bank->program != *batch.program) return false;
    // Rows with gaps between them are not worth a copy: llama.cpp has none.
    if (batch.row_stride != uint64_t{learned_->bank->shape.input()} * sizeof(float)) return false;
    // llama.cpp's warm-up selects every expert: not work for the swarm.
    const uint32_t used = replica_.model().experts_used;
    if (batch.used == learned_->bank->experts && batch.used > used && used > 0) return false;
    const void* data = nullptr;
    for (const auto* tensor : batch.weights) {
        if (tensor != nullptr && data == nullptr) data = tensor;
    }
    if (!known_weights_.contains({batch.layer, data})) {
        if (!replica_.same_weights(batch.layer, batch.weights)) {
            replica_.warn_other_model(batch.layer);
            return false;
        }
        known_weights_.insert({batch.layer, data});
    }
    rows_quantised_ = false;
    remote_pairs_ = local_pairs_ = retried_pairs_ = 0;
    local_compute_ = std::chrono::nanoseconds(0);
    worker_compute_.clear();
    suspects_.clear();
    exact_ = true;
    return true;
}

void SwarmLane::group_pairs() {
    const auto& pairs = batch_->pairs;
    order_.resize(pairs.size());
    for (uint32_t i = 0; i < order_.size(); ++i) order_[i] = i;
    std::sort(order_.begin(), order_.end(), [&](uint32_t a, uint32_t b) {
        return pairs[a].expert != pairs[b].expert ? pairs[a].expert < pairs[b].expert : a < b;
    });
    groups_.clear();
    to_assign_.clear();
    for (uint32_t i = 0; i < order_.size(); ++i) {
        const uint32_t expert = pairs[order_[i]].expert;
        if (groups_.empty() || groups_.back().expert != expert) {
            to_assign_.push_back(static_cast<uint32_t>(groups_.size()));
            groups_.push_back({expert, i, i, {}});
        }
        groups_.back().end = i + 1;
    }
}

uint32_t SwarmLane::pairs_in(std::span<const uint32_t> groups) const {
    uint32_t count = 0;
    for (uint32_t g : groups) count += groups_[g].end - groups_[g].begin;
    return count;
}

void SwarmLane::assign(std::span<const uint32_t> groups) {
    to_send_.clear();
    to_compute_.clear();
    plan_workers_.clear();
    plan_groups_.clear();
    plan_costs_.clear();
    plan_holders_.resize(std::max(plan_holders_.size(), groups.size()));
    for (size_t i = 0; i < groups.size(); ++i) {
        const ExpertRows& rows = groups_[groups[i]];
        plan_holders_[i].clear();
        if (layer_ == nullptr) continue;
        for (uint32_t worker : layer_->holders[rows.expert]) {
            if (!session(worker).usable()) continue;
            if (std::find(rows.tried.begin(), rows.tried.end(), worker) != rows.tried.end())
                continue;
            auto known = std::find(plan_workers_.begin(), plan_workers_.end(), worker);
            if (known == plan_workers_.end()) {
                plan_costs_.push_back(session(worker).costs());
                known = plan_workers_.insert(known, worker);
            }
            plan_holders_[i].push_back(static_cast<uint32_t>(known - plan_workers_.begin()));
        }
    }
    for (size_t i = 0; i < groups.size(); ++i) {
        const ExpertRows& rows = groups_[groups[i]];
        plan_groups_.push_back({rows.end - rows.begin, plan_holders_[i]});
    }
    dispatch::plan_into(plan_groups_, plan_costs_, plan_out_, plan_busy_);
    for (size_t i = 0; i < groups.size(); ++i) {
        if (plan_out_[i] == dispatch::kBackbone) {
            to_compute_.push_back(groups[i]);
            continue;
        }
        const uint32_t worker = plan_workers_[static_cast<size_t>(plan_out_[i])];
        auto entry = std::find_if(to_send_.begin(), to_send_.end(),
                                  [&](const auto& e) { return e.first == worker; });
        if (entry == to_send_.end()) entry = to_send_.insert(entry, {worker, {}});
        entry->second.push_back(groups[i]);
    }
}

Status SwarmLane::run_assigned() {
    for (;;) {
        to_assign_.clear();
        if (!to_send_.empty() && learned_->bank->takes_q8k) {
            if (Status ok = quantise_rows(); !ok) return ok;
        }
        const auto sends = std::move(to_send_);
        to_send_.clear();
        for (const auto& [worker, groups] : sends) send_group(worker, groups);
        if (!sends.empty()) serve_relays();
        if (Status ok = compute_groups(to_compute_); !ok) return ok;
        if (to_assign_.empty()) return {};
        const std::vector<uint32_t> again = to_assign_;  // groups whose worker could not be asked
        assign(again);
    }
}

// Splits what goes to a worker into requests it accepts. Experts stay whole as long as they fit.
void SwarmLane::send_group(uint32_t worker, std::span<const uint32_t> groups) {
    const wire::Hello& hello = session(worker).hello();
    const uint32_t most =
        std::min({hello.pairs_max, hello.rows_max, wire::kPairsMax, wire::kRowsMax});
    size_t begin = 0;
    while (begin < groups.size()) {
        size_t end = begin + 1;
        while (end < groups.size() && pairs_in(groups.subspan(begin, end + 1 - begin)) <= most)
            ++end;
        const auto part = groups.subspan(begin, end - begin);
        if (pairs_in(part) > most || !send_call(worker, part)) {
            for (uint32_t g : part) {
                groups_[g].tried.push_back(worker);
                to_assign_.push_back(g);
            }
        }
        begin = end;
    }
}

bool SwarmLane::send_call(uint32_t worker, std::span<const uint32_t> groups) {
    WorkerSession& target = session(worker);
    auto call = std::make_unique<Call>();
    call->worker = worker;
    call->groups.assign(groups.begin(), groups.end());
    for (uint32_t g : groups) {
        call->pairs.insert(call->pairs.end(), order_.begin() + groups_[g].begin,
                           order_.begin() + groups_[g].end);
    }
    const HeldBank* held = target.bank(batch_->layer);
    KVASIR_CHECK(held != nullptr);
    std::span<const uint8_t> rows;
    uint32_t row_count = 0;
    if (!rows_for(*call, rows, row_count)) return false;
    for (size_t i = 0; i < call->pairs.size(); ++i) {
        wire_pairs_[i].local =
            static_cast<uint32_t>(held->local_of_global[batch_->pairs[call->pairs[i]].expert]);
    }
    Link* link = target.link().get();
    if (std::find(claimed_.begin(), claimed_.end(), link) == claimed_.end() && link->claim(this)) {
        claimed_.push_back(link);
    }
    call->request_id = target.next_request_id();
    head_.clear();
    wire::begin_compute(head_, call->request_id, learned_->program_id,
                        learned_->bank->takes_q8k ? engine::kRowQ8K : engine::kRowF32, row_count,
                        wire_pairs_, rows.size());
    const std::span<const uint8_t> pieces[] = {head_.data(), rows};
    call->sent = net::Clock::now();
    // The worker computes what it was asked before first.
    uint32_t pairs_ahead = 0;
    for (const auto& other : calls_) {
        if (other->open && other->worker == worker)
            pairs_ahead += static_cast<uint32_t>(other->pairs.size());
    }
    const auto pairs = static_cast<uint32_t>(call->pairs.size());
    call->deadline = call->sent + target.deadline(pairs_ahead + pairs);
    const uint64_t cookie = (uint64_t{epoch_} << 32) | calls_.size();
    if (!target.request(call->request_id, pieces, pairs, &mailbox_, cookie)) return false;
    call->open = true;
    ++calls_open_;
    calls_.push_back(std::move(call));
    return true;
}

// The rows a call needs, each once, and wire_pairs_ with their numbers.
bool SwarmLane::rows_for(Call& call, std::span<const uint8_t>& rows, uint32_t& row_count) {
    const engine::Bank& bank = *learned_->bank;
    const uint64_t bytes =
        engine::row_bytes(bank.takes_q8k ? engine::kRowQ8K : engine::kRowF32, bank.shape.input());
    const uint8_t* source = bank.takes_q8k ? quantised_.data() : batch_->rows;
    const uint64_t stride = bank.takes_q8k ? bytes : batch_->row_stride;
    wire_pairs_.assign(call.pairs.size(), {});
    if (batch_->row_count == 1) {
        rows = {source, bytes};
        row_count = 1;
        return true;
    }
    row_slot_.assign(batch_->row_count, kNoSlot);
    gathered_.clear();
    row_count = 0;
    for (size_t i = 0; i < call.pairs.size(); ++i) {
        const uint32_t row = batch_->pairs[call.pairs[i]].row;
        if (row_slot_[row] == kNoSlot) {
            row_slot_[row] = row_count++;
            const uint8_t* from = source + row * stride;
            gathered_.insert(gathered_.end(), from, from + bytes);
        }
        wire_pairs_[i].row = row_slot_[row];
    }
    rows = gathered_;
    return true;
}

Status SwarmLane::collect() {
    while (calls_open_ > 0) {
        wait_for_replies();
        to_assign_.clear();
        settle();
        if (to_assign_.empty()) continue;
        const std::vector<uint32_t> again = to_assign_;
        retried_pairs_ += pairs_in(again);
        assign(again);
        if (Status ok = run_assigned(); !ok) return ok;
    }
    // A worker whose values were no numbers although the right ones are has lied.
    for (uint32_t index : suspects_) {
        const Call& call = *calls_[index];
        const uint32_t width = learned_->bank->shape.output();
        bool finite = true;
        for (uint32_t p : call.pairs) {
            for (uint32_t i = 0; i < width && finite; ++i)
                finite = std::isfinite(batch_->pairs[p].out[i]);
        }
        if (finite) session(call.worker).close({Errc::kBadAnswer, kNotNumbers});
    }
    return {};
}

void SwarmLane::serve_relays() {
    for (const RelayHere& relay : relays_here_) relays_busy_ |= !relay.serve_ready();
}

void SwarmLane::wait_for_replies() {
    auto deadline = net::Deadline::max();
    for (const auto& call : calls_) {
        if (call->open) deadline = std::min(deadline, call->deadline);
    }
    poll_entries_.clear();
    poll_links_.clear();
    for (Link* link : claimed_) {
        if (!link->open()) continue;  // its socket would wake poll() again and again
        const short events = static_cast<short>(link->wants_write() ? POLLIN | POLLOUT : POLLIN);
        poll_entries_.push_back({link->fd(), events, 0});
        poll_links_.push_back(link);
    }
    poll_entries_.push_back({mailbox_.fd(), POLLIN, 0});
    if (!std::exchange(relays_busy_, false)) {
        for (const RelayHere& relay : relays_here_)
            poll_entries_.push_back({relay.event_fd, POLLIN, 0});
    }
    if (::poll(poll_entries_.data(), poll_entries_.size(), poll_timeout(deadline)) <= 0) return;
    bool relayed = false;
    for (size_t i = poll_links_.size() + 1; i < poll_entries_.size(); ++i)
        relayed = relayed || poll_entries_[i].revents != 0;
    if (relayed) serve_relays();
    for (size_t i = 0; i < poll_links_.size(); ++i) {
        if (relayed || poll_entries_[i].revents != 0)
            (void)poll_links_[i]->pump(&mailbox_, on_reply_);
    }
    if (poll_entries_[poll_links_.size()].revents != 0) {
        mailbox_.take(replies_);
        for (const Reply& reply : replies_)
            on_reply(reply.cookie, reply.type, reply.payload, reply.error);
    }
}

void SwarmLane::on_reply(uint64_t cookie, wire::FrameType type, std::span<const uint8_t> payload,
                         const Error& error) {
    const auto index = static_cast<size_t>(cookie & 0xffffffff);
    if (cookie >> 32 != epoch_ || index >= calls_.size() || !calls_[index]->open) return;
    Call& call = *calls_[index];
    if (type == wire::FrameType::kResult) {
        auto result = wire::decode_result(payload);
        if (result) {
            accept_rows(call, *result);
        } else {
            call.failed = true;
            call.code = Errc::kBadAnswer;
            call.error = result.error().detail;
        }
    } else {
        call.failed = true;
        call.code = type == wire::FrameType::kError ? error.code : Errc::kProtocol;
        call.error = error.detail;
    }
}

void SwarmLane::accept_rows(Call& call, const wire::ResultView& result) {
    const uint32_t width = learned_->bank->shape.output();
    if (result.pair_count != call.pairs.size() || result.width != width) {
        call.failed = true;
        call.code = Errc::kBadAnswer;
        call.error = "answer has the wrong size";
        return;
    }
    bool finite = true;
    for (size_t i = 0; i < call.pairs.size(); ++i) {
        finite &= copy_finite(batch_->pairs[call.pairs[i]].out,
                              result.rows.data() + i * width * sizeof(float), width);
    }
    call.compute = std::chrono::nanoseconds(result.compute_ns);
    call.answered = finite;
    call.failed = call.suspicious = !finite;
    if (!finite) {
        call.code = Errc::kBadAnswer;
        call.error = kNotNumbers;
    }
}

// Books what came back or did not.
void SwarmLane::settle() {
    const auto now = net::Clock::now();
    for (size_t i = 0; i < calls_.size(); ++i) {
        Call& call = *calls_[i];
        if (!call.open) continue;
        WorkerSession& worker = session(call.worker);
        if (call.answered) {
            call.open = false;
            --calls_open_;
            const auto pairs = static_cast<uint32_t>(call.pairs.size());
            const auto compute = std::clamp(call.compute, std::chrono::nanoseconds(0),
                                            std::chrono::nanoseconds(now - call.sent));
            worker.on_answer(pairs, now - call.sent, compute);
            remote_pairs_ += pairs;
            exact_ = exact_ && worker.exact();
            auto sum = std::find_if(worker_compute_.begin(), worker_compute_.end(),
                                    [&](const auto& e) { return e.first == call.worker; });
            if (sum == worker_compute_.end())
                sum = worker_compute_.insert(sum, {call.worker, std::chrono::nanoseconds(0)});
            sum->second += compute;
        } else if (call.failed || now >= call.deadline) {
            if (call.suspicious) suspects_.push_back(static_cast<uint32_t>(i));
            settle_failure(call);
        }
    }
}

void SwarmLane::settle_failure(Call& call) {
    WorkerSession& worker = session(call.worker);
    call.open = false;
    --calls_open_;
    if (!call.failed) {
        worker.cancel(call.request_id);
        call.error = "no answer within its deadline";
    }
    worker.on_failure();
    log(LogLevel::kWarn, "dispatch",
        worker.label() + ", layer " + to_string(batch_->layer) + ": " + call.error +
            "; asking elsewhere");
    if (call.code == Errc::kBadAnswer && !call.suspicious)
        worker.close({Errc::kBadAnswer, call.error});
    for (uint32_t g : call.groups) {
        if (call.suspicious) {
            // Only our own replica can say whether such values are right.
            groups_[g].tried = layer_->holders[groups_[g].expert];
        } else {
            groups_[g].tried.push_back(call.worker);
        }
        to_assign_.push_back(g);
    }
}

void SwarmLane::finish() {
    for (const auto& call : calls_) {
        if (call->open) session(call->worker).cancel(call->request_id);
    }
    calls_.clear();
    calls_open_ = 0;
    for (Link* link : claimed_) link->release(this);
    claimed_.clear();
}

}  // namespace kvasir::backbone
