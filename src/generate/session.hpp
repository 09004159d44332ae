// Session: one model loaded by llama.cpp and one context, for repeatable, measured generation.
//
// Used by `kvasir run`, `kvasir bench` and tests. Equal options and requests give equal bits;
// llama.cpp does not promise that across different batch sizes or thread counts. The weights are
// memory-mapped and, unless asked, not repacked: that is the reference everywhere in this project.
// There is no warm-up run. A context computes on the devices that were registered when prepare()
// ran: prepare a plain llama.cpp session before registering the KVASIR device.
// Thread: one thread at a time per Session; sessions are independent. Owns: model, context, thread
// pool.
// Limits: prompt and generated tokens together fit the context.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"

namespace kvasir::generate {

using Token = int32_t;

// Tensors whose name matches the regular expression go to the named ggml device's (or buffer
// type's) memory, e.g. {"_exps", "RPC0"}.
struct TensorPlacement {
    std::string pattern;
    std::string where;
};

struct SessionOptions {
    std::string model_path;
    uint32_t threads = 1;
    uint32_t context_tokens = 0;   // 0: sized by the first request or prepare()
    uint32_t batch_tokens = 512;   // tokens handed to llama.cpp at a time
    uint32_t ubatch_tokens = 512;  // tokens computed at a time
    bool mmap = true;
    bool repack = false;               // llama.cpp's other weight layouts: faster, other bits
    std::vector<std::string> devices;  // ggml devices that join the CPU, by name; none by default
    std::vector<TensorPlacement> placements;
};

struct Request {
    std::string prompt;                // text, or
    std::vector<Token> prompt_tokens;  // explicit tokens, when not empty
    uint32_t tokens_max = 64;
    float temperature = 0;    // 0: the most likely token, the lowest id among equals
    uint32_t seed = 0;        // of the sampler, when temperature > 0; 0xffffffff is not allowed
    bool stop_at_end = true;  // stop at an end-of-generation token
    // Teacher forcing: these tokens are taken in place of sampled ones (then tokens_max,
    // temperature, seed and stop_at_end do not matter), so that several runs do exactly the same
    // work.
    std::vector<Token> forced;
    bool keep_logits = false;
    std::function<void(std::string_view)> on_text;  // whole UTF-8 characters, as they come
    // Asked before each token: true ends it with kClosed.
    std::function<bool()> is_cancelled;
    std::function<void()> on_prompt_done;  // between the prompt and the first decoded token
};

struct Generation {
    std::string text;
    std::vector<Token> tokens;  // without the prompt; an end token is the last one
    bool stopped_at_end = false;
    uint64_t prompt_tokens = 0;
    // Of the f32 logits (all vocabulary entries, host byte order) that each token was chosen from,
    // in order.
    Sha256 logits_sha256 = {};
    std::vector<std::vector<float>> logits;  // the same rows, with keep_logits
    std::chrono::nanoseconds prompt_time{0};
    // Decoding of one token and choosing the next; hashing and callbacks are not counted. The first
    // token is chosen from the prompt's logits, so there is one step fewer than tokens.
    std::vector<std::chrono::nanoseconds> step_times;

    double prompt_tok_s() const;
    double gen_tok_s() const;  // 0 without steps
    std::chrono::nanoseconds longest_step() const;
};

class Session {
public:
    // Loads the model; load_backends() must have succeeded. Errors: kEnvironment (no such file,
    // memory), kBadInput (not a model, damaged), kUsage (options), kUnsupported (encoder models).
    static Result<Session> open(SessionOptions options);
    Session(Session&&) noexcept;
    Session& operator=(Session&&) noexcept;
    ~Session();

    // The prompt's tokens: BOS in front if the model asks for it, special tokens in the text
    // recognised. Errors: kUsage (empty, or the model has no tokenizer).
    Result<std::vector<Token>> tokenize(std::string_view text) const;
    uint32_t vocabulary() const;
    uint32_t context_trained() const;  // what the model was trained for; 0 if it does not say
    uint32_t context_tokens() const;   // 0 before prepare()

    // Creates the context for at least `tokens` positions (at least context_tokens of the options).
    // Does nothing when it is there already and large enough. Errors: kUsage (more than the options
    // or the model allow), kEnvironment (memory).
    Status prepare(uint64_t tokens);
    // The same for a request, which is checked as generate() would.
    Status prepare(const Request& request);

    // Starts from an empty context each time. Errors: kUsage (prompt empty, both forms, token out
    // of range, does not fit), kBadInput (logits that are not numbers), kEnvironment, kClosed (a
    // computation failed).
    Result<Generation> generate(const Request& request);

private:
    struct Impl;
    explicit Session(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

}  // namespace kvasir::generate
