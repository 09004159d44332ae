// FakeWorker: a worker whose answers can be right, late, wrong, torn or missing, as a test wants.
//
// Used by backbone's tests. It speaks the wire format with the wire codecs and computes with a real
// engine. Thread: its own; set_mood() and the counters from any. Owns: the connection, a mapping of
// the model. It dials once.
#pragma once

#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine_testing.hpp"
#include "moe/manifest.hpp"
#include "net/upgrade.hpp"
#include "wire/messages.hpp"

namespace kvasir::backbone::testing {

using namespace std::chrono_literals;
namespace toy = engine::testing;

enum class Mood {
    kHonest,
    kLate,       // after 600 ms
    kNever,      // silent from now on, pings included
    kOnlyPings,  // answers pings, computes nothing
    kTwice,
    kNan,
    kInfinity,
    kWrongWidth,
    kWrongCount,
    kShort,        // says what it should, carries less
    kDiesBefore,   // closes when asked
    kDiesHalfway,  // half of the answer, then a reset
    kDiesAfter,    // the answer, then a reset
    kFin,          // a clean close frame instead of an answer
    kError,        // ERROR for every request
    kGivesUp,      // ERROR for the connection
    kPingFlood,
    kPongFlood,
    kUnknownFrame,
    kUnasked,          // a RESULT to a request nobody made
    kProgramAck,       // the wrong kind of answer
    kText,             // not a frame
    kRounded,          // the last bit of every value flipped
    kWrongForSeveral,  // right for one row, garbage for several
    kRefusesLayer1,    // PROGRAM of layer 1: more than it takes
};

struct FakeOptions {
    std::string model;
    std::string cache_dir;
    std::vector<Segment> segments;
    uint16_t port = 0;
    Mood mood = Mood::kHonest;
    std::string name = "fake";
    wire::NodeId node = {};
    std::function<void(wire::Hello&)> edit;  // before it is sent
};

class FakeWorker {
public:
    explicit FakeWorker(FakeOptions options)
        : options_(std::move(options)), mood_(options_.mood), model_(options_.model) {
        if (options_.node == wire::NodeId{}) {
            static std::atomic<uint8_t> next{1};
            options_.node[0] = next.fetch_add(1);
        }
        thread_ = std::thread([this] { run(); });
    }
    ~FakeWorker() { stop(); }
    FakeWorker(const FakeWorker&) = delete;
    FakeWorker& operator=(const FakeWorker&) = delete;

    void set_mood(Mood mood) { mood_.store(mood); }
    uint64_t computes() const { return computes_.load(); }
    uint64_t refused() const { return refused_.load(); }  // programs
    bool ended() const { return ended_.load(); }
    // The text of the ERROR that ended the connection, once ended().
    std::string last_error() const {
        const std::lock_guard lock(mu_);
        return last_error_;
    }
    Errc last_code() const {
        const std::lock_guard lock(mu_);
        return last_code_;
    }
    void stop() {
        stopping_.store(true);
        if (thread_.joinable()) thread_.join();
    }

private:
    struct Loaded {
        std::shared_ptr<const engine::Bank> bank;
        std::vector<uint32_t> globals;
    };

    void run() {
        if (auto stream = join()) {
            stream_.emplace(std::move(*stream));
            while (!stopping_.load() && !stream_->closed()) {
                auto message = stream_->receive(net::Clock::now() + 20ms);
                if (!message && message.error().code == Errc::kTimeout) continue;
                if (!message || !on_message(*message)) break;
            }
            stream_.reset();
        }
        ended_.store(true);
    }

