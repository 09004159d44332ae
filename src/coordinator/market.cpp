#include "coordinator/market.hpp"

#include <mutex>
#include <utility>

#include "base/log.hpp"
#include "base/task_thread.hpp"
#include "coordinator/operator_secret.hpp"
#include "store/market_store.hpp"

namespace kvasir::coordinator {
namespace {

constexpr size_t kDiskTasksMax = 64;

Status check(const MarketOptions& options) {
    const std::string& origin = options.origin;
    const bool is_url = origin.starts_with("https://") || origin.starts_with("http://");
    if (!origin.empty() && (!is_url || printable(origin, origin.size()) != origin)) {
        return fail(Errc::kUsage, "the origin must be a URL, like https://HOST/FOLDER");
    }
    // A redirect is shown to every node.
    if (origin.find('@') != origin.npos) {
        return fail(Errc::kUsage, "the origin must not contain credentials: nodes would see them");
    }
    return {};
}

}  // namespace

struct Market::Impl {
    Impl(crypto::KeyPair pair, size_t queue_max)
        : key(std::move(pair)), thread("the market", queue_max) {}
    ~Impl() {
        // Reads post their verdicts to the market's thread, so they end first.
        disk.close();
        (void)thread.call([this] {
            if (service) (void)service->save();
        });
        thread.close();
    }

    void answer(net::HttpRequest request, const net::Respond& respond) {
        if (auto response = service->answer_at_once(request)) return respond(std::move(*response));
        auto shared = std::make_shared<net::HttpRequest>(std::move(request));
        Status ok = thread.post([this, shared, respond] { service->answer(*shared, respond); });
        if (!ok) respond(net::error_response(ok.error()));
    }

    // Constant after construction.
    crypto::KeyPair key;
    std::unique_ptr<market::Storage> storage;
    std::unique_ptr<ModelFiles> files;
    std::unique_ptr<Registry> registry;
    std::unique_ptr<Service> service;  // its state: the market's thread only
    // Guarded by mu.
    std::mutex mu;
    OnRevoked on_revoked;
    // Last, so that they end first.
    TaskThread disk{"the market's disk", kDiskTasksMax};
    TaskThread thread;
};

Market::Market(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
Market::~Market() = default;

Result<std::unique_ptr<Market>> Market::open(MarketOptions options) {
    auto storage = store::open_market_store(options.db_path);
    if (!storage) return tl::unexpected(storage.error());
    return open_over(std::move(options), std::move(*storage));
}

Result<std::unique_ptr<Market>> Market::open_over(MarketOptions options,
                                                  std::unique_ptr<market::Storage> storage) {
    if (Status ok = check(options); !ok) return tl::unexpected(ok.error());
    auto key = crypto::load_or_make_key(options.key_path);
    if (!key) return tl::unexpected(key.error());
    auto secret = load_or_make_operator_secret(
        options.operator_path.empty() ? options.db_path + ".operator" : options.operator_path);
    if (!secret) return tl::unexpected(secret.error());
    auto files = ModelFiles::open(options.model_path, options.cache_dir, options.progress);
    if (!files) return tl::unexpected(files.error());
    auto impl = std::make_shared<Impl>(std::move(*key), options.queue_max);
    impl->storage = std::move(storage);
    impl->files = std::move(*files);
    const int64_t now = seconds_of(options.clocks.wall());
    const auto state = impl->storage->load(impl->files->model_id(), now);
    if (!state) return tl::unexpected(state.error());
    const auto is_other_key = impl->storage->set_market_key(crypto::to_hex(impl->key.public_key()));
    if (!is_other_key) return tl::unexpected(is_other_key.error());
    if (*is_other_key) {
        log(LogLevel::kWarn, "market",
            "the database was made under another key than that in " + printable(options.key_path) +
                ": tokens and invites of before are void, and workers need new invites");
    }
    impl->registry = std::make_unique<Registry>(*impl->storage, impl->key, impl->files->model_id(),
                                                options.token_life, options.clocks);
    if (Status ok = impl->registry->restore(*state); !ok) return tl::unexpected(ok.error());
    Impl* const self = impl.get();
    ServiceConfig config{options.name,    options.origin, options.relay_url, *secret,
                         options.tls_pin, options.rules,  options.limits,    options.clocks};
    Service::Parts parts{
        self->key,
        *self->files,
        *self->registry,
        *self->storage,
        self->disk,
        [self](std::function<void()> task) { return self->thread.post(std::move(task)); },
        [self](const crypto::PublicKey& node, const std::vector<uint64_t>& serials) {
            OnRevoked callback;
            {
                const std::lock_guard guard(self->mu);
                callback = self->on_revoked;
            }
            if (callback) callback(node, serials);
        }};
    impl->service = std::make_unique<Service>(std::move(config), std::move(parts));
    impl->service->restore(*state);
    return std::unique_ptr<Market>(new Market(std::move(impl)));
}

net::HttpHandler Market::handler() {
    return [weak = std::weak_ptr<Impl>(impl_)](net::HttpRequest request, net::Respond respond) {
        if (const auto impl = weak.lock()) return impl->answer(std::move(request), respond);
        respond(net::error_response({Errc::kClosed, "the market is closing"}));
    };
}

const crypto::PublicKey& Market::key() const {
    return impl_->key.public_key();
}
const Sha256& Market::model_id() const {
    return impl_->files->model_id();
}

Result<crypto::Invite> Market::make_invite(uint32_t uses, std::chrono::seconds valid_for,
                                           uint8_t roles) {
    InviteBody terms;
    terms.uses = uses;
    terms.valid_for = valid_for;
    terms.roles = roles;
    return impl_->service->make_invite(terms);
}

Status Market::revoke(const crypto::PublicKey& node) {
    Status done;
    Status ran = impl_->thread.call([&] {
        if (auto serials = impl_->service->revoke(node); !serials) {
            done = tl::unexpected(serials.error());
        }
    });
    return ran ? done : ran;
}

Result<crypto::TokenClaims> Market::open_token(std::string_view text) const {
    return impl_->registry->open_token(text);
}

bool Market::is_revoked(uint64_t serial) const {
    return impl_->registry->is_revoked(serial);
}

void Market::on_revoked(OnRevoked callback) {
    const std::lock_guard guard(impl_->mu);
    impl_->on_revoked = std::move(callback);
}

Result<market::CoverageMap> Market::coverage() {
    market::CoverageMap map;
    if (Status ran = impl_->thread.call([&] { map = impl_->service->coverage(); }); !ran) {
        return tl::unexpected(ran.error());
    }
    return map;
}

Status Market::save() {
    Status done;
    Status ran = impl_->thread.call([&] { done = impl_->service->save(); });
    return ran ? done : ran;
}

}  // namespace kvasir::coordinator
