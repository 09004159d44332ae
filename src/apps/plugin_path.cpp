// `kvasir plugin-path`: where libggml-kvasir.so is.
#include <filesystem>
#include <memory>
#include <system_error>

#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include "apps/commands.hpp"
#include "apps/console.hpp"
#include "apps/local_workers.hpp"
#include "apps/plugin_path.hpp"

namespace kvasir::apps {

Result<std::string> find_plugin() {
    const auto program = own_program();
    if (!program) return tl::unexpected(program.error());
    const auto folder = std::filesystem::path(*program).parent_path();
    for (const auto& candidate :
         {folder.parent_path() / "lib" / "libggml-kvasir.so", folder / "libggml-kvasir.so"}) {
        std::error_code error;
        if (std::filesystem::exists(candidate, error)) return candidate.string();
    }
    return fail(Errc::kEnvironment,
                "libggml-kvasir.so is not in ../lib or beside " + *program + "; run `./run build`");
}

void add_plugin_path(CLI::App& app, int& exit_code) {
    CLI::App* command =
        app.add_subcommand("plugin-path", "print where the ggml plugin is (for GGML_BACKEND_PATH)");
    command->callback([&exit_code] {
        const auto path = find_plugin();
        if (path) fmt::print("{}\n", *path);
        exit_code = path ? 0 : report_error(path.error());
    });
}

}  // namespace kvasir::apps