    std::optional<net::MessageStream> join() {
        auto endpoint = net::parse_url("ws://127.0.0.1:" + std::to_string(options_.port));
        auto stream = net::dial(*endpoint);
        if (!stream) return std::nullopt;
        auto manifest = moe::load_or_compute_manifest(model_.model, options_.cache_dir);
        KVASIR_CHECK(manifest.has_value());
        wire::Hello hello;
        hello.node = options_.node;
        hello.name = options_.name;
        hello.model_id = manifest->model_id;
        hello.rows_max = hello.pairs_max = 512;
        for (const Segment& segment : options_.segments) {
            hello.segments.push_back({segment, manifest->segment_digest(segment)});
        }
        if (options_.edit) options_.edit(hello);
        rows_max_ = hello.rows_max;
        pairs_max_ = hello.pairs_max;
        const uint8_t role[] = {static_cast<uint8_t>(wire::Role::kWorker)};
        (void)stream->enqueue(role);
        (void)stream->enqueue(wire::encode_hello(hello));
        (void)stream->flush_until(net::Clock::now() + 5s);
        return std::move(*stream);
    }

    bool on_message(std::span<const uint8_t> message) {
        auto frame = wire::decode_frame(message);
        if (!frame) return false;
        if (mood_.load() == Mood::kNever) return true;
        switch (frame->header.type) {
            case wire::FrameType::kWelcome:
                return true;
            case wire::FrameType::kPing:
                send(wire::encode_pong(*wire::decode_token(frame->payload)));
                return true;
            case wire::FrameType::kProgram:
                on_program(*frame);
                return true;
            case wire::FrameType::kCompute:
                ++computes_;
                return on_compute(*frame);
            case wire::FrameType::kError: {
                auto error = wire::decode_error(frame->payload);
                const std::lock_guard lock(mu_);
                last_error_ = error ? error->detail : "(malformed)";
                last_code_ = error ? error->code : Errc::kCount_;
                return frame->header.request_id != 0;
            }
            default:
                return false;
        }
    }

    void on_program(const wire::FrameView& frame) {
        auto message = wire::decode_program_message(frame.payload);
        auto program = moe::decode_program(message->code);
        if (mood_.load() == Mood::kRefusesLayer1 && message->layer.layer == 1) {
            const uint16_t code = errc_info(Errc::kLimit).wire_code;
            send(wire::encode_program_ack({message->program, code, "too much memory"},
                                          frame.header.request_id));
            ++refused_;
            return;
        }
        Loaded loaded;
        loaded.bank = model_.prepare(*engine_, message->layer, *program);
        for (const Segment& segment : options_.segments) {
            if (segment.layer != message->layer) continue;
            for (uint32_t id = segment.begin; id < segment.end; ++id) loaded.globals.push_back(id);
        }
        programs_[message->program] = std::move(loaded);
        send(wire::encode_program_ack({message->program, 0, ""}, frame.header.request_id));
    }

    std::vector<float> right_answer(const wire::ComputeView& view, uint32_t& width) {
        const Loaded& loaded = programs_.at(view.program);
        std::vector<engine::PairIn> pairs;
        for (uint32_t i = 0; i < view.pair_count; ++i) {
            pairs.push_back({view.pair(i).row, loaded.globals.at(view.pair(i).local)});
        }
        auto out = engine_->compute(*loaded.bank, view.row_type, view.row_count, view.rows, pairs);
        KVASIR_CHECK(out.has_value());
        width = loaded.bank->shape.output();
        return {out->begin(), out->end()};
    }

    static std::vector<uint8_t> result(uint32_t request_id, uint32_t pairs, uint32_t width,
                                       const std::vector<float>& rows) {
        ByteWriter out;
        wire::begin_result(out, request_id, 1000, pairs, width);
        out.bytes(toy::as_bytes(rows));
        return out.take();
    }

