// Bodies of requests: JSON to values.
#include <algorithm>
#include <array>
#include <limits>

#include <nlohmann/json.hpp>

#include "base/encoding.hpp"
#include "base/log.hpp"
#include "coordinator/messages.hpp"
#include "crypto/hash.hpp"
#include "market/roles.hpp"

namespace kvasir::coordinator {
namespace {

using Json = nlohmann::json;

constexpr size_t kTextMax = 4096;
constexpr uint64_t kBytesMax = std::numeric_limits<int64_t>::max();
constexpr uint64_t kNumberMax = std::numeric_limits<uint32_t>::max();

// One object of a request. Reads give zeros after the first error, which is kept.
class Fields {
public:
    // `where` names the object in errors: "" or "have[3]."
    Fields(const Json& json, std::string where) : json_(json), where_(std::move(where)) {
        if (!json.is_object()) refuse("", "must be an object");
    }

    uint64_t number(const char* name, uint64_t most) {
        const Json* value = find(name);
        if (value == nullptr) return missing(name), 0;
        return to_number(*value, name, most);
    }
    uint64_t number_or(const char* name, uint64_t most, uint64_t otherwise) {
        const Json* value = find(name);
        return value == nullptr ? otherwise : to_number(*value, name, most);
    }
    std::string text(const char* name) {
        const Json* value = find(name);
        if (value == nullptr) return missing(name), "";
        if (!value->is_string()) return refuse(name, "must be a text"), "";
        const auto& text = value->get_ref<const std::string&>();
        if (text.size() > kTextMax) return refuse(name, "is too long"), "";
        return text;
    }
    std::vector<uint8_t> hex(const char* name, size_t bytes_max) {
        const auto bytes = decode_hex(text(name));
        if (!bytes || bytes->size() > bytes_max) refuse(name, "must be lower-case hex digits");
        return bytes.value_or(std::vector<uint8_t>{});
    }
    template <size_t kBytes>
    std::array<uint8_t, kBytes> hex_array(const char* name) {
        std::array<uint8_t, kBytes> out = {};
        const auto bytes = hex(name, kBytes);
        if (bytes.size() == kBytes) std::ranges::copy(bytes, out.begin());
        if (bytes.size() != kBytes) {
            refuse(name, "must have " + std::to_string(2 * kBytes) + " hex digits");
        }
        return out;
    }
    crypto::PublicKey key(const char* name) {
        const auto key = crypto::parse_public_key(text(name));
        if (!key) refuse(name, "must be a public key, 64 hex digits");
        return key.value_or(crypto::PublicKey{});
    }
    const Json& list(const char* name, size_t count_max) {
        static const Json kNone = Json::array();
        const Json* value = find(name);
        if (value == nullptr) return missing(name), kNone;
        if (!value->is_array()) return refuse(name, "must be a list"), kNone;
        if (value->size() > count_max) {
            return refuse(name, "has more than " + std::to_string(count_max) + " entries"), kNone;
        }
        return *value;
    }
    std::vector<uint64_t> ids(const char* name) {
        std::vector<uint64_t> out;
        for (const Json& item : list(name, kIdsMax)) {
            out.push_back(to_number(item, name, kBytesMax));
        }
        return out;
    }
    bool has(const char* name) const { return find(name) != nullptr; }
    void refuse(const std::string& name, const std::string& what) {
        if (status_) {
            status_ = fail(Errc::kBadInput, "field \"" + where_ + name + "\" " + what);
        }
    }
    const Status& status() const { return status_; }
    void take(const Fields& other) {
        if (status_) status_ = other.status_;
    }

private:
    const Json* find(const char* name) const {
        if (!json_.is_object()) return nullptr;
        const auto found = json_.find(name);
        return found == json_.end() || found->is_null() ? nullptr : &*found;
    }
    void missing(const char* name) { refuse(name, "is missing"); }
    uint64_t to_number(const Json& value, const char* name, uint64_t most) {
        if (!value.is_number_unsigned()) {
            return refuse(name, "must be a whole number, not negative"), 0;
        }
        const auto number = value.get<uint64_t>();
        if (number > most) return refuse(name, "is more than " + std::to_string(most)), 0;
        return number;
    }

