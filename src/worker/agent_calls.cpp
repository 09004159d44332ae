#include <algorithm>
#include <utility>

#include <malloc.h>

#include "base/log.hpp"
#include "crypto/hash.hpp"
#include "moe/file.hpp"
#include "moe/segments.hpp"
#include "worker/agent_serving.hpp"
#include "worker/slice_budget.hpp"

namespace kvasir::worker {
namespace {

constexpr std::chrono::milliseconds kReleaseTimeout{5000};

event::Granted granted(const Grant& grant) {
    return {grant.expires_in, grant.renew_in};
}

}  // namespace

Status Agent::fresh_client() {
    auto http = net::HttpClient::make(trust_);
    if (!http) return tl::unexpected(http.error());
    const std::string token = market_ ? market_->token() : std::string();
    const std::lock_guard lock(mu_);
    market_ = std::make_unique<MarketClient>(**http, address_);
    market_->set_token(token);
    http_ = std::move(*http);
    return {};
}

AgentEvent Agent::call(const AgentAction& action) {
    auto event = try_call(action);
    if (event) return std::move(*event);
    return event::Failed{action.step, event.error()};
}

Result<AgentEvent> Agent::try_call(const AgentAction& action) {
    const auto take = [this](const Result<Grant>& grant) -> Result<AgentEvent> {
        if (!grant) return tl::unexpected(grant.error());
        const auto claims = crypto::open_token(grant->token, invite_.market);
        if (claims && (claims->roles & crypto::kRoleWorker) == 0) {
            return fail(Errc::kDenied,
                        "the invite code is not a worker's (but a backbone's or an observer's): "
                        "ask for a worker's");
        }
        take_token(grant->token);
        return granted(*grant);
    };
    switch (action.step) {
        case AgentStep::kLookUp:
            return look_up();
        case AgentStep::kEnroll:
            return take(market_->enroll(invite_, *key_, options_.name, "worker"));
        case AgentStep::kRenew:
            return take(market_->renew(*key_));
        case AgentStep::kLease:
            return lease();
        case AgentStep::kProgress: {
            std::vector<LeaseProgress> leases;
            {
                const std::lock_guard lock(mu_);
                for (const auto& [segment, lease] : progress_) leases.push_back(lease);
            }
            auto news = market_->progress(leases);
            if (!news) return tl::unexpected(news.error());
            return event::Progressed{std::move(*news)};
        }
        case AgentStep::kProve:
            return prove(action.ids);
        case AgentStep::kBeat: {
            auto reply = market_->heartbeat(action.ids);
            if (!reply) return tl::unexpected(reply.error());
            event::Beaten beaten{std::move(reply->news), std::nullopt, reply->has_more};
            if (reply->grant) {
                take_token(reply->grant->token);
                beaten.granted = granted(*reply->grant);
            }
            return beaten;
        }
        case AgentStep::kRelease:
            return release();
        case AgentStep::kFetch:
        case AgentStep::kServe:
        case AgentStep::kCount_:
            break;
    }
    return fail(Errc::kUsage, "no call to the market");
}

void Agent::take_token(const std::string& token) {
    market_->set_token(token);
    const std::lock_guard lock(mu_);
    token_ = token;
}

Result<AgentEvent> Agent::look_up() {
    auto info = market_->look_up();
    if (!info) return tl::unexpected(info.error());
    if (info->market_key != invite_.market) {
        return fail(Errc::kDenied,
                    "the market at " + address_.base +
                        " has another key than the invite code names: the code belongs to another "
                        "market, or somebody stands in between");
    }
    auto endpoint = relay_endpoint(*info, address_);
    if (!endpoint) return tl::unexpected(endpoint.error());
    const auto cached = cache_.load_outline(info->outline_sha256);
    if (!cached || !check_outline(*cached, *info, invite_.market)) {
        auto outline = market_->outline(*info, invite_.market);
        if (!outline) return tl::unexpected(outline.error());
        if (auto decoded =
                moe::decode_outline(std::span<const uint8_t>(*outline).subspan(kSignatureBytes));
            !decoded)
            return tl::unexpected(decoded.error());
        if (Status ok = cache_.store_outline(info->outline_sha256, *outline); !ok)
            return tl::unexpected(ok.error());
    }
    const Sha256 name = info->outline_sha256;
    info_ = std::move(*info);
    ::malloc_trim(0);
    return event::Seen{name};
}

Result<moe::Outline> Agent::load_outline(const MarketInfo& info) const {
    const auto cached = cache_.load_outline(info.outline_sha256);
    if (!cached) return fail(Errc::kMismatch, "the model's outline is gone from the cache");
    if (Status ok = check_outline(*cached, info, invite_.market); !ok)
        return fail(Errc::kMismatch, ok.error().detail);
    auto outline = moe::decode_outline(std::span<const uint8_t>(*cached).subspan(kSignatureBytes));
    if (outline && outline->manifest.model_id != info.model_id)
        return fail(Errc::kMismatch, "the model's outline is of another model");
    return outline;
}

Result<AgentEvent> Agent::lease() {
    auto outline = load_outline(info_);
    if (!outline) return tl::unexpected(outline.error());
    auto ask = lease_budget(*outline, options_.budget_bytes);
    if (!ask) return tl::unexpected(ask.error());
    auto reply = market_->lease(*ask, cache_.have(info_.model_id), cache_.begun(info_.model_id),
                                options_.threads);
    if (!reply) return tl::unexpected(reply.error());
    auto fitting = fit_leases(*outline, std::move(reply->leases), options_.budget_bytes);
    if (!fitting) return tl::unexpected(fitting.error());
    if (!fitting->dropped.empty()) {
        if (Status ok = market_->release(fitting->dropped); !ok) return tl::unexpected(ok.error());
    }
    return event::Leased{std::move(fitting->kept), reply->heartbeat_every};
}

Result<AgentEvent> Agent::prove(const std::vector<uint64_t>& ids) {
    auto task = market_->ask_proof(ids);
    if (!task) return tl::unexpected(task.error());
    auto slice = moe::open_model(whole_path_);
    if (!slice) return fail(Errc::kMismatch, slice.error().detail);
    auto fd = moe::open_for_reading(whole_path_);
    if (!fd) return fail(Errc::kMismatch, fd.error().detail);
    std::vector<Sha256> answers;
    for (const ByteProbe& probe : task->probes) {
        auto one = answer(*task, probe, *slice, fd->get());
        if (!one) return tl::unexpected(one.error());
        answers.push_back(*one);
    }
    auto news = market_->prove(*task, answers);
    if (!news) return tl::unexpected(news.error());
    return event::Proved{std::move(*news)};
}

Result<Sha256> Agent::answer(const ProofTask& task, const ByteProbe& probe, const moe::Model& slice,
                             int fd) const {
    const auto bad = [] {
        return fail(Errc::kProtocol, "the market asks for bytes that were never leased");
    };
    const auto& leases = rules_.leases();
    const auto lease = std::ranges::find(leases, probe.lease, &NodeLease::id);
    if (lease == leases.end()) return bad();
    const moe::ExpertBank* bank = slice.find_bank(lease->segment.layer);
    if (bank == nullptr || probe.tensor >= bank->tensors.size()) return bad();
    const auto found = std::ranges::lower_bound(bank->global_ids, probe.expert);
    if (found == bank->global_ids.end() || *found != probe.expert) return bad();
    const moe::SlabTensor& tensor = bank->tensors[probe.tensor];
    if (probe.offset > tensor.slab_bytes || probe.bytes > tensor.slab_bytes - probe.offset)
        return bad();
    const auto local = static_cast<uint64_t>(found - bank->global_ids.begin());
    std::vector<uint8_t> bytes(task.nonce.size() + probe.bytes);
    std::copy(task.nonce.begin(), task.nonce.end(), bytes.begin());
    const uint64_t at = tensor.offset + local * tensor.slab_bytes + probe.offset;
    const auto rest = std::span<uint8_t>(bytes).subspan(task.nonce.size());
    if (Status ok = moe::read_exactly(fd, whole_path_, at, rest); !ok)
        return fail(Errc::kMismatch, ok.error().detail);
    return crypto::sha256(bytes);
}

// After stop() the client is cancelled for good: the goodbye takes one of its own.
Result<AgentEvent> Agent::release() {
    if (Status ok = fresh_client(); !ok) return tl::unexpected(ok.error());
    market_->set_timeout(kReleaseTimeout);
    if (Status ok = market_->release({}); !ok) return tl::unexpected(ok.error());
    return event::Released{};
}

}  // namespace kvasir::worker
