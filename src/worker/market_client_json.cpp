#include "worker/market_client.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/encoding.hpp"
#include "base/log.hpp"
#include "crypto/hash.hpp"
#include "moe/outline.hpp"

namespace kvasir::worker {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kReplyBytesMax = uint64_t{4} << 20;
constexpr size_t kTextMax = 2048;
constexpr uint64_t kSecondsMax = 10ull * 365 * 24 * 3600;

tl::unexpected<Error> not_as_agreed(const std::string& what) {
    return fail(Errc::kProtocol, "the market's answer is not what its API says: " + what);
}

// Fields of one JSON object; the first that is missing or wrong is remembered.
class Fields {
public:
    explicit Fields(const Json& object) : object_(object) {
        if (!object.is_object()) problem_ = "no object where one belongs";
    }
    std::string text(const char* name, bool is_needed = true) {
        const Json* value = find(name, is_needed);
        if (value == nullptr) return {};
        const auto* text = value->get_ptr<const std::string*>();
        if (text == nullptr || text->size() > kTextMax) return wrong(name), std::string();
        return *text;
    }
    uint64_t number(const char* name, uint64_t most, bool is_needed = true) {
        const Json* value = find(name, is_needed);
        if (value == nullptr) return 0;
        if (!value->is_number_unsigned() || value->get<uint64_t>() > most) return wrong(name), 0;
        return value->get<uint64_t>();
    }
    std::chrono::seconds seconds(const char* name) {
        return std::chrono::seconds(number(name, kSecondsMax));
    }
    Sha256 digest(const char* name) {
        const auto digest = crypto::parse_hex(text(name));
        if (!digest) wrong(name);
        return digest.value_or(Sha256{});
    }
    Fields object(const char* name) {
        static const Json empty = Json::object();
        const Json* value = find(name, true);
        return Fields(value == nullptr ? empty : *value, problem_);
    }
    const Json& array(const char* name, size_t most, bool is_needed = true) {
        static const Json empty = Json::array();
        const Json* value = find(name, is_needed);
        if (value == nullptr) return empty;
        if (!value->is_array() || value->size() > most) return wrong(name), empty;
        return *value;
    }
    bool has(const char* name) const { return object_.is_object() && object_.contains(name); }
    void take(const Fields& other) {
        if (problem_.empty()) problem_ = other.problem_;
    }
    Status status() const {
        if (problem_.empty()) return {};
        return not_as_agreed(problem_);
    }

private:
    Fields(const Json& object, const std::string& problem) : Fields(object) {
        if (!problem.empty()) problem_ = problem;
    }
    const Json* find(const char* name, bool is_needed) {
        if (object_.is_object()) {
            const auto found = object_.find(name);
            if (found != object_.end() && !found->is_null()) return &*found;
        }
        if (is_needed && problem_.empty()) problem_ = std::string("\"") + name + "\" is missing";
        return nullptr;
    }
    void wrong(const char* name) {
        if (problem_.empty()) problem_ = std::string("\"") + name + "\" is malformed";
    }

