#include "store/market_store.hpp"

#include <array>
#include <optional>
#include <utility>

#include <soci/soci.h>

#include "base/log.hpp"
#include "base/task_thread.hpp"
#include "market/roles.hpp"

namespace kvasir::store {
namespace {

using market::BytesServed;
using market::LeaseDelta;
using market::LeaseRow;
using market::LeaseState;
using market::NodeRow;
using market::Registered;
using market::Registration;
using market::StoredState;
using market::TokenMade;
using market::TokenRow;
using soci::into;
using soci::use;

// Only ever append: a database's version is how many of these it has seen.
constexpr std::array kMigrations = {
    "CREATE TABLE counters (name VARCHAR(64) PRIMARY KEY, value BIGINT NOT NULL)",
    "INSERT INTO counters (name, value) VALUES ('token_serial', 0)",
    "INSERT INTO counters (name, value) VALUES ('lease_id', 0)",
    "CREATE TABLE nodes (node VARCHAR(64) PRIMARY KEY, name VARCHAR(256) NOT NULL, "
    "roles INTEGER NOT NULL, registered BIGINT NOT NULL, invite VARCHAR(64) NOT NULL, "
    "revoked INTEGER NOT NULL, bytes_served BIGINT NOT NULL)",
    "CREATE TABLE invites (secret_sha256 VARCHAR(64) PRIMARY KEY, "
    "uses_left BIGINT NOT NULL CHECK (uses_left >= 0), expires BIGINT NOT NULL, "
    "roles INTEGER NOT NULL)",
    "CREATE TABLE tokens (serial BIGINT PRIMARY KEY, node VARCHAR(64) NOT NULL REFERENCES nodes, "
    "expires BIGINT NOT NULL, revoked INTEGER NOT NULL)",
    "CREATE INDEX tokens_by_node ON tokens (node)",
    "CREATE INDEX tokens_by_expiry ON tokens (expires)",
    "CREATE TABLE leases (id BIGINT PRIMARY KEY, model VARCHAR(64) NOT NULL, "
    "node VARCHAR(64) NOT NULL REFERENCES nodes, layer BIGINT NOT NULL, bank BIGINT NOT NULL, "
    "expert_begin BIGINT NOT NULL, expert_end BIGINT NOT NULL, bytes BIGINT NOT NULL, "
    "state INTEGER NOT NULL)",
    "CREATE INDEX leases_by_node ON leases (node)",
    "CREATE TABLE facts (name VARCHAR(64) PRIMARY KEY, value VARCHAR(256) NOT NULL)",
};

constexpr int64_t kKeptSeconds = 7 * 86400;  // what expired before that is deleted
// Who asks again within this part of a token's life gets the last one again: a node has few that
// are good.
constexpr int64_t kSameTokenPart = 20;

tl::unexpected<Error> revoked_error() {
    return fail(Errc::kRevoked, "this node was revoked by the market's operator");
}

// 1, 2, 3, ...: the next number of a counter.
long long next_number(soci::session& sql, const std::string& counter) {
    long long value = 0;
    sql << "UPDATE counters SET value = value + 1 WHERE name = :name", use(counter);
    sql << "SELECT value FROM counters WHERE name = :name", use(counter), into(value);
    return value;
}

TokenMade make_token(soci::session& sql, const std::string& node, long long now,
                     long long expires) {
    const long long expires_least = expires - (expires - now) / kSameTokenPart;
    long long serial = 0, last_expires = 0;
    sql << "SELECT serial, expires FROM tokens WHERE node = :n AND revoked = 0 AND "
           "expires BETWEEN :least AND :e ORDER BY expires DESC, serial DESC LIMIT 1",
        use(node), use(expires_least), use(expires), into(serial), into(last_expires);
    if (sql.got_data()) return {static_cast<uint64_t>(serial), last_expires};
    const long long before = now - kKeptSeconds;
    sql << "DELETE FROM tokens WHERE expires < :before", use(before);
    serial = next_number(sql, "token_serial");
    sql << "INSERT INTO tokens (serial, node, expires, revoked) VALUES (:s, :n, :e, 0)",
        use(serial), use(node), use(expires);
    return {static_cast<uint64_t>(serial), expires};
}

std::optional<bool> is_revoked(soci::session& sql, const std::string& node) {
    int revoked = 0;
    sql << "SELECT revoked FROM nodes WHERE node = :node", use(node), into(revoked);
    if (!sql.got_data()) return std::nullopt;
    return revoked != 0;
}

// The roles that an invite gives. Errors: kDenied.
Result<int> check_invite(soci::session& sql, const std::string& invite, long long now) {
    long long uses = 0, expires = 0;
    int roles = 0;
    sql << "SELECT uses_left, expires, roles FROM invites WHERE secret_sha256 = :s", use(invite),
        into(uses), into(expires), into(roles);
    if (!sql.got_data()) {
        return fail(Errc::kDenied, "this market does not know the invite code: ask for a new one");
    }
    if (expires <= now) {
        return fail(Errc::kDenied, "the invite code has expired: ask for a new one");
    }
    if (uses <= 0) {
        return fail(Errc::kDenied, "the invite code was used up by other nodes: ask for a new one");
    }
    return roles;
}

void use_invite(soci::session& sql, const std::string& invite) {
    sql << "UPDATE invites SET uses_left = uses_left - 1 WHERE secret_sha256 = :s", use(invite);
}

// Returns the node's roles afterwards. Errors: kRevoked, kDenied.
Result<int> enroll(soci::session& sql, const Registration& asked, bool& is_new) {
    const std::string invite = to_hex(asked.invite);
    const long long now = asked.now;
    int roles = 0, revoked = 0;
    sql << "SELECT roles, revoked FROM nodes WHERE node = :node", use(asked.node), into(roles),
        into(revoked);
    is_new = !sql.got_data();
    if (!is_new && revoked != 0) return revoked_error();
    auto granted = check_invite(sql, invite, now);
    const int wanted = asked.role_wanted;
    if (granted && wanted != 0 && (*granted & wanted) == 0) {
        granted = fail(Errc::kDenied,
                       market::wrong_role_text(static_cast<uint8_t>(*granted), asked.role_wanted));
    }
    if (!is_new && !granted && wanted != 0 && (roles & wanted) == 0) {
        return tl::unexpected(granted.error());
    }
    if (is_new) {
        if (!granted) return tl::unexpected(granted.error());
        use_invite(sql, invite);
        sql << "INSERT INTO nodes (node, name, roles, registered, invite, revoked, bytes_served) "
               "VALUES (:node, :name, :roles, :now, :invite, 0, 0)",
            use(asked.node), use(asked.name), use(*granted), use(now), use(invite);
        return *granted;
    }
    if (granted && (roles | *granted) != roles) {
        use_invite(sql, invite);
        roles |= *granted;
    }
    sql << "UPDATE nodes SET name = :name, roles = :roles WHERE node = :node", use(asked.name),
        use(roles), use(asked.node);
    return roles;
}

std::vector<NodeRow> read_nodes(soci::session& sql) {
    std::vector<NodeRow> out;
    std::string node, name;
    long long registered = 0, bytes = 0;
    int roles = 0, revoked = 0;
    soci::statement rows =
        (sql.prepare << "SELECT node, name, roles, registered, revoked, bytes_served FROM nodes "
                        "ORDER BY node",
         into(node), into(name), into(roles), into(registered), into(revoked), into(bytes));
    rows.execute();
    while (rows.fetch()) {
        out.push_back({node, name, static_cast<uint8_t>(roles), registered, revoked != 0,
                       static_cast<uint64_t>(bytes)});
    }
    return out;
}

std::vector<TokenRow> read_tokens_revoked(soci::session& sql, long long now) {
    std::vector<TokenRow> out;
    std::string node;
    long long serial = 0, expires = 0;
    soci::statement rows = (sql.prepare << "SELECT serial, node, expires FROM tokens "
                                           "WHERE revoked = 1 AND expires >= :now",
                            use(now), into(serial), into(node), into(expires));
    rows.execute();
    while (rows.fetch()) out.push_back({static_cast<uint64_t>(serial), node, expires, true});
    return out;
}

std::vector<LeaseRow> read_leases(soci::session& sql) {
    std::vector<LeaseRow> out;
    std::string node;
    long long id = 0, layer = 0, bank = 0, begin = 0, end = 0, bytes = 0;
    int state = 0;
    soci::statement rows =
        (sql.prepare << "SELECT id, node, layer, bank, expert_begin, expert_end, bytes, state "
                        "FROM leases ORDER BY id",
         into(id), into(node), into(layer), into(bank), into(begin), into(end), into(bytes),
         into(state));
    rows.execute();
    while (rows.fetch()) {
        LeaseRow row;
        row.id = static_cast<uint64_t>(id);
        row.node = node;
        row.segment = {{static_cast<uint32_t>(layer), static_cast<uint32_t>(bank)},
                       static_cast<uint32_t>(begin),
                       static_cast<uint32_t>(end)};
        row.bytes = static_cast<uint64_t>(bytes);
        row.state = state == 1 ? LeaseState::kServing : LeaseState::kLoading;
        out.push_back(std::move(row));
    }
    return out;
}

void upsert_lease(soci::session& sql, const std::string& model, const LeaseRow& row) {
    const auto id = static_cast<long long>(row.id);
    const long long layer = row.segment.layer.layer, bank = row.segment.layer.bank;
    const long long begin = row.segment.begin, end = row.segment.end;
    const auto bytes = static_cast<long long>(row.bytes);
    const int state = static_cast<int>(row.state);
    sql << "DELETE FROM leases WHERE id = :id", use(id);
    sql << "INSERT INTO leases (id, model, node, layer, bank, expert_begin, expert_end, bytes, "
           "state) VALUES (:id, :model, :node, :layer, :bank, :begin, :end, :bytes, :state)",
        use(id), use(model), use(row.node), use(layer), use(bank), use(begin), use(end), use(bytes),
        use(state);
    sql << "UPDATE counters SET value = :id WHERE name = 'lease_id' AND value < :id2", use(id),
        use(id);
}

class MarketStore final : public market::Storage {
public:
    MarketStore(std::unique_ptr<Database> database, size_t calls_max)
        : database_(std::move(database)), thread_("the database", calls_max) {}

