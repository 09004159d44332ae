// Transport: the bytes of one connection, over a bare socket or through TLS on it.
//
// Private to net/: used by MessageStream, dial and Listener. Nothing here waits, except a read()
// that was told so; whoever waits polls fd() for reading, and for writing while wants_write().
//
// TLS reaches the socket through a small BIO of ours instead of OpenSSL's socket BIO, for three
// reasons: it sends with MSG_NOSIGNAL (OpenSSL's write() would raise SIGPIPE), it decides call by
// call whether a read may wait, and it takes every write: records are gathered in a buffer that
// leaves in one send(). So SSL_write never has to be repeated with the same arguments, and whatever
// TLS itself wants to say (handshake, key updates, alerts) never makes a read wait for writability:
// OpenSSL only ever asks for more bytes, and "wants to write" has the one meaning of a socket.
//
// Thread: not thread-safe. Owns: the socket, the TLS session. Limits: kBatchBytes of plaintext are
// encrypted ahead of the socket; idle, nothing but OpenSSL's session is held.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "net/message_stream.hpp"

struct ssl_st;
struct ssl_ctx_st;

namespace kvasir::net {

class Transport {
public:
    explicit Transport(UniqueFd fd);
    // TLS as `side`, the handshake still to come; keeps a reference to `context`. `server_name`: of
    // a client, whose certificate is expected (a name or an IP address). Errors: kEnvironment.
    static Result<Transport> make_tls(UniqueFd fd, ssl_ctx_st* context, Side side,
                                      const std::string& server_name = {});
    Transport(Transport&&) noexcept;
    Transport& operator=(Transport&&) noexcept;
    ~Transport();

    int fd() const { return fd_.get(); }
    bool tls() const { return tls_ != nullptr; }

    // One step of the TLS handshake: true when it is complete (at once without TLS), false when the
    // peer must say more. Errors: kDenied (the certificate: says why), kProtocol (not TLS, no
    // common version), kClosed, kIo.
    Result<bool> handshake();
    // The handshake ended because nobody whom we know vouches for the other side's certificate.
    bool is_peer_unknown() const;

    struct Got {
        size_t bytes = 0;
        // What it cost, in bytes from the kernel: more for each record and each handshake of TLS.
        uint64_t effort = 0;
        bool drained = false;  // all that had arrived was taken
        bool end = false;      // the peer sends no more; bytes is 0
    };
    // Fills `room` with what has arrived; over TLS less, if that costs much more than its bytes
    // (short records, records without data: not drained then). `may_wait`: the socket must be
    // blocking; waits for the first bytes as long as its SO_RCVTIMEO says (bytes may still be 0
    // then, as after a TLS record that carries no data). Errors: kProtocol (TLS; also too many
    // handshake messages), kClosed, kIo.
    Result<Got> read(std::span<uint8_t> room, bool may_wait);
    // Appends what TLS has read from the socket but not yet given out. Bounded by its buffers.
    void take_buffered(std::vector<uint8_t>& out);

    // Takes bytes from where they lie; returns how many, 0 when the socket has no room. Errors:
    // kClosed, kIo, kProtocol (TLS).
    Result<uint64_t> write(std::span<const iovec> vectors);
    // Encrypted bytes wait for room in the socket. Without TLS always false.
    bool wants_write() const { return tls_ != nullptr && unsent_bytes() != 0; }
    uint64_t unsent_bytes() const;  // encrypted ones
    // Encrypted bytes that write() took and the kernel never did, because the connection broke.
    uint64_t lost_bytes() const;
    Status flush();

    // Tests: the next write() also changes the keys, and asks the peer to do the same.
    bool request_key_update();

    // No more will be written: TLS's goodbye (best effort) and the socket's.
    void shut_down_write();

private:
    struct Tls;

    Result<uint64_t> write_tls(std::span<const iovec> vectors);
    Result<Got> read_tls(std::span<uint8_t> room, bool may_wait);
    Error tls_error(const char* what, int result);

    UniqueFd fd_;
    std::unique_ptr<Tls> tls_;  // null: plain
};

}  // namespace kvasir::net
