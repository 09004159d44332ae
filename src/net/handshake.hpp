// The pieces of the WebSocket handshake (RFC 6455 section 4) that need no socket.
//
// Used by dial and Listener. Thread: any. Owns: nothing.
#pragma once

#include <string>
#include <string_view>

namespace kvasir::net {

constexpr std::string_view kSubprotocol = "kvasir.1";
constexpr std::string_view kPathPrefix = "/kvasir";

// A fresh Sec-WebSocket-Key: base64 of 16 random bytes.
std::string make_websocket_key();
// Sec-WebSocket-Accept for a key.
std::string websocket_accept(std::string_view key);
// Has it the form of a key: base64 of 16 bytes?
bool valid_websocket_key(std::string_view key);
// Is `target` (of the request line) "/kvasir", or below it?
bool valid_target(std::string_view target);

}  // namespace kvasir::net
