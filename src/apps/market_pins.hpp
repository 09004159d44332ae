// MarketPins: by which key a backbone recognises the server of each market that it has joined, as
// the invite said, so that it comes back without that.
//
// Used by membership. The file "market.pins" in the state folder, mode 0600, has one line a market:
// "https://HOST:PORT <64 hex of the pin>", the one whose pin changed last at the end. Thread: one
// at a time, and one process a folder (state_lock). Owns: nothing. Limits: 256 markets; the oldest
// go first.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"

namespace kvasir::apps {

class MarketPins {
public:
    // No file: no pins. Errors: kEnvironment, kBadInput (says what to do).
    static Result<MarketPins> load(const std::string& state_dir);

    // `url` is the market's, of whose path nothing counts. Of a market without TLS: none.
    std::optional<Sha256> find(const std::string& url) const;
    // Replaces what is kept for that market; null: nothing is. Errors: kNoSpace, kIo.
    Status keep(const std::string& url, const std::optional<Sha256>& pin);
    const std::string& path() const { return path_; }

private:
    explicit MarketPins(std::string path) : path_(std::move(path)) {}

    std::string path_;
    std::vector<std::pair<std::string, Sha256>> pins_;  // by origin
};

}  // namespace kvasir::apps
