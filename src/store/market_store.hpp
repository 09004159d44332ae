// The market's storage in SQLite: nodes, invites, tokens, leases.
//
// Used by the coordinator. The database belongs to a thread of its own; calls queue for it and
// wait. Tables are plain SQL with counters of their own, so that another database can take their
// place. Thread: any. Owns: thread and connection; destruction finishes what is queued. Limits:
// StoreOptions.
#pragma once

#include <memory>
#include <string>

#include "base/result.hpp"
#include "market/storage.hpp"
#include "store/database.hpp"

namespace kvasir::store {

struct StoreOptions {
    DatabaseOptions database;
    size_t calls_max = 256;  // waiting for the thread; more are kBusy
};

// Locked: two markets over one database would each give away what the other has given. Errors:
// those of Database::open().
Result<std::unique_ptr<market::Storage>> open_market_store(const std::string& path,
                                                           const StoreOptions& options = {});

}  // namespace kvasir::store
