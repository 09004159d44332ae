#include "base/check.hpp"

#include <cstdio>
#include <cstdlib>

namespace kvasir {

void check_failed(const char* file, int line, const char* expression) {
    std::fprintf(stderr, "kvasir: internal error at %s:%d: %s\n", file, line, expression);
    std::abort();
}

}  // namespace kvasir