    const Json& object_;
    std::string problem_;
};

Result<Json> parse(const std::string& body) {
    Json json = Json::parse(body, nullptr, false);
    if (json.is_discarded() || !json.is_object()) return not_as_agreed("it is no JSON object");
    return json;
}

Errc code_of_status(int status) {
    switch (status) {
        case 401:
            return Errc::kExpired;
        case 403:
            return Errc::kDenied;
        case 404:
            return Errc::kNotFound;
        case 408:
        case 504:
            return Errc::kTimeout;
        case 409:
            return Errc::kMismatch;
        case 413:
            return Errc::kLimit;
        case 426:
            return Errc::kVersion;
        case 429:
        case 503:
            return Errc::kBusy;
        case 507:
            return Errc::kNoSpace;
        default:
            return status >= 500 ? Errc::kIo : Errc::kBadInput;
    }
}

// The market's own words, where the answer has them in the agreed form.
Error market_error(const net::HttpReply& reply, const std::string& path) {
    Error error{code_of_status(reply.status), {}};
    const Json json = Json::parse(reply.body, nullptr, false);
    std::string said;  // what is not of that form is some proxy's page
    if (json.is_object() && json.contains("error") && json["error"].is_object()) {
        const Json& inner = json["error"];
        if (inner.contains("message") && inner["message"].is_string())
            said = inner["message"].get<std::string>();
        if (inner.contains("code") && inner["code"].is_string()) {
            for (size_t i = 0; i < static_cast<size_t>(Errc::kCount_); ++i) {
                const auto code = static_cast<Errc>(i);
                if (inner["code"].get<std::string>() == errc_info(code).name) error.code = code;
            }
        }
        // Wrong answers of a proof: not the token is denied, the bytes are not the model's.
        if (inner.contains("wrong")) error.code = Errc::kMismatch;
    }
    const std::string status = "HTTP " + std::to_string(reply.status);
    error.detail = "the market says to " + path + ": " +
                   (said.empty() ? status : printable(said, 400) + " (" + status + ")");
    return error;
}

Result<Grant> read_grant(Fields fields) {
    Grant grant;
    grant.node = printable(fields.text("node", false), 100);
    grant.token = fields.text("token");
    grant.expires_in = fields.seconds("expires_in_s");
    grant.renew_in = fields.seconds("renew_in_s");
    if (Status ok = fields.status(); !ok) return tl::unexpected(ok.error());
    if (grant.token.empty() || grant.token.size() > crypto::kTokenBytesMax ||
        printable(grant.token, crypto::kTokenBytesMax) != grant.token) {
        return not_as_agreed("\"token\" is malformed");
    }
    return grant;
}

Result<std::vector<uint64_t>> read_ids(const Json& list) {
    std::vector<uint64_t> ids;
    for (const Json& id : list) {
        if (!id.is_number_unsigned()) return not_as_agreed("a lease's id is no number");
        ids.push_back(id.get<uint64_t>());
    }
    return ids;
}

Result<LeaseNews> read_news(Fields& fields) {
    LeaseNews news;
    for (const Json& item : fields.array("leases", kLeasesMax)) {
        Fields lease(item);
        LeaseLife one;
        one.id = lease.number("id", std::numeric_limits<uint64_t>::max());
        one.expires_in = lease.seconds("expires_in_s");
        fields.take(lease);
        news.leases.push_back(one);
    }
    auto lost = read_ids(fields.array("lost", kLeasesMax, false));
    if (!lost) return tl::unexpected(lost.error());
    news.lost = std::move(*lost);
    if (Status ok = fields.status(); !ok) return tl::unexpected(ok.error());
    return news;
}

Json write_segments(const std::vector<Segment>& segments) {
    Json list = Json::array();
    for (const Segment& segment : segments) {
        list.push_back({{"layer", segment.layer.layer},
                        {"bank", segment.layer.bank},
                        {"begin", segment.begin},
                        {"end", segment.end}});
    }
    return list;
}

bool is_own_path(const std::string& path) {
    return !path.empty() && path.front() == '/' && path.rfind("//", 0) != 0 &&
           printable(path, kTextMax) == path && path.find(' ') == std::string::npos;
}

template <size_t kBytes>
std::optional<std::array<uint8_t, kBytes>> parse_bytes(std::string_view hex) {
    const auto bytes = decode_hex(hex);
    if (!bytes || bytes->size() != kBytes) return std::nullopt;
    std::array<uint8_t, kBytes> out = {};
    std::copy(bytes->begin(), bytes->end(), out.begin());
    return out;
}

std::string find_header(const net::HeaderList& headers, std::string_view name) {
    for (const auto& [key, value] : headers) {
        if (key == name) return value;
    }
    return {};
}

}  // namespace

Result<std::string> MarketClient::send(const std::string& method, const std::string& path,
                                       const std::string& body, bool with_token) {
    net::HttpCall call;
    call.method = method;
    call.url = address_.base + path;
    call.headers.emplace_back("Accept", "application/json");
    if (with_token) call.secret_headers = bearer();
    call.body = body;
    call.reply_bytes_max = kReplyBytesMax;
    call.timeout = timeout_;
    auto reply = http_.call(call);
    if (!reply) return tl::unexpected(reply.error());
    if (reply->status >= 200 && reply->status < 300) return std::move(reply->body);
    return tl::unexpected(market_error(*reply, path));
}

Result<MarketInfo> MarketClient::look_up() {
    auto body = send("GET", "/api/v1/market", {}, false);
    if (!body) return tl::unexpected(body.error());
    auto json = parse(*body);
    if (!json) return tl::unexpected(json.error());
    Fields fields(*json);
    MarketInfo info;
    info.name = printable(fields.text("name", false), 64);
    auto key = crypto::parse_public_key(fields.text("market_key"));
    Fields model = fields.object("model");
    info.model_id = model.digest("id");
    info.model_name = printable(model.text("name", false), 64);
    info.model_bytes = model.number("bytes", std::numeric_limits<int64_t>::max(), false);
    fields.take(model);
    if (fields.has("relay")) {
        Fields relay = fields.object("relay");
        info.relay_url = relay.text("url", false);
        fields.take(relay);
    }
    Fields outline = fields.object("outline");
    info.outline_path = outline.text("path");
    info.outline_bytes = outline.number("bytes", moe::kOutlineBytesMax);
    info.outline_sha256 = outline.digest("sha256");
    fields.take(outline);
    Fields data = fields.object("data");
    info.data_path = data.text("path");
    fields.take(data);
    if (Status ok = fields.status(); !ok) return tl::unexpected(ok.error());
    if (!key) return not_as_agreed("\"market_key\" is malformed");
    info.market_key = *key;
    if (!is_own_path(info.outline_path)) return not_as_agreed("\"outline.path\" is malformed");
    if (!is_own_path(info.data_path) || info.data_path.find("{shard}") == std::string::npos)
        return not_as_agreed("\"data.path\" is malformed");
    return info;
}

