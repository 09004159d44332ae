// Session's insides, shared by session.cpp (loading) and generation.cpp (running).
//
// Private to generate/. Members are destroyed bottom up: context, then thread pool, then model.
#pragma once

#include <string>
#include <vector>

#include "generate/llama_handles.hpp"
#include "generate/session.hpp"

namespace kvasir::generate {

struct Session::Impl {
    // Constant after opening
    SessionOptions options;
    ModelPtr model;
    const llama_vocab* vocab = nullptr;
    // Made by prepare()
    ThreadPoolPtr pool;
    ContextPtr context;

    // Checks the request; its prompt as tokens.
    Result<std::vector<Token>> prompt_of(const Request& request, const Session& session) const;
    Result<Generation> run(const Request& request, const std::vector<Token>& prompt);
    // Decodes `tokens` (at most batch_tokens of them); with `wants_logits` for the last one.
    Status decode(const Token* tokens, size_t count, bool wants_logits);
    Status decode_prompt(const std::vector<Token>& prompt);
    std::string piece(Token token) const;
};

bool has_tokenizer(const llama_vocab* vocab);

}  // namespace kvasir::generate
