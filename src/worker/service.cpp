#include "worker/service.hpp"

#include <algorithm>
#include <chrono>
#include <string>

#include "base/log.hpp"
#include "wire/attach.hpp"

namespace kvasir::worker {
namespace {

constexpr uint64_t kScratchBytes = 8 << 20;
constexpr uint64_t kScratchBytesMax = 4 * kScratchBytes;  // of a program with many operations
constexpr uint32_t kPairsMin = 16;
constexpr size_t kProgramsMax = 4096;

uint32_t pairs_that_fit(const moe::Model& model) {
    uint64_t widest = 1;
    for (const moe::ExpertBank& bank : model.banks) {
        uint64_t floats = 0;
        for (const moe::SlabTensor& slab : bank.tensors) {
            if (slab.part == moe::SlabPart::kWeight) floats += slab.n_in + 2 * slab.n_out;
        }
        widest = std::max(widest, floats * sizeof(float));
    }
    return static_cast<uint32_t>(
        std::clamp<uint64_t>(kScratchBytes / widest, kPairsMin, wire::kRowsMax));
}

Answer error_answer(const Error& error, uint32_t request_id) {
    Answer answer;
    answer.head = wire::encode_error({error.code, error.detail}, request_id);
    answer.close = request_id == 0;
    answer.reason = error;
    return answer;
}

}  // namespace

ExpertService::ExpertService(const Holding& holding, ggml_backend_device* device,
                             std::unique_ptr<engine::ExpertEngine> engine)
    : holding_(holding),
      device_(device),
      engine_(std::move(engine)),
      pairs_max_(pairs_that_fit(holding.model())) {}

Answer ExpertService::handle(std::span<const uint8_t> message, Speaker speaker) {
    auto frame = wire::decode_frame(message);
    if (!frame) return error_answer(frame.error(), 0);
    Answer answer = handle(*frame, speaker);
    if (frame->header.peer != 0 && !answer.head.empty())
        wire::set_peer(answer.head, frame->header.peer);
    return answer;
}

void ExpertService::reset(uint16_t peer) {
    programs_.erase(programs_.lower_bound({peer, 0}), programs_.lower_bound({peer + 1, 0}));
}

Answer ExpertService::handle(const wire::FrameView& frame, Speaker speaker) {
    switch (frame.header.type) {
        case wire::FrameType::kProgram:
            return program(frame);
        case wire::FrameType::kCompute:
            return compute(frame);
        case wire::FrameType::kPing: {
            auto token = wire::decode_token(frame.payload);
            if (!token) return error_answer(token.error(), 0);
            Answer answer;
            answer.head = wire::encode_pong(*token);
            return answer;
        }
        case wire::FrameType::kPong:
            return {};
        case wire::FrameType::kGoodbye: {
            Answer answer;
            answer.close = true;
            return answer;
        }
        case wire::FrameType::kError: {
            auto error = wire::decode_error(frame.payload);
            const std::string who = speaker == Speaker::kRelay ? "the relay" : "the backbone";
            log(LogLevel::kWarn, "worker",
                who + " says: " + (error ? printable(error->detail) : "(malformed)"));
            Answer answer;
            answer.close = frame.header.request_id == 0;
            if (error)
                answer.reason = {error->code, who + " says: " + printable(error->detail, 500)};
            if (!error) answer.reason.detail = who + " ended the connection";
            return answer;
        }
        default:
            return error_answer(
                {Errc::kProtocol, "frame type " +
                                      std::to_string(static_cast<int>(frame.header.type)) +
                                      " is not for a worker"},
                0);
    }
}

Answer ExpertService::program(const wire::FrameView& frame) {
    auto message = wire::decode_program_message(frame.payload);
    if (!message) return error_answer(message.error(), 0);
    wire::ProgramAck ack;
    ack.program = message->program;
    if (Status ok = load(frame.header.peer, *message, ack.detail); !ok) {
        ack.status = errc_info(ok.error().code).wire_code;
        ack.detail = ok.error().detail;
        log(LogLevel::kWarn, "worker", "program refused: " + ok.error().detail);
    }
    Answer answer;
    answer.head = wire::encode_program_ack(ack, frame.header.request_id);
    return answer;
}

Status ExpertService::load(uint16_t peer, const wire::ProgramMessage& message,
                           std::string& computes) {
    if (programs_.size() >= kProgramsMax)
        return fail(Errc::kLimit, "too many programs on one connection");
    auto program = moe::decode_program(message.code);
    if (!program) return tl::unexpected(program.error());
    const moe::ExpertBank* bank = holding_.model().find_bank(message.layer);
    const auto* file_index = holding_.file_index(message.layer);
    if (bank == nullptr || file_index == nullptr) {
        return fail(Errc::kNotHeld,
                    "no expert of layer " + to_string(message.layer) + " is held here");
    }
    auto weights = engine::BankWeights::map(*bank, holding_.mapping(), device_);
    if (!weights) return tl::unexpected(weights.error());
    auto prepared = engine_->prepare(*bank, std::move(*weights), *program,
                                     engine::numeric_class_of(message.numeric));
    if (!prepared) return tl::unexpected(prepared.error());
    if ((*prepared)->scratch_bytes_per_pair() * pairs_max_ > kScratchBytesMax) {
        return fail(Errc::kLimit, "the program's intermediate values take too much memory");
    }
    computes = (*prepared)->computed_by();
    programs_[{peer, message.program}] = {std::move(*prepared), file_index};
    return {};
}

Answer ExpertService::compute(const wire::FrameView& frame) {
    auto view = wire::decode_compute(frame.payload);
    if (!view) return error_answer(view.error(), 0);
    const auto start = std::chrono::steady_clock::now();
    uint32_t width = 0;
    auto rows = run(frame.header.peer, *view, width);
    if (!rows) return error_answer(rows.error(), frame.header.request_id);
    const auto took = std::chrono::steady_clock::now() - start;
    // After computing: whoever writes to a file changes its time first.
    if (Status ok = holding_.mapping().unchanged(); !ok) {
        Answer answer = error_answer(ok.error(), 0);
        answer.over = true;
        return answer;
    }
    pairs_done_ += view->pair_count;
    ++requests_done_;
    ByteWriter head;
    wire::begin_result(head, frame.header.request_id,
                       static_cast<uint64_t>(std::chrono::nanoseconds(took).count()),
                       view->pair_count, width);
    Answer answer;
    answer.head = head.take();
    answer.body = {reinterpret_cast<const uint8_t*>(rows->data()), rows->size_bytes()};
    return answer;
}

Result<std::span<const float>> ExpertService::run(uint16_t peer, const wire::ComputeView& view,
                                                  uint32_t& width) {
    const auto found = programs_.find({peer, view.program});
    if (found == programs_.end()) {
        return fail(Errc::kNotHeld,
                    "program " + std::to_string(view.program) + " is not loaded here");
    }
    if (view.pair_count > pairs_max_ || view.row_count > pairs_max_) {
        return fail(Errc::kLimit, std::to_string(view.pair_count) +
                                      " pairs or rows in one request, at most " +
                                      std::to_string(pairs_max_) + " are taken");
    }
    const Loaded& loaded = found->second;
    pairs_.resize(view.pair_count);
    for (uint32_t i = 0; i < view.pair_count; ++i) {
        const wire::Pair pair = view.pair(i);
        if (pair.local >= loaded.file_index->size()) {
            return fail(Errc::kNotHeld, "local expert " + std::to_string(pair.local) + " of " +
                                            std::to_string(loaded.file_index->size()) + " held");
        }
        pairs_[i] = {pair.row, (*loaded.file_index)[pair.local]};
    }
    width = loaded.bank->shape.output();
    return engine_->compute(*loaded.bank, view.row_type, view.row_count, view.rows, pairs_);
}

}  // namespace kvasir::worker
