#include "apps/unknown_flag.hpp"

#include <algorithm>
#include <numeric>

#include <CLI/CLI.hpp>

#include "base/log.hpp"

namespace kvasir::apps {
namespace {

// How many letters must be put in, taken out, changed or swapped with the next one.
size_t distance(const std::string& a, const std::string& b) {
    std::vector<size_t> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
    std::iota(last.begin(), last.end(), size_t{0});
    for (size_t i = 1; i <= a.size(); ++i) {
        row[0] = i;
        for (size_t j = 1; j <= b.size(); ++j) {
            const size_t changed = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
            row[j] = std::min({last[j] + 1, row[j - 1] + 1, changed});
            const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
            if (swapped) row[j] = std::min(row[j], before[j - 2] + 1);
        }
        before.swap(last);
        last.swap(row);
    }
    return last[b.size()];
}

std::vector<std::string> flags_of(const CLI::App& app) {
    std::vector<std::string> names;
    for (const CLI::Option* option : app.get_options()) {
        for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    }
    return names;
}

}  // namespace

std::optional<std::string> closest(const std::string& word, const std::vector<std::string>& known) {
    std::optional<std::string> best;
    size_t least = std::max<size_t>(word.size() / 3, 1) + 1;
    for (const std::string& name : known) {
        const size_t apart = distance(word, name);
        if (apart >= least) continue;
        least = apart;
        best = name;
    }
    return best;
}

std::optional<std::string> describe_unknown(const CLI::App& app) {
    const auto rest = app.remaining(true);
    if (rest.empty()) return std::nullopt;
    const auto flag = std::ranges::find_if(
        rest, [](const std::string& word) { return word.size() > 1 && word.front() == '-'; });
    const auto chosen = app.get_subcommands();
    const std::string where = chosen.empty() ? "kvasir" : "kvasir " + chosen.front()->get_name();
    if (flag == rest.end()) return where + " does not take '" + printable(rest.front()) + "'";
    const std::string name = flag->substr(0, flag->find('='));
    auto known = flags_of(app);
    for (const CLI::App* command : chosen) {
        const auto more = flags_of(*command);
        known.insert(known.end(), more.begin(), more.end());
    }
    const auto meant = closest(name, known);
    return where + " has no flag " + printable(name) +
           (meant ? "; did you mean " + *meant + "?" : std::string());
}

}  // namespace kvasir::apps
