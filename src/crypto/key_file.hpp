// The system calls of load_or_make_key(), replaceable so that tests can make them fail, go missing
// or be the last thing that a process does.
//
// Used by keys and its tests. The steps: open `path`; when there is none, write a temporary file
// "<path>.<16 hex>.tmp" of mode 0600, sync it, give it its name only if that is free (a hard link;
// where those are forbidden, as on Android, a rename that replaces nothing), sync the folder, open
// `path` again. So the name never holds half a key, and whoever comes second reads the first's key.
// A process killed in between may leave the temporary, which nobody uses.
// Thread: values.
#pragma once

#include <string>

#include <sys/types.h>

#include "crypto/keys.hpp"

namespace kvasir::crypto {

struct KeyFileCalls {
    ssize_t (*write)(int fd, const void* data, size_t bytes);
    int (*sync)(int fd);
    int (*link)(const char* from, const char* to);
    int (*rename_if_free)(const char* from, const char* to);
    int (*unlink)(const char* path);
};
const KeyFileCalls& kernel_key_file_calls();

Result<KeyPair> load_or_make_key(const std::string& path, const KeyFileCalls& calls);

}  // namespace kvasir::crypto
