// Session::generate: prompt in batches, then one token at a time.
#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <string>
#include <utility>

#include "base/log.hpp"
#include "crypto/hash.hpp"
#include "generate/llama_log.hpp"
#include "generate/session_impl.hpp"
#include "generate/utf8.hpp"

namespace kvasir::generate {
namespace {

using SteadyClock = std::chrono::steady_clock;

// llama_batch over borrowed storage, one sequence.
class Batch {
public:
    explicit Batch(size_t tokens_max)
        : batch_(llama_batch_init(static_cast<int32_t>(tokens_max), 0, 1)) {}
    ~Batch() { llama_batch_free(batch_); }
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;

    const llama_batch& fill(const Token* tokens, size_t count, llama_pos first, bool wants_logits) {
        batch_.n_tokens = static_cast<int32_t>(count);
        for (size_t i = 0; i < count; ++i) {
            batch_.token[i] = tokens[i];
            batch_.pos[i] = first + static_cast<llama_pos>(i);
            batch_.n_seq_id[i] = 1;
            batch_.seq_id[i][0] = 0;
            batch_.logits[i] = wants_logits && i + 1 == count ? 1 : 0;
        }
        return batch_;
    }

private:
    llama_batch batch_;
};

// Chooses tokens from rows of logits.
class Chooser {
public:
    explicit Chooser(const Request& request) : forced_(request.forced) {
        if (!forced_.empty() || request.temperature <= 0) return;
        sampler_.reset(llama_sampler_chain_init(llama_sampler_chain_default_params()));
        llama_sampler_chain_add(sampler_.get(), llama_sampler_init_temp(request.temperature));
        llama_sampler_chain_add(sampler_.get(), llama_sampler_init_dist(request.seed));
    }

