// Result<T>: how every operating error (peer, network, disk, input, overload) travels.
//
// Used by every module. An Error is a code of one closed enum plus a sentence for a person that
// names the file, tensor or field and, where there is one, what to do about it.
// Thread: values; no shared state. Owns: its detail string. Limits: none.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include <tl/expected.hpp>

namespace kvasir {

// The closed set of operating errors. The table in result.cpp maps each to its wire code, process
// exit code and retryability; a test checks that the table is total.
enum class Errc : uint8_t {
    kUsage,        // the caller's words are off (flags, specs)
    kBadInput,     // a file or text from outside is malformed or inconsistent
    kEnvironment,  // the machine lacks something (file, library, memory, port)
    kIo,           // a read, write or socket call failed
    kProtocol,     // a peer broke the wire format
    kVersion,      // a peer speaks another protocol version
    kMismatch,     // another model, slice, build or numeric class than expected
    kNotHeld,      // an expert was asked of someone who does not hold it
    kUnsupported,  // understood, but not something this build can compute
    kLimit,        // a documented limit would be exceeded
    kBusy,         // bounded queue full; try again later or elsewhere
    kTimeout,      // a deadline passed
    kClosed,       // the connection or the component is closed
    kBadAnswer,    // a worker's answer had the wrong size or non-finite values
    kDenied,       // key, token or invite code not accepted
    kExpired,      // a token or lease ran out: renew it
    kRevoked,      // a token was taken back: do not try again
    kNotFound,     // no such thing
    kNoSpace,      // disk full or quota reached
    kCount_,       // not a code: the number of codes
};

struct Error {
    Errc code = Errc::kBadInput;
    std::string detail;
};

template <class T>
using Result = tl::expected<T, Error>;
using Status = Result<void>;

[[nodiscard]] inline tl::unexpected<Error> fail(Errc code, std::string detail) {
    return tl::unexpected<Error>(Error{code, std::move(detail)});
}

// One row of the error table.
struct ErrcInfo {
    std::string_view name;  // stable lower_snake identifier, used in logs and JSON
    uint16_t wire_code;     // value in a wire ERROR frame; never reused
    int exit_code;          // process exit status: 2 usage, 3 bad input, 4 environment, 1 other
    bool retryable;         // may the same request succeed elsewhere or later?
    int http_status;        // of an HTTP answer that carries this error
};

const ErrcInfo& errc_info(Errc code);
// Inverse of ErrcInfo::wire_code; unknown codes map to kProtocol.
Errc errc_from_wire(uint16_t wire_code);

}  // namespace kvasir
