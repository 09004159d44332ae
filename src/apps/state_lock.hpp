// The lock on a backbone's key: two backbones with one key would replace each other at the relay,
// again and again.
//
// Used by run and up. Thread: any. Owns: the lock, until the handle is closed or the process ends.
#pragma once

#include <string>

#include "base/result.hpp"
#include "moe/file.hpp"

namespace kvasir::apps {

// Of the state folder, which exists. Errors: kUsage (another backbone has it), kEnvironment
// (files).
Result<moe::Fd> lock_backbone(const std::string& state_dir);

}  // namespace kvasir::apps