    Result<Token> choose(std::span<const float> row, size_t step) {
        if (!forced_.empty()) return forced_[step];
        if (std::any_of(row.begin(), row.end(), [](float v) { return std::isnan(v); })) {
            return fail(Errc::kBadInput, "the logits of token " + std::to_string(step + 1) +
                                             " are not numbers; the model is damaged or was "
                                             "computed wrongly");
        }
        if (sampler_ == nullptr) {
            return static_cast<Token>(std::max_element(row.begin(), row.end()) - row.begin());
        }
        candidates_.resize(row.size());
        for (size_t i = 0; i < row.size(); ++i) {
            candidates_[i] = {static_cast<Token>(i), row[i], 0.0F};
        }
        llama_token_data_array array{candidates_.data(), candidates_.size(), -1, false};
        llama_sampler_apply(sampler_.get(), &array);
        const Token token = array.data[array.selected].id;
        llama_sampler_accept(sampler_.get(), token);
        return token;
    }

private:
    const std::vector<Token>& forced_;
    SamplerPtr sampler_;
    std::vector<llama_token_data> candidates_;
};

Status check_tokens(const std::vector<Token>& tokens, int32_t vocabulary, const char* what) {
    for (size_t i = 0; i < tokens.size(); ++i) {
        if (tokens[i] >= 0 && tokens[i] < vocabulary) continue;
        return fail(Errc::kUsage, std::string(what) + " token number " + std::to_string(i + 1) +
                                      " is " + std::to_string(tokens[i]) +
                                      "; the vocabulary goes from 0 to " +
                                      std::to_string(vocabulary - 1));
    }
    return {};
}

}  // namespace

Result<std::vector<Token>> Session::Impl::prompt_of(const Request& request,
                                                    const Session& session) const {
    const int32_t vocabulary = llama_vocab_n_tokens(vocab);
    if (!request.prompt.empty() && !request.prompt_tokens.empty()) {
        return fail(Errc::kUsage, "give the prompt as text or as token numbers, not both");
    }
    if (request.prompt.empty() && request.prompt_tokens.empty()) {
        return fail(Errc::kUsage, "the prompt is empty");
    }
    if (!std::isfinite(request.temperature) || request.temperature < 0) {
        return fail(Errc::kUsage, "the temperature must be 0 or more");
    }
    if (request.seed == LLAMA_DEFAULT_SEED) {
        return fail(Errc::kUsage, "seed 4294967295 means 'random' to llama.cpp; choose another");
    }
    if (request.forced.empty() && request.tokens_max == 0) {
        return fail(Errc::kUsage, "the number of tokens to generate must be at least 1");
    }
    if (auto valid = check_tokens(request.prompt_tokens, vocabulary, "prompt"); !valid) {
        return tl::unexpected(valid.error());
    }
    if (auto valid = check_tokens(request.forced, vocabulary, "forced"); !valid) {
        return tl::unexpected(valid.error());
    }
    if (request.prompt_tokens.empty()) return session.tokenize(request.prompt);
    return request.prompt_tokens;
}

Status Session::Impl::decode(const Token* tokens, size_t count, bool wants_logits) {
    const llama_pos last = llama_memory_seq_pos_max(llama_get_memory(context.get()), 0);
    Batch batch(count);
    clear_llama_error();
    const int32_t code =
        llama_decode(context.get(), batch.fill(tokens, count, last + 1, wants_logits));
    if (code == 0) {
        llama_synchronize(context.get());
        return {};
    }
    const std::string reason = last_llama_error();
    const std::string detail = "llama.cpp could not compute a batch of " + std::to_string(count) +
                               " tokens (code " + std::to_string(code) + ")" +
                               (reason.empty() ? "" : ": " + reason);
    return fail(code == -2 ? Errc::kEnvironment : Errc::kClosed, detail);
}

Status Session::Impl::decode_prompt(const std::vector<Token>& prompt) {
    for (size_t begin = 0; begin < prompt.size();) {
        const size_t count = std::min<size_t>(options.batch_tokens, prompt.size() - begin);
        const bool is_last = begin + count == prompt.size();
        if (Status done = decode(prompt.data() + begin, count, is_last); !done) return done;
        begin += count;
    }
    return {};
}

std::string Session::Impl::piece(Token token) const {
    if (!has_tokenizer(vocab)) return {};
    std::array<char, 256> small;
    const int32_t size = llama_token_to_piece(vocab, token, small.data(),
                                              static_cast<int32_t>(small.size()), 0, false);
    if (size >= 0) return std::string(small.data(), static_cast<size_t>(size));
    std::string large(static_cast<size_t>(-size), '\0');
    llama_token_to_piece(vocab, token, large.data(), -size, 0, false);
    return large;
}

Result<Generation> Session::Impl::run(const Request& request, const std::vector<Token>& prompt) {
    llama_memory_clear(llama_get_memory(context.get()), true);
    const auto vocabulary = static_cast<size_t>(llama_vocab_n_tokens(vocab));
    const size_t count = request.forced.empty() ? request.tokens_max : request.forced.size();
    Generation out;
    out.prompt_tokens = prompt.size();
    crypto::Hasher hasher;
    Utf8Stream stream;
    Chooser chooser(request);
    const auto emit = [&](const std::string& text) {
        if (text.empty()) return;
        out.text += text;
        if (request.on_text) request.on_text(text);
    };

    auto start = SteadyClock::now();
    if (Status done = decode_prompt(prompt); !done) return tl::unexpected(done.error());
    out.prompt_time = SteadyClock::now() - start;
    if (request.on_prompt_done) request.on_prompt_done();

    for (size_t step = 0; step < count; ++step) {
        if (request.is_cancelled && request.is_cancelled())
            return fail(Errc::kClosed, "the text was broken off");
        if (step > 0) {
            start = SteadyClock::now();
            if (Status done = decode(&out.tokens.back(), 1, true); !done) {
                return tl::unexpected(done.error());
            }
        } else {
            start = SteadyClock::now();
        }
        const float* logits = llama_get_logits_ith(context.get(), -1);
        if (logits == nullptr) return fail(Errc::kClosed, "llama.cpp gave no logits");
        const std::span<const float> row(logits, vocabulary);
        const auto token = chooser.choose(row, step);
        if (!token) return tl::unexpected(token.error());
        if (step > 0) out.step_times.push_back(SteadyClock::now() - start);

        hasher.update({reinterpret_cast<const uint8_t*>(row.data()), row.size_bytes()});
        if (request.keep_logits) out.logits.emplace_back(row.begin(), row.end());
        out.tokens.push_back(*token);
        if (request.forced.empty() && request.stop_at_end && llama_vocab_is_eog(vocab, *token)) {
            out.stopped_at_end = true;
            break;
        }
        emit(stream.push(piece(*token)));
    }
    emit(stream.finish());
    out.logits_sha256 = hasher.finish();
    return out;
}

double Generation::prompt_tok_s() const {
    const double seconds = std::chrono::duration<double>(prompt_time).count();
    return seconds > 0 ? static_cast<double>(prompt_tokens) / seconds : 0;
}

double Generation::gen_tok_s() const {
    std::chrono::nanoseconds sum{0};
    for (const auto step : step_times) sum += step;
    const double seconds = std::chrono::duration<double>(sum).count();
    return seconds > 0 ? static_cast<double>(step_times.size()) / seconds : 0;
}

std::chrono::nanoseconds Generation::longest_step() const {
    if (step_times.empty()) return {};
    return *std::max_element(step_times.begin(), step_times.end());
}

}  // namespace kvasir::generate
