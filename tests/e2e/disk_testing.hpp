// Bad disks for programs (tests/tools/bad_disk.cpp), and what files are on them.
//
// Used by the end-to-end tests. Thread: any. Owns: nothing. Limits: none.
#pragma once

#include <string>
#include <vector>

#include "run_program.hpp"

namespace kvasir::e2e {

// The environment of a program for which `what` fails in files whose path begins with `under` and
// has `like` in it; with `during` only as long as that file exists.
ProgramOptions bad_disk(const std::string& under, const std::string& what,
                        const std::string& like = {}, const std::string& during = {});

void put(const std::string& path, const std::string& text);
std::string content(const std::string& path);
// The names in `folder` that end in `end`.
std::vector<std::string> names_in(const std::string& folder, const std::string& end = {});

// Which of the pages that were not synced a power cut takes.
enum class LostPages { kNone, kAll, kEven, kOdd };
// Makes of a file that a program with "copies" wrote what a power cut would have left; the number
// of lost pages.
size_t lose_unsynced(const std::string& path, LostPages which);

}  // namespace kvasir::e2e