    const Json& json_;
    const std::string where_;
    Status status_;
};

Result<Json> parse(std::string_view body) {
    // Without exceptions; depth is no matter, the parser keeps its own stack.
    Json json = Json::parse(body, nullptr, false);
    if (json.is_discarded()) return fail(Errc::kBadInput, "the body is not JSON");
    if (!json.is_object()) return fail(Errc::kBadInput, "the body is not a JSON object");
    return json;
}

// Runs `read` over the body's fields.
template <class T, class Read>
Result<T> decode(std::string_view body, const Read& read) {
    const auto json = parse(body);
    if (!json) return tl::unexpected(json.error());
    Fields fields(*json, "");
    T out = read(fields);
    if (!fields.status()) return tl::unexpected(fields.status().error());
    return out;
}

std::string at(const char* name, size_t index) {
    return std::string(name) + "[" + std::to_string(index) + "].";
}

uint8_t read_role(Fields& fields) {
    const auto role = market::parse_role(fields.text("role"));
    if (!role) fields.refuse("role", "must be worker, backbone or observer");
    return role.value_or(uint8_t{0});
}

}  // namespace

Result<EnrollBody> decode_enroll(std::string_view body) {
    return decode<EnrollBody>(body, [](Fields& fields) {
        EnrollBody out;
        const auto invite = crypto::parse_invite(fields.text("invite"));
        if (invite) out.invite = *invite;
        if (!invite) fields.refuse("invite", "is no invite code: " + invite.error().detail);
        out.key = fields.key("public_key");
        out.name = fields.has("name") ? fields.text("name") : "";
        if (fields.has("role")) out.role_wanted = read_role(fields);
        out.challenge = fields.hex("challenge", 256);
        out.signature = fields.hex_array<64>("signature");
        return out;
    });
}

Result<RenewBody> decode_renew(std::string_view body) {
    return decode<RenewBody>(body, [](Fields& fields) {
        RenewBody out;
        out.key = fields.key("public_key");
        out.challenge = fields.hex("challenge", 256);
        out.signature = fields.hex_array<64>("signature");
        return out;
    });
}

std::vector<Segment> read_segments(Fields& fields, const char* name) {
    std::vector<Segment> out;
    if (!fields.has(name)) return out;
    size_t index = 0;
    for (const Json& item : fields.list(name, kSegmentsMax)) {
        Fields segment(item, at(name, index++));
        Segment one;
        one.layer.layer = static_cast<uint32_t>(segment.number("layer", kNumberMax));
        one.layer.bank = static_cast<uint32_t>(segment.number_or("bank", kNumberMax, 0));
        one.begin = static_cast<uint32_t>(segment.number("begin", kNumberMax));
        one.end = static_cast<uint32_t>(segment.number("end", kNumberMax));
        if (one.end < one.begin) segment.refuse("end", "must not be below begin");
        fields.take(segment);
        out.push_back(one);
    }
    return out;
}

Result<AskBody> decode_ask(std::string_view body) {
    return decode<AskBody>(body, [](Fields& fields) {
        AskBody out;
        out.budget_bytes = fields.number("budget_bytes", kBytesMax);
        out.threads = static_cast<uint32_t>(fields.number_or("threads", kNumberMax, 0));
        out.have = read_segments(fields, "have");
        out.begun = read_segments(fields, "begun");
        return out;
    });
}

Result<std::vector<market::Progress>> decode_progress(std::string_view body) {
    return decode<std::vector<market::Progress>>(body, [](Fields& fields) {
        std::vector<market::Progress> out;
        for (const Json& item : fields.list("leases", kIdsMax)) {
            Fields lease(item, at("leases", out.size()));
            const uint64_t id = lease.number("id", kBytesMax);
            out.push_back({id, lease.number("bytes_done", kBytesMax)});
            fields.take(lease);
        }
        return out;
    });
}

Result<ProveBody> decode_prove(std::string_view body) {
    return decode<ProveBody>(body, [](Fields& fields) {
        ProveBody out;
        if (!fields.has("nonce")) {
            out.leases = fields.ids("leases");
            if (out.leases.empty()) fields.refuse("leases", "names no lease");
            return out;
        }
        out.nonce = fields.hex_array<32>("nonce");
        for (const Json& item : fields.list("answers", kAnswersMax)) {
            const auto* text = item.get_ptr<const std::string*>();
            const auto digest = text ? crypto::parse_hex(*text) : std::nullopt;
            if (!digest) fields.refuse("answers", "must be texts of 64 hex digits");
            out.answers.push_back(digest.value_or(Sha256{}));
        }
        return out;
    });
}

Result<std::vector<uint64_t>> decode_heartbeat(std::string_view body) {
    return decode<std::vector<uint64_t>>(body,
                                         [](Fields& fields) { return fields.ids("serving"); });
}

Result<std::optional<std::vector<uint64_t>>> decode_release(std::string_view body) {
    using Ids = std::optional<std::vector<uint64_t>>;
    if (body.empty()) return Ids();
    return decode<Ids>(body, [](Fields& fields) {
        return fields.has("leases") ? Ids(fields.ids("leases")) : Ids();
    });
}

Result<InviteBody> decode_invite(std::string_view body) {
    return decode<InviteBody>(body, [](Fields& fields) {
        InviteBody out;
        out.uses = static_cast<uint32_t>(fields.number_or("uses", kInviteUsesMax, 1));
        if (out.uses == 0) fields.refuse("uses", "must be at least 1");
        out.valid_for = std::chrono::seconds(
            fields.number_or("valid_for_s", static_cast<uint64_t>(kInviteLifeMax.count()), 86400));
        if (fields.has("role")) out.roles = read_role(fields);
        return out;
    });
}

Result<crypto::PublicKey> decode_revoke(std::string_view body) {
    return decode<crypto::PublicKey>(body, [](Fields& fields) { return fields.key("node"); });
}

}  // namespace kvasir::coordinator
