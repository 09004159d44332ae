// Waiting for a socket with a deadline, and what its errno means to us.
//
// Private to net/. Thread: any, reentrant. Owns: nothing.
#pragma once

#include "base/result.hpp"
#include "net/message_stream.hpp"

namespace kvasir::net {

// "send: Connection reset by peer"; kClosed when the peer is gone, else kIo.
Error socket_error(const char* what, int error);

// Waits for `events` (of poll()) on the socket. false: the deadline passed. Errors: kIo.
Result<bool> wait_for(int fd, short events, Deadline deadline);

}  // namespace kvasir::net