    bool on_compute(const wire::FrameView& frame) {
        const Mood mood = mood_.load();
        auto view = wire::decode_compute(frame.payload);
        if (mood == Mood::kOnlyPings) return true;
        const uint32_t id = frame.header.request_id;
        if (view->row_count > rows_max_ || view->pair_count > pairs_max_) {
            return send(wire::encode_error({Errc::kLimit, "more than HELLO said"}, id));
        }
        uint32_t width = 0;
        std::vector<float> rows = right_answer(*view, width);
        const uint32_t pairs = view->pair_count;
        const auto garbage_rows = [&] {
            for (float& value : rows) value = 3 - value;
        };
        switch (mood) {
            case Mood::kLate:
                pause(600ms);
                break;
            case Mood::kTwice:
                send(result(id, pairs, width, rows));
                break;
            case Mood::kNan:
                rows[rows.size() / 2] = std::numeric_limits<float>::quiet_NaN();
                break;
            case Mood::kInfinity:
                rows.back() = -std::numeric_limits<float>::infinity();
                break;
            case Mood::kWrongWidth:
                rows.resize(size_t{pairs} * (width + 1));
                return send(result(id, pairs, width + 1, rows));
            case Mood::kWrongCount:
                rows.resize(size_t{pairs + 1} * width);
                return send(result(id, pairs + 1, width, rows));
            case Mood::kShort:
                rows.pop_back();
                break;
            case Mood::kDiesBefore:
                return false;
            case Mood::kDiesHalfway: {
                const auto bytes = result(id, pairs, width, rows);
                (void)stream_->enqueue(bytes);  // whole, then torn by the reset
                return reset();
            }
            case Mood::kDiesAfter:
                send(result(id, pairs, width, rows));
                return reset();
            case Mood::kFin:
                stream_->close();
                return false;
            case Mood::kError:
                return send(wire::encode_error({Errc::kEnvironment, "out of memory"}, id));
            case Mood::kGivesUp:
                send(wire::encode_error({Errc::kEnvironment, "out of memory"}, 0));
                return true;
            case Mood::kPingFlood:
                for (uint64_t i = 0; i < 5000 && send(wire::encode_ping(i)); ++i) {
                }
                return true;
            case Mood::kPongFlood:
                for (uint64_t i = 0; i < 5000 && send(wire::encode_pong(i)); ++i) {
                }
                return true;
            case Mood::kUnknownFrame: {
                auto bytes = wire::encode_simple(wire::FrameType::kDrain);
                bytes[0] = 77;
                send(bytes);
                break;
            }
            case Mood::kUnasked:
                send(result(id + 1000000, pairs, width, rows));
                break;
            case Mood::kProgramAck:
                return send(wire::encode_program_ack({1, 0, ""}, id));
            case Mood::kText:
                send(std::vector<uint8_t>{'h', 'e', 'l', 'l', 'o'});
                break;
            case Mood::kRounded:
                for (float& value : rows)
                    value = std::nextafter(value, std::numeric_limits<float>::infinity());
                break;
            case Mood::kWrongForSeveral:
                if (view->row_count > 1) garbage_rows();
                break;
            default:
                break;
        }
        return send(result(id, pairs, width, rows));
    }

    bool send(const std::vector<uint8_t>& bytes) {
        if (!stream_->enqueue(bytes)) return false;
        return stream_->flush_until(net::Clock::now() + 5s).has_value();
    }
    bool reset() {
        const linger now{1, 0};
        ::setsockopt(stream_->fd(), SOL_SOCKET, SO_LINGER, &now, sizeof(now));
        return false;
    }
    void pause(std::chrono::milliseconds time) {
        const auto until = net::Clock::now() + time;
        while (!stopping_.load() && net::Clock::now() < until) {
            std::this_thread::sleep_for(5ms);  // tidy: sleep, a slow worker is what is tested
        }
    }

    FakeOptions options_;
    std::atomic<Mood> mood_;
    std::atomic<bool> stopping_{false}, ended_{false};
    std::atomic<uint64_t> computes_{0}, refused_{0};
    uint32_t rows_max_ = 0, pairs_max_ = 0;  // of the HELLO
    mutable std::mutex mu_;
    std::string last_error_;          // Guarded by mu_
    Errc last_code_ = Errc::kCount_;  // Guarded by mu_
    toy::Toy model_;
    std::unique_ptr<engine::ExpertEngine> engine_ = toy::make_engine();
    std::map<uint32_t, Loaded> programs_;
    std::optional<net::MessageStream> stream_;
    std::thread thread_;
};

}  // namespace kvasir::backbone::testing