    Result<StoredState> load(const Sha256& model_id, int64_t now_s) override {
        const std::string model = to_hex(model_id);
        StoredState out;
        Status ok = transact([&](soci::session& sql) -> Status {
            const long long before = now_s - kKeptSeconds;
            model_ = model;
            sql << "DELETE FROM leases WHERE model <> :model", use(model);
            sql << "DELETE FROM tokens WHERE expires < :before", use(before);
            sql << "DELETE FROM invites WHERE expires < :before", use(before);
            out.nodes = read_nodes(sql);
            out.tokens_revoked = read_tokens_revoked(sql, before);
            out.leases = read_leases(sql);
            long long last = 0;
            sql << "SELECT value FROM counters WHERE name = 'lease_id'", into(last);
            out.lease_id_next = static_cast<uint64_t>(last) + 1;
            return {};
        });
        if (!ok) return tl::unexpected(ok.error());
        return out;
    }

    Result<bool> set_market_key(const std::string& key) override {
        bool is_other = false;
        Status ok = transact([&](soci::session& sql) -> Status {
            std::string known = key;  // also of a database that was made before keys were kept
            sql << "SELECT value FROM facts WHERE name = 'market_key'", into(known);
            long long rows = 0;
            sql << "SELECT (SELECT count(*) FROM nodes) + (SELECT count(*) FROM invites)",
                into(rows);
            is_other = known != key && rows > 0;
            sql << "DELETE FROM facts WHERE name = 'market_key'";
            sql << "INSERT INTO facts (name, value) VALUES ('market_key', :key)", use(key);
            return {};
        });
        if (!ok) return tl::unexpected(ok.error());
        return is_other;
    }

