// KVASIR_CHECK / KVASIR_DCHECK: programmer errors only.
//
// A failed check logs file, line and expression, and aborts. Never use one on bytes from a peer or
// a file: those are operating errors (base/result.hpp). DCHECK vanishes in release builds.
// Thread: any.
#pragma once

namespace kvasir {
[[noreturn]] void check_failed(const char* file, int line, const char* expression);
}

#define KVASIR_CHECK(expression)             \
    (static_cast<bool>(expression) ? void(0) \
                                   : ::kvasir::check_failed(__FILE__, __LINE__, #expression))

#ifdef NDEBUG
#define KVASIR_DCHECK(expression) void(0)
#else
#define KVASIR_DCHECK(expression) KVASIR_CHECK(expression)
#endif
