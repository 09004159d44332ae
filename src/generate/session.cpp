#include "generate/session.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <limits>
#include <utility>

#include "base/check.hpp"
#include "base/log.hpp"
#include "generate/llama_log.hpp"
#include "generate/session_impl.hpp"

namespace kvasir::generate {
namespace {

constexpr uint32_t kThreadsMax = 512;   // GGML_MAX_N_THREADS
constexpr uint64_t kContextStep = 256;  // llama.cpp rounds up to this

std::string quoted(const std::string& text) {
    std::string out("'");
    out += printable(text);
    out += '\'';
    return out;
}

Status check_options(const SessionOptions& options) {
    if (options.threads == 0 || options.threads > kThreadsMax) {
        return fail(Errc::kUsage,
                    "threads must be 1 to 512, not " + std::to_string(options.threads));
    }
    if (options.batch_tokens == 0 || options.ubatch_tokens == 0) {
        return fail(Errc::kUsage, "batch sizes must be at least 1");
    }
    struct stat status {};
    const std::string shown = quoted(options.model_path);
    if (stat(options.model_path.c_str(), &status) != 0) {
        return fail(Errc::kEnvironment, "model " + shown + ": " + std::strerror(errno));
    }
    if (!S_ISREG(status.st_mode)) {
        return fail(Errc::kUsage, "model " + shown + " is not a file; name the .gguf file itself");
    }
    return {};
}

// Names of everything a placement may point at, for the error message.
Result<ggml_backend_buffer_type_t> find_buffer_type(const std::string& where) {
    std::string known;
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(device);
        if (where == ggml_backend_dev_name(device) || where == ggml_backend_buft_name(type)) {
            return type;
        }
        known += std::string(known.empty() ? "" : ", ") + ggml_backend_dev_name(device);
    }
    return fail(Errc::kUsage,
                "no ggml device or buffer type " + quoted(where) + "; there are: " + known);
}

Result<std::vector<ggml_backend_dev_t>> find_devices(const std::vector<std::string>& names) {
    std::vector<ggml_backend_dev_t> devices;
    for (const std::string& name : names) {
        ggml_backend_dev_t device = ggml_backend_dev_by_name(name.c_str());
        if (device == nullptr) {
            return fail(Errc::kUsage, "no ggml device " + quoted(name));
        }
        devices.push_back(device);
    }
    devices.push_back(nullptr);  // llama.cpp's list ends with null; an empty list means CPU only
    return devices;
}

Result<ModelPtr> load_model(const SessionOptions& options) {
    auto devices = find_devices(options.devices);
    if (!devices) return tl::unexpected(devices.error());
    std::vector<llama_model_tensor_buft_override> overrides;
    for (const TensorPlacement& placement : options.placements) {
        const auto type = find_buffer_type(placement.where);
        if (!type) return tl::unexpected(type.error());
        overrides.push_back({placement.pattern.c_str(), *type});
    }
    overrides.push_back({nullptr, nullptr});

    llama_model_params params = llama_model_default_params();
    params.devices = devices->data();
    params.tensor_buft_overrides = overrides.data();
    params.n_gpu_layers = 0;
    params.load_mode = options.mmap ? LLAMA_LOAD_MODE_MMAP : LLAMA_LOAD_MODE_NONE;
    params.use_extra_bufts = options.repack;
    params.progress_callback = [](float, void*) { return true; };

    clear_llama_error();
    const std::string shown = quoted(options.model_path);
    try {
        ModelPtr model(llama_model_load_from_file(options.model_path.c_str(), params));
        if (model != nullptr) return model;
    } catch (const std::exception& error) {
        return fail(Errc::kBadInput, "model " + shown + ": " + printable(error.what()));
    }
    const std::string reason = last_llama_error();
    return fail(Errc::kBadInput, "llama.cpp cannot load model " + shown + ": " +
                                     (reason.empty() ? "no reason given" : reason));
}

}  // namespace

bool has_tokenizer(const llama_vocab* vocab) {
    return llama_vocab_type(vocab) != LLAMA_VOCAB_TYPE_NONE;
}