    Status add_invite(const market::InviteRow& invite) override {
        return transact([&](soci::session& sql) -> Status {
            const std::string secret = to_hex(invite.secret_sha256);
            const long long uses = invite.uses, expires = invite.expires;
            const int roles = invite.roles;
            sql << "INSERT INTO invites (secret_sha256, uses_left, expires, roles) "
                   "VALUES (:s, :u, :e, :r)",
                use(secret), use(uses), use(expires), use(roles);
            return {};
        });
    }

    Result<Registered> register_node(const Registration& asked) override {
        Registered out;
        Status ok = transact([&](soci::session& sql) -> Status {
            const auto roles = enroll(sql, asked, out.is_new);
            if (!roles) return tl::unexpected(roles.error());
            out.roles = static_cast<uint8_t>(*roles);
            out.token = make_token(sql, asked.node, asked.now, asked.token_expires);
            return {};
        });
        if (!ok) return tl::unexpected(ok.error());
        return out;
    }

    Result<TokenMade> add_token(const std::string& node, int64_t now, int64_t expires) override {
        TokenMade made;
        Status ok = transact([&](soci::session& sql) -> Status {
            const auto revoked = is_revoked(sql, node);
            if (!revoked) return no_node(node);
            if (*revoked) return revoked_error();
            made = make_token(sql, node, now, expires);
            return {};
        });
        if (!ok) return tl::unexpected(ok.error());
        return made;
    }