Result<std::vector<uint8_t>> MarketClient::outline(const MarketInfo& info,
                                                   const crypto::PublicKey& market_key) {
    net::HttpCall call;
    call.url = address_.base + info.outline_path;
    call.secret_headers = bearer();
    call.reply_bytes_max = info.outline_bytes;
    call.timeout = std::max<std::chrono::milliseconds>(timeout_, std::chrono::minutes(5));
    auto reply = http_.call(call);
    if (!reply) return tl::unexpected(reply.error());
    if (reply->status != 200) return tl::unexpected(market_error(*reply, info.outline_path));
    const auto signature =
        parse_bytes<kSignatureBytes>(find_header(reply->headers, "kvasir-signature"));
    if (!signature) return not_as_agreed("the outline's signature is missing or malformed");
    std::vector<uint8_t> bytes(signature->begin(), signature->end());
    bytes.insert(bytes.end(), reply->body.begin(), reply->body.end());
    if (Status ok = check_outline(bytes, info, market_key); !ok) return tl::unexpected(ok.error());
    return bytes;
}

// ---- the node's token ----

Result<std::string> MarketClient::challenge() {
    auto body = send("POST", "/api/v1/challenge", "{}", false);
    if (!body) return tl::unexpected(body.error());
    auto json = parse(*body);
    if (!json) return tl::unexpected(json.error());
    Fields fields(*json);
    std::string challenge = fields.text("challenge");
    if (Status ok = fields.status(); !ok) return tl::unexpected(ok.error());
    if (!decode_hex(challenge)) return not_as_agreed("\"challenge\" is no hex");
    return challenge;
}

Result<Grant> MarketClient::enroll(const crypto::Invite& invite, const crypto::KeyPair& key,
                                   const std::string& name, const std::string& role) {
    auto challenge_hex = challenge();
    if (!challenge_hex) return tl::unexpected(challenge_hex.error());
    std::vector<uint8_t> statement = *decode_hex(*challenge_hex);
    statement.insert(statement.end(), invite.secret.begin(), invite.secret.end());
    const Json request = {{"invite", crypto::to_string(invite)},
                          {"public_key", crypto::to_hex(key.public_key())},
                          {"name", printable(name, crypto::kNameBytesMax)},
                          {"role", role},
                          {"challenge", *challenge_hex},
                          {"signature", encode_hex(key.sign("register", statement))}};
    auto body = send("POST", "/api/v1/nodes", request.dump(), false);
    if (!body) return tl::unexpected(body.error());
    auto json = parse(*body);
    if (!json) return tl::unexpected(json.error());
    return read_grant(Fields(*json));
}

Result<Grant> MarketClient::renew(const crypto::KeyPair& key) {
    auto challenge_hex = challenge();
    if (!challenge_hex) return tl::unexpected(challenge_hex.error());
    const Json request = {
        {"public_key", crypto::to_hex(key.public_key())},
        {"challenge", *challenge_hex},
        {"signature", encode_hex(key.sign("renew", *decode_hex(*challenge_hex)))}};
    auto body = send("POST", "/api/v1/nodes/renew", request.dump(), false);
    if (!body) return tl::unexpected(body.error());
    auto json = parse(*body);
    if (!json) return tl::unexpected(json.error());
    return read_grant(Fields(*json));
}

// ---- leases ----