Session::Session(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Session::Session(Session&&) noexcept = default;
Session& Session::operator=(Session&&) noexcept = default;
Session::~Session() = default;

Result<Session> Session::open(SessionOptions options) {
    options.ubatch_tokens = std::min(options.ubatch_tokens, options.batch_tokens);
    if (const Status valid = check_options(options); !valid) return tl::unexpected(valid.error());
    auto model = load_model(options);
    if (!model) return tl::unexpected(model.error());
    if (llama_model_has_encoder(model->get()) || !llama_model_has_decoder(model->get())) {
        return fail(Errc::kUnsupported, "model " + quoted(options.model_path) +
                                            " has an encoder; only text generators are supported");
    }
    auto impl = std::make_unique<Impl>();
    impl->options = std::move(options);
    impl->vocab = llama_model_get_vocab(model->get());
    impl->model = std::move(*model);
    return Session(std::move(impl));
}

uint32_t Session::vocabulary() const {
    return static_cast<uint32_t>(llama_vocab_n_tokens(impl_->vocab));
}

uint32_t Session::context_trained() const {
    return static_cast<uint32_t>(std::max(0, llama_model_n_ctx_train(impl_->model.get())));
}

uint32_t Session::context_tokens() const {
    return impl_->context == nullptr ? 0 : llama_n_ctx(impl_->context.get());
}

Result<std::vector<Token>> Session::tokenize(std::string_view text) const {
    if (text.empty()) return fail(Errc::kUsage, "the prompt is empty");
    if (!has_tokenizer(impl_->vocab)) {
        return fail(Errc::kUsage, "model " + quoted(impl_->options.model_path) +
                                      " has no tokenizer; give the prompt as token numbers");
    }
    if (text.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max())) {
        return fail(Errc::kLimit, "the prompt is larger than 2 GiB");
    }
    std::vector<Token> tokens;
    const Token bos = llama_vocab_bos(impl_->vocab);
    if (llama_vocab_get_add_bos(impl_->vocab) && bos != LLAMA_TOKEN_NULL) tokens.push_back(bos);
    const size_t before = tokens.size();
    const auto bytes = static_cast<int32_t>(text.size());
    try {
        // Special tokens are not added here: an end token after the prompt would end the text.
        const int32_t needed =
            -llama_tokenize(impl_->vocab, text.data(), bytes, nullptr, 0, false, true);
        if (needed <= 0) return fail(Errc::kUsage, "the prompt has no tokens");
        tokens.resize(before + static_cast<size_t>(needed));
        const int32_t written = llama_tokenize(impl_->vocab, text.data(), bytes,
                                               tokens.data() + before, needed, false, true);
        KVASIR_CHECK(written == needed);
    } catch (const std::exception& error) {
        return fail(Errc::kBadInput, "the prompt cannot be tokenized: " + printable(error.what()));
    }
    return tokens;
}

Status Session::prepare(uint64_t tokens) {
    Impl& impl = *impl_;
    const uint64_t wanted = std::max<uint64_t>(tokens, 1);
    const uint32_t explicit_limit = impl.options.context_tokens;
    const uint64_t limit = explicit_limit != 0 ? explicit_limit : context_trained();
    if (limit != 0 && wanted > limit) {
        return fail(Errc::kUsage,
                    "prompt and generated tokens need a context of " + std::to_string(wanted) +
                        ", but " + (explicit_limit != 0 ? "it was set" : "the model was trained") +
                        " for " + std::to_string(limit) +
                        "; shorten them or set a larger context with --ctx");
    }
    if (impl.context != nullptr && llama_n_ctx(impl.context.get()) >= wanted) return {};
    if (wanted > std::numeric_limits<uint32_t>::max() - kContextStep) {
        return fail(Errc::kLimit,
                    "a context of " + std::to_string(wanted) + " tokens is too large");
    }
    llama_context_params params = llama_context_default_params();
    params.n_ctx =
        explicit_limit != 0
            ? explicit_limit
            : static_cast<uint32_t>((wanted + kContextStep - 1) / kContextStep * kContextStep);
    params.n_batch = impl.options.batch_tokens;
    params.n_ubatch = impl.options.ubatch_tokens;
    params.n_threads = params.n_threads_batch = static_cast<int32_t>(impl.options.threads);
    params.offload_kqv = false;
    params.op_offload = false;
    params.no_perf = true;

    clear_llama_error();
    impl.context.reset();
    try {
        impl.context.reset(llama_init_from_model(impl.model.get(), params));
    } catch (const std::exception& error) {
        return fail(Errc::kEnvironment, "llama.cpp context: " + printable(error.what()));
    }
    if (impl.context == nullptr) {
        const std::string reason = last_llama_error();
        return fail(Errc::kEnvironment,
                    "llama.cpp cannot make a context of " + std::to_string(params.n_ctx) +
                        " tokens: " + (reason.empty() ? "no reason given" : reason));
    }
    if (impl.pool == nullptr) {
        impl.pool.reset(engine::make_threads(static_cast<int>(impl.options.threads)));
    }
    if (impl.pool != nullptr) {
        llama_attach_threadpool(impl.context.get(), impl.pool.get(), nullptr);
    } else {
        log(LogLevel::kWarn, "generate", "this ggml CPU backend has no thread pool: threads spin");
    }
    return {};
}

Status Session::prepare(const Request& request) {
    const auto prompt = impl_->prompt_of(request, *this);
    if (!prompt) return tl::unexpected(prompt.error());
    const uint64_t count = request.forced.empty() ? request.tokens_max : request.forced.size();
    return prepare(prompt->size() + count);
}

Result<Generation> Session::generate(const Request& request) {
    const auto prompt = impl_->prompt_of(request, *this);
    if (!prompt) return tl::unexpected(prompt.error());
    const uint64_t count = request.forced.empty() ? request.tokens_max : request.forced.size();
    if (const Status ready = prepare(prompt->size() + count); !ready) {
        return tl::unexpected(ready.error());
    }
    try {
        return impl_->run(request, *prompt);
    } catch (const std::exception& error) {
        return fail(Errc::kClosed, "llama.cpp failed: " + printable(error.what()));
    }
}

}  // namespace kvasir::generate
