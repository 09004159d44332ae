// The verifier: agrees on programs with workers and runs the numeric challenge, bank by bank.
//
// Used by the hub at join and when a new program is learned. For every bank a worker holds:
// PROGRAM, PROGRAM_ACK, then requests with random rows for some of its own experts, once with one
// row and once with several; the answers are compared with the replica's bits. What passes enters
// the roster. Workers are checked side by side, each one bank after the other, so that one that is
// slow or silent keeps nobody waiting. Thread: its own.
//
// Owns: an engine (one thread). Limits: one request under way per worker; a worker that does not
// answer in time is closed.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "backbone/replica.hpp"
#include "backbone/roster.hpp"

namespace kvasir::backbone {

class Verifier {
public:
    Verifier(Replica& replica, RosterBoard& board, std::unique_ptr<engine::ExpertEngine> engine,
             bool exact_strict);
    ~Verifier();
    bool works() const { return mailbox_.works(); }  // no: out of descriptors

    // A worker joined: check all banks whose program is known.
    void add(std::shared_ptr<WorkerSession> session);
    void remove(uint64_t tag);
    // A program was learned: check that bank with every worker.
    void on_program(LayerKey layer);

private:
    // The check of one bank that is under way.
    struct Check {
        LearnedBank learned;
        uint32_t rows = 0;     // of the challenge; 0: PROGRAM was sent
        bool crowded = false;  // the request with several rows was sent
        uint32_t request_id = 0;
        uint64_t cookie = 0;
        net::Deadline deadline{};
        std::vector<float> values;          // the challenge's rows
        std::vector<engine::PairIn> pairs;  // with global experts
        bool exact = true;
    };
    struct Candidate {
        std::shared_ptr<WorkerSession> session;
        std::deque<LayerKey> todo;
        std::optional<Check> check;  // of todo.front()
    };

    void run();
    void take_tasks();
    void start_checks();
    void take_replies();
    void expire();
    net::Deadline next_deadline() const;
    Status start(Candidate& candidate);
    Status step(Candidate& candidate, const Reply& reply);
    Status on_ack(Candidate& candidate, const Reply& reply);
    Status on_answer(Candidate& candidate, const Reply& reply);
    static uint32_t crowd(const Candidate& candidate);
    Status send_challenge(Candidate& candidate, uint32_t rows);
    Status send(Candidate& candidate, std::span<const std::span<const uint8_t>> pieces);
    Status passed(Candidate& candidate);
    void finish(Candidate& candidate, const Status& outcome);

    // Constant after construction.
    Replica& replica_;
    RosterBoard& board_;
    const std::unique_ptr<engine::ExpertEngine> engine_;
    const bool exact_strict_;
    Mailbox mailbox_;

    // Verifier thread only.
    std::mt19937_64 random_;
    uint64_t last_cookie_ = 0;  // of the mailbox: request ids repeat from session to session
    std::map<uint64_t, Candidate> candidates_;  // by session tag

    std::mutex mu_;
    // Guarded by mu_.
    bool stopping_ = false;
    std::vector<std::pair<std::shared_ptr<WorkerSession>, LayerKey>> tasks_;
    std::map<uint64_t, std::shared_ptr<WorkerSession>> sessions_;
    std::thread thread_;
};

}  // namespace kvasir::backbone
