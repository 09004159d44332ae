// The verifier: agrees on programs with a worker and runs the numeric challenge, bank by bank.
//
// Used by the hub at join and when a new program is learned. For every bank a worker holds:
// PROGRAM, PROGRAM_ACK, then requests with random rows for some of its own experts, once with one
// row and once with several; the answers are compared with the replica's bits. What passes enters
// the roster. Thread: its own, one task at a time.
//
// Owns: an engine (one thread). Limits: kVerifyQueueMax tasks; a worker that does not answer in
// time is closed.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "backbone/replica.hpp"
#include "backbone/roster.hpp"

namespace kvasir::backbone {

class Verifier {
public:
    Verifier(Replica& replica, RosterBoard& board, std::unique_ptr<engine::ExpertEngine> engine,
             bool exact_strict);
    ~Verifier();

    // A worker joined: check all banks whose program is known.
    void add(std::shared_ptr<WorkerSession> session);
    void remove(uint64_t tag);
    // A program was learned: check that bank with every worker.
    void on_program(LayerKey layer);

private:
    struct Task {
        std::shared_ptr<WorkerSession> session;
        LayerKey layer;
    };
    void run();
    Status verify(WorkerSession& session, LayerKey layer);
    Status challenge(WorkerSession& session, const LearnedBank& learned, const HeldBank& held,
                     uint32_t rows, bool& exact);
    Result<Reply> ask(WorkerSession& session, uint32_t request_id,
                      std::span<const std::span<const uint8_t>> pieces);

    Replica& replica_;
    RosterBoard& board_;
    const std::unique_ptr<engine::ExpertEngine> engine_;  // verifier thread only
    const bool exact_strict_;
    Mailbox mailbox_;  // verifier thread only
    std::mt19937_64 random_;
    uint64_t last_cookie_ = 0;  // of the mailbox: request ids repeat from session to session

    std::mutex mu_;
    std::condition_variable wake_;
    // Guarded by mu_.
    bool stopping_ = false;
    std::deque<Task> tasks_;
    std::map<uint64_t, std::shared_ptr<WorkerSession>> sessions_;
    std::thread thread_;
};

}  // namespace kvasir::backbone
