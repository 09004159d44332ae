// Membership: a backbone's place in a market that runs elsewhere: its key, and a token that stays
// fresh.
//
// Used by run (and by up for its own backbone, whose tokens it can sign itself). The credentials
// are asked for by an uplink's thread at every attempt to attach and before the token it has shown
// ends; a token that is near its end is renewed there first, which may take as long as the market
// does. Thread: credentials() from any; enroll() blocks. Owns: the key, the HTTP
// client.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "access/access.hpp"
#include "backbone/uplink.hpp"
#include "base/result.hpp"
#include "net/tls.hpp"

namespace kvasir::apps {

struct MembershipOptions {
    std::string url;         // https://HOST:PORT of the market
    std::string model_path;  // the backbone's; must be the market's model
    std::string invite;      // code; may be empty when this key has enrolled before
    std::string state_dir;   // where the key and the market's pin are; empty: the user's
    std::string ca_file;     // PEM, for what no invite pins; empty: the system's roots
    std::string name;
};

// $XDG_STATE_HOME/kvasir, else ~/.local/state/kvasir; made with mode 0700. Errors: kEnvironment.
Result<std::string> make_state_dir(const std::string& wanted);

// Enrols with the invite, or renews with the key; the pin of the last invite is kept in the state
// folder and counts until another invite comes. The uplink leads to the market's relay. Reads the
// whole model once, for its id (cached). Errors: kUsage (url, code), kDenied (certificate, invite,
// market key), kMismatch (the market has another model; the invite stays unused), those of
// moe::open_model, kIo, ...
Result<backbone::UplinkOptions> enroll_backbone(const MembershipOptions& options);

}  // namespace kvasir::apps