Result<LeaseReply> MarketClient::lease(uint64_t budget_bytes, const std::vector<Segment>& have,
                                       const std::vector<Segment>& begun, uint32_t threads) {
    const Json request = {{"budget_bytes", budget_bytes},
                          {"have", write_segments(have)},
                          {"begun", write_segments(begun)},
                          {"threads", threads}};
    auto body = send("POST", "/api/v1/leases", request.dump(), true);
    if (!body) return tl::unexpected(body.error());
    auto json = parse(*body);
    if (!json) return tl::unexpected(json.error());
    Fields fields(*json);
    LeaseReply reply;
    for (const Json& item : fields.array("leases", kLeasesMax)) {
        Fields lease(item);
        NodeLease one;
        one.id = lease.number("id", std::numeric_limits<uint64_t>::max());
        one.segment.layer.layer = static_cast<uint32_t>(lease.number("layer", 1 << 20));
        one.segment.layer.bank = static_cast<uint32_t>(lease.number("bank", 16, false));
        one.segment.begin = static_cast<uint32_t>(lease.number("begin", 1 << 24));
        one.segment.end = static_cast<uint32_t>(lease.number("end", 1 << 24));
        one.bytes = lease.number("bytes", std::numeric_limits<int64_t>::max());
        one.expires_in = lease.seconds("expires_in_s");
        fields.take(lease);
        if (one.segment.begin >= one.segment.end) return not_as_agreed("an empty lease");
        reply.leases.push_back(one);
    }
    const auto every = fields.seconds("heartbeat_every_s");
    reply.heartbeat_every = std::clamp(every, std::chrono::seconds(1), std::chrono::seconds(3600));
    if (Status ok = fields.status(); !ok) return tl::unexpected(ok.error());
    return reply;
}

Result<LeaseNews> MarketClient::progress(const std::vector<LeaseProgress>& leases) {
    Json list = Json::array();
    for (const LeaseProgress& lease : leases)
        list.push_back({{"id", lease.id}, {"bytes_done", lease.bytes_done}});
    auto body = send("POST", "/api/v1/leases/progress", Json{{"leases", list}}.dump(), true);
    if (!body) return tl::unexpected(body.error());
    auto json = parse(*body);
    if (!json) return tl::unexpected(json.error());
    Fields fields(*json);
    return read_news(fields);
}

Result<ProofTask> MarketClient::ask_proof(const std::vector<uint64_t>& leases) {
    auto body = send("POST", "/api/v1/leases/prove", Json{{"leases", leases}}.dump(), true);
    if (!body) return tl::unexpected(body.error());
    auto json = parse(*body);
    if (!json) return tl::unexpected(json.error());
    Fields fields(*json);
    ProofTask task;
    task.nonce_hex = fields.text("nonce");
    for (const Json& item : fields.array("probes", kProbesMax)) {
        Fields probe(item);
        ByteProbe one;
        one.lease = probe.number("lease", std::numeric_limits<uint64_t>::max());
        one.expert = static_cast<uint32_t>(probe.number("expert", 1 << 24));
        one.tensor = static_cast<uint32_t>(probe.number("tensor", 1 << 16));
        one.offset = probe.number("offset", std::numeric_limits<int64_t>::max());
        one.bytes = probe.number("bytes", kProbeBytesMax);
        fields.take(probe);
        task.probes.push_back(one);
    }
    if (Status ok = fields.status(); !ok) return tl::unexpected(ok.error());
    const auto nonce = decode_hex(task.nonce_hex);
    if (!nonce || nonce->empty()) return not_as_agreed("\"nonce\" is no hex");
    task.nonce = *nonce;
    return task;
}

Result<LeaseNews> MarketClient::prove(const ProofTask& task, const std::vector<Sha256>& answers) {
    Json list = Json::array();
    for (const Sha256& answer : answers) list.push_back(to_hex(answer));
    const Json request = {{"nonce", task.nonce_hex}, {"answers", list}};
    auto body = send("POST", "/api/v1/leases/prove", request.dump(), true);
    if (!body) return tl::unexpected(body.error());
    auto json = parse(*body);
    if (!json) return tl::unexpected(json.error());
    Fields fields(*json);
    return read_news(fields);
}

Result<BeatReply> MarketClient::heartbeat(const std::vector<uint64_t>& serving) {
    auto body = send("POST", "/api/v1/heartbeat", Json{{"serving", serving}}.dump(), true);
    if (!body) return tl::unexpected(body.error());
    auto json = parse(*body);
    if (!json) return tl::unexpected(json.error());
    Fields fields(*json);
    auto news = read_news(fields);
    if (!news) return tl::unexpected(news.error());
    BeatReply reply;
    reply.news = std::move(*news);
    if (fields.has("ask") && (*json)["ask"].is_boolean()) reply.has_more = (*json)["ask"];
    if (!fields.has("token") || (*json)["token"].is_null()) return reply;
    auto grant = read_grant(Fields((*json)["token"]));
    if (!grant) return tl::unexpected(grant.error());
    reply.grant = std::move(*grant);
    return reply;
}

Status MarketClient::release(const std::vector<uint64_t>& leases) {
    const Json request = leases.empty() ? Json::object() : Json{{"leases", leases}};
    auto body = send("DELETE", "/api/v1/leases", request.dump(), true);
    if (!body) return tl::unexpected(body.error());
    return {};
}

// ---- bytes ----

net::HeaderList MarketClient::bearer() const {
    if (token_.empty()) return {};
    return {{"Authorization", "Bearer " + token_}};
}

}  // namespace kvasir::worker
