// The bad disk itself (tests/tools/bad_disk.cpp), where the other tests of disks cannot see it err.
#include <dlfcn.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "disk_testing.hpp"
#include "swarm_testing.hpp"

namespace kvasir::e2e {
namespace {

using ::testing::UnorderedElementsAre;

// From here on this process has no such call, as on file systems that do not know it.
bool forbid_copy_file_range() {
    sock_filter program[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_copy_file_range, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EOPNOTSUPP),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog filter = {std::size(program), program};
    return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

// The bad disk's own copies: of a file that has no name any more there is none, and they need
// nothing that some file systems lack.
TEST(Disk, WhatWasSyncedIsCopiedEverywhere) {
    const ScratchFolder scratch;
    const std::string kept = scratch.path("kept"), gone = scratch.path("gone");
    const std::string text(200'000, 'x');
    const auto sync_both = [&] {
        for (const std::string& variable :
             bad_disk(kept.substr(0, kept.rfind('/')), "copies").environment) {
            if (variable.starts_with("KVASIR_")) ::putenv(::strdup(variable.c_str()));
        }
        void* const library = ::dlopen(KVASIR_BAD_DISK, RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) std::_Exit(2);
        const auto sync = reinterpret_cast<int (*)(int)>(::dlsym(library, "fsync"));
        if (!forbid_copy_file_range()) std::_Exit(3);
        for (const std::string& path : {kept, gone}) {
            const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
            if (::write(fd, text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
                std::_Exit(4);
            }
            if (path == gone) ::unlink(path.c_str());
            if (sync(fd) != 0) std::_Exit(5);
        }
        std::_Exit(0);
    };
    EXPECT_EXIT(sync_both(), ::testing::ExitedWithCode(0), "");
    EXPECT_TRUE(content(kept + ".synced") == text) << "all of it, or it is no copy";
    EXPECT_THAT(names_in(scratch.path("")), UnorderedElementsAre("kept", "kept.synced"));
}

}  // namespace
}  // namespace kvasir::e2e
