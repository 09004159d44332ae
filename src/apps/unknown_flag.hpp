// What was meant by an argument that no subcommand has.
//
// Used by the program's error messages: CLI11 names a missing required flag first, although a
// misspelt one is why it is missing. Thread: pure. Limits: none.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace kvasir::apps {

// The one of `known` that `word` is likely a misspelling of.
std::optional<std::string> closest(const std::string& word, const std::vector<std::string>& known);
// The first argument that neither `app` nor its chosen subcommand knows, as a sentence with what
// may have been meant; nullopt: there is none. For an `app` whose parse() has failed.
std::optional<std::string> describe_unknown(const CLI::App& app);

}  // namespace kvasir::apps
