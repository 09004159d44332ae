// SwarmLane: dispatches one layer of one batch: plan, send, compute our own share, collect, retry.
//
// Used by the ggml backend, one lane per llama_context. All requests of a layer are in flight at
// once; while they are, the backbone computes what nobody holds. An expert whose worker dies,
// stalls or answers badly is asked of another holder, and at last computed here: same bits, one
// layer late.
//
// Thread: one at a time. Owns: an engine, a mailbox, buffers that are reused from layer to layer.
#pragma once

#include <poll.h>

#include <memory>
#include <set>
#include <vector>

#include "backbone/backbone.hpp"
#include "backbone/replica.hpp"
#include "backbone/roster.hpp"
#include "backbone/stats.hpp"
#include "backbone/uplink.hpp"
#include "dispatch/planner.hpp"

namespace kvasir::backbone {

class SwarmLane final : public Lane {
public:
    // `relays_here`: those in this process.
    SwarmLane(Replica& replica, RosterBoard& board, Stats& stats,
              std::unique_ptr<engine::ExpertEngine> engine, std::vector<RelayHere> relays_here);
    ~SwarmLane() override;

    bool works() const { return mailbox_.works(); }  // no: out of descriptors
    Result<bool> compute(const LayerBatch& batch) override;
    void note_local(uint64_t pairs) override { stats_.add_local(pairs); }
    void note_time(std::chrono::nanoseconds in_backend) override { stats_.add_time(in_backend); }
    void set_threads(uint32_t threads) override;

private:
    bool uses_kernels() const;

    // All rows of one expert; pairs_ [begin, end) in order_.
    struct ExpertRows {
        uint32_t expert = 0;
        uint32_t begin = 0;
        uint32_t end = 0;
        std::vector<uint32_t> tried;  // worker indices that failed
    };
    // One request to one worker.
    struct Call {
        uint32_t worker = 0;  // index into roster_->workers
        uint32_t request_id = 0;
        std::vector<uint32_t> pairs;   // indices into batch.pairs, in request order
        std::vector<uint32_t> groups;  // of groups_
        net::Clock::time_point sent{};
        net::Deadline deadline{};
        bool open = false;
        bool answered = false;  // since the last look
        bool failed = false;
        bool suspicious = false;     // not-a-number in the answer
        Errc code = Errc::kTimeout;  // of a failure
        std::chrono::nanoseconds compute{0};
        std::string error;
    };

    bool prepare(const LayerBatch& batch);
    void group_pairs();
    void assign(std::span<const uint32_t> groups);  // -> to_send_, to_compute_
    Status run_assigned();  // sends and computes until nothing is left to assign
    void send_group(uint32_t worker, std::span<const uint32_t> groups);
    bool send_call(uint32_t worker, std::span<const uint32_t> groups);
    bool rows_for(Call& call, std::span<const uint8_t>& rows, uint32_t& row_count);
    Status quantise_rows();
    Status compute_groups(std::span<const uint32_t> groups);
    Status compute_chunk(std::span<const uint32_t> groups);
    Status collect();
    void serve_relays();
    void wait_for_replies();
    void on_reply(uint64_t cookie, wire::FrameType type, std::span<const uint8_t> payload,
                  const Error& error);
    void accept_rows(Call& call, const wire::ResultView& result);
    void settle();
    void settle_failure(Call& call);
    void finish();
    uint32_t pairs_in(std::span<const uint32_t> groups) const;
    WorkerSession& session(uint32_t worker) const { return *roster_->workers[worker]; }

    // Constant after construction.
    Replica& replica_;
    RosterBoard& board_;
    Stats& stats_;
    std::unique_ptr<engine::ExpertEngine> engine_;
    const std::vector<RelayHere> relays_here_;
    Mailbox mailbox_;
    OnReply on_reply_;

    // Of the lane's thread: the roster snapshot.
    std::shared_ptr<const Roster> roster_;
    uint64_t roster_version_ = 0;
    std::set<std::pair<LayerKey, const void*>>
        known_weights_;  // tensors found equal to the replica's

    // Of the layer under way.
    const LayerBatch* batch_ = nullptr;
    uint32_t epoch_ = 0;  // tells late replies of an earlier layer apart
    std::optional<LearnedBank> learned_;
    const LayerRoster* layer_ = nullptr;  // null: nobody holds any of its experts
    std::vector<uint32_t> order_;         // pair indices sorted by expert
    std::vector<ExpertRows> groups_;
    std::vector<uint32_t> to_assign_;                                  // groups to place (again)
    std::vector<uint32_t> to_compute_;                                 // groups for the backbone
    std::vector<std::pair<uint32_t, std::vector<uint32_t>>> to_send_;  // (worker, groups)
    std::vector<std::unique_ptr<Call>> calls_;
    size_t calls_open_ = 0;
    std::vector<uint32_t> suspects_;  // calls whose answer had values that are not numbers
    std::vector<Link*> claimed_;      // of workers in roster_, which keeps them
    std::vector<uint8_t> quantised_;  // all rows as Q8_K
    bool rows_quantised_ = false;
    uint64_t remote_pairs_ = 0, local_pairs_ = 0, retried_pairs_ = 0;
    std::vector<std::pair<uint32_t, std::chrono::nanoseconds>> worker_compute_;
    std::chrono::nanoseconds local_compute_{0};
    bool exact_ = true;

    // Scratch.
    std::vector<uint32_t> plan_workers_;
    std::vector<dispatch::Group> plan_groups_;
    std::vector<std::vector<uint32_t>> plan_holders_;
    std::vector<dispatch::HolderCost> plan_costs_;
    std::vector<int32_t> plan_out_;
    std::vector<double> plan_busy_;
    std::vector<uint8_t> gathered_;
    std::vector<wire::Pair> wire_pairs_;
    std::vector<engine::PairIn> engine_pairs_;
    std::vector<uint32_t> row_slot_;
    std::vector<Reply> replies_;
    std::vector<pollfd> poll_entries_;
    std::vector<Link*> poll_links_;
    bool relays_busy_ = false;  // their threads are at it: only they are waited for
    ByteWriter head_;
};

}  // namespace kvasir::backbone