    Result<std::vector<TokenRow>> revoke_node(const std::string& node) override {
        std::vector<TokenRow> out;
        Status ok = transact([&](soci::session& sql) -> Status {
            out.clear();
            if (!is_revoked(sql, node)) return no_node(node);
            sql << "UPDATE nodes SET revoked = 1 WHERE node = :node", use(node);
            sql << "UPDATE tokens SET revoked = 1 WHERE node = :node", use(node);
            sql << "DELETE FROM leases WHERE node = :node", use(node);
            long long serial = 0, expires = 0;
            soci::statement rows = (sql.prepare << "SELECT serial, expires FROM tokens "
                                                   "WHERE node = :node ORDER BY serial",
                                    use(node), into(serial), into(expires));
            rows.execute();
            while (rows.fetch())
                out.push_back({static_cast<uint64_t>(serial), node, expires, true});
            return {};
        });
        if (!ok) return tl::unexpected(ok.error());
        return out;
    }

    Status write_leases(const LeaseDelta& delta) override {
        return transact([&](soci::session& sql) -> Status {
            for (const uint64_t erased : delta.erased) {
                const auto id = static_cast<long long>(erased);
                sql << "DELETE FROM leases WHERE id = :id", use(id);
            }
            for (const LeaseRow& row : delta.upserts) upsert_lease(sql, model_, row);
            return {};
        });
    }

    Status add_bytes_served(const std::vector<BytesServed>& served) override {
        return transact([&](soci::session& sql) -> Status {
            for (const BytesServed& one : served) {
                const auto bytes = static_cast<long long>(one.bytes);
                sql << "UPDATE nodes SET bytes_served = bytes_served + :bytes WHERE node = :node",
                    use(bytes), use(one.node);
            }
            return {};
        });
    }

private:
    static tl::unexpected<Error> no_node(const std::string& node) {
        return fail(Errc::kNotFound, "no node " + printable(node) + " is registered here");
    }

    Status transact(const std::function<Status(soci::session&)>& work) {
        Status done;
        Status ran = thread_.call([&] { done = database_->transact(work); });
        return ran ? done : ran;
    }

    // Store thread only
    std::unique_ptr<Database> database_;
    std::string model_;  // of the leases
    // Last, so that it ends first.
    TaskThread thread_;
};

}  // namespace

Result<std::unique_ptr<market::Storage>> open_market_store(const std::string& path,
                                                           const StoreOptions& options) {
    DatabaseOptions locked = options.database;
    locked.is_locked = true;
    auto database = Database::open(path, kMigrations, locked);
    if (!database) return tl::unexpected(database.error());
    return std::make_unique<MarketStore>(std::move(*database), options.calls_max);
}

}  // namespace kvasir::store
